"""Which values of a failing problem are necessary for it to fail, found out by taking them away.

A value is necessary where the problem passes without it, all else being the same: that is a cause,
where values that failing problems share may stand beside one another by chance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ....reference import AttentionProblem, Problem
from ...findings.causes import IDENTITIES, LENGTHS, SIZES
from ...findings.ledger import holds
from ...findings.relations import RELATIONS, relation
from ...space.axes import Axes, fields_of
from ...space.axis_values import FIELDS
from ...space.simplifying import simplest_values

Fails = Callable[[Problem], "bool | None"]
"""Whether a problem fails for the cause that is looked for; None where it cannot be judged."""
MORE_KEYS = 256
"""Keys added to the requests of a base: a window behind them hides some, whatever its size."""
MORE_QUERIES = 16
"""Queries and keys added likewise, where the window lies right of them."""
ALTERNATIVES = 3
"""Other values that are tried of a field that has its simplest one."""
WINDOWS = ("window_left", "window_right", "chunk")
"""Fields that hide keys further away than their value."""
KNOWN = 2
"""Passing problems per unjudged one, from which on the unjudged ones are assumed to pass."""
UNIFORM = ("uniform_queries", "exact", "empty_batch")
"""Properties that follow from too few requests or from the regime; they are never a cause."""


@dataclass(frozen=True)
class Needs:
    """What a failing problem needs to fail.

    Attributes:
        fields: the values with which it fails, by necessary field.
        passing: the values with which it passes, by necessary field.
        simplest: the values that fields have where they are not in use.
        structure: conditions on sizes, and on properties of the batch.
    """

    fields: Mapping[str, frozenset[Any]]
    passing: Mapping[str, frozenset[Any]]
    simplest: Mapping[str, Any]
    structure: Mapping[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        """All of it as a predicate of the ledger."""
        named = {
            name: condition(failing, self.passing[name], self.simplest.get(name))
            for name, failing in self.fields.items()
        }
        return {**named, **self.structure}


def condition(failing: frozenset[Any], passing: frozenset[Any], simplest: object) -> Any:  # noqa: ANN401
    """Return the shortest condition of a predicate that tells failing values from passing ones."""
    ordered = sorted(failing, key=lambda each: (str(type(each)), each if _is_number(each) else 0))
    numbers = all(map(_is_number, [*failing, *passing]))
    if numbers and _is_number(simplest) and simplest not in failing:
        low, high = min(failing), max(failing)
        if simplest < low and not any(each > low for each in passing):
            return {"min": low}
        if simplest > high and not any(each < high for each in passing):
            return {"max": high}
    return ordered[0] if len(ordered) == 1 else ordered


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def needs_of(problem: Problem, axes: Axes, fails: Fails) -> Needs:
    """Return what a problem that fails needs, a field, a size and a property at a time.

    In few keys most windows and masks hide nothing, and more keys may show another fault: they tell
    of a field where they fail for what the problem fails for, which the fields in use decide.
    """
    # One value at a time: pairs would be quadratic. Where either of two values suffices, the
    # problem fails without each, and neither seems necessary.
    simplest, longer = fields_when_unused(problem, axes), _longer(problem, axes, fails)
    found: dict[str, tuple[frozenset[Any], frozenset[Any]]] = {}
    names = names_of(problem)
    used = [name for name in names if getattr(problem, name) != simplest.get(name, ...)]
    used = [name for name in used if name in simplest]
    for name in used:
        # Only a problem that passes without the value tells: where it cannot be judged, nothing is
        # known.
        apart = without(problem, name, simplest)
        if apart is not None and fails(apart) is False:
            alike = [problem, *(base for base in longer if _fails_for(name, base, simplest, fails))]
            others = _others(name, problem, axes)
            found[name] = _told_apart(name, problem, alike, others, simplest[name], fails)
    same = _of_one_fault(longer, _needs(found, simplest), fails) if found else []
    for name in names:
        others = _others(name, problem, axes)
        bases = [problem, *(longer if name in WINDOWS else same)]
        changed = (with_value(base, name, other) for base in bases for other in _some(others))
        if name not in used and others and _never_fails(fails, changed):
            unused = getattr(problem, name)
            found[name] = _told_apart(name, problem, bases, others, unused, fails)
    needs = _needs({name: found[name] for name in names if name in found}, simplest)
    same = [problem, *_of_one_fault(longer, needs, fails)]
    return replace(needs, structure=_structure(problem, axes, fails, same))


def _needs(
    found: Mapping[str, tuple[frozenset[Any], frozenset[Any]]], simplest: Mapping[str, Any]
) -> Needs:
    failing = {name: each for name, (each, _) in found.items()}
    return Needs(failing, {name: each for name, (_, each) in found.items()}, simplest, {})


def _of_one_fault(longer: Sequence[Problem], needs: Needs, fails: Fails) -> list[Problem]:
    """Return the longer problems that pass without each field that is needed."""
    return [base for base in longer if _fails_as_needed(base, needs, fails)]


def _fails_as_needed(base: Problem, needs: Needs, fails: Fails) -> bool:
    """Whether a longer problem passes without each field that is needed."""
    changed = (lacking(base, name, needs) for name in needs.fields)
    return all(each is None or fails(each) is False for each in changed)


def _fails_for(name: str, base: Problem, simplest: Mapping[str, Any], fails: Fails) -> bool:
    """Whether a longer problem passes without a value: else more keys show another fault."""
    if getattr(base, name) == simplest.get(name):
        return True
    apart = without(base, name, simplest)
    return apart is not None and fails(apart) is False


def _told_apart(
    name: str,
    problem: Problem,
    bases: Sequence[Problem],
    others: Sequence[Any],
    unused: object,
    fails: Fails,
) -> tuple[frozenset[Any], frozenset[Any]]:
    """Return the values of a necessary field with which a problem fails, and passes."""
    value = getattr(problem, name)
    failing, passing = {value}, set()
    for other in others:
        known = [base for base in bases if not _hides_nothing(name, other, base)]
        tried = [with_value(base, name, other) for base in known]
        if other == unused:
            passing.add(other)
        elif any(each is not None and fails(each) for each in tried):
            failing.add(other)
        elif known:
            passing.add(other)
    return frozenset(failing), frozenset(passing)


def _hides_nothing(name: str, value: object, problem: Problem) -> bool:
    """Whether a window is as wide as what it could hide: that a problem passes says nothing."""
    if name not in WINDOWS or not isinstance(problem, AttentionProblem):
        return False
    # Right of a query are only keys of later queries.
    most = problem.most_queries if name == "window_right" else problem.most_keys
    return isinstance(value, int) and value >= most - 1


def names_of(problem: Problem) -> list[str]:
    """Return the fields of a problem that a cause may lie in."""
    left_out = (*IDENTITIES, *LENGTHS, "operation")
    return [each.name for each in dataclasses.fields(problem) if each.name not in left_out]


def fields_when_unused(problem: Problem, axes: Axes) -> dict[str, Any]:
    """Return the simplest value of each field that an axis is of."""
    found: dict[str, Any] = {}
    for axis, value in simplest_values(problem, axes).items():  # type: ignore[type-var]  # any problem with axes
        found |= fields_of(axis, value)
    return {name: value for name, value in found.items() if hasattr(problem, name)}


def with_value(problem: Problem, name: str, value: Any) -> Problem | None:  # noqa: ANN401
    """Return a problem with another value of a field; None if there is no such call."""
    try:
        changed = replace(problem, **{name: value})
    except (ValueError, TypeError):
        return None
    return None if changed == problem else changed


def without(problem: Problem, name: str, simplest: Mapping[str, Any]) -> Problem | None:
    """Return a problem without a value, and where need be without one that depends on it."""
    if name not in simplest or getattr(problem, name) == simplest[name]:
        return None
    alone = with_value(problem, name, simplest[name])
    if alone is not None:
        return alone
    for other, value in simplest.items():
        if other != name and getattr(problem, other) != value:
            try:
                return replace(problem, **{name: simplest[name], other: value})
            except (ValueError, TypeError):
                continue
    return None


def lacking(problem: Problem, name: str, needs: Needs) -> Problem | None:
    """Return a problem without the value of a field that is needed; None where none is known."""
    changed = without(problem, name, needs.simplest)
    if changed is None and getattr(problem, name) in needs.fields[name] and needs.passing[name]:
        changed = with_value(problem, name, min(needs.passing[name], key=str))
    return changed


def _never_fails(fails: Fails, problems: Iterator[Problem | None]) -> bool:
    """Whether none of the problems fails, and little of them is unknown."""
    answers = []
    for problem in problems:
        answers.append(None if problem is None else fails(problem))
        if answers[-1]:
            return False
    return answers.count(False) > KNOWN * answers.count(None)


def _others(name: str, problem: Problem, axes: Axes) -> list[Any]:
    """Return the other values that may be drawn of a field."""
    found: list[Any] = []
    for axis, values in axes.values.items():
        if axis == name or name in FIELDS.get(axis, ()) or axis == "head_dims":
            found += [each[name] for each in (fields_of(axis, v) for v in values) if name in each]
    mine = getattr(problem, name)
    return [value for value in dict.fromkeys(found) if value != mine]


def _some(values: Sequence[Any]) -> list[Any]:
    """Return the first, the middle and the last of several values."""
    spread = [values[0], values[len(values) // 2], values[-1]]
    return list(dict.fromkeys(spread))[:ALTERNATIVES]


def _longer(problem: Problem, axes: Axes, fails: Fails) -> list[Problem]:
    """Return the problem with more keys, and with more queries too, if it fails with them."""
    if not isinstance(problem, AttentionProblem) or not problem.seq_lens:
        return []
    pairs = list(zip(problem.query_lens, problem.seq_lens, strict=True))
    tried = [[(t, s + MORE_KEYS if s else 0) for t, s in pairs]]
    if problem.keys_to_the_right >= 0:  # which hides keys of later queries only
        tried.append([(t + MORE_QUERIES, s + MORE_QUERIES) if t else (t, s) for t, s in pairs])
    made = (with_lengths(problem, each) for each in tried)
    return [each for each in made if each and each.work <= axes.max_work and fails(each)]


Condition = tuple[str, Any]


def _structure(
    problem: Problem, axes: Axes, fails: Fails, bases: Sequence[Problem]
) -> dict[str, Any]:
    """Return the sizes and properties of a batch that it needs.

    Those that a changed batch lacks which still fails are none. Of the others, the first ones are
    taken without which a changed batch passes.
    """
    # First what still fails without a condition clears it, then each passing batch must lack one of
    # those that are left; the last loop drops those that a later one has made superfluous.
    possible = conditions_of(problem)
    passed: list[Problem] = []
    for changed in [*bases[1:], *_changed(problem, axes)]:
        answer = fails(changed)
        if answer:
            possible = [each for each in possible if _has(changed, each)]
        elif answer is False and not getattr(changed, "empty_batch", False):
            passed.append(changed)  # nothing can fail in a batch without a query
    found: dict[str, Any] = {}
    for changed in passed:
        if holds(changed, found):
            lacking = [each for each in possible if not _has(changed, each)]
            found |= dict(lacking[:1])
    for name in [*found]:
        fewer = {other: wanted for other, wanted in found.items() if other != name}
        if not any(holds(changed, fewer) for changed in passed):
            found = fewer
    return found


def conditions_of(problem: Problem) -> list[Condition]:
    """Return the properties of a batch, its lengths' relations, and sizes beyond the least."""
    properties = [
        (name, True)
        for name, kind in vars(type(problem)).items()
        if isinstance(kind, property)
        and not name.startswith("_")
        and name not in UNIFORM
        and getattr(problem, name) is True
    ]
    relations = [(name, True) for name in RELATIONS if relation(problem, name)]
    order = ("num_requests", "most_queries", "most_keys", "num_pages")
    sizes = [
        (name, {"min": getattr(problem, name)})
        for name in order
        if getattr(problem, name, 0) > max(SIZES[name], 1)
    ]
    return [*properties, *relations, *sizes]


