"""Which compiled attention kernel a problem needs, and which kernels belong together.

A module is what a problem's options decide: dtypes, channels, features. How many rows a request
has decides which of its kernels is called, for each number of rows a block has one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from ..reference import AttentionProblem, Problem
from ..reference.kv_format import NVFP4
from ..reference.quantization import NVFP4_BLOCK
from .cuda_graphs import room_for
from .triton_attention_call import rows_a_request
from .triton_blocks import LEAST_BLOCK, most_rows
from .triton_merge import FEW_STATES
from .triton_splits import FEWEST_KEYS, most_splits
from .triton_support import ceil_div, next_power_of_two
from .triton_units import LARGEST_UNIT

ONE_SPLIT, TWO_SPLITS, MANY_SPLITS = FEWEST_KEYS // 2, FEWEST_KEYS * 3 // 2, FEWEST_KEYS * 32
"""Keys of one request that are not split, and for which either kernel merges; on pages of any size
below the fewest keys of a split."""
PAGE_SIZE = 16
"""Of problems that stand for a module; pages of another power of two take the same kernels."""


def compile_key(problem: Problem) -> Hashable:
    """Name the compiled kernel of a problem: its constants, and the alignment of its tensors."""
    if not isinstance(problem, AttentionProblem):
        return None
    rows = rows_a_request(problem.num_tokens, len(problem.seq_lens), problem.group_size)
    return (
        problem.operation, problem.dtype, problem.head_dim_qk, problem.head_dim_vo,
        problem.logits_soft_cap > 0, problem.custom_mask, _shifts(problem), problem.kv_element,
        _aligned(problem), block_rows(problem, rows),
    )  # fmt: skip


def split_key(problem: Problem) -> Hashable:
    """Name the kernels of a call that may split its keys; how often, the device has a say in."""
    if not isinstance(problem, AttentionProblem):
        return None
    pages = sum(ceil_div(length, problem.page_size) for length in problem.seq_lens)
    keys = pages * problem.page_size // max(len(problem.seq_lens), 1)
    return compile_key(problem), min(most_splits(keys), FEW_STATES + 1)


def kernels(problem: Problem, seq_lens: tuple[int, ...] = (1,)) -> list[Problem]:
    """Give a problem for each kernel of a problem's module: for each number of rows a block.

    Args:
        problem: of the module.
        seq_lens: lengths of a single request; there is a problem for each, with each of the rows.
    """
    if not isinstance(problem, AttentionProblem):
        return [problem]
    options: dict[str, Any] = {
        name: getattr(problem, name)
        for name in ("operation", "dtype", "head_dim_qk", "head_dim_vo", "logits_soft_cap",
                     "custom_mask", "kv_cache", "values_in_keys")
    }  # fmt: skip
    options["page_size"] = PAGE_SIZE if _shifts(problem) else problem.page_size
    if not _aligned(problem):
        options |= {"strided_kv": True, "num_kv_heads": problem.num_kv_heads,
                    "kv_layout": problem.kv_layout, "page_size": problem.page_size}  # fmt: skip
    rows = LEAST_BLOCK
    found: list[Problem] = []
    while rows <= block_rows(problem, rows):
        found += [
            AttentionProblem(query_lens=(rows,), seq_lens=(length,), **options)
            for length in seq_lens
        ]
        rows *= 2
    return found


def graph_kernels(problem: Problem) -> list[Problem]:
    """Give a problem for each kernel of a call that is captured with room for a batch."""
    return [
        replace(each, query_lens=(room_for(1) * each.query_lens[0],))
        for each in kernels(problem)
        if isinstance(each, AttentionProblem)
    ]


def split_kernels(problem: Problem) -> list[Problem]:
    """Give a problem for each kernel of a call that may split its keys, those of merging too."""
    return kernels(problem, (ONE_SPLIT, TWO_SPLITS, MANY_SPLITS))


def block_rows(problem: AttentionProblem, rows: int) -> int:
    """Give the rows of a block, or more where shared memory has no room for as many."""
    channels = next_power_of_two(max(problem.head_dim_qk, problem.head_dim_vo))
    size: int = getattr(torch, problem.dtype).itemsize
    return min(max(rows, LEAST_BLOCK), most_rows(channels, size))


def _shifts(problem: AttentionProblem) -> bool:
    return problem.page_size & (problem.page_size - 1) == 0


def _aligned(problem: AttentionProblem) -> bool:
    """Tell whether values begin where wide loads may; beside keys in one allocation they may not.

    See ``reference.materialise``: keys of a page come first, and its values right behind them.
    """
    if not problem.strided_kv or problem.values_in_keys:
        return True
    width = max(problem.head_dim_qk, problem.head_dim_vo)
    slots = 1 if problem.operation == "ragged_attention" else problem.page_size
    keys = slots * problem.num_kv_heads * width
    size: int = getattr(torch, problem.dtype).itemsize
    if problem.kv_element == NVFP4:  # block scales lie like codes, one byte for sixteen of them
        return keys // NVFP4_BLOCK % LARGEST_UNIT == 0
    return keys * (1 if problem.kv_element else size) % LARGEST_UNIT == 0
