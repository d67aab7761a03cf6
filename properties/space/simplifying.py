"""Further shrinking after Hypothesis's, in few steps where each costs a process.

A HANG or a death costs its deadline and a process, a problem that passes next to nothing. So what
a counterexample needs is looked for from below, from problems that pass up to the first that fails:
that costs one failure where a search from above costs one for each thing that it takes away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ...reference import (
    AttentionProblem,
    BatchedMoEProblem,
    MergeProblem,
    MoEProblem,
    Problem,
    RouteProblem,
)
from ...reference.problems.cache_names import multiples_of
from .attention_axes import head_fields
from .attention_strategies import LENGTH_EDGES
from .axis_values import FIELDS, NO_FIELDS, Axes

FEW_PAGES = 2
ALWAYS_FREE: dict[str, Any] = {"seed": 0, "request_ids": (), "token_ids": ()}
"""Fields without an axis, and their simplest values."""
RUNGS = 16
"""Lengths that are tried at a time between one that passes and one that fails."""

Attending = TypeVar(
    "Attending", AttentionProblem, MergeProblem, RouteProblem, MoEProblem, BatchedMoEProblem
)
Fails = Callable[[Problem], bool]
"""Whether a problem fails in the same way; always False once the budget is used up."""
Cheap = Callable[[], bool]
"""Whether problems that pass have cost little so far."""


def simpler_batch(
    problem: AttentionProblem, axes: Axes, fails: Fails, cheap: Cheap
) -> AttentionProblem:
    """Simplify a problem of attention: fewer requests, simpler values, shorter requests."""
    problem = simpler_values(_fewer_requests(problem, fails), axes, fails, cheap)
    for position in range(len(problem.seq_lens)):
        problem = _shorter_request(problem, position, fails)
    return problem


def simpler_paged_batch(
    problem: AttentionProblem, axes: Axes, fails: Fails, cheap: Cheap
) -> AttentionProblem:
    """Simplify a problem of attention over pages, and put it on fewer of them."""
    problem = simpler_batch(problem, axes, fails, cheap)
    return next(filter(fails, on_few_pages(problem, axes)), problem)


def on_few_pages(problem: AttentionProblem, axes: Axes) -> Iterator[AttentionProblem]:
    """Yield the same problem on larger pages, the smallest first, if it has more than a few."""
    few = max(FEW_PAGES, len(problem.seq_lens))
    if problem.num_pages <= few:
        return
    least = multiples_of(problem.kv_cache).get("page_size", 1)
    for size in sorted(size for size in axes.allows("page_size") if not size % least):
        larger = replace(problem, page_size=size)
        if size > problem.page_size and larger.num_pages <= few:
            yield larger


def _fewer_requests(problem: AttentionProblem, fails: Fails) -> AttentionProblem:
    """Keep one request if that is enough, the one with most work first; else drop what can go."""
    count = len(problem.seq_lens)
    alone = [_some_requests(problem, (i,)) for i in range(count)] if count > 1 else []
    # The one with most work first: it is the likeliest to fail alone, and the first failure ends
    # the loop.
    for each in sorted(alone, key=lambda each: -each.work):
        if fails(each):
            return each
    for i in reversed(range(count)):
        if len(problem.seq_lens) > 2:  # noqa: PLR2004  each alone has been tried
            fewer = _some_requests(
                problem, tuple(j for j in range(len(problem.seq_lens)) if j != i)
            )
            problem = fewer if fails(fewer) else problem
    return problem


def _some_requests(problem: AttentionProblem, chosen: tuple[int, ...]) -> AttentionProblem:
    return replace(
        problem,
        query_lens=tuple(problem.query_lens[i] for i in chosen),
        seq_lens=tuple(problem.seq_lens[i] for i in chosen),
        request_ids=tuple(problem.request_ids[i] for i in chosen if problem.request_ids),
    )


def simpler_values(problem: Attending, axes: Axes, fails: Fails, cheap: Cheap) -> Attending:
    """Keep the few values that it takes to fail, and set the others to their simplest."""
    # Other modules come first only where they are simpler than the problem's own.
    *simpler, own = _parts(problem, axes)
    for part in (*simpler, own):
        candidate = _with(problem, _simplest(problem, part))
        if candidate is not None and fails(candidate):
            return candidate
    now, simplest = _values(problem, own), _simplest(problem, own)
    # Most faults need one value or two. Asking from below (all simplest, then one kept, then two)
    # costs passing problems, which are cheap, and one failure at the end.
    left = [name for name in simplest if now[name] != simplest[name]]
    for count in (1, 2):
        # Pairs are quadratic: they are skipped where even passing problems have been slow.
        if count > 1 and not cheap():
            break
        for kept in itertools.combinations(left, count):
            if len(kept) == len(left):
                break  # the problem itself
            values = {**simplest, **{name: now[name] for name in kept}}
            candidate = _with(problem, values)
            if candidate is not None and fails(candidate):
                return _lower_values(candidate, kept, own, fails)
    return _lower_values(*_without(problem, left, simplest, fails), own, fails)


def _parts(problem: Attending, axes: Axes) -> list[Axes]:
    """Return the axes of each module up to the problem's own, which comes last."""
    parts = axes.restricted()
    for position, part in enumerate(parts):
        if _within(problem, part):
            return parts[: position + 1]
    return [axes]


