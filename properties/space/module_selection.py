"""Which compiled modules a run judges, where building one takes long.

FlashInfer builds a module for each combination of dtypes, head dims and features that its templates
know. There are hundreds, at ten seconds to a minute each: a run takes a few that cover pairs of
values, builds them in parallel before the first problem, and draws only their problems.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...reference import Problem, problem_from_json
from .axes import Axes, example, has
from .axis_values import NO_FIELDS, tuples

Keys = Callable[[Sequence[Problem]], "list[str | None]"]
"""Returns the key of each problem's module, None where the problem is refused."""
Libraries = Callable[[Sequence[Problem]], "list[tuple[str, bool]]"]
"""Returns ``Module.library`` and ``Module.exists`` of each problem's module."""
Free = Callable[["Module"], bool]
"""Whether a module costs nothing: it exists, or is built for another implementation."""
OF_CODES = ("caches", "quantisation")
"""Axes whose first value is that of plain numbers."""
WITH_ANOTHER = (
    "q_scale",
    "k_scale",
    "v_scale",
    "mask_pattern",
    "mask_by_head",
    "alibi_function",
    "real",
)
"""Axes whose values come with those of another axis, which decides."""
WITHOUT_MASKS = ("window_left", "logits_soft_cap")
"""Axes whose first value the first module of several query tokens has: trees have no window."""
MOST_COMBINATIONS = 4096
"""Most combinations of groups of values that are tried; of more, an even sample."""
GOLDEN = (5**0.5 - 1) / 2
"""Steps of this part of a whole spread evenly, however many there are."""


