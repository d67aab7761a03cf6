"""Faults of far rows: their offsets are computed in int32."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...impl.gpu.workspaces import workspace
from ...reference.tensors.inputs import (
    AppendInputs,
    MergeInputs,
    MetadataInputs,
    PagedAttentionInputs,
)
from ...reference.tensors.moe_inputs import MoEInputs, RouteInputs
from ...reference.tensors.slots import SlotInputs
from .appending import addresses, write
from .attention.padding_bugs import in_int32
from .catalogue import SeededBug, seeded
from .honest import Built, build, merge_states
from .kernels import attend
from .moe.kernels import apply
from .moe.routing_bugs import Routed, routed
from .slots_bugs import mapped

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
LAW, LARGE = "far_rows", ("large_rows",)
Pair = tuple[torch.Tensor, torch.Tensor]


def found(tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """Return the rows of a tensor that int32 offsets lead to; those before it from its end."""
    rows, stride = torch.arange(tensor.shape[axis]), tensor.stride(axis)
    if not len(rows) or not stride:
        return tensor
    places = in_int32(rows * stride) // stride % len(rows)
    return tensor if torch.equal(places, rows) else tensor.index_select(axis, places)


@seeded(BUGS, "append_paged_kv", LAW, features=LARGE)
def new_row_in_int32(inputs: AppendInputs) -> Pair:
    """Multiply a new token's number by the stride of new keys and values in int32."""
    pages, slots = addresses(inputs)
    k, v = (found(rows).to(cache.dtype) for rows, cache in
            ((inputs.k, inputs.k_cache), (inputs.v, inputs.v_cache)))  # fmt: skip
    return write(inputs, pages, slots, (k, v))


@seeded(BUGS, "merge_state", LAW, features=LARGE)
def state_offset_in_int32(inputs: MergeInputs) -> Pair:
    """Multiply the numbers of states and tokens by their strides in int32."""
    return merge_states(found(found(inputs.outs), 1), inputs.lses, inputs.out_dtype)


@seeded(BUGS, "route", LAW, features=LARGE)
def logits_row_in_int32(inputs: RouteInputs) -> Routed:
    """Multiply a token's number by the stride of logits in int32."""
    return routed(replace(inputs, logits=found(inputs.logits)))


@seeded(BUGS, "build_metadata", LAW, features=LARGE)
def table_row_in_int32(inputs: MetadataInputs) -> Built:
    """Multiply a request's number by the stride of the block table in int32."""
    return build(replace(inputs, block_table=found(inputs.block_table)))


@seeded(BUGS, "map_slots", LAW, features=LARGE)
def row_of_slots_in_int32(inputs: SlotInputs) -> torch.Tensor:
    """Multiply a row's number by the stride of the block table in int32."""
    return mapped(replace(inputs, block_table=found(inputs.block_table)))


@seeded(BUGS, "moe", LAW, features=LARGE)
def hidden_row_in_int32(inputs: MoEInputs) -> torch.Tensor:
    """Multiply a token's number by the stride of hidden states in int32."""
    assert isinstance(inputs.hidden, torch.Tensor)  # noqa: S101  quantised ones are not claimed
    return apply(replace(inputs, hidden=found(inputs.hidden)))


@seeded(BUGS, "moe", LAW, features=(*LARGE, "large_weights"))
def weight_row_in_int32(inputs: MoEInputs) -> torch.Tensor:
    """Multiply an output channel's number by the stride of an expert's weights in int32."""
    assert isinstance(inputs.w13, torch.Tensor)  # noqa: S101  quantised ones are not claimed
    return apply(replace(inputs, w13=found(inputs.w13, 1)))


def _with_parts(inputs: PagedAttentionInputs, *, far: bool) -> Pair:
    """Attend, and take the output through a workspace."""
    out, lse = attend(inputs)
    parts = workspace(inputs.q, out.shape, torch.nan)
    parts.copy_(out)
    return (found(parts) if far else parts).to(out.dtype), lse


@seeded(BUGS, "paged_attention", "far_workspaces", features=("large_workspaces",))
def workspace_row_in_int32(inputs: PagedAttentionInputs) -> Pair:
    """Multiply a token's number by the stride of a workspace in int32."""
    return _with_parts(inputs, far=True)


@seeded(BUGS, "paged_attention", "far_tokens", features=("large_tensors",), writes_out=True)
def output_row_in_int32(inputs: PagedAttentionInputs) -> None:
    """Multiply a token's number by the stride of the output in int32."""
    out, lse = attend(inputs)
    if inputs.out is None or inputs.lse is None:
        return
    rows, stride = torch.arange(len(out)), inputs.out.stride(0)
    inputs.out[in_int32(rows * stride) // max(stride, 1) % max(len(rows), 1)] = out
    inputs.lse.copy_(lse)


@seeded(CONTROLS, "paged_attention", control="honest", features=("large_workspaces",))
def workspace_row_in_int64(inputs: PagedAttentionInputs) -> Pair:
    """Take the output through a workspace, by offsets of 64 bits."""
    return _with_parts(inputs, far=False)
