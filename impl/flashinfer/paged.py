"""FlashInfer's wrappers of attention to a paged cache: decode, prefill, and batches of both."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from ...reference import AttentionProblem, BatchMetadata, build_metadata
from ...reference.tensors.inputs import PagedAttentionInputs
from ..gating.rules import version_matches
from ..protocol import implementation
from ..targets.backends import FLASHINFER
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from ..torch.sdpa import paged as torch_attention
from .backends import CUDA_CORE, FA2, FA3, module_key, one_module
from .calls import attention_refusal, flashinfer, version, wrapper
from .claims import Refuses, few_query_tokens, one_head_dim, unavailable
from .libraries import attention_library
from .plans import (
    DECODE,
    DECODE_FA2,
    DECODE_FAST,
    DECODE_FIXED,
    DECODE_UNSPLIT,
    PREFILL_FA2,
    PREFILL_FA3,
    PREFILL_UNIFORM,
    PREFILL_UNSPLIT,
    WITH_LSE_BASE,
    Kind,
    Pair,
    head_dim_vo,
    plan_batch_attention,
    plan_prefill,
    run,
    run_batch_attention,
    run_without_lse,
)
from .sessions import batch_attention_session, paged_session
from .triton import to_natural


def _masked(problem: AttentionProblem, _: Target) -> str | None:
    return "a decode wrapper takes no mask" if problem.custom_mask else None


MIXED: tuple[Refuses, ...] = (
    _masked,
    one_head_dim("a decode wrapper has one head_dim"),
    attention_refusal,
)
"""What neither decodes nor a mixed batch are called with."""
VERIFIES: tuple[Refuses, ...] = (few_query_tokens("a decode wrapper takes", surplus=True), *MIXED)
"""What decode wrappers are not called with: which of them take several tokens, the rules say."""


def _unlike_fa3(problem: AttentionProblem, _: Target) -> str | None:
    if problem.q_dtype:
        return None
    return first_reason(
        (problem.kv_cache, "FA3 takes queries and keys of one dtype"),
        (problem.per_head_scales, "FA3 takes scales of a head with FP8 queries alone"),
        (
            problem.head_dim_qk != problem.head_dim_vo and not problem.strided_kv,
            "FA3 takes pages of keys and values of one stride",
        ),
    )


def attend(
    kind: Kind,
    inputs: PagedAttentionInputs,
    metadata: BatchMetadata,
    *,
    apart: str = "",
    **options: Any,  # noqa: ANN401  of the run
) -> Pair:
    """Plan a wrapper, its own where it is to be kept ``apart``, and run it."""
    return run(_planned(kind, inputs, metadata, apart), inputs, kind.backend, **options)


def _planned(kind: Kind, inputs: PagedAttentionInputs, metadata: BatchMetadata, apart: str) -> Any:  # noqa: ANN401  untyped
    planned = wrapper(
        kind.name, inputs.q.device, apart=apart, kv_layout=inputs.kv_layout, **kind.options
    )
    kind.plan(planned, inputs, metadata, kind.backend)
    return planned


@CUDA_CORE.adapter(
    "paged_attention",
    "flashinfer-decode",
    *VERIFIES,
    decodes=True,
    session=functools.partial(paged_session, DECODE),
)
def cuda_core_decode(inputs: PagedAttentionInputs) -> Pair:
    """Decode without tensor cores."""
    return attend(DECODE, inputs, inputs.metadata)


@FA2.adapter(
    "paged_attention",
    "flashinfer-decode-fa2",
    *VERIFIES,
    decodes=True,
    session=functools.partial(paged_session, DECODE_FA2),
)
def tensor_core_decode(inputs: PagedAttentionInputs) -> Pair:
    """Decode with tensor cores, several tokens a request too: FA2's prefill kernel."""
    return attend(DECODE_FA2, inputs, inputs.metadata)


WITH_FAST_PLAN = ">=0.7.2.post1"
"""Releases whose ``fast_decode_plan`` takes ``q_len_per_req``."""


