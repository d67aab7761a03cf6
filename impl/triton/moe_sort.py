"""Sorting pairs of a token and a slot by expert: the launches of ``triton_moe_sort_kernel``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.optional import require
from .support import ceil_div, next_power_of_two

KERNEL = "kernelproof.impl.triton.kernels.moe_sort"
CHUNK, INTERPRETED_CHUNK = 256, 64
"""Pairs that a program compares with each other; fewer in the interpreter, to have several."""
LEAST_CHUNK = 16
LEAST_EXPERTS = 32
"""No tile is smaller than a warp."""


class Sorted(NamedTuple):
    """Where pairs are: blocks of rows, each of one expert.

    Attributes:
        pairs: int32 [blocks * m], token * top_k + slot by row; anything where a row is no pair.
        block_experts: int32 [blocks], an index into the weights.
        block_rows: int32 [blocks], how many rows are pairs: the first ones; 0 past the last block.
        blocks: the most that there can be.
    """

    pairs: torch.Tensor
    block_experts: torch.Tensor
    block_rows: torch.Tensor
    blocks: int

    def arguments(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, for a launch."""
        return {
            "pairs": self.pairs,
            "block_experts": self.block_experts,
            "block_rows": self.block_rows,
        }


def most_blocks(pairs: int, experts: int, m: int) -> int:
    """Return how many blocks of m rows there can be, whatever the experts of the pairs."""
    return min(pairs, (pairs + min(experts, pairs) * (m - 1)) // m)


def sort_pairs(
    ids: torch.Tensor,
    weights: torch.Tensor,
    m: int,
    expert_offset: int,
    num_experts: int,
    *,
    on_input: bool = False,
) -> Sorted:
    """Sort pairs by expert, and by token within; an expert's begin a block.

    Args:
        ids: integers [tokens, top_k], not empty; what is outside of the experts has no row.
        weights: [tokens, top_k]; a pair of weight 0 has no row, unless on_input.
        m: rows of a block.
        expert_offset, num_experts: the ids of the experts that are here.
        on_input: weights multiply the hidden states.
    """
    pairs, experts = ids.numel(), next_power_of_two(max(num_experts, LEAST_EXPERTS))
    blocks = most_blocks(pairs, num_experts, m)
    chunk = CHUNK if ids.is_cuda else INTERPRETED_CHUNK
    chunk = min(chunk, max(next_power_of_two(pairs), LEAST_CHUNK))
    chunks = ceil_div(pairs, chunk)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids.device)

    found = Sorted(empty(blocks * m), empty(blocks), empty(blocks), blocks)
    counts, ranks = empty(chunks, num_experts), empty(pairs)
    phases = ((True, True),) if chunks == 1 else ((True, False), (False, True))
    for counting, placing in phases:
        arguments: dict[str, Any] = {
            "ids": ids, "weights": weights, **found.arguments(), "counts": counts, "ranks": ranks,
            "num_pairs": pairs, "num_chunks": chunks, "most_blocks": blocks, "top_k": ids.shape[1],
            "expert_offset": expert_offset, "num_experts": num_experts,
            "ids_token": ids.stride(0), "ids_slot": ids.stride(1),
            "weights_token": weights.stride(0), "weights_slot": weights.stride(1),
            "ON_INPUT": on_input, "COUNTS": counting, "PLACES": placing, "BLOCK_M": m,
            "EXPERTS": experts, "CHUNK": chunk, "blocks_each": ceil_div(blocks, chunks),
        }  # fmt: skip
        with scalars_as_bounds(ids):
            require(KERNEL, "triton").sort_pairs[(chunks,)](**arguments)
    return found
