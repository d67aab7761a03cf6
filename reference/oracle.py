"""The oracle's answer to a record of inputs, and the bound on what may differ."""

from __future__ import annotations

import torch

from .attention.append import append_paged_kv
from .attention.bounds import Judged, Values, judge, value_dtype
from .attention.definition import AttentionOutput, paged_attention, ragged_attention
from .attention.merge import merge_error_bound, merge_states
from .attention.metadata import BatchMetadata, build_metadata
from .attention.options import Options
from .attention.requests import paged_call, ragged_call
from .formats.arithmetic import Arithmetic
from .formats.kv_format import stored_head_dim
from .moe.bounds import JudgedMoE, judge_moe
from .moe.calls import MoEOptions, checked_call
from .moe.definition import moe
from .moe.routing import Routing, route
from .moe.routing_bounds import RoutingComparison, compare_routing
from .tensors.inputs import (
    AppendInputs,
    AttentionInputs,
    MergeInputs,
    MetadataInputs,
    PagedAttentionInputs,
)
from .tensors.moe_inputs import MoEInputs, RouteInputs


def attention(inputs: AttentionInputs) -> AttentionOutput:
    """Attend as the record says, in float64."""
    if isinstance(inputs, PagedAttentionInputs):
        return paged_attention(
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            inputs.metadata,
            kv_layout=inputs.kv_layout,
            **inputs.keywords(),
        )
    return ragged_attention(
        inputs.q, inputs.k, inputs.v, inputs.qo_indptr, inputs.kv_indptr, **inputs.keywords()
    )


def judge_attention(inputs: AttentionInputs, arithmetic: Arithmetic) -> Judged:
    """Attend as the record says, and bound what an honest kernel may differ."""
    options = Options(**inputs.keywords())
    if isinstance(inputs, PagedAttentionInputs):
        v_cache = inputs.v_cache
        values = Values(stored_head_dim(v_cache, inputs.kv_format), value_dtype(inputs.q, v_cache))
        call = paged_call(
            inputs.q, inputs.k_cache, v_cache, inputs.metadata, inputs.kv_layout, options
        )
    else:
        values = Values(inputs.v.shape[-1], inputs.v.dtype)
        call = ragged_call(
            inputs.q, inputs.k, inputs.v, inputs.qo_indptr, inputs.kv_indptr, options
        )
    return judge(call, values, options, arithmetic, inputs.out_dtype)


def judge_merge(inputs: MergeInputs, arithmetic: Arithmetic) -> Judged:
    """Merge the record's states, and bound what an honest kernel may differ."""
    return Judged(
        merge_states(inputs.outs, inputs.lses),
        merge_error_bound(
            inputs.outs, inputs.lses, arithmetic=arithmetic, out_dtype=inputs.out_dtype
        ),
    )


def append(inputs: AppendInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Append as the record says, into copies."""
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


def metadata(inputs: MetadataInputs) -> BatchMetadata:
    """Build the record's metadata."""
    return build_metadata(inputs.query_lens, inputs.seq_lens, inputs.block_table, inputs.page_size)


def routing(inputs: RouteInputs) -> Routing:
    """Route as the record says, in float64; of equal scores the lowest index comes first."""
    return route(inputs.logits, inputs.top_k, **inputs.keywords())


def judge_routing(inputs: RouteInputs, found: Routing, arithmetic: Arithmetic) -> RoutingComparison:
    """Judge what was made of the record, in which ties may have gone either way."""
    return compare_routing(
        found, inputs.logits, inputs.top_k, **inputs.keywords(), arithmetic=arithmetic
    )


def experts(inputs: MoEInputs) -> torch.Tensor:
    """Apply experts as the record says, in float64."""
    return moe(*inputs.tensors(), **inputs.keywords())


def judge_experts(inputs: MoEInputs, arithmetic: Arithmetic) -> JudgedMoE:
    """Apply experts as the record says, and bound what an honest kernel may differ."""
    call = checked_call(*inputs.tensors(), MoEOptions(**inputs.keywords()))
    return judge_moe(call, torch.float64, arithmetic, inputs.out_dtype)