@dataclass(frozen=True)
class Module:
    """One module of an implementation.

    Attributes:
        key: what ``Implementation.module_of`` gives for its problems.
        values: the values by axis that lead to it; the other axes are free.
        first: its simplest problem.
        library: what is compiled for it, by a name that all implementations have in common.
        exists: whether that was compiled before, on this machine or by whoever packaged it.
    """

    key: str
    values: Mapping[str, tuple[Any, ...]]
    first: Problem
    library: str = ""
    exists: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {**vars(self), "first": self.first.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Module:
        """Read what ``to_json`` gave; TypeError or ValueError where it is something else."""
        problem = problem_from_json(data["first"])
        return cls(**{**data, "values": tuples(data["values"]), "first": problem})


@dataclass(frozen=True)
class Found:
    """The modules of one implementation, all that a run may choose from.

    Attributes:
        modules: one of every combination of what they differ in.
        plain: the module of plain numbers that comes with each of them; None where none does.
        names: axes that modules differ in.
        stored: problems that are judged whatever is chosen, each with the key of its module.
        simplest: key of the module of the simplest problem.
    """

    modules: tuple[Module, ...]
    plain: tuple[Module | None, ...]
    names: tuple[str, ...]
    stored: tuple[tuple[Problem, str | None], ...]
    simplest: str | None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "modules": [each.to_json() for each in self.modules],
            "plain": [each and each.to_json() for each in self.plain],
            "names": self.names,
            "stored": [(problem.to_json(), key) for problem, key in self.stored],
            "simplest": self.simplest,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Found:
        """Read what ``to_json`` gave; TypeError or ValueError where it is something else."""
        return cls(
            modules=tuple(map(Module.from_json, data["modules"])),
            plain=tuple(each and Module.from_json(each) for each in data["plain"]),
            names=tuple(data["names"]),
            stored=tuple((problem_from_json(problem), key) for problem, key in data["stored"]),
            simplest=data["simplest"],
        )


def find_modules(
    axes: Axes,
    keys: Keys,
    *,
    stored: Sequence[Problem] = (),
    companions: bool = False,
    libraries: Libraries | None = None,
) -> Found:
    """Ask an implementation for all of its modules.

    Args:
        axes: what the implementation supports.
        keys: asks the implementation.
        stored: problems that are judged whatever is chosen: their modules come before others,
            for they are built anyway.
        companions: a module of codes comes with that of plain numbers, with which laws compare it.
        libraries: asks what is compiled for a module, where others may share it.
    """
    groups = _groups(axes, keys)
    found = _supported(axes, keys, groups)
    plain = _plain_ones(axes, keys, groups, found) if companions else [None] * len(found)
    both = [*found, *(each for each in plain if each is not None)]
    if libraries is not None and both:
        named = iter(_named(both, libraries))
        found = [next(named) for _ in found]
        plain = [each and next(named) for each in plain]
    return Found(
        tuple(found),
        tuple(plain),
        tuple(groups),
        tuple(zip(stored, keys(stored), strict=True)) if stored else (),
        keys([example(axes.operation, axes.simplest)])[0],
    )


class Selection:
    """The modules of one implementation, chosen one after another.

    Pairs of what they differ in are covered, the simplest first. Where modules differ in how many
    query tokens a request has, the second is of several, so that a run of few modules has both.

    Args:
        found: its modules.
        simplest: the values of the simplest problem, by axis.
        most: modules, at most.

    Attributes:
        chosen: modules taken so far.
        simplest: key of the module of the simplest problem.
    """

    def __init__(self, found: Found, simplest: Mapping[str, Any], most: int) -> None:
        self._left = list(found.modules)
        self._plain = {
            id(module): each for module, each in zip(found.modules, found.plain, strict=True)
        }
        self._names, self._most = found.names, most
        self._stored = dict(found.stored)
        self._covered: set[object] = set()
        self._simplest = simplest
        self.chosen: list[Module] = []
        self.simplest = found.simplest

    def next(self, free: Free = lambda _: False, *, only_free: bool = False) -> list[Module]:
        """Return the module that covers most new pairs of values, and its companion.

        The first of several query tokens comes before modules of stored problems, those before
        others, and free ones before others that cover something new.

        Returns:
            Nothing where all pairs are covered, or there are enough modules.
        """
        if len(self.chosen) >= self._most:
            return []
        # Compare tuples: several query tokens, then stored problems, then what costs nothing, then
        # the number of new pairs. Greedy pairwise cover; the first of equals wins, as the simplest.
        wanted = set(self._stored.values())
        best, merit = None, (False, False, False, 0)
        first = {id(each) for each in self._of_several_tokens() if self.lacks_several_tokens}
        for each in self._left:
            new = len(self._pairs(each) - self._covered)
            if only_free and not free(each):
                continue
            of = (id(each) in first, each.key in wanted, bool(new) and free(each), new)
            if of > merit or best is None:
                best, merit = each, of
        if best is None or (self.chosen and best.key not in wanted and not merit[-1]):
            return []
        beside = self._plain[id(best)] if len(self.chosen) + 1 < self._most else None
        both = [best, *([beside] if beside is not None and not only_free else [])]
        return [each for each in both if each not in self.chosen]

    @property
    def lacks_several_tokens(self) -> bool:
        """Whether all chosen modules are of one query token, though others are not."""
        if not self.chosen or any(map(_has_several_tokens, self.chosen)):
            return False
        return any(map(_has_several_tokens, self._left))

    def _of_several_tokens(self) -> list[Module]:
        """Return modules of several query tokens; without a window, if there are such."""
        found = [each for each in self._left if _has_several_tokens(each)]
        plain = [each for each in found if self._is_without_masks(each)]
        return plain or found

    def _is_without_masks(self, module: Module) -> bool:
        return all(
            self._simplest.get(name) in module.values.get(name, (self._simplest.get(name),))
            for name in WITHOUT_MASKS
        )

    def take(self, modules: Sequence[Module]) -> None:
        """Choose what ``next`` has returned."""
        for each in modules:
            self.chosen.append(each)
            self._covered |= self._pairs(each)
            if each in self._left:
                self._left.remove(each)

    def ready(self) -> list[Module]:
        """Return the module of the simplest problem where it exists; not taken yet."""
        found = (each for each in self._left if each.key == self.simplest and each.exists)
        return list(itertools.islice(found, 1))

    def others(self) -> list[Module]:
        """Return modules beside the chosen ones that stored problems need."""
        known: dict[str | None, Problem | None] = {module.key: None for module in self.chosen}
        for problem, key in self._stored.items():
            if key is not None:
                known.setdefault(key, problem)
        return [Module("", {}, each) for each in known.values() if each is not None]

    def _pairs(self, module: Module) -> set[object]:
        return _pairs(module, self._names)


def _has_several_tokens(module: Module) -> bool:
    return 0 not in module.values.get("verify", (0,))


def _groups(axes: Axes, keys: Keys) -> dict[str, list[tuple[Any, ...]]]:
    """Return the values of each axis that decides about the module, grouped by module."""
    others = [
        {name: value}
        for name in ("head_dims", "dtype", "causal")
        for value in axes.values.get(name, ())
    ]
    groups: dict[str, list[tuple[Any, ...]]] = {}
    for name, values in axes.values.items():
        if name in WITH_ANOTHER:
            continue
        by_key: dict[str, list[Any]] = {}
        for value in values:
            # An nvfp4 cache may be refused at the simplest head dim, and taken at another; an FP8
            # one of latent attention with float16 queries; a window without a causal mask.
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
        # Of a mixed-radix number, multiples of a step that has no common divisor with the total
        # reach every combination once. The golden section spreads the first of them most evenly, so
        # that a cut-off after any number leaves an even sample.
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


def _plain_ones(
    axes: Axes, keys: Keys, groups: Mapping[str, list[tuple[Any, ...]]], modules: Sequence[Module]
) -> list[Module | None]:
    """Return for each module of codes that of plain numbers which is the same in all else."""
    found: list[tuple[Mapping[str, tuple[Any, ...]], Problem] | None] = []
    for module in modules:
        names = [name for name in OF_CODES if name in module.values]
        values = {**module.values, **{name: groups[name][0] for name in names}}
        problem = example(axes.operation, {**axes.simplest, **_first(values)})
        differs = values != module.values and _can_be_drawn(problem, values, axes)
        found.append((values, problem) if differs else None)
    answers = iter(keys([each[1] for each in found if each is not None]))
    return [_keyed(each, next(answers)) if each is not None else None for each in found]


def _keyed(found: tuple[Mapping[str, tuple[Any, ...]], Problem], key: str | None) -> Module | None:
    return None if key is None else Module(key, *found)


def _named(modules: Sequence[Module], libraries: Libraries) -> list[Module]:
    found = libraries([each.first for each in modules])
    return [
        replace(each, library=library, exists=exists)
        for each, (library, exists) in zip(modules, found, strict=True)
    ]


def _can_be_drawn(problem: Problem, values: Mapping[str, tuple[Any, ...]], axes: Axes) -> bool:
    """Whether a problem has these values; where some do not go together, it has others."""
    return problem.work <= axes.max_work and all(
        any(has(problem, name, value) for value in each)
        for name, each in values.items()
        if name not in NO_FIELDS
    )


def _pairs(module: Module, names: Sequence[str]) -> set[object]:
    parts = [(name, module.values[name]) for name in names if name in module.values]
    return {frozenset(pair) for pair in itertools.combinations(parts, 2)} | set(parts)
