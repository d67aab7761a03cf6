"""Making a failing problem simpler field by field, after Hypothesis has shrunk its draws.

Hypothesis makes the choices smaller from which a problem was drawn, and stops where none of them
alone can be: at 129 keys where 33 do, or with an option that does not matter but whose absence
draws all that follows anew. Here each field is changed by itself, with the others as they are.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from ...reference import Problem
from ..space.attention_strategies import LENGTH_EDGES

Fails = Callable[[Problem], bool]
"""Whether a problem fails by the same fault, under the same law."""
ROUNDS = 4
"""Most passes over all fields: what one field allows may depend on another."""
IDENTITIES = ("operation", "seed", "request_ids", "token_ids")
"""Fields that are no lengths: they have their simplest value or their own."""
KEPT = ("operation", "page_size")
"""Fields that are never put back. Small pages are no simpler: there are more of them."""
TOGETHER = (("head_dim_qk", "head_dim_vo"), ("hidden", "inter"))
"""Sizes that kernels often claim in pairs only."""


@dataclass
class Limit:
    """A budget in seconds and in problems: with enough of the former, the same problems each time.

    Attributes:
        seconds: the seconds that it may take.
        tries: problems that may be judged.
    """

    seconds: float
    tries: int = 400
    _begun: float = field(default_factory=time.monotonic)

    def spent(self) -> bool:
        """Count a problem; whether no more may be judged."""
        self.tries -= 1
        return self.tries < 0 or time.monotonic() - self._begun > self.seconds


def simplify(problem: Problem, still_fails: Fails, budget: Limit) -> Problem:
    """Return the simplest problem found that fails by the same fault.

    Args:
        problem: the problem that fails.
        still_fails: judges another problem; False too where it is not claimed.
        budget: asked before each problem is judged.

    Returns:
        The last problem that ``still_fails`` said True to; ``problem`` itself if there was none.
    """
    search = _Search(problem, still_fails, budget)
    for _ in range(ROUNDS):
        before = search.problem
        search.drop_requests()
        search.reset_options()
        search.lower_lengths()
        if search.problem == before:
            break
    return search.problem


def options_of(problem: Problem) -> dict[str, Any]:
    """Return the fields whose values are not the simplest, except lengths, identities and seeds.

    What a person has to look at to understand a problem, beside its sizes.
    """
    return {
        name: getattr(problem, name)
        for name, simplest in _simplest(problem).items()
        if getattr(problem, name) != simplest
        and name not in (*KEPT, *IDENTITIES)
        and not isinstance(simplest, tuple)
        and not _is_size(simplest)
    }


def _simplest(problem: Problem) -> dict[str, Any]:
    """Return each field's simplest value: its default."""
    return {
        each.name: each.default
        for each in fields(problem)
        if each.init and each.default is not MISSING
    }


