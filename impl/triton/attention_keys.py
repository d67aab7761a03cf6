"""Which compiled attention kernel a problem needs, and which kernels belong together.

A module is what a problem's options decide: dtypes, channels, features. How many rows a request
has decides which of its kernels is called, for each number of rows a block has one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from ...reference import AttentionProblem
from ..gpu.cuda_graphs import room_for
from .attention_call import rows_a_request
from .blocks import FEWEST_KEYS, LEAST_BLOCK, most_rows, most_splits
from .support import ceil_div, next_power_of_two
from .units import alignment_of, in_every_alignment

ONE_SPLIT, TWO_SPLITS, MANY_SPLITS = FEWEST_KEYS // 2, FEWEST_KEYS * 3 // 2, FEWEST_KEYS * 32
"""Keys of one request that are not split, and for which either kernel merges; on pages of any size
below the fewest keys of a split."""
PAGE_SIZE = 16
"""Page size of problems that stand for a module; pages of another power of two take the same
kernels."""


def compile_key(problem: AttentionProblem) -> Hashable:
    """Name the compiled kernel of a problem: its constants, and the alignment of its tensors."""
    rows = rows_a_request(problem.num_tokens, len(problem.seq_lens), problem.group_size)
    return (
        problem.operation, problem.dtype, problem.head_dim_qk, problem.head_dim_vo,
        problem.logits_soft_cap > 0, _masked(problem), _shifts(problem), problem.kv_element,
        *alignment_of(problem), block_rows(problem, rows),
    )  # fmt: skip


def split_key(problem: AttentionProblem) -> Hashable:
    """Name the kernels of a call that may split its keys, by all that decides how often it does."""
    pages = sum(ceil_div(length, problem.page_size) for length in problem.seq_lens)
    requests = max(len(problem.seq_lens), 1)
    rows = ceil_div(problem.num_tokens * problem.group_size, requests)
    tiles = max(ceil_div(rows, block_rows(problem, rows)), 1)
    programs = requests * tiles * problem.num_kv_heads
    return compile_key(problem), programs, most_splits(pages * problem.page_size // requests)


def kernels(problem: AttentionProblem, seq_lens: tuple[int, ...] = (1,)) -> list[AttentionProblem]:
    """Return a problem for each kernel of a problem's module: by rows a block, and by alignment.

    Args:
        problem: the problem of the module.
        seq_lens: lengths of a single request; there is a problem for each, with each of the rows.
    """
    options: dict[str, Any] = {
        name: getattr(problem, name)
        for name in ("operation", "dtype", "head_dim_qk", "head_dim_vo", "logits_soft_cap",
                     "kv_cache", "values_in_keys")
    }  # fmt: skip
    options["custom_mask"] = _masked(problem)
    page_size = PAGE_SIZE if _shifts(problem) else problem.page_size
    least = AttentionProblem(page_size=page_size, **options)
    rows = LEAST_BLOCK
    found: list[AttentionProblem] = []
    while rows <= block_rows(problem, rows):
        found += [
            replace(each, query_lens=(rows,), seq_lens=(length,))
            for each in in_every_alignment(least)
            for length in seq_lens
        ]
        rows *= 2
    return found


def graph_kernels(problem: AttentionProblem) -> list[AttentionProblem]:
    """Return a problem for each kernel of a call that is captured with room for a batch."""
    return [
        replace(each, query_lens=(room_for(1) * each.query_lens[0],)) for each in kernels(problem)
    ]


def split_kernels(problem: AttentionProblem) -> list[AttentionProblem]:
    """Return a problem for each kernel of a call that may split its keys, those of merging too."""
    return kernels(problem, (ONE_SPLIT, TWO_SPLITS, MANY_SPLITS))


def block_rows(problem: AttentionProblem, rows: int) -> int:
    """Return the rows of a block, or more where shared memory has no room for as many."""
    channels = next_power_of_two(max(problem.head_dim_qk, problem.head_dim_vo))
    size: int = getattr(torch, problem.dtype).itemsize
    return min(max(rows, LEAST_BLOCK), most_rows(channels, size))


def _masked(problem: AttentionProblem) -> bool:
    return problem.custom_mask or problem.tree > 0


def _shifts(problem: AttentionProblem) -> bool:
    return problem.page_size & (problem.page_size - 1) == 0
