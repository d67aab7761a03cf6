"""What a plan function is given, and what its plan looks like, as FlashInfer's wrappers have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..problems.plan import DECODE, FA2, FA3, MLA, PlanProblem
from .allocation import Allocator

LAYOUTS: Mapping[str, tuple[str, ...]] = {
    DECODE: (
        "padded_batch_size", "v", "s", "request_indices", "kv_tile_indices", "o_indptr",
        "block_valid_mask", "kv_chunk_size", "graph", "split_kv",
    ),
    FA2: (
        "padded_batch_size", "total_num_rows", "total_num_rows_at", "cta_tile_q", "request_indices",
        "qo_tile_indices", "kv_tile_indices", "merge_indptr", "o_indptr", "kv_chunk_size", "v", "s",
        "block_valid_mask", "graph", "split_kv",
    ),
    FA3: (
        "qo_tile_indices", "qo_indptr", "kv_indptr", "qo_len", "kv_len", "head_indices",
        "work_indptr", "batch_indices", "same_schedule_for_all_heads",
    ),
    MLA: (
        "num_blks_x", "num_blks_y", "q_indptr", "kv_indptr", "partial_indptr", "merge_start",
        "merge_end", "merge_partial_start", "merge_partial_end", "merge_stride", "q_len", "kv_len",
        "q_start", "kv_start", "kv_end", "work_indptr", "partial_o", "partial_lse",
    ),
}  # fmt: skip
"""Names of the numbers of a plan's vector: sizes, and offsets into the two workspaces."""
INT_BYTES, FLOAT_BYTES = 2 << 20, 1 << 30
"""Bytes of the workspace of a plan's integers, and of that of partial results."""
GUARD_BYTES = 1 << 18
"""Bytes behind a workspace of integers that a plan must not touch."""
MLA_TILE = 64
"""Packed rows of a block of MLA; a cluster has as many tiles as blocks."""
WIDE_TILE, TILE = 192, 128
"""Rows of a tile of FA3, with 64 channels and with more, as its kernel has it."""


@dataclass(frozen=True, eq=False)
class PlanInputs:
    """Arguments of ``plan``.

    Attributes:
        call: the batch and its options, on the host: its fields are those of the problem.
        workspace: [``INT_BYTES + GUARD_BYTES``] uint8, of which the plan writes its integers into
            the first ``INT_BYTES``; what it holds before is garbage, or the plan of an earlier
            batch.
        pinned: the same on the host, where a plan may be made before it is copied.
        storages: flat buffers by field name, of which the tensors are views.
    """

    call: PlanProblem
    workspace: torch.Tensor
    pinned: torch.Tensor
    storages: Mapping[str, torch.Tensor] = field(default_factory=dict)


def plan_inputs(problem: PlanProblem, home: Allocator) -> PlanInputs:
    """Make the workspaces of one call of ``plan``."""
    garbage = torch.full((INT_BYTES + GUARD_BYTES,), problem.garbage, dtype=torch.uint8)
    workspace = home.place("workspace", garbage)
    return PlanInputs(problem, workspace, garbage, storages=home.storages)
