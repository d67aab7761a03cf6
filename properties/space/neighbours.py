"""The nearest problem to a given one that may be drawn for an implementation.

A problem that is kept was drawn for kernels that claim everything. Of one that claims less, each
refused value becomes the nearest claimed one: a smaller head, no mask, a decode for a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...reference import AttentionProblem, Problem
from ...reference.problems.mask_fields import NO_MASK
from .attention_axes import PHASES
from .axes import all_axes, fields_of
from .axis_values import FIELDS, NO_FIELDS, Axes
from .given_lengths import given, has_lengths, with_lengths
from .operations import OPERATIONS

HALVINGS = 8
"""Times that the lengths of a problem are halved so that its work is within an implementation's."""


def neighbours(problem: Problem, axes: Axes) -> Iterator[Problem]:
    """Yield problems that may be drawn from these axes, the nearest one first, each once.

    That is the problem itself where it may be drawn; then the one with its refused values changed,
    then those with one more of its values put back to the simplest, and at last with all of them.
    """
    seen = set()
    for each in _candidates(problem, axes):
        if each.id not in seen and may_be_drawn(each, axes):
            seen.add(each.id)
            yield each


def may_be_drawn(problem: Problem, axes: Axes) -> bool:
    """Whether each value of a problem is one of an implementation's, and its work within limits."""
    return (
        problem.operation == axes.operation
        and any(not _refused(problem, part) for part in axes.restricted())
        and _is_small_enough(problem, axes)
        and _has_phases(problem, axes)
        and _has_regime(problem, axes)
    )


def _candidates(problem: Problem, axes: Axes) -> Iterator[Problem]:
    yield problem
    parts = sorted(axes.restricted(), key=lambda part: len(_refused(problem, part)))
    for part in parts[:1]:
        nearest = {
            name: _nearest(_value(problem, name), part.values[name], _simplest(part, name))
            for name in _refused(problem, part)
        }
        yield from _with(problem, nearest, part)
        others = {
            name: simplest
            for name in _named(problem, part)
            if name not in nearest and (simplest := _simplest(part, name)) != _value(problem, name)
        }
        for name, value in others.items():
            yield from _with(problem, {**nearest, name: value}, part)
        yield from _with(problem, {**nearest, **others}, part)


def _named(problem: Problem, axes: Axes) -> list[str]:
    """Return the axes that stand for fields of a problem."""
    known = type(problem).__dataclass_fields__
    return [
        name
        for name, values in axes.values.items()
        if values and name not in NO_FIELDS and set(FIELDS.get(name, (name,))) <= known.keys()
    ]


def _refused(problem: Problem, axes: Axes) -> list[str]:
    """Return the axes of which a problem has a value that is not theirs."""
    every = all_axes(axes.operation)
    return [
        name
        for name in _named(problem, axes)
        # Where an axis has all of its values, other numbers will do too: models have them.
        if len(axes.values[name]) < len(every[name]) and not _is_among(problem, name, axes)
    ]


def _is_among(problem: Problem, name: str, axes: Axes) -> bool:
    return any(
        all(getattr(problem, field) == each for field, each in _fields(name, value).items())
        for value in axes.values[name]
    )


def _fields(name: str, value: Any) -> dict[str, Any]:  # noqa: ANN401  a value of any axis
    separate = {"values_in_keys": False} if name == "head_dims" else {}
    return {**separate, **fields_of(name, value)}


def _value(problem: Problem, name: str) -> Any:  # noqa: ANN401  a value of any axis
    own = tuple(getattr(problem, field) for field in FIELDS.get(name, (name,)))
    return own if name in FIELDS else own[0]


def _simplest(axes: Axes, name: str) -> Any:  # noqa: ANN401  a value of any axis
    simplest, allowed = axes.simplest.get(name), axes.values[name]
    return simplest if simplest in allowed else allowed[0]


def _nearest(own: Any, allowed: Sequence[Any], simplest: Any) -> Any:  # noqa: ANN401
    """Return the number, or pair of numbers, that is nearest by factor; else the simplest value."""
    numbers = _numbers(own)
    near = [each for each in allowed if len(_numbers(each)) >= len(numbers) > 0]
    return min(near, key=lambda each: _distance(numbers, _numbers(each)), default=simplest)


def _numbers(value: Any) -> tuple[float, ...]:  # noqa: ANN401  a value of any axis
    """Return a positive number, or several; nothing for whatever else, such as an option's off."""
    several = value if isinstance(value, tuple) else (value,)
    plain = all(isinstance(each, int | float) and not isinstance(each, bool) for each in several)
    return several if plain and several[0] > 0 else ()