def _has(problem: Problem, one: Condition) -> bool:
    return holds(problem, dict([one]))


def _changed(problem: Problem, axes: Axes) -> Iterator[Problem]:
    """Yield batches of other lengths, and on pages of another size."""
    if not isinstance(problem, AttentionProblem):
        return
    pairs = list(zip(problem.query_lens, problem.seq_lens, strict=True))
    # One more request of any shape, then each one left out.
    changed = [[*pairs, (2, 5)]]
    if len(pairs) > 1:
        changed += [pairs[:i] + pairs[i + 1 :] for i in range(len(pairs))]
    for i, pair in enumerate(pairs):
        others = _other_lengths(*pair, problem.page_size)
        changed += [[*pairs[:i], other, *pairs[i + 1 :]] for other in others]
    yield from filter(None, (with_lengths(problem, each) for each in changed))
    sizes = axes.values.get("page_size", ())
    for size in (*sizes[:1], *sizes[-1:]):
        if other_pages := with_value(problem, "page_size", size):
            yield other_pages


def _other_lengths(t: int, s: int, page_size: int) -> list[tuple[int, int]]:
    """Return numbers of queries and keys near those of a request, and on either side of bounds."""
    whole = -(-s // page_size) * page_size
    found = {
        (1, s), (t, t), (t, s + 1), (t, max(s - 1, 0)), (t, 0), (0, s), (t, max(s, 1)),
        (max(t - 1, 0), s), (t, whole), (t, max(s, t + 1)), (s + 2, s + 1),
    }  # fmt: skip
    return sorted(found - {(t, s)})


def with_lengths(
    problem: AttentionProblem, pairs: Sequence[tuple[int, int]]
) -> AttentionProblem | None:
    """Return a problem with requests of these queries and keys; None if there is no such call."""
    try:
        return replace(
            problem,
            query_lens=tuple(t for t, _ in pairs),
            seq_lens=tuple(s for _, s in pairs),
            request_ids=(),
        )
    except ValueError:
        return None
