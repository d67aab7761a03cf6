"""SGLang's extend attention: new tokens attend to a prefix in the cache, and to each other."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import Refusal
from ..targets.target import Target
from . import sglang_calls as sglang
from .sources import known, load, unavailable

FILE = sglang.file_of("extend_attention")
BATCHES = (1, 2, 16)
"""Requests of batches that Triton compiles apart: the number is an argument of the kernel."""


def _supports(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    scales = problem.k_scale, problem.v_scale
    for holds, why in (
        (problem.empty_batch, "engines make no call without a token"),
        (problem.more_queries_than_keys, "new tokens are keys, too"),
        (any(scale not in (0.5, 1, 2) for scale in scales),
         "scales are the prefix's: new keys would be rounded by another than a power of two"),
        (problem.window_left >= 0 and not problem.causal, "without causal, a window has two sides"),
        (problem.custom_mask and problem.causal, "a mask stands in for the causal one"),
    ):  # fmt: skip
        if holds:
            return why
    return sglang.pool_refusal(problem) or unavailable(FILE, target) or True


def _compile_key(problem: AttentionProblem) -> Hashable:
    options = (
        problem.page_size, problem.causal, problem.window_left, problem.logits_soft_cap,
        problem.sinks, problem.custom_mask,
        problem.num_requests == 1, problem.num_requests % BATCHES[-1] == 0,
    )  # fmt: skip
    return *sglang.strides_key(problem), *options


def _kernels(problem: AttentionProblem) -> list[AttentionProblem]:
    single = replace(problem, shared_prefix_pages=0, request_ids=())
    return [replace(single, query_lens=(2,) * n, seq_lens=(3,) * n) for n in BATCHES]


@sglang.kernel(
    "paged_attention",
    name="sglang-extend",
    supports=_supports,
    features=("custom_mask", "mla", "host_bounds"),
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32", tanh="sigmoid"),
    compile_key=_compile_key,
    kernels=_kernels,
    # A tile that the window cuts is read whole. SGLang leaves pages behind it out of the indices.
    hidden_keys="finite",
    tile=64,  # 128 on SM80, SM89 and SM120, 32 with head dims above 128 in the interpreter
)
def extend(inputs: PagedAttentionInputs) -> sglang.Pair:
    """Attend with ``extend_attention_fwd``; releases without ``lse_extend`` have no LSE."""
    lengths, queries = inputs.metadata.seq_lens, inputs.metadata.qo_indptr.diff()
    prefix = lengths - queries
    k, v = (sglang.pool(cache, inputs.kv_layout) for cache in (inputs.k_cache, inputs.v_cache))
    new, mask = sglang.slots(inputs, prefix, queries), inputs.custom_mask
    masks = sglang.indptr(queries * lengths).long()
    with load(FILE, sglang.stubs) as kernels, scalars_as_bounds(inputs.q):
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
            **known(attend, page_size=inputs.metadata.page_size),
        )
    return inputs.out, inputs.lse if lse else None
