"""Which compiled modules a run looks at, where building one takes long.

FlashInfer builds a module for each combination of dtypes, head dims and features that its templates
know. There are hundreds, at ten seconds to a minute each: a run takes a few that cover pairs of
values, builds them in parallel before the first problem, and draws problems of these alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...reference import Problem
from .axes import Axes, example, has

Keys = Callable[[Sequence[Problem]], "list[str | None]"]
"""Gives the key of each problem's module, None where the problem is refused."""
OF_CODES = ("caches", "quantisation")
"""Axes whose first value is that of plain numbers."""
WITH_ANOTHER = ("q_scale", "k_scale", "v_scale")
"""Axes whose values come with those of another axis, which decides."""
MOST_COMBINATIONS = 4096
"""Of groups of values; of more, so many that are spread over all of them."""
GOLDEN = (5**0.5 - 1) / 2
"""Steps of this part of a whole spread evenly, however many there are."""


@dataclass(frozen=True)
class Module:
    """One module of an implementation.

    Attributes:
        key: what ``Implementation.module_of`` gives for its problems.
        values: by axis, the values that lead to it; the other axes are free.
        first: its simplest problem.
    """

    key: str
    values: Mapping[str, tuple[Any, ...]]
    first: Problem


def choose(
    axes: Axes, keys: Keys, most: int, *, stored: Sequence[Problem] = (), companions: bool = False
) -> list[Module]:
    """Choose modules such that pairs of what they differ in are covered, the simplest first.

    Args:
        axes: what an implementation supports.
        keys: asks the implementation.
        most: modules, at most.
        stored: problems that are judged whatever is chosen: their modules come before others,
            for they are built anyway.
        companions: a module of codes comes with that of plain numbers, with which laws compare it.
    """
    groups = _groups(axes, keys)
    found = _supported(axes, keys, groups)
    plain = _PlainOnes(axes, keys, groups) if companions else None
    return _covering(found, list(groups), most, set(keys(stored)) if stored else set(), plain)


def further(modules: Sequence[Module], keys: Keys, stored: Sequence[Problem]) -> list[Problem]:
    """Return a problem for each module beside these that stored ones need, of those not refused."""
    if not stored:
        return []
    known: dict[str | None, Problem | None] = {module.key: None for module in modules}
    for key, problem in zip(keys(stored), stored, strict=True):
        if key is not None:
            known.setdefault(key, problem)
    return [problem for problem in known.values() if problem is not None]


def _groups(axes: Axes, keys: Keys) -> dict[str, list[tuple[Any, ...]]]:
    """Give, for each axis whose value decides about the module, its values by module."""
    others = [{name: value} for name in ("head_dims", "dtype")
              for value in axes.values.get(name, ())]  # fmt: skip
    groups: dict[str, list[tuple[Any, ...]]] = {}
    for name, values in axes.values.items():
        if name in WITH_ANOTHER:
            continue
        by_key: dict[str, list[Any]] = {}
        for value in values:
            # An nvfp4 cache may be refused at the simplest head dim, and taken at another; an FP8
            # one of latent attention with float16 queries, and taken with bfloat16 ones.
            bases = [axes.simplest, *({**axes.simplest, **other} for other in others)]
            tried = [example(axes.operation, {**base, name: value}) for base in bases]
            key = next((key for key in keys(tried) if key is not None), None)
            if key is not None:
                by_key.setdefault(key, []).append(value)
        if len(by_key) > 1:
            groups[name] = [tuple(each) for each in by_key.values()]
    return groups


def _supported(axes: Axes, keys: Keys, groups: Mapping[str, list[tuple[Any, ...]]]) -> list[Module]:
    """Return the module of every combination of groups that is supported and can be drawn."""
    found = [
        (combination, example(axes.operation, {**axes.simplest, **_first(combination)}))
        for combination in combinations(groups)
    ]
    found = [(values, problem) for values, problem in found if _can_be_drawn(problem, values, axes)]
    answers = keys([problem for _, problem in found])
    return [
        Module(key, combination, problem)
        for key, (combination, problem) in zip(answers, found, strict=True)
        if key is not None
    ]


def _first(combination: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: values[0] for name, values in combination.items()}


def combinations(
    groups: Mapping[str, list[tuple[Any, ...]]],
) -> Iterator[dict[str, tuple[Any, ...]]]:
    """Return every combination of groups, or some spread over all of them; the simplest first."""
    total = math.prod(len(each) for each in groups.values())
    step = 1
    if total > MOST_COMBINATIONS:
        step = round(total * GOLDEN)
        while math.gcd(step, total) > 1:
            step += 1
    for number in range(min(total, MOST_COMBINATIONS)):
        place = number * step % total
        chosen: dict[str, tuple[Any, ...]] = {}
        for name in reversed(list(groups)):
            place, index = divmod(place, len(groups[name]))
            chosen[name] = groups[name][index]
        yield {name: chosen[name] for name in groups}


def _covering(
    found: Sequence[Module],
    names: Sequence[str],
    most: int,
    wanted: Container[str | None],
    plain: _PlainOnes | None,
) -> list[Module]:
    """Take the module that covers most new pairs of values, time and again; wanted ones first."""
    left = list(found)
    chosen: list[Module] = []
    covered: set[object] = set()
    while left and len(chosen) < most:
        best = max(left, key=lambda each: (each.key in wanted, len(_pairs(each, names) - covered)))
        if chosen and best.key not in wanted and not _pairs(best, names) - covered:
            break
        beside = plain.of(best) if plain and len(chosen) + 1 < most else None
        for each in (best, beside):
            if each is not None and each not in chosen:
                chosen.append(each)
                covered |= _pairs(each, names)
                if each in left:
                    left.remove(each)
    return chosen


@dataclass(frozen=True)
class _PlainOnes:
    """Gives the module of plain numbers that is the same in all else as one of codes."""

    axes: Axes
    keys: Keys
    groups: Mapping[str, list[tuple[Any, ...]]]

    def of(self, module: Module) -> Module | None:
        """Give it where there is one."""
        names = [name for name in OF_CODES if name in module.values]
        values = {**module.values, **{name: self.groups[name][0] for name in names}}
        if values == module.values:
            return None
        problem = example(self.axes.operation, {**self.axes.simplest, **_first(values)})
        key = self.keys([problem])[0] if _can_be_drawn(problem, values, self.axes) else None
        return None if key is None else Module(key, values, problem)


def _can_be_drawn(problem: Problem, values: Mapping[str, tuple[Any, ...]], axes: Axes) -> bool:
    """Whether a problem has these values; where some do not go together, it has others."""
    return problem.work <= axes.max_work and all(
        any(has(problem, name, value) for value in each)
        for name, each in values.items()
        if name != "phase"
    )


def _pairs(module: Module, names: Sequence[str]) -> set[object]:
    parts = [(name, module.values[name]) for name in names if name in module.values]
    return {frozenset(pair) for pair in itertools.combinations(parts, 2)} | set(parts)
