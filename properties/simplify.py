"""Simpler counterexamples than Hypothesis ends at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..reference import AttentionProblem, Problem
from ..reference.cache_names import multiples_of
from .axes import Axes

FEW_PAGES = 2


def on_fewer_pages(problem: Problem, axes: Axes) -> Iterator[AttentionProblem]:
    """Give the same problem on larger pages, the smallest first, if it has more than a few.

    Pages are drawn before lengths, so Hypothesis ends at pages of one key and as many of them as
    there are keys. One page of 128 says more than 66 of one.
    """
    if not isinstance(problem, AttentionProblem) or problem.operation == "ragged_attention":
        return
    few = max(FEW_PAGES, len(problem.seq_lens))
    if problem.num_pages <= few:
        return
    least = multiples_of(problem.kv_cache).get("page_size", 1)
    for size in sorted(size for size in axes.allows("page_size") if not size % least):
        larger = replace(problem, page_size=size)
        if size > problem.page_size and larger.num_pages <= few:
            yield larger