def _no_fast_plan(_: AttentionProblem, target: Target) -> Refusal | None:
    if version_matches(target.flashinfer, WITH_FAST_PLAN):
        return None
    return Refusal(
        "fast_decode_plan takes q_len_per_req from flashinfer-python 0.7.2.post1 on",
        "package",
        "flashinfer-python 0.7.2.post1",
    )


@FA2.adapter(
    "paged_attention",
    "flashinfer-decode-fa2-fast-plan",
    *VERIFIES,
    _no_fast_plan,
    decodes=True,
    session=functools.partial(paged_session, DECODE_FAST),
)
def fast_planned_decode(inputs: PagedAttentionInputs) -> Pair:
    """Decode with tensor cores as ``fast_decode_plan`` plans it, after a plan of other lengths."""
    return attend(DECODE_FAST, inputs, inputs.metadata, apart="fast")


# FlashInfer calls both options of the plan its controls of batch invariance. Of prefills that is
# not taken for a promise: the tile of queries follows from the mean length of the batch.
INVARIANT = replace(FA2, features=(*FA2.features, "batch_invariant"), decodes=True)


@INVARIANT.adapter("paged_attention", "flashinfer-decode-fa2-fixed-split", *VERIFIES)
def fixed_split_decode(inputs: PagedAttentionInputs) -> Pair:
    """Decode with tensor cores in parts of as many pages (``fixed_split_size``)."""
    return attend(DECODE_FIXED, inputs, inputs.metadata, apart="fixed", enable_pdl=False)


@INVARIANT.adapter("paged_attention", "flashinfer-decode-fa2-unsplit", *VERIFIES)
def unsplit_decode(inputs: PagedAttentionInputs) -> Pair:
    """Decode with tensor cores, each request in one part (``disable_split_kv``)."""
    return attend(DECODE_UNSPLIT, inputs, inputs.metadata, apart="unsplit", enable_pdl=False)


@FA2.adapter(
    "paged_attention",
    "flashinfer-prefill-fa2-unsplit",
    attention_refusal,
    features=("tree", *FA2.features),
)
def unsplit_prefill(inputs: PagedAttentionInputs) -> Pair:
    """Attend a whole batch, each request in one part; the LSE is natural where it can be."""
    base = {"lse_base": "ln"} if version_matches(version(), WITH_LSE_BASE) else {}
    return attend(
        PREFILL_UNSPLIT, inputs, inputs.metadata, apart="unsplit", enable_pdl=False, **base
    )


WITH_UNIFORM = ">=0.7.2.post1"
"""Releases whose prefill wrapper takes ``uniform_q_len``."""
NO_UNIFORM = Refusal(
    "uniform_q_len came with flashinfer-python 0.7.2.post1",
    "package",
    "flashinfer-python 0.7.2.post1",
)


def _not_uniform(problem: AttentionProblem, target: Target) -> str | None:
    return first_reason(
        (not version_matches(target.flashinfer, WITH_UNIFORM), NO_UNIFORM),
        (not problem.uniform_queries, "uniform_q_len is of equally many tokens of each request"),
    )


def _uniform_key(problem: AttentionProblem) -> Hashable:
    """Return the key of FA2's module; the shape of SM90's own verify kernel is another's."""
    shape = (problem.num_kv_heads, problem.group_size, problem.page_size, problem.most_queries)
    return module_key(problem), shape == (1, 4, 1, 4)


@FA2.adapter(
    "paged_attention",
    "flashinfer-prefill-fa2-uniform",
    attention_refusal,
    _not_uniform,
    features=("custom_mask", "tree", *FA2.features),
    compile_key=_uniform_key,
)
def uniform_prefill(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, None]:
    """Attend a batch of equally many tokens a request, with ``uniform_q_len``; no LSE.

    Without an LSE, four masked tokens may take a kernel of their own on SM90.
    """
    planned = _planned(PREFILL_UNIFORM, inputs, inputs.metadata, "uniform")
    return run_without_lse(planned, inputs, "fa2"), None


