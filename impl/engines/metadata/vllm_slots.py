"""vLLM's Triton kernels that map new tokens to slots of a paged cache."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ....reference import PAD_SLOT, SlotsProblem
from ....reference.tensors.slots import SlotInputs
from ...features import INT64_INPUTS
from ...gpu.triton_interpreter import scalar_conditions, scalars_as_bounds
from ...targets.refusal import Refusal
from ...targets.target import Target
from ..sources import load, missing_name, says, unavailable
from ..vllm_stubs import stubs
from .batches import launched

ONE_TABLE = "vllm.v1.worker.block_table"
GROUPS = "vllm.v1.worker.gpu.block_table"
KERNEL = "_compute_slot_mappings_kernel"
BLOCK = 1024
"""Tokens a block, as both callers launch their kernels."""


def _of_sixteen(number: int) -> tuple[bool, bool]:
    """Return what Triton compiles another kernel for: whether a number is 1, a multiple of 16."""
    return number == 1, number % 16 == 0


def _supports_one(problem: SlotsProblem, target: Target) -> Refusal | str | bool:
    if lacking := missing_name(ONE_TABLE, "ComputeSlotMappingKernel"):
        return lacking
    if says(ONE_TABLE, "BLOCKS_PER_KV_BLOCK"):
        return "this release's kernel takes other arguments"
    for query_lens, seq_lens in problem.steps:
        if any(t and not s for t, s in zip(query_lens, seq_lens, strict=True)):
            return "requests that fill up a batch have no tokens, and rows of their own"
    return unavailable(ONE_TABLE, target) or True


def _compile_key(problem: SlotsProblem) -> Hashable:
    group = problem.page_size, problem.world, problem.rank, problem.interleave
    return *group, _of_sixteen(problem.columns)


def _key_of_groups(problem: SlotsProblem) -> Hashable:
    group = problem.world, problem.interleave, _of_sixteen(problem.rank)
    return *group, _of_sixteen(problem.num_slots)


@launched(
    "map_slots",
    name="vllm-slot-mapping",
    provider="vllm",
    supports=_supports_one,
    features=("far_slots", "large_rows", INT64_INPUTS),
    compile_key=_compile_key,
)
def one_table(inputs: SlotInputs) -> torch.Tensor:
    """Map a batch whose requests have the block table's rows in their order."""
    table = inputs.block_table[inputs.rows.clamp(min=0).long()]
    with load(ONE_TABLE, stubs) as kernels, scalars_as_bounds(inputs.block_table):
        kernels.ComputeSlotMappingKernel.kernel[(len(inputs.rows) + 1,)](
            len(inputs.positions),
            len(inputs.slot_mapping),
            inputs.query_start_loc,
            inputs.positions,
            table,
            table.stride(0),
            inputs.slot_mapping,
            KV_CACHE_BLOCK_SIZE=inputs.page_size,
            TOTAL_CP_WORLD_SIZE=inputs.world,
            TOTAL_CP_RANK=inputs.rank,
            CP_KV_CACHE_INTERLEAVE_SIZE=inputs.interleave,
            PAD_ID=PAD_SLOT,
            BLOCK_SIZE=BLOCK,
        )
    return inputs.slot_mapping


def _supports_groups(_: SlotsProblem, target: Target) -> Refusal | str | bool:
    if lacking := missing_name(GROUPS, KERNEL):
        return lacking
    known = says(GROUPS, "slot_mapping_enabled") and says(GROUPS, "dcp_sharded")
    if not known or says(GROUPS, "group_cp_sizes"):
        return "this release's kernel takes other arguments"
    return unavailable(GROUPS, target) or True


@launched(
    "map_slots",
    name="vllm-slot-mappings",
    provider="vllm",
    supports=_supports_groups,
    # Not far_slots: page ids and sizes are multiplied in int32.
    compile_key=_key_of_groups,
)
def groups(inputs: SlotInputs) -> torch.Tensor:
    """Map a batch for the second of two groups of layers; the first, of recurrent state, has none.

    The kernel takes addresses of block tables, and rows by the index of a request's state.
    """
    device, table = inputs.rows.device, inputs.block_table
    mappings = torch.stack([torch.zeros_like(inputs.slot_mapping), inputs.slot_mapping])

    def of_groups(first: int, second: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([first, second], dtype=dtype, device=device)

    with (
        load(GROUPS, stubs) as kernels,
        scalar_conditions(table),
        scalars_as_bounds(table),
    ):
        getattr(kernels, KERNEL)[(2, len(inputs.rows) + 1)](
            mappings.shape[1],
            inputs.rows,
            inputs.query_start_loc,
            inputs.positions,
            of_groups(table.data_ptr(), table.data_ptr(), torch.uint64),
            of_groups(table.stride(0), table.stride(0), torch.int64),
            of_groups(1, inputs.page_size, torch.int32),
            of_groups(0, 1, torch.bool),
            of_groups(0, 1, torch.bool),
            mappings,
            mappings.stride(0),
            inputs.rank,
            CP_SIZE=inputs.world,
            CP_INTERLEAVE=inputs.interleave,
            PAD_ID=PAD_SLOT,
            TRITON_BLOCK_SIZE=BLOCK,
        )
    if (mappings[0] != PAD_SLOT).any():
        message = "the group of recurrent state, which has no slots, was given some"
        raise RuntimeError(message)
    inputs.slot_mapping.copy_(mappings[1])
    return inputs.slot_mapping
