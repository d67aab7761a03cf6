"""Which compiled modules a run looks at, where building one takes long.

FlashInfer builds a module for each combination of dtypes, head dims and features that its templates
know. There are hundreds, at ten seconds to a minute each: a run takes a few that cover pairs of
values, builds them in parallel before the first problem, and draws problems of these alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..reference import Problem
from .axes import Axes, example

Keys = Callable[[Sequence[Problem]], "list[str | None]"]
"""Gives the key of each problem's module, None where the problem is refused."""
WITH_ANOTHER = ("q_scale",)
"""Axes whose values come with those of another axis, which decides."""
MOST_COMBINATIONS = 4096
"""Of groups of values; beyond, those of the first axes only."""


@dataclass(frozen=True)
class Module:
    """One module of an implementation.

    Attributes:
        key: what ``compile_key`` gives for its problems, as text.
        values: by axis, the values that lead to it; the other axes are free.
        first: its simplest problem.
    """

    key: str
    values: Mapping[str, tuple[Any, ...]]
    first: Problem


def choose(axes: Axes, keys: Keys, most: int, *, stored: Sequence[Problem] = ()) -> list[Module]:
    """Choose modules such that pairs of what they differ in are covered, the simplest first.

    Args:
        axes: what an implementation supports.
        keys: asks the implementation.
        most: modules, at most.
        stored: problems that are judged whatever is chosen: their modules come before others,
            for they are built anyway.
    """
    groups = _groups(axes, keys)
    found = _supported(axes, keys, groups)
    return _covering(found, list(groups), most, set(keys(stored)) if stored else set())


def further(modules: Sequence[Module], keys: Keys, stored: Sequence[Problem]) -> list[Problem]:
    """Give a problem for each module beside these that stored ones need, of those not refused."""
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
    """Give the module of every combination of groups that is supported."""
    names = list(groups)
    while math.prod(len(groups[name]) for name in names) > MOST_COMBINATIONS:
        names.pop()
    combinations = list(itertools.product(*(groups[name] for name in names)))
    problems = [
        example(
            axes.operation,
            {**axes.simplest, **{name: part[0] for name, part in zip(names, each, strict=True)}},
        )
        for each in combinations
    ]
    answers = keys(problems)
    return [
        Module(key, dict(zip(names, each, strict=True)), problem)
        for key, each, problem in zip(answers, combinations, problems, strict=True)
        if key is not None
    ]


def _covering(
    found: Sequence[Module], names: Sequence[str], most: int, wanted: Container[str | None]
) -> list[Module]:
    """Take the module that covers most new pairs of values, time and again; wanted ones first."""
    left = list(found)
    chosen: list[Module] = []
    covered: set[object] = set()
    while left and len(chosen) < most:
        best = max(left, key=lambda each: (each.key in wanted, len(_pairs(each, names) - covered)))
        new = _pairs(best, names) - covered
        if chosen and not new and best.key not in wanted:
            break
        chosen.append(best)
        covered |= new
        left.remove(best)
    return chosen


def _pairs(module: Module, names: Sequence[str]) -> set[object]:
    parts = [(name, module.values[name]) for name in names if name in module.values]
    return {frozenset(pair) for pair in itertools.combinations(parts, 2)} | set(parts)
