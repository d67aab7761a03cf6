"""FlashInfer's attention to ragged keys: batched prefill, and single requests."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...reference import AttentionProblem, Problem
from ...reference.tensors.inputs import RaggedAttentionInputs
from ..protocol import implementation
from ..targets.target import Target
from .calls import (
    BUILD_MINUTES,
    CUDA_CORES,
    FA2,
    FA2_WIDE,
    FA3,
    attention_refusal,
    flashinfer,
    module_key,
    plan_options,
    wrapper,
)
from .sessions import RaggedSession
from .triton import to_natural

Pair = tuple[torch.Tensor, torch.Tensor]


def _unscaled(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, AttentionProblem) and (problem.k_scale, problem.v_scale) != (1, 1):
        return "ragged wrappers apply k_scale and v_scale to quantised keys alone"
    if isinstance(problem, AttentionProblem) and problem.sinks:
        return "ragged wrappers take no sinks"
    return attention_refusal(problem, target) or True


def _plan(planned: Any, inputs: RaggedAttentionInputs) -> None:  # noqa: ANN401  untyped
    planned.plan(
        qo_indptr=inputs.qo_indptr,
        kv_indptr=inputs.kv_indptr,
        num_qo_heads=inputs.q.shape[1],
        num_kv_heads=inputs.k.shape[1],
        head_dim_qk=inputs.q.shape[-1],
        head_dim_vo=inputs.v.shape[-1],
        causal=inputs.causal,
        custom_mask=inputs.custom_mask,
        **plan_options(inputs, inputs.k.dtype),
    )


def _run(planned: Any, inputs: RaggedAttentionInputs) -> Pair:  # noqa: ANN401  untyped
    out, lse = planned.run(inputs.q, inputs.k, inputs.v, return_lse=True)
    return out, to_natural(lse)


def _prefill(inputs: RaggedAttentionInputs, backend: str) -> Pair:
    planned = wrapper(
        "BatchPrefillWithRaggedKVCacheWrapper",
        inputs.q.device,
        # A plan without a mask keeps the mask of the plan before (0.6.13 to 0.7.2.post1): the law
        # life_cycle plans both in one session, and would not be the only one to fail.
        apart="masked" if inputs.custom_mask is not None else "",
        kv_layout="NHD",
        backend=backend,
    )
    _plan(planned, inputs)
    return _run(planned, inputs)


@implementation(
    "ragged_attention",
    name="flashinfer-ragged-fa2",
    backend="fa2",
    supports=_unscaled,
    features=("custom_mask",),
    arithmetic=FA2,
    wide_arithmetic=FA2_WIDE,
    compile_key=module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["fa2"],
    session=functools.partial(RaggedSession, "fa2", _plan, _run),
)
def ragged_fa2(inputs: RaggedAttentionInputs) -> Pair:
    """Attend by ``BatchPrefillWithRaggedKVCacheWrapper`` with FA2."""
    return _prefill(inputs, "fa2")


@implementation(
    "ragged_attention",
    name="flashinfer-ragged-fa3",
    backend="fa3",
    supports=_unscaled,
    arithmetic=FA3,
    compile_key=module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["fa3"],
    session=functools.partial(RaggedSession, "fa3", _plan, _run),
)
def ragged_fa3(inputs: RaggedAttentionInputs) -> Pair:
    """Attend by ``BatchPrefillWithRaggedKVCacheWrapper`` with FA3."""
    return _prefill(inputs, "fa3")


def _one_request(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, AttentionProblem) and len(problem.query_lens) != 1:
        return "single_prefill_with_kv_cache takes one request"
    return _unscaled(problem, target)


@implementation(
    "ragged_attention",
    name="flashinfer-single-prefill-fa2",
    backend="fa2",
    supports=_one_request,
    features=("custom_mask",),
    arithmetic=FA2,
    compile_key=module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["fa2"],
)
def single_prefill(inputs: RaggedAttentionInputs) -> Pair:
    """Attend one request by ``single_prefill_with_kv_cache`` with FA2."""
    mask = inputs.custom_mask
    out, lse = flashinfer().single_prefill_with_kv_cache(
        inputs.q,
        inputs.k,
        inputs.v,
        custom_mask=None if mask is None else mask.view(inputs.q.shape[0], -1),
        causal=inputs.causal,
        sm_scale=inputs.sm_scale,
        window_left=inputs.window_left,
        logits_soft_cap=inputs.logits_soft_cap,
        backend="fa2",
        return_lse=True,
    )
    return out, to_natural(lse)


def _one_decode(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, AttentionProblem) and problem.query_lens != (1,):
        return "single_decode_with_kv_cache takes one token of one request"
    if isinstance(problem, AttentionProblem) and problem.custom_mask:
        return "single_decode_with_kv_cache takes no mask"
    if isinstance(problem, AttentionProblem) and problem.strided_kv:
        return "single_decode_with_kv_cache takes contiguous keys and values"
    return _unscaled(problem, target)


@implementation(
    "ragged_attention",
    name="flashinfer-single-decode",
    backend="cuda-core",
    supports=_one_decode,
    arithmetic=CUDA_CORES,
    compile_key=module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["cuda-core"],
)
def single_decode(inputs: RaggedAttentionInputs) -> Pair:
    """Attend one token by ``single_decode_with_kv_cache`` without tensor cores."""
    out, lse = flashinfer().single_decode_with_kv_cache(
        inputs.q[0],
        inputs.k,
        inputs.v,
        sm_scale=inputs.sm_scale,
        window_left=inputs.window_left,
        logits_soft_cap=inputs.logits_soft_cap,
        return_lse=True,
    )
    return out.unsqueeze(0), to_natural(lse).unsqueeze(0)
