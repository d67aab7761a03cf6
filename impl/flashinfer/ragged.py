"""FlashInfer's attention to ragged keys: batched prefill, and single requests."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ...reference import AttentionProblem
from ...reference.tensors.inputs import RaggedAttentionInputs
from ..targets.refusal import first_reason
from ..targets.target import Target
from .backends import CUDA_CORE, FA2, FA3
from .calls import attention_refusal, flashinfer, plan_options, wrapper
from .claims import no_more_queries_than_keys
from .libraries import attention_library
from .sessions import RAGGED, ragged_session
from .triton import to_natural

Pair = tuple[torch.Tensor, torch.Tensor]


def _scaled(problem: AttentionProblem, _: Target) -> str | None:
    return first_reason(
        (
            (problem.k_scale, problem.v_scale) != (1, 1),
            "ragged wrappers apply k_scale and v_scale to quantised keys alone",
        ),
        (problem.sinks, "ragged wrappers take no sinks"),
    )


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
        RAGGED,
        inputs.q.device,
        # A plan without a mask keeps the mask of the plan before (0.6.13 to 0.7.2.post1): the law
        # life_cycle plans both in one session, and would not be the only one to fail.
        apart="masked" if inputs.custom_mask is not None else "",
        kv_layout="NHD",
        backend=backend,
    )
    _plan(planned, inputs)
    return _run(planned, inputs)


SINGLE_SPLIT = 256
"""Keys of the shortest part in which kernels of a single request read its keys."""


@FA2.adapter(
    "ragged_attention",
    "flashinfer-ragged-fa2",
    _scaled,
    attention_refusal,
    features=("custom_mask", "tree"),
    session=functools.partial(ragged_session, "fa2", _plan, _run),
)
def ragged_fa2(inputs: RaggedAttentionInputs) -> Pair:
    """Attend by ``BatchPrefillWithRaggedKVCacheWrapper`` with FA2."""
    return _prefill(inputs, "fa2")


@FA3.adapter(
    "ragged_attention",
    "flashinfer-ragged-fa3",
    _scaled,
    attention_refusal,
    features=(),
    session=functools.partial(ragged_session, "fa3", _plan, _run),
)
def ragged_fa3(inputs: RaggedAttentionInputs) -> Pair:
    """Attend by ``BatchPrefillWithRaggedKVCacheWrapper`` with FA3."""
    return _prefill(inputs, "fa3")


def _several_requests(problem: AttentionProblem, _: Target) -> str | None:
    several = len(problem.query_lens) != 1
    return "single_prefill_with_kv_cache takes one request" if several else None


@FA2.adapter(
    "ragged_attention",
    "flashinfer-single-prefill-fa2",
    _several_requests,
    no_more_queries_than_keys("single_prefill_with_kv_cache takes", causal=True),
    _scaled,
    attention_refusal,
    features=("custom_mask", "tree"),
    library=attention_library("single_prefill", "fa2"),
    wide_arithmetic=(),
    split=SINGLE_SPLIT,
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


def _no_single_decode(problem: AttentionProblem, _: Target) -> str | None:
    return first_reason(
        (
            problem.query_lens != (1,),
            "single_decode_with_kv_cache takes one token of one request",
        ),
        (problem.custom_mask, "single_decode_with_kv_cache takes no mask"),
        (problem.strided_kv, "single_decode_with_kv_cache takes contiguous keys and values"),
    )


@CUDA_CORE.adapter(
    "ragged_attention",
    "flashinfer-single-decode",
    _no_single_decode,
    _scaled,
    attention_refusal,
    features=(),
    library=attention_library("single_decode"),
    split=SINGLE_SPLIT,
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
