"""Relations of queries and keys in a batch, which predicates name beside fields and properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...reference import AttentionProblem, Problem


def _earlier_keys(problem: AttentionProblem) -> bool:
    lengths = zip(problem.query_lens, problem.seq_lens, strict=True)
    return any(t and s > t for t, s in lengths)


def _unequal_lengths(problem: AttentionProblem) -> bool:
    lengths = zip(problem.query_lens, problem.seq_lens, strict=True)
    return any(t and s != t for t, s in lengths)


RELATIONS: Mapping[str, Callable[[AttentionProblem], bool]] = {
    "earlier_keys": _earlier_keys,
    "unequal_lengths": _unequal_lengths,
}
"""Relations of lengths by name: whether some request with queries has keys from before them, and
whether some has another number of keys than of queries."""


def relation(problem: Problem, name: str) -> bool | None:
    """Whether a relation holds in a problem; None where there is no such relation."""
    found = RELATIONS.get(name)
    return found(problem) if found and isinstance(problem, AttentionProblem) else None