def _is_size(value: object) -> bool:
    """Whether a simplest value is that of a length or a count: some of it must be there."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class _Search:
    """The simplest problem so far, and what may be tried of it."""

    def __init__(self, problem: Problem, fails: Fails, budget: Limit) -> None:
        self.problem = problem
        self._fails, self._budget = fails, budget
        self._simplest = _simplest(problem)
        self._seen = {problem.id}

    def takes(self, changes: Mapping[str, Any]) -> bool:
        """Whether the problem fails with these changes, which are kept then."""
        try:
            changed: Any = replace(self.problem, **changes)
        except ValueError:  # there is no such call
            return False
        if changed.id in self._seen or self._budget.spent():
            return False
        self._seen.add(changed.id)
        if not self._fails(changed):
            return False
        self.problem = changed
        return True

    def drop_requests(self) -> None:
        """Keep one request if that is enough, else leave out what can go, the last ones first."""
        count = self._requests
        if count < 2:  # noqa: PLR2004
            return
        for kept in range(count):
            if self.takes(self._requests_of([kept])):
                return
        for dropped in reversed(range(count)):
            self.takes(self._requests_of([i for i in range(self._requests) if i != dropped]))

    @property
    def _requests(self) -> int:
        """How many requests, or experts with a count each, the problem has."""
        return max(map(len, self._by_request().values()), default=0)

    def _by_request(self) -> dict[str, tuple[Any, ...]]:
        """Return the fields with a value for each request."""
        found = {
            name: getattr(self.problem, name)
            for name, simplest in self._simplest.items()
            if isinstance(simplest, tuple) and getattr(self.problem, name)
        }
        most = max(map(len, found.values()), default=0)
        return {name: values for name, values in found.items() if len(values) == most}

    def _requests_of(self, kept: Sequence[int]) -> dict[str, Any]:
        return {name: tuple(v[i] for i in kept) for name, v in self._by_request().items()}

    def reset_options(self) -> None:
        """Put back what can be: all options, then each, then two that need each other."""
        self.takes(self._reset(self._used))
        for name in self._used:
            self.takes(self._reset([name]))
        # Of two options that need each other, neither can be put back without the other.
        for pair in itertools.combinations(self._used, 2):
            self.takes(self._reset(pair))

    @property
    def _used(self) -> list[str]:
        return [
            name
            for name, simplest in self._simplest.items()
            if name not in KEPT
            and getattr(self.problem, name) != simplest
            and not (isinstance(simplest, tuple) and name not in IDENTITIES)
            # A size below its default is smaller than what it would be put back to.
            and not (_is_size(simplest) and 0 < getattr(self.problem, name) < simplest)
        ]

    def _reset(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: self._simplest[name] for name in names}

    def lower_lengths(self) -> None:
        """Lower each number to the least that is found to fail: sizes together, then alone."""
        for names in TOGETHER:
            known = [name for name in names if name in self._simplest]
            if known and min(getattr(self.problem, name) for name in known) > 1:
                self._lower_pair(known)
        for name, value, low in list(self._numbers()):
            self._lower(value, low, lambda n, name=name: self.takes({name: n}))  # type: ignore[misc]
        for position in range(self._requests):
            self._lower_request(position)

    def _lower_pair(self, names: Sequence[str]) -> None:
        most = max(getattr(self.problem, name) for name in names)
        low = min(self._simplest[name] for name in names)
        self._lower(most, low, lambda n: self.takes(dict.fromkeys(names, n)))

    def _numbers(self) -> Iterator[tuple[str, int, int]]:
        """Yield each field that counts something: its name, its value, the least to try."""
        for name, simplest in self._simplest.items():
            value = getattr(self.problem, name)
            if name in (*KEPT, *IDENTITIES) or isinstance(value, bool):
                continue
            if isinstance(value, int) and isinstance(simplest, int) and value > max(simplest, 0):
                # A default below zero, or zero, means that the option is off.
                yield name, value, max(simplest, 0) if simplest else 1

    def _lower_request(self, position: int) -> None:
        """Lower a request's lengths: all of them to one number, by one number, each by itself."""
        # A step of a problem of several calls is no length: Hypothesis has shrunk it.
        lengths = [
            name
            for name, each in self._by_request().items()
            if name not in IDENTITIES and isinstance(each[position], int)
        ]

        def at(name: str) -> int:
            return int(getattr(self.problem, name)[position])

        def takes(values: Mapping[str, int]) -> bool:
            changes = {}
            for name, value in values.items():
                given = list(getattr(self.problem, name))
                given[position] = value
                changes[name] = tuple(given)
            return self.takes(changes)

        if len(lengths) > 1:
            least = min(map(at, lengths))
            self._lower(least + 1, 1, lambda n: takes(dict.fromkeys(lengths, n)))
            now = {name: at(name) for name in lengths}
            fewer = min(now.values())
            self._lower(
                fewer, 1, lambda n: takes({name: each - fewer + n for name, each in now.items()})
            )
        for name in lengths:
            self._lower(at(name), 1, lambda n, name=name: takes({name: n}))  # type: ignore[misc]

    def _lower(self, most: int, low: int, takes: Callable[[int], bool]) -> None:
        """Find how low a number may be: edges of tiles from below, then halving what is left."""
        # A fault at a tile's edge fails from the edge on, and halving assumes that. Edges are tried
        # from below first, as there are few, and most faults lie there.
        for edge in (low, *LENGTH_EDGES):
            if low <= edge < most:
                if takes(edge):
                    most = edge
                    break
                low = edge + 1
        while low < most:
            middle = (low + most) // 2
            if takes(middle):
                most = middle
            else:
                low = middle + 1
