"""vLLM's unified attention for keys and values of different head dims, by its 2D and 3D kernel."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs
from ..features import ALGEBRA
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from .claims import LEAST_CHANNELS, by_slots, wrong_here
from .launch import why_not
from .sources import implementation, known, load, unavailable
from .vllm_attention import (
    TILE,
    padded_table,
    scratch_for,
    scratch_is_given,
    why_2d,
)
from .vllm_stubs import stubs

FILE = "vllm.v1.attention.ops.triton_unified_attention_diffkv"
DECODE_TILE = 16


def _supports(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    return first_reason(
        (problem.more_queries_than_keys,
         "every query is one of the keys: a request has no more queries than keys"),
        (not problem.causal or problem.causal_by_request, "it is causal only"),
        (problem.alibi and problem.sinks and problem.most_queries > 1,
         "ALiBi is counted from the first new token, which sinks know nothing of"),
        (min(problem.head_dim_qk, problem.head_dim_vo) < LEAST_CHANNELS,
         f"tl.dot takes {LEAST_CHANNELS} channels or more"),
        (not problem.kv_cache and (problem.k_scale != 1 or problem.v_scale != 1),
         "scales belong to FP8 caches"),
    ) or wrong_here(target, problem.kv_cache) or unavailable(FILE, target) or True  # fmt: skip


def _supports_3d(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    wrong = _supports(problem, target)
    if wrong is not True:
        return wrong
    why = why_not(
        FILE,
        "unified_attention_diffkv",
        "use_3d",
        "seq_threshold_3D",
        {
            **scratch_is_given(problem),
            "max_seqlen_q": problem.most_queries,
            "sliding_window_val": problem.window_left + 1,
        },
    )
    return why_2d(why) or True


def _compile_key(problem: AttentionProblem) -> Hashable:
    return (
        problem.dtype, problem.kv_cache, problem.num_kv_heads, problem.group_size,
        problem.head_dim_qk, problem.head_dim_vo, problem.page_size, problem.window_left,
        problem.logits_soft_cap > 0, problem.alibi, problem.sinks, problem.strided_q,
        problem.strided_kv, problem.different_kv_strides, problem.kv_layout,
        (problem.most_queries * problem.group_size - 1).bit_length(),
    )  # fmt: skip


diffkv = functools.partial(
    implementation,
    "paged_attention",
    provider="vllm",
    features=("fp8_kv", "host_bounds", "alibi", "different_kv_strides", "large_caches", ALGEBRA),
    writes_out=True,
    # Scales of the cache multiply logits and sums: codes are exact in 16 bits.
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32", tanh="sigmoid"),
    compile_key=_compile_key,
    build_ahead="cuda",
    build_minutes=0.05,
    build_compilers=1,
)


@diffkv(name="vllm-unified-attention-diffkv", supports=_supports, tile=TILE)
def attend_2d(inputs: PagedAttentionInputs) -> tuple[torch.Tensor | None, None]:
    """Attend with the 2D kernel: no scratch is given."""
    return _attend(inputs)


@diffkv(
    name="vllm-unified-attention-diffkv-3d", supports=_supports_3d, tile=DECODE_TILE,
    split=DECODE_TILE,
)  # fmt: skip
def attend_3d(inputs: PagedAttentionInputs) -> tuple[torch.Tensor | None, None]:
    """Attend with the 3D kernel, whose scratch holds NaN before."""
    return _attend(inputs, **scratch_for(inputs, inputs.head_dim_vo))


def _attend(
    inputs: PagedAttentionInputs,
    **more: Any,  # noqa: ANN401  arguments of vLLM's
) -> tuple[torch.Tensor | None, None]:
    caches = [by_slots(each, inputs.kv_layout) for each in (inputs.k_cache, inputs.v_cache)]
    if inputs.kv_format is not None:
        caches = [inputs.kv_format.view(each) for each in caches]
        for name in ("k", "v"):
            scale = getattr(inputs, f"{name}_scale")
            more[f"{name}_descale"] = inputs.q.new_tensor(scale, dtype=torch.float32)
    longest = int(inputs.lengths()[0].max()) if len(inputs.metadata.seq_lens) else 0
    # A bound that is larger than the truth must not choose the other kernel.
    bound = longest if "seq_threshold_3D" in more else inputs.max_q_len
    with load(FILE, stubs) as kernels, scalars_as_bounds(inputs.q):
        attend = kernels.unified_attention_diffkv
        attend(
            q=inputs.q,
            k=caches[0],
            v=caches[1],
            out=inputs.out,
            cu_seqlens_q=inputs.metadata.qo_indptr,
            seqused_k=inputs.metadata.seq_lens,
            softmax_scale=inputs.sm_scale,
            causal=True,
            window_size=(inputs.window_left, 0),
            block_table=padded_table(inputs),
            softcap=inputs.logits_soft_cap,
            max_seqlen_q=bound,
            alibi_slopes=inputs.alibi_slopes,
            sinks=inputs.sinks,
            **known(attend, **more),
        )
    return inputs.out, None
