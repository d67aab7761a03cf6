"""The claimed space of an implementation: by axis, the values that it claims and those it refuses.

``supports`` is asked about each value in a few simple problems; a value that is refused there may
be accepted together with others, and is claimed once a problem with it was judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...impl.targets.refusal import Refusal

OFTEN = 60
"""Drawn problems with an accepted value from which on, if all of them were refused, it counts as
refused."""

ValuesOf = Callable[[Any], Mapping[str, str]]
"""Returns the value that a problem has of each axis, as text."""


@dataclass(frozen=True)
class AxisClaims:
    """The values of one axis, as text, simplest first.

    Attributes:
        claimed: values that are accepted, alone or in a problem that was judged.
        refused: values that are refused, each with the reason.
        not_drawn: values that are not refused, and of which no problem was judged: chance or time
            left them out, or an option such as ``--only``.
    """

    claimed: tuple[str, ...] = ()
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    not_drawn: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "claimed": list(self.claimed),
            "refused": {value: str(reason) for value, reason in self.refused.items()},
            "not_drawn": list(self.not_drawn),
        }


ClaimedSpace = Mapping[str, AxisClaims]
"""Values by axis."""


class ClaimTally:
    """What problems say about an implementation's claims, beside what ``supports`` said of each.

    Args:
        asked: the answers of ``supports`` about each value, see ``surveyed``.
        values_of: see ``ValuesOf``; it leaves out the axes that follow from no field of a problem.
        countable: the axes that it does not leave out.
        whole: whether any problem may be judged: where modules were not built, a refusal may
            stand for them.
    """

    def __init__(
        self, asked: ClaimedSpace, values_of: ValuesOf, countable: set[str], *, whole: bool
    ) -> None:
        self._asked, self._values_of = asked, values_of
        self._countable, self._whole = countable, whole
        self._judged: set[tuple[str, str]] = set()
        self._refused: Counter[tuple[str, str]] = Counter()
        self._reasons: dict[tuple[str, str], str] = {}

    def judged(self, problem: Any) -> None:  # noqa: ANN401  of any operation
        """Count a problem that was judged."""
        self._judged.update(self._values_of(problem).items())

    def refused(self, problem: Any, reason: str) -> None:  # noqa: ANN401  of any operation
        """Count a problem that was drawn and refused."""
        for value in self._values_of(problem).items() if self._whole else ():
            self._refused[value] += 1
            self._reasons.setdefault(value, reason)

    def space(self) -> dict[str, AxisClaims]:
        """Return the claimed space, as far as it is known by now."""
        return {axis: self._axis(axis, asked) for axis, asked in self._asked.items()}

    def _axis(self, axis: str, asked: AxisClaims) -> AxisClaims:
        judged = {value for name, value in self._judged if name == axis}
        refused = {value: why for value, why in asked.refused.items() if value not in judged}
        for value in asked.claimed:
            count = self._refused[axis, value]
            if value not in judged and count >= OFTEN:
                why = f"each of {count:,} problems drawn with it: {self._reasons[axis, value]}"
                refused[value] = Refusal(why)
        every = (*asked.claimed, *asked.refused, *asked.not_drawn)
        unseen = every if axis in self._countable else asked.not_drawn
        claimed = judged.union(asked.claimed)
        return AxisClaims(
            tuple(each for each in every if each in claimed and each not in refused),
            refused,
            tuple(each for each in unseen if each not in judged and each not in refused),
        )


def surveyed(
    axes: Mapping[str, tuple[Any, ...]],
    accepted: Mapping[str, tuple[Any, ...]],
    refused: Mapping[str, str],
    *,
    rows: tuple[str, ...] = ("real",),
) -> dict[str, AxisClaims]:
    """Return the claimed space by what ``supports`` said of each value, before anything is drawn.

    Args:
        axes: every value by axis.
        accepted: values that were accepted.
        refused: reasons, by axis and value, see ``Axes.refused``.
        rows: axes that are left out, as they stand for values of several others.
    """
    found = {}
    for axis, values in axes.items():
        if axis in rows:
            continue
        names = tuple(dict.fromkeys(map(str, values)))
        kept = set(map(str, accepted.get(axis, ())))
        reasons = {
            name: refused[f"{axis}={name}"]
            for name in names
            if name not in kept and f"{axis}={name}" in refused
        }
        found[axis] = AxisClaims(
            tuple(name for name in names if name in kept),
            {name: _refusal(why) for name, why in reasons.items()},
            tuple(name for name in names if name not in kept and name not in reasons),
        )
    return found


def _refusal(reason: str) -> Refusal:
    return reason if isinstance(reason, Refusal) else Refusal(reason)