def _distance(own: Sequence[float], other: Sequence[float]) -> float:
    return sum(abs(math.log((b + 1) / (a + 1))) for a, b in zip(own, other, strict=False))


def _with(problem: Problem, values: Mapping[str, Any], axes: Axes) -> Iterator[Problem]:
    """Yield a problem with these values and whatever they ask for; nothing if there is none."""
    changes: dict[str, Any] = {}
    for name, value in values.items():
        changes |= _fields(name, value)
    if isinstance(problem, AttentionProblem) and not changes.get("custom_mask", True):
        changes |= {name: off for name, off in NO_MASK.items() if name not in values}
    try:
        changed: Any = _of_phases(replace(problem, **changes), axes)
        changed = _of_lengths(changed, axes)
        changed = OPERATIONS[axes.operation].fitted(changed)
        regimes = OPERATIONS[axes.operation].regimes(changed, axes)
        if not _has_regime(changed, axes):
            changed = replace(changed, regime=regimes[0])
        for _ in range(HALVINGS):
            if _is_small_enough(changed, axes):
                break
            changed = _halved(changed)
    except ValueError:  # there is no such call
        return
    yield changed


def _has_regime(problem: Problem, axes: Axes) -> bool:
    regimes = OPERATIONS[axes.operation].regimes(problem, axes)
    return not regimes or getattr(problem, "regime", None) in regimes


def _is_small_enough(problem: Problem, axes: Axes) -> bool:
    if problem.work > axes.max_work:
        return False
    if not isinstance(problem, AttentionProblem):
        return True
    requests, heads = len(problem.seq_lens), problem.num_kv_heads * problem.group_size
    return requests <= (axes.max_requests or requests) and (
        requests <= 1 or requests * heads <= (axes.max_heads or requests * heads)
    )


def _halved(problem: Any) -> Any:  # noqa: ANN401  a problem of any operation
    """Return a problem of half the requests, or else of half the length."""
    if has_lengths(problem.operation):
        kept = slice(max(1, len(problem.seq_lens) // 2))
        if len(problem.seq_lens) > 1:
            queries, keys = problem.query_lens[kept], problem.seq_lens[kept]
        else:
            queries = tuple(-(-t // 2) for t in problem.query_lens)
            keys = tuple(-(-s // 2) for s in problem.seq_lens)
        return replace(problem, query_lens=queries, seq_lens=keys)
    if hasattr(problem, "num_tokens"):
        return replace(problem, num_tokens=-(-problem.num_tokens // 2))
    if hasattr(problem, "counts"):
        return replace(problem, counts=tuple(each // 2 for each in problem.counts))
    return problem


def _phase(query_len: int, seq_len: int) -> str:
    if not query_len or not seq_len:
        return "no_keys" if query_len else "no_query"
    if query_len > seq_len:
        return "surplus"
    if query_len == 1:
        return "decode"
    return "prefill" if query_len == seq_len else "chunk"


def _has_phases(problem: Problem, axes: Axes) -> bool:
    if not isinstance(problem, AttentionProblem) or given(axes.values):
        return True
    return bool(_of_phases(problem, axes) == problem)


def _of_phases(problem: Any, axes: Axes) -> Any:  # noqa: ANN401  a problem of any operation
    """Return a problem whose requests have phases that an implementation takes."""
    phases = axes.values.get("phase", ())
    if not isinstance(problem, AttentionProblem) or not phases:
        return problem
    verified = any(axes.values.get("verify", ())) or "verify" in phases
    allowed = {*phases, *(("chunk", "prefill", "decode") if verified else ())}
    lengths = [
        # A prefill of one token is a decode, too.
        (t, s)
        if _phase(t, s) in allowed or (t == s == 1 and "prefill" in allowed)
        else _as_phase(phases[0], t, s)
        for t, s in zip(problem.query_lens, problem.seq_lens, strict=True)
    ]
    return replace(
        problem,
        query_lens=tuple(t for t, _ in lengths),
        seq_lens=tuple(s for _, s in lengths),
    )


def _as_phase(phase: str, query_len: int, seq_len: int) -> tuple[int, int]:
    """Return the lengths of a request as near to the given ones as its phase allows."""
    keys = max(seq_len, 1)
    if phase == "decode":
        return 1, keys
    if phase == "prefill":
        return max(query_len, 1), max(query_len, 1)
    if phase in ("chunk", "verify"):
        return min(max(query_len, 2), keys + 1), keys + 2
    return PHASES[phase]


def _of_lengths(problem: Problem, axes: Axes) -> Problem:
    phases = axes.values.get("phase", ("decode",))
    all_new = not {"decode", "chunk"} & set(phases)
    return with_lengths(problem, given(axes.values), max_work=axes.max_work, all_new=all_new)