@FA2.adapter(
    "paged_attention",
    "flashinfer-prefill-fa2",
    attention_refusal,
    features=("custom_mask", "tree", *FA2.features),
    session=functools.partial(paged_session, PREFILL_FA2),
)
def prefill_fa2(inputs: PagedAttentionInputs) -> Pair:
    """Attend a whole batch, decodes too, in one prefill call of FA2."""
    return attend(PREFILL_FA2, inputs, inputs.metadata)


@FA3.adapter(
    "paged_attention",
    "flashinfer-prefill-fa3",
    _unlike_fa3,
    attention_refusal,
    session=functools.partial(paged_session, PREFILL_FA3),
)
def prefill_fa3(inputs: PagedAttentionInputs) -> Pair:
    """Attend a whole batch in one prefill call of FA3."""
    return attend(PREFILL_FA3, inputs, inputs.metadata)


@FA2.adapter("paged_attention", "flashinfer-mixed-fa2", *MIXED)
def mixed(inputs: PagedAttentionInputs) -> Pair:
    """Split a batch as vLLM does: decodes to one wrapper, the rest to the other."""
    is_decode = inputs.metadata.qo_indptr.diff() == 1
    out = inputs.q.new_empty((*inputs.q.shape[:2], head_dim_vo(inputs)), dtype=inputs.out_dtype)
    lse = inputs.q.new_empty(inputs.q.shape[:2], dtype=torch.float32)
    for chosen in (is_decode, ~is_decode):
        part, tokens = _requests(inputs, chosen)
        if not tokens.numel():
            continue
        some = replace(inputs, q=inputs.q[tokens])
        kind = DECODE_FA2 if chosen is is_decode else PREFILL_FA2
        out[tokens], lse[tokens] = attend(kind, some, part)
    return out, lse


def _requests(
    inputs: PagedAttentionInputs, chosen: torch.Tensor
) -> tuple[BatchMetadata, torch.Tensor]:
    """Return the metadata of some requests, and which query tokens are theirs."""
    metadata = inputs.metadata
    query_lens = metadata.qo_indptr.diff()
    request = torch.repeat_interleave(torch.arange(len(chosen), device=chosen.device), query_lens)
    part = build_metadata(
        query_lens[chosen],
        metadata.seq_lens[chosen],
        inputs.block_table[chosen],
        metadata.page_size,
    )
    return part.to(inputs.q.device), chosen[request].nonzero().squeeze(-1)


SINK_HEAD_DIM = 64
"""Channels of a head of gpt-oss, whose sinks the wrapper serves."""


def _not_with_sinks(problem: AttentionProblem, _: Target) -> str | None:
    return first_reason(
        (problem.logits_soft_cap, "the wrapper with sinks is built without a soft cap"),
        (
            problem.head_dim_qk != SINK_HEAD_DIM,
            "the name of the module with sinks does not say its head_dim: two overwrite each other",
        ),
    )


@replace(FA2, backend="fa2-sinks", features=(), library=None).adapter(
    "paged_attention",
    "flashinfer-attention-sink-fa2",
    attention_refusal,
    _not_with_sinks,
    one_head_dim("the wrapper with sinks is called with one head_dim"),
)
def attention_sink(inputs: PagedAttentionInputs) -> Pair:
    """Attend a whole batch with a sink of each head, of probability 0 where there is none."""
    q, planned = inputs.q, _with_sinks(inputs)
    plan_prefill(planned, inputs, inputs.metadata, "fa2")
    sinks = inputs.sinks
    given = q.new_full(q.shape[1:2], -torch.inf) if sinks is None else sinks
    pair = (inputs.k_cache, inputs.v_cache)
    # The variant's scale is an argument of the run: what the plan has does not reach it.
    scale = inputs.sm_scale * float(inputs.k_scale)
    more = {"v_scale": float(inputs.v_scale), "return_lse": True}
    out, lse = planned.run(q, pair, given.float(), scale, **more)
    return out, to_natural(lse)


