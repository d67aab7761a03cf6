"""Lengths of requests that ``--only`` asks for: ``seq_lens=8200``, ``query_lens=1,5``.

One number is that of every request, several are those of a batch with just these requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...reference import AttentionProblem, ContextParallelProblem, Problem
from ...reference.operations import OPERATIONS as REFERENCE
from ...reference.problems import MAX_SEQ_LEN

WITH_LENGTHS = (AttentionProblem, ContextParallelProblem)
"""Types of problems whose requests have numbers of queries and of keys."""
LENGTHS = ("query_lens", "seq_lens")
"""Fields of a problem, and names among axes where lengths are given."""
Batch = AttentionProblem | ContextParallelProblem
NEW_KEYS_ONLY = ("append_paged_kv", "slice_context_parallel")
"""Operations whose requests have no more query tokens than keys."""


def has_lengths(operation: str) -> bool:
    """Whether problems of an operation have requests with lengths."""
    return set(LENGTHS) <= REFERENCE[operation].problem.__dataclass_fields__.keys()


def given(values: Mapping[str, Sequence[Any]]) -> dict[str, tuple[int, ...]]:
    """Return the lengths among the values of axes, by field."""
    return {name: values[name][0] for name in LENGTHS if name in values}


def without_lengths(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return one value of each axis, without lengths."""
    return {name: value for name, value in chosen.items() if name not in LENGTHS}


def conflict(operation: str, lengths: Mapping[str, tuple[int, ...]]) -> str:
    """Return why no batch has these lengths, and what to do; empty where some has."""
    for name, numbers in lengths.items():
        for number in numbers:
            if not 0 <= number <= MAX_SEQ_LEN:
                return f"{name}={number} is no length; give one from 0 to {MAX_SEQ_LEN}"
    if len(lengths) < len(LENGTHS):
        return ""
    queries, keys = (lengths[name] for name in LENGTHS)
    if len(queries) > 1 and len(keys) > 1 and len(queries) != len(keys):
        return (
            f"query_lens has {len(queries)} lengths and seq_lens {len(keys)}; give as many of "
            "both, or one for all requests"
        )
    pairs = itertools.zip_longest(queries, keys, fillvalue=min(queries + keys))
    if operation in NEW_KEYS_ONLY and any(t > s for t, s in pairs):
        return f"requests of {operation} have no more query_lens than seq_lens; give fewer"
    return ""


def with_lengths(
    problem: Problem,
    lengths: Mapping[str, tuple[int, ...]],
    *,
    max_work: int = 0,
    all_new: bool = False,
) -> Problem:
    """Return a problem whose requests have the given lengths, as many of them as the work affords.

    Args:
        problem: the problem whose lengths say which requests are decodes, chunks and prefills.
        lengths: given ones, by field.
        max_work: most work of the batch besides its first request; 0 for any.
        all_new: each request has as many queries as keys, where these are not given.
    """
    if not lengths or not isinstance(problem, WITH_LENGTHS):
        return problem
    queries, keys = (lengths.get(name, ()) for name in LENGTHS)
    exactly = max(len(queries), len(keys))
    count = exactly if exactly > 1 else max(len(problem.seq_lens), 1)
    drawn = list(zip(problem.query_lens, problem.seq_lens, strict=True)) or [(1, 1)]
    # Work of one query with one key, by what the drawn batch costs; rounded up.
    one = problem.work // max(1, sum(t * s + 8 * (t + s) for t, s in drawn)) + 1
    found: list[tuple[int, int]] = []
    for index, (t, s) in zip(range(count), itertools.cycle(drawn), strict=False):
        many = s > 0 and t >= s
        if keys:
            s = keys[index % len(keys)]  # noqa: PLW2901  the given one
            most = max(1, max_work // max(1, one * s)) if max_work else s
            t = s if many and (all_new or most >= s) else min(t, s, most)  # noqa: PLW2901
        if queries:
            t = queries[index % len(queries)]  # noqa: PLW2901  the given one
            s = s if keys else max(s, t)  # noqa: PLW2901
        found.append((t, s))
    while True:
        changed = _of_requests(problem, found)
        if exactly > 1 or len(found) == 1 or not max_work or changed.work <= max_work:
            return changed
        # Given lengths are kept as they are; it is the number of requests that gives way.
        found.pop()


def _of_requests(problem: Batch, requests: Sequence[tuple[int, int]]) -> Batch:
    """Return the problem with these requests; a tree has no more queries than keys."""
    changes: dict[str, Any] = {
        "query_lens": tuple(t for t, _ in requests),
        "seq_lens": tuple(s for _, s in requests),
    }
    if isinstance(problem, AttentionProblem) and any(t > s for t, s in requests):
        changes["tree"] = 0
    return replace(problem, **changes)
