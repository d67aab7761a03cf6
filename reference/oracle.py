"""The oracle's answer to a record of inputs, and the bound on what may differ."""

from __future__ import annotations

import torch

from .attention.append import append_paged_kv, append_paged_scaled
from .attention.append_bounds import append_error_bound
from .attention.bounds import Bounded, Values, bounded, value_dtype
from .attention.definition import AttentionOutput, attend
from .attention.merge import merge_error_bound, merge_states
from .attention.metadata import BatchMetadata, build_metadata
from .attention.options import Options
from .attention.visibility import seen_slots
from .formats.arithmetic import Arithmetic
from .moe.batched import batched_moe, bounded_batched
from .moe.bounds import BoundedMoE, bounded_moe
from .moe.calls import MoEOptions, checked_call
from .moe.definition import moe
from .moe.routing import Routing, route
from .moe.routing_bounds import RoutingComparison, compare_routing
from .tensors.batched_moe import BatchedMoEInputs
from .tensors.inputs import AppendInputs, AttentionInputs, MergeInputs, MetadataInputs
from .tensors.moe_inputs import MoEInputs, RouteInputs


def attention(inputs: AttentionInputs) -> AttentionOutput:
    """Attend as the record says, in float64."""
    options = Options(**inputs.keywords())
    return attend(inputs.call(options), inputs.head_dim_vo, options)


def bounded_attention(inputs: AttentionInputs, arithmetic: Arithmetic) -> Bounded:
    """Attend as the record says, and bound what an honest kernel may differ."""
    options = Options(**inputs.keywords())
    values = Values(inputs.head_dim_vo, value_dtype(inputs.q, inputs.values))
    return bounded(inputs.call(options), values, options, arithmetic, inputs.out_dtype)


def seen_keys(inputs: AttentionInputs) -> torch.Tensor:
    """Return which slots of the record's keys some query sees, bool [pages, page_size].

    Keys without pages are pages of one key.
    """
    options = Options(**inputs.keywords())
    return seen_slots(inputs.call(options), options)


def merged(inputs: MergeInputs) -> AttentionOutput:
    """Merge the record's states, in float64."""
    return merge_states(
        inputs.outs,
        inputs.lses,
        context_tokens=inputs.context_tokens,
        inf_marks_empty=inputs.inf_marks_empty,
        output_scale=inputs.output_scale,
    )


def bounded_merge(inputs: MergeInputs, arithmetic: Arithmetic) -> Bounded:
    """Merge the record's states, and bound what an honest kernel may differ."""
    return Bounded(
        merged(inputs),
        merge_error_bound(
            inputs.outs,
            inputs.lses,
            context_tokens=inputs.context_tokens,
            inf_marks_empty=inputs.inf_marks_empty,
            output_scale=inputs.output_scale,
            arithmetic=arithmetic,
            out_dtype=inputs.out_dtype,
        ),
    )


def append(inputs: AppendInputs) -> tuple[torch.Tensor, ...]:
    """Append as the record says, into copies of its caches and of their scales, if any."""
    if inputs.kv_cache_sf is not None and inputs.kv_format is not None:
        caches = inputs.k_cache, inputs.v_cache
        codes, scales = append_paged_scaled(
            inputs.k,
            inputs.v,
            caches,
            inputs.kv_cache_sf,
            inputs.metadata,
            kv_format=inputs.kv_format,
            k_scale=float(inputs.k_scale),
            v_scale=float(inputs.v_scale),
        )
        return *codes, *scales
    return append_paged_kv(
        inputs.k,
        inputs.v,
        inputs.k_cache,
        inputs.v_cache,
        inputs.metadata,
        kv_layout=inputs.kv_layout,
        k_scale=inputs.k_scale,
        v_scale=inputs.v_scale,
        kv_format=inputs.kv_format,
    )


def bounded_append(
    inputs: AppendInputs,
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...] | None]:
    """Append as the record says; bounds where tokens have scales, None where bits are right."""
    if inputs.kv_cache_sf is None or inputs.kv_format is None:
        return append(inputs), None
    caches = inputs.k_cache, inputs.v_cache
    return append_error_bound(
        inputs.k, inputs.v, caches, inputs.kv_cache_sf, inputs.metadata, kv_format=inputs.kv_format
    )


def metadata(inputs: MetadataInputs) -> BatchMetadata:
    """Build the record's metadata."""
    return build_metadata(inputs.query_lens, inputs.seq_lens, inputs.block_table, inputs.page_size)


def routing(inputs: RouteInputs) -> Routing:
    """Route as the record says, in float64; of equal scores the lowest index comes first."""
    return route(inputs.logits, inputs.top_k, **inputs.keywords())


def shapes_of_routing(inputs: RouteInputs, arithmetic: Arithmetic) -> Bounded:
    """Return weights and ids with bounds of 0: of routings only shapes are compared one by one.

    Ties may go either way: ``judge_routing`` knows which choices are right.
    """
    del arithmetic
    wanted = AttentionOutput(*(each.double() for each in reversed(routing(inputs))))
    return Bounded(wanted, AttentionOutput(*(torch.zeros_like(each) for each in wanted)))


def judge_routing(inputs: RouteInputs, found: Routing, arithmetic: Arithmetic) -> RoutingComparison:
    """Judge what was made of the record, in which ties may have gone either way."""
    return compare_routing(
        found, inputs.logits, inputs.top_k, **inputs.keywords(), arithmetic=arithmetic
    )


def experts(inputs: MoEInputs) -> torch.Tensor:
    """Apply experts as the record says, in float64."""
    return moe(*inputs.tensors(), **inputs.keywords())


def paired_experts(inputs: MoEInputs, arithmetic: Arithmetic) -> Bounded:
    """Return the answer of ``bounded_experts``, with nothing in the place of an lse."""
    answer = bounded_experts(inputs, arithmetic)
    nothing = answer.expected.new_empty(0)
    return Bounded(*(AttentionOutput(each, nothing) for each in answer))


def bounded_experts(inputs: MoEInputs, arithmetic: Arithmetic) -> BoundedMoE:
    """Apply experts as the record says, and bound what an honest kernel may differ."""
    call = checked_call(*inputs.tensors(), MoEOptions(**inputs.keywords()))
    return bounded_moe(call, torch.float64, arithmetic, inputs.out_dtype)


def batched_experts(inputs: BatchedMoEInputs) -> torch.Tensor:
    """Apply each expert to its own rows as the record says, in float64."""
    return batched_moe(*inputs.tensors(), **inputs.keywords())


def paired_batched_experts(inputs: BatchedMoEInputs, arithmetic: Arithmetic) -> Bounded:
    """Return the answer of ``batched_experts`` and its bound, with nothing in place of an lse."""
    options = MoEOptions(**inputs.keywords())
    answer = bounded_batched(inputs.tensors(), options, arithmetic, inputs.out_dtype)
    nothing = answer.expected.new_empty(0)
    return Bounded(*(AttentionOutput(each, nothing) for each in answer))