def _without(
    problem: Attending, left: list[str], simplest: Mapping[str, Any], fails: Fails
) -> tuple[Attending, list[str]]:
    """Set values to their simplest where that can be, half of them, then fewer at a time."""
    # Bisection from above for what needs three values or more, as delta debugging does: halves,
    # then quarters, restarting after each success since positions have moved.
    share = len(left) // 2
    while share:
        for start in range(0, len(left), share):
            chunk = left[start : start + share]
            candidate = _with(problem, {name: simplest[name] for name in chunk})
            if candidate is not None and fails(candidate):
                problem = candidate
                left = [name for name in left if name not in chunk]
                break  # the rest stands elsewhere now
        else:
            share //= 2
            continue
        share = min(share, len(left) // 2)
    return problem, left


def _lower_values(problem: Attending, kept: Sequence[str], axes: Axes, fails: Fails) -> Attending:
    """Return each value that is kept the simplest one with which the problem still fails."""
    for name in kept:
        allowed = axes.values.get(name, ())
        value = _values(problem, axes)[name]
        between = allowed[1 : allowed.index(value)] if value in allowed else ()
        for simpler in between:
            candidate = _with(problem, {name: simpler})
            if candidate is not None and fails(candidate):
                problem = candidate
                break
    return problem


def _values(problem: Attending, axes: Axes) -> dict[str, Any]:
    """Return the problem's value of each axis, and of the fields without one."""
    found: dict[str, Any] = {}
    for name in [name for name in axes.values if name not in NO_FIELDS] + [*ALWAYS_FREE]:
        if name == "head_dims":
            found[name] = _head_dims(problem, axes.values[name])
        elif name in FIELDS:
            found[name] = tuple(getattr(problem, field) for field in FIELDS[name])
        elif name in problem.__dataclass_fields__:
            found[name] = getattr(problem, name)
    return found


def _head_dims(problem: Attending, values: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return which of the axis's values a problem has; what it has, where none is like it."""
    for dims in reversed(values):  # the last says most
        if all(getattr(problem, name) == value for name, value in _fields_of_heads(dims).items()):
            return dims
    return tuple(getattr(problem, field) for field in FIELDS["head_dims"])


def _fields_of_heads(dims: Sequence[int]) -> dict[str, Any]:
    return {"values_in_keys": False, **head_fields(dims)}


def _simplest(problem: Attending, axes: Axes) -> dict[str, Any]:
    """Return the simplest value of each axis, and of the fields without one."""
    found: dict[str, Any] = {}
    for name in _values(problem, axes):
        if name in ALWAYS_FREE:
            found[name] = ALWAYS_FREE[name]
        elif axes.values[name]:
            together = axes.simplest.get(name)
            found[name] = together if together in axes.values[name] else axes.values[name][0]
    return found


def simplest_values(problem: Attending, axes: Axes) -> dict[str, Any]:
    """Return the simplest value of each axis in the module that a problem needs."""
    return _simplest(problem, _parts(problem, axes)[-1])


def _within(problem: Attending, axes: Axes) -> bool:
    values = _values(problem, axes)
    return all(values[name] in axes.values[name] for name in values if name not in ALWAYS_FREE)


def _with(problem: Attending, values: Mapping[str, Any]) -> Attending | None:
    """Return the problem with these values; None if it stays the same, or there is no such call."""
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name == "head_dims":
            changes |= _fields_of_heads(value)
        elif name in FIELDS:
            changes |= dict(zip(FIELDS[name], value, strict=True))
        else:
            changes[name] = value
    try:
        changed = replace(problem, **changes)
    except ValueError:
        return None
    return changed if changed != problem else None


def simpler_merge(problem: MergeProblem, axes: Axes, fails: Fails, cheap: Cheap) -> MergeProblem:
    """Simplify a merge: simpler values, then the fewest tokens, then the fewest heads."""
    problem = simpler_values(problem, axes, fails, cheap)
    tokens = least(problem.num_tokens, lambda n: fails(replace(problem, num_tokens=n)))
    problem = replace(problem, num_tokens=tokens)
    heads = least(problem.num_heads, lambda n: fails(replace(problem, num_heads=n)))
    return replace(problem, num_heads=heads)


def simpler_batched(
    problem: BatchedMoEProblem, axes: Axes, fails: Fails, cheap: Cheap
) -> BatchedMoEProblem:
    """Simplify batched experts: fewer experts, then simpler values, then fewer rows."""
    for expert in reversed(range(problem.num_experts)):
        if problem.num_experts > 1:
            counts = problem.counts[:expert] + problem.counts[expert + 1 :]
            fewer = replace(problem, counts=counts)
            problem = fewer if fails(fewer) else problem
    problem = simpler_values(problem, axes, fails, cheap)
    for expert, count in enumerate(problem.counts):
        for fewer_rows in sorted({0, 1, count // 2} - {count}):
            if fewer_rows < count:
                counts = (*problem.counts[:expert], fewer_rows, *problem.counts[expert + 1 :])
                fewer = replace(problem, counts=counts)
                if fails(fewer):
                    problem = fewer
                    break
    return problem


def _shorter_request(problem: AttentionProblem, position: int, fails: Fails) -> AttentionProblem:
    """Find how short a request may be: as a decode, as a prefill, or its queries and keys apart."""
    t, s = problem.query_lens[position], problem.seq_lens[position]

    def of(query_len: int, seq_len: int) -> AttentionProblem:
        queries, keys = list(problem.query_lens), list(problem.seq_lens)
        queries[position], keys[position] = query_len, seq_len
        return replace(problem, query_lens=tuple(queries), seq_lens=tuple(keys))

    def fails_with(query_len: int, seq_len: int) -> bool:
        try:
            shorter = of(query_len, seq_len)
        except ValueError:  # no such call: keys that are appended are among the request's
            return False
        return fails(shorter)

    if t > 1 and fails_with(1, s):
        t = 1
    if t <= 1:
        return of(t, least(s, lambda n: fails_with(t, n))) if s else problem
    if t == s or fails_with(min(t, s), min(t, s)):
        n = least(min(t, s), lambda n: fails_with(n, n))
        return of(n, n)
    t = least(t, lambda n: fails_with(n, s))
    return of(t, least(s, lambda n: fails_with(t, n))) if s else of(t, s)


def least(most: int, fails: Callable[[int], bool]) -> int:
    """Return the smallest number from 1 to ``most``, which fails, that is found to fail.

    From below, edges of tiles first: each round of numbers costs one failure at most.
    """
    # Not a plain binary search: whether a length fails need not be monotonic, and each failing
    # probe may cost a whole deadline. Ascending rungs cost one failure for each round.
    low, rungs = 1, [edge for edge in LENGTH_EDGES if edge < most]
    while low < most:
        for number in rungs:
            if fails(number):
                most = number
                break
            low = number + 1
        rungs = [*range(low, most, max(1, -(-(most - low) // RUNGS)))]
    return most
