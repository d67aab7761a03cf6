"""The numbers of a comparison as a page draws them: error over bound, and ratios of time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ...console.rendering import number
from ...reports.pictures import histogram, time_ratio
from ..behaviour.speed import memory_sentences
from ..sides.releases import SIDES
from .page_sides import chip_label

EDGES = tuple(10 ** (exponent / 2) for exponent in range(-10, 1))
"""Edges of the bars, from 1e-5 to the bound itself, two a decade; smaller ratios come before."""
SPAN = 2.0
"""The speed's axis goes from half to twice the baseline's seconds, or as far as it must."""


@dataclass(frozen=True)
class Spread:
    """How error over bound is spread on one side.

    Attributes:
        count: of problems.
        median, high, worst: the middle, the 95th percentile and the largest.
        counts: of problems by bar.
    """

    count: int
    median: float
    high: float
    worst: float
    counts: tuple[int, ...]


def spreads(machine: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Spread], Markup]]:
    """Yield the distributions of one machine: implementation, spread by side, and their picture."""
    for each in machine.get("implementations", ()):
        values = {side: finite(each.get("ratios", {}).get(side, ())) for side in SIDES}
        if any(values.values()):
            both = {side: _spread(found) for side, found in values.items() if found}
            told = "; ".join(
                f"median {number(found.median)} and worst {number(found.worst)} with the {side}"
                for side, found in both.items()
            )
            bars = [_counts(found) for found in values.values()]
            title = f"Error over bound of {each['name']}"
            yield each["name"], both, histogram(title, told, EDGES, *bars)


def finite(values: object) -> list[float]:
    """Return the numbers among values; JSON writes infinity as the text ``inf``."""
    if not isinstance(values, list | tuple):
        return []
    return sorted(
        float(each)
        for each in values
        if isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each)
    )


def _counts(values: Sequence[float]) -> list[int]:
    """Count values by bar; the first bar has all that is smaller than the first edge."""
    counts = [0] * len(EDGES)
    for value in values:
        counts[sum(value > edge for edge in EDGES[:-1])] += 1
    return counts


def _spread(values: Sequence[float]) -> Spread:
    high = values[min(len(values) - 1, math.ceil(0.95 * len(values)) - 1)]
    counts = tuple(_counts(values))
    return Spread(len(values), statistics.median(values), high, values[-1], counts)


@dataclass(frozen=True)
class Speed:
    """The seconds of one problem with both releases.

    Attributes:
        name: of the implementation.
        measured: the report's numbers.
        drawn: picture of the ratio and its range, on the axis of all.
        word: what the ratio means.
        tone: how that is coloured.
        memory: what calls need of it with either side; empty where that is not known.
    """

    name: str
    measured: Mapping[str, Any]
    drawn: Markup
    word: str
    tone: str
    memory: str


def speeds(machine: Mapping[str, Any], limit: float) -> list[Speed]:
    """Return the ratios of time of one machine, all on one axis.

    Args:
        machine: of a report.
        limit: ratio from which the policy calls it slower.
    """
    found = [
        (str(each["name"]), one)
        for each in machine.get("timings", {}).get("speed", ())
        for one in each["measurements"]
        if all(finite([one[field]]) and one[field] > 0 for field in ("ratio", "low", "high"))
    ]
    widest = [max(abs(math.log(one[field])) for field in ("low", "high")) for _, one in found]
    span = math.exp(max([math.log(SPAN), *widest]))
    return [
        Speed(
            name,
            one,
            _time_ratio(one, limit, span),
            *_word(one, limit),
            "; ".join(memory_sentences(one)),
        )
        for name, one in found
    ]


def _time_ratio(one: Mapping[str, Any], limit: float, span: float) -> Markup:
    ratio, low, high = (float(one[field]) for field in ("ratio", "low", "high"))
    title = f"{ratio:.2f} times the seconds, from {low:.2f} to {high:.2f}"
    return time_ratio(title, ratio, low, high, limit, span)


def _word(one: Mapping[str, Any], limit: float) -> tuple[str, str]:
    if one["low"] > limit:
        return "slower", "bad"
    if one["high"] < 1 / limit:
        return "faster", "good"
    return "no clear change", "dim"


def compiled(machine: Mapping[str, Any]) -> list[tuple[str, str, dict[str, str]]]:
    """Return the modules that were compiled: name, chip, and what came of it by side."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for each in machine.get("compiled", ()):
        cell = cells.setdefault((str(each["unit"]), chip_label(each["sm"])), {})
        cell[str(each["side"])] = str(each["status"])
    return [(*where, sides) for where, sides in cells.items()]
