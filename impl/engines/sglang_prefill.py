"""SGLang's attention of prefills: over a prefix in the cache (extend), and without a cache."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs
from ..features import ALGEBRA
from ..gating.rules import provider_matches
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from . import sglang_calls as sglang
from .sglang_calls import SGLANG, Pair, file_of, kernel, strides_key, stubs
from .sources import known, load, unavailable

FILE = file_of("prefill_attention")
SCALED = ">=0.5.23"
"""Releases whose kernel takes ``sm_scale``; others multiply by 1 / sqrt(head_dim)."""


def _supports(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    usual = problem.scale == problem.head_dim_qk**-0.5
    return first_reason(
        (problem.empty_batch, "engines make no call without a token"),
        (problem.query_lens != problem.seq_lens, "each request has as many queries as keys"),
        (problem.head_dim_qk != problem.head_dim_vo, "queries and values have the same channels"),
        (problem.window_left >= 0 or problem.logits_soft_cap or problem.sinks,
         "it has no window, no soft cap and no sinks"),
        (problem.k_scale != 1 or problem.v_scale != 1, "it has no scales of keys and values"),
        (not usual and not provider_matches(target, SGLANG, SCALED),
         f"a release that is not {SCALED} has no sm_scale"),
    ) or unavailable(FILE, target) or True  # fmt: skip


def _compile_key(problem: AttentionProblem) -> Hashable:
    return *strides_key(problem), problem.causal


@kernel(
    "ragged_attention",
    name="sglang-prefill",
    supports=_supports,
    features=("host_bounds", ALGEBRA),
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32"),
    compile_key=_compile_key,
    tile=128,
)
def prefill(inputs: RaggedAttentionInputs) -> Pair:
    """Attend with ``context_attention_fwd``."""
    lengths = inputs.qo_indptr.diff()
    with load(FILE, stubs) as kernels, scalars_as_bounds(inputs.q):
        attend = kernels.context_attention_fwd
        attend(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            o=inputs.out,
            b_start_loc=inputs.qo_indptr[:-1],
            b_seq_len=lengths,
            max_input_len=inputs.max_q_len,
            is_causal=inputs.causal,
            **known(attend, sm_scale=inputs.sm_scale),
        )
    return inputs.out, None


EXTEND = sglang.file_of("extend_attention")
TWO_SIDED = ">=0.5.23"
"""Releases whose window has two sides without a causal mask."""
ON_AMD = {
    name: f"sglang/kernels/ops/attention/extend_attention.py:{line} of sglang 0.5.23"
    for name, line in (
        ("USE_COMPACT_TILE_GRID", 1059), ("STORE_TRANSPOSE", 1152), ("IS_GFX1250", 1151),
        ("USE_EXP2", 1046), ("USE_FP8_PREFIX", 1023), ("USE_FP8_EXTEND", 1029),
    )
} | {
    "IDENTITY_KV_INDICES":
    "sglang/srt/layers/attention/triton_backend.py:275 of sglang 0.5.23"
}  # fmt: skip
"""Flags that these lines set on AMD's GPUs only."""
BATCHES = (1, 2, 16)
"""Requests of batches that Triton compiles apart: the number is an argument of the kernel."""


def _extends(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    scales = problem.k_scale, problem.v_scale
    return first_reason(
        (problem.empty_batch, "engines make no call without a token"),
        (problem.more_queries_than_keys, "new tokens are keys, too"),
        (any(scale not in (0.5, 1, 2) for scale in scales),
         "scales are the prefix's: new keys would be rounded by another than a power of two"),
        (problem.window_left >= 0 and not problem.causal and not problem.two_sided_window,
         "without causal, a window has two sides"),
        (problem.two_sided_window and not provider_matches(target, SGLANG, TWO_SIDED),
         f"a release that is not {TWO_SIDED} was not read for windows with two sides"),
        (problem.custom_mask and problem.causal, "a mask stands in for the causal one"),
    ) or sglang.bias_refusal(problem, EXTEND) or sglang.pool_refusal(problem) \
        or unavailable(EXTEND, target) or True  # fmt: skip


def _extend_key(problem: AttentionProblem) -> Hashable:
    options = (
        problem.page_size, problem.causal, problem.window_left, problem.logits_soft_cap,
        problem.sinks, problem.custom_mask, problem.logits_bias, problem.two_sided_window,
        problem.num_requests == 1, problem.num_requests % BATCHES[-1] == 0,
    )  # fmt: skip
    return *sglang.strides_key(problem), *options


def _kernels(problem: AttentionProblem) -> list[AttentionProblem]:
    single = replace(problem, shared_prefix_pages=0, request_ids=())
    return [replace(single, query_lens=(2,) * n, seq_lens=(3,) * n) for n in BATCHES]


@sglang.kernel(
    "paged_attention",
    name="sglang-extend",
    supports=_extends,
    features=(
        "custom_mask",
        "mla",
        "host_bounds",
        "logits_bias",
        "two_sided_window",
        "large_caches",
        ALGEBRA,
    ),
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32", tanh="sigmoid"),
    compile_key=_extend_key,
    kernels=_kernels,
    # A tile that the window cuts is read whole. SGLang leaves pages behind it out of the indices.
    hidden_keys="finite",
    unset_flags=ON_AMD,
    tile=64,  # 128 on SM80, SM89 and SM120, 32 with head dims above 128 in the interpreter
)
def extend(inputs: PagedAttentionInputs) -> sglang.Pair:
    """Attend with ``extend_attention_fwd``; releases without ``lse_extend`` have no LSE."""
    lengths, queries = inputs.metadata.seq_lens, inputs.metadata.qo_indptr.diff()
    prefix = lengths - queries
    k, v = (sglang.pool(cache, inputs.kv_layout) for cache in (inputs.k_cache, inputs.v_cache))
    new, mask = sglang.slots(inputs, prefix, queries), inputs.custom_mask
    masks = sglang.indptr(queries * lengths).long()
    with load(EXTEND, sglang.stubs) as kernels, scalars_as_bounds(inputs.q):
        attend = kernels.extend_attention_fwd
        lse = known(attend, lse_extend=inputs.lse)
        attend(
            q_extend=inputs.q,
            k_extend=k[new] * inputs.k_scale,
            v_extend=v[new] * inputs.v_scale,
            o_extend=inputs.out,
            k_buffer=k,
            v_buffer=v,
            qo_indptr=inputs.metadata.qo_indptr,
            kv_indptr=sglang.indptr(prefix),
            kv_indices=sglang.slots(inputs, torch.zeros_like(prefix), prefix),
            custom_mask=None if mask is None else mask.view(torch.uint8),
            is_causal=inputs.causal,
            mask_indptr=masks,
            max_len_extend=inputs.max_q_len,
            k_scale=inputs.k_scale,
            v_scale=inputs.v_scale,
            sm_scale=inputs.sm_scale,
            logit_cap=inputs.logits_soft_cap,
            skip_prefix_custom_mask=False,
            sliding_window_size=inputs.window_left,
            sinks=inputs.sinks,
            window_kv_offsets=torch.zeros_like(lengths),
            **lse,
            **sglang.bias_arguments(inputs),
            **known(attend, page_size=inputs.metadata.page_size),
        )
    return inputs.out, inputs.lse if lse else None