def _with_sinks(inputs: PagedAttentionInputs) -> Any:  # noqa: ANN401  untyped
    return wrapper(
        "BatchAttentionWithAttentionSinkWrapper",
        inputs.q.device,
        kv_layout=inputs.kv_layout,
        backend="fa2",
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.k_cache.dtype,
        head_dim_qk=inputs.q.shape[-1],
        head_dim_vo=head_dim_vo(inputs),
        window_left=min(inputs.window_left, 0),  # whether there is one; its width is the plan's
    )


QUANTISATION = "flashinfer.quantization.fp4_quantization"


def _reads_nvfp4(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    if lacking := unavailable(problem, target):
        return lacking
    if problem.kv_cache != "nvfp4" or problem.dtype == "float32":
        return "nvfp4_kv_dequantize reads caches in NVFP4, and writes 16 bits"
    return torch_attention.supports(problem, target) if torch_attention.supports else True


@implementation(
    "paged_attention",
    name="flashinfer-nvfp4-dequantize",
    provider=FLASHINFER,
    supports=_reads_nvfp4,
    features=("nvfp4_kv",),
    arithmetic=torch_attention.arithmetic,
    compile_key=one_module("nvfp4-dequantize"),
)
def dequantised(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, None]:
    """Read a cache in NVFP4 by ``nvfp4_kv_dequantize``, and attend to it with torch.

    A code times its block's scale has 6 bits, which 16 bits hold: scales of whole caches are the
    attention's.
    """
    k, v = _read(inputs, 0), _read(inputs, 1)
    widened = replace(inputs, k_cache=k, v_cache=v, kv_cache_sf=None, kv_format=None)
    found: tuple[torch.Tensor, None] = torch_attention.function(widened)
    return found


def _read(inputs: PagedAttentionInputs, which: int) -> torch.Tensor:
    """Return the numbers of a cache of keys or values, in the queries' format."""
    cache = (inputs.k_cache, inputs.v_cache)[which]
    assert inputs.kv_cache_sf is not None  # noqa: S101  it is there in NVFP4
    scales = inputs.kv_cache_sf[which]
    rows = [each.contiguous().view(torch.uint8).flatten(0, 2) for each in (cache, scales)]
    one = torch.ones(1, dtype=torch.float32, device=cache.device)
    module = flashinfer(QUANTISATION)
    found: torch.Tensor = module.nvfp4_kv_dequantize(*rows, one, output_dtype=inputs.q.dtype)
    return found.view(*cache.shape[:3], -1)


def _not_persistent(problem: AttentionProblem, _: Target) -> str | None:
    return first_reason(
        (
            problem.window_left >= 0 or problem.custom_mask or problem.sinks,
            "BatchAttention has no window, no mask and no sinks",
        ),
        (
            problem.kv_cache or problem.k_scale != 1 or problem.v_scale != 1,
            "BatchAttention's scales are tensors of the kernel's own; they are not given",
        ),
    )


@FA2.adapter(
    "paged_attention",
    "flashinfer-batch-attention",
    _not_persistent,
    one_head_dim("BatchAttention has one head_dim"),
    attention_refusal,
    features=(),
    library=attention_library("batch_attention"),
    # ``persistent.cuh``: parts of 64 keys or more, merged by two rows of threads with 128 channels.
    arithmetic=replace(FA2.arithmetic, merged_outputs=2 * 64),
    split=64,
    wide_arithmetic=(),
    session=batch_attention_session,
)
def batch_attention(inputs: PagedAttentionInputs) -> Pair:
    """Attend a mixed batch in one persistent kernel, ``BatchAttention``."""
    metadata = inputs.metadata
    planned = _batch_attention(inputs.kv_layout, str(inputs.q.device))
    plan_batch_attention(planned, inputs, metadata)
    return run_batch_attention(planned, inputs)


@functools.cache
def _batch_attention(kv_layout: str, device: str) -> Any:  # noqa: ANN401  untyped
    return flashinfer().BatchAttention(kv_layout=kv_layout, device=device)
