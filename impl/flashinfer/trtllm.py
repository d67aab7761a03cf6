"""FlashInfer's paged attention for serving: trtllm-gen on data-centre Blackwell, XQA elsewhere.

``trtllm_batch_decode_with_kv_cache`` and ``trtllm_batch_context_with_kv_cache`` take a block table
and lengths, no plan. Their workspace must be zero before its first use and belong to one backend
alone (vllm-project/vllm#25520); bmm1_scale multiplies the logits, bmm2_scale the output. LSE came
with 0.6.12, in base 2, and XQA has none.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from ...reference import Arithmetic, AttentionProblem, Problem
from ...reference.formats.cache_elements import FP8, NVFP4
from ...reference.formats.kv_format import stored_head_dim
from ...reference.tensors.inputs import PagedAttentionInputs
from ..gating import decide
from ..gating.of_problem import feature_of
from ..gating.rules import version_matches
from ..protocol import implementation
from ..targets.target import Target
from .calls import (
    BUILD_MINUTES,
    WORKSPACE_BYTES,
    attention_refusal,
    flashinfer,
    module_key,
    paged_cache,
    unavailable,
    version,
)
from .triton import to_natural

Result = tuple[torch.Tensor, "torch.Tensor | None"]
TRTLLM_GEN = Arithmetic(probabilities="inputs", partial_outputs=True, exponent="fused")
"""Of binaries: at least what its CUTLASS-like sources elsewhere round."""
XQA = Arithmetic(probabilities="inputs", partial_outputs=True, exponent="fused")
"""``xqa/mha.cu``: exp2(s c - m c); probabilities rounded as they are stored, and once more where a
later tile has a larger maximum, after the row sum; outputs of warps and blocks in the output's
dtype."""
XQA_IN_FP8 = Arithmetic(probabilities="inputs", partial_outputs=True, exponent="fused")
"""``xqa/mha_sm90.cu``: probabilities times 448 in FP8, row sums before that rounding."""
WITH_LSE = ">=0.6.12.dev0"
TRTLLM_FEATURES = ("fp8_kv", "fp8_q", "nvfp4_kv", "interleaved_v_scales")
FP8_ON_HOPPER = (
    "XQA on SM90 rounds 16-bit queries to FP8 for an FP8 cache: flashinfer-xqa-decode-fp8 gives it "
    "queries that FP8 holds"
)


@functools.cache
def zeroed_workspace(use: str, device: torch.device) -> torch.Tensor:
    """Give the workspace of one backend and function: zero at first, and never another's."""
    del use  # it tells apart what is cached
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def padded_block_table(inputs: PagedAttentionInputs, keys: int = 1) -> torch.Tensor:
    """Give the block table with stale ids behind each request's pages, as engines leave them.

    Args:
        inputs: of a call; its table has garbage there, which need not be a page's id.
        keys: a row covers a multiple of so many.
    """
    table = inputs.block_table.remainder(inputs.k_cache.shape[0])
    whole = max(keys // inputs.metadata.page_size, 1)
    return torch.nn.functional.pad(table, (0, -table.shape[1] % whole)).contiguous()


def natural_or_none(lse: torch.Tensor | None) -> torch.Tensor | None:
    """Give an LSE of base 2 as a natural one."""
    return None if lse is None else to_natural(lse)


def _served(problem: Problem, target: Target, backend: str = "trtllm-gen") -> str | None:
    """Say why a backend does not take a problem."""
    if isinstance(problem, AttentionProblem):
        if problem.head_dim_qk != problem.head_dim_vo:
            return "keys and values have one head_dim"
        if problem.kv_cache == NVFP4 and backend == "trtllm-gen":
            return "trtllm-gen reads V's block scales interleaved"
    return attention_refusal(problem, target)


def _decodes(problem: Problem, target: Target, backend: str = "trtllm-gen") -> bool | str:
    if isinstance(problem, AttentionProblem) and any(t != 1 for t in problem.query_lens):
        return "trtllm_batch_decode_with_kv_cache takes one query token a request"
    return _served(problem, target, backend) or True


def _on_hopper(target: Target) -> bool:
    return target.sm == 90  # noqa: PLR2004


def _decodes_with_xqa(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, AttentionProblem) and problem.kv_element in FP8 and _on_hopper(target):
        return FP8_ON_HOPPER
    return _decodes(problem, target, "xqa")


def _decodes_in_fp8(problem: Problem, target: Target) -> bool | str:
    absent = unavailable(target)
    if absent is not None or not isinstance(problem, AttentionProblem):
        return absent or "attention"
    if not problem.q_dtype:
        return "queries that FP8 does not hold are rounded"
    said = _decodes(problem, target, "xqa")
    if said is not True:
        return said
    if not _on_hopper(target):
        return "XQA multiplies in FP8 on SM90 alone"
    # What XQA is given, and the rules speak of, are 16-bit queries.
    return _allowed(replace(problem, q_dtype="", q_scale=1.0), "xqa", target)


def _allowed(problem: AttentionProblem, backend: str, target: Target) -> bool | str:
    """Ask the support rules, as for an implementation that names its backend."""
    return decide(feature_of(problem, backend), target).refusal or True


def _prefills(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, AttentionProblem) and any(
        t > s for t, s in zip(problem.query_lens, problem.seq_lens, strict=True)
    ):
        return "trtllm_batch_context_with_kv_cache takes no more queries than keys"
    return _served(problem, target) or True


def chosen_backend(target: Target) -> str:
    """Say what ``backend="auto"`` chooses on a chip."""
    return "trtllm-gen" if (target.sm or 0) // 10 == 10 else "xqa"  # noqa: PLR2004  its major


def _decodes_as_chosen(problem: Problem, target: Target) -> bool | str:
    backend = chosen_backend(target)
    said = (_decodes_with_xqa if backend == "xqa" else _decodes)(problem, target)
    if said is not True:
        return said
    return _allowed(problem, backend, target) if isinstance(problem, AttentionProblem) else True


def _scales(inputs: PagedAttentionInputs) -> dict[str, float]:
    scale = inputs.sm_scale * float(inputs.q_scale) * float(inputs.k_scale)
    return {"bmm1_scale": scale, "bmm2_scale": float(inputs.v_scale)}


def _cache(inputs: PagedAttentionInputs, backend: str) -> dict[str, Any]:
    """Name the cache as the release does; XQA's block scales never were ``kv_block_scales``."""
    arguments = paged_cache(inputs, "trtllm-gen" if backend != "xqa" else backend)
    pair = arguments.pop("paged_kv_cache")
    if backend == "xqa":
        arguments = dict(zip(("kv_cache_sf",), arguments.values(), strict=False))
    return {"kv_cache": pair, **arguments}


def _shared(inputs: PagedAttentionInputs, backend: str) -> dict[str, Any]:
    """Give the keyword arguments that decode and context share."""
    width = stored_head_dim(inputs.v_cache, inputs.kv_format)
    shape = (*inputs.q.shape[:2], width)
    return {
        "query": inputs.q,
        **_cache(inputs, backend),
        "workspace_buffer": zeroed_workspace(backend, inputs.q.device),
        "block_tables": padded_block_table(inputs),
        "seq_lens": inputs.metadata.seq_lens,
        **_scales(inputs),
        "window_left": inputs.window_left,
        "out": inputs.q.new_empty(shape, dtype=inputs.out_dtype),
        "sinks": inputs.sinks,
        "kv_layout": inputs.kv_layout,
    }


def _finished(result: Any, *, with_lse: bool) -> Result:  # noqa: ANN401  untyped
    if not with_lse:
        return result, None
    out, lse = result
    return out, natural_or_none(lse)


def _decode(inputs: PagedAttentionInputs, backend: str) -> Result:
    with_lse = backend == "trtllm-gen" and version_matches(version(), WITH_LSE)
    result = flashinfer("flashinfer.decode").trtllm_batch_decode_with_kv_cache(
        **_shared(inputs, backend),
        max_seq_len=int(inputs.metadata.seq_lens.max()),
        backend=backend,
        **({"return_lse": True} if with_lse else {}),
    )
    return _finished(result, with_lse=with_lse)


@implementation(
    "paged_attention",
    name="flashinfer-trtllm-decode",
    backend="trtllm-gen",
    supports=_decodes,
    features=TRTLLM_FEATURES,
    arithmetic=TRTLLM_GEN,
    compile_key=lambda _: "trtllm-gen",
)
def trtllm_decode(inputs: PagedAttentionInputs) -> Result:
    """Decode by trtllm-gen."""
    return _decode(inputs, "trtllm-gen")


@implementation(
    "paged_attention",
    name="flashinfer-trtllm-context",
    backend="trtllm-gen",
    supports=_prefills,
    features=TRTLLM_FEATURES,
    arithmetic=TRTLLM_GEN,
    compile_key=lambda _: "trtllm-gen",
)
def trtllm_context(inputs: PagedAttentionInputs) -> Result:
    """Attend a whole batch, decodes too, in one call of trtllm-gen's context kernels."""
    metadata = inputs.metadata
    with_lse = version_matches(version(), WITH_LSE)
    lengths = metadata.seq_lens
    result = flashinfer("flashinfer.prefill").trtllm_batch_context_with_kv_cache(
        **_shared(inputs, "trtllm-gen"),
        max_q_len=int(metadata.qo_indptr.diff().max()),
        max_kv_len=int(lengths.max()),
        batch_size=len(lengths),
        cum_seq_lens_q=metadata.qo_indptr,
        cum_seq_lens_kv=metadata.paged_kv_indptr,  # in pages, whatever its name says (vLLM)
        **({"return_lse": True} if with_lse else {}),
    )
    return _finished(result, with_lse=with_lse)


def xqa_module_key(problem: Problem) -> Any:  # noqa: ANN401  hashable
    """Give what XQA builds a module for: pages and group sizes are compiled in, too."""
    if not isinstance(problem, AttentionProblem):
        return problem.operation
    return module_key(problem), problem.page_size, problem.group_size


@implementation(
    "paged_attention",
    name="flashinfer-xqa-decode",
    backend="xqa",
    supports=_decodes_with_xqa,
    features=("fp8_kv", "nvfp4_kv"),
    arithmetic=XQA,
    compile_key=xqa_module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["xqa"],
)
def xqa_decode(inputs: PagedAttentionInputs) -> Result:
    """Decode by XQA; no LSE."""
    return _decode(inputs, "xqa")


@implementation(
    "paged_attention",
    name="flashinfer-xqa-decode-fp8",
    supports=_decodes_in_fp8,
    features=("fp8_kv", "fp8_q"),
    arithmetic=XQA_IN_FP8,
    compile_key=xqa_module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["xqa"],
)
def xqa_decode_fp8(inputs: PagedAttentionInputs) -> Result:
    """Decode by XQA's FP8 kernel of SM90, with 16-bit queries that FP8 holds; no LSE."""
    # Its own rounding of them to FP8 then changes nothing: the oracle is given the same numbers.
    return _decode(replace(inputs, q=inputs.q.to(inputs.out_dtype)), "xqa")


@implementation(
    "paged_attention",
    name="flashinfer-trtllm-decode-auto",
    supports=_decodes_as_chosen,
    features=("fp8_kv",),
    arithmetic=XQA,
    compile_key=xqa_module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["xqa"],
)
def auto_decode(inputs: PagedAttentionInputs) -> Result:
    """Decode by the backend that FlashInfer chooses; no LSE, which not every choice gives."""
    return _decode(inputs, "auto")
