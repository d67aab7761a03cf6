"""The numbers of a comparison as a page draws them: error over bound, and ratios of time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..behaviour.speed import memory_sentences
from ..sides.releases import BASELINE, SIDES
from .page_sides import chip_label

EDGES = tuple(10 ** (exponent / 2) for exponent in range(-10, 1))
"""Edges of the bars, from 1e-5 to the bound itself, two a decade; smaller ratios come before."""
BAR, GAP, HALF = 14, 2, 26
"""Width of a bar, between bars, and height of each side's half; pixels."""
SPAN = 2.0
"""The speed's axis goes from half to twice the baseline's seconds, or as far as it must."""
AXIS = 200


@dataclass(frozen=True)
class Spread:
    """How error over bound is spread on one side.

    Attributes:
        count: of problems.
        median, high, worst: the middle, the 95th percentile and the largest.
        bars: left edge, top, height and count of each bar that is not empty.
    """

    count: int
    median: float
    high: float
    worst: float
    bars: tuple[tuple[int, float, float, int], ...]


def spreads(machine: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Spread]]]:
    """Return the distributions of one machine: name of the implementation, and a spread by side."""
    for each in machine.get("implementations", ()):
        values = {side: finite(each.get("ratios", {}).get(side, ())) for side in SIDES}
        if any(values.values()):
            tallest = max(max(_counts(found)) for found in values.values())
            yield (
                each["name"],
                {side: _spread(found, tallest, side) for side, found in values.items() if found},
            )


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


def _spread(values: Sequence[float], tallest: int, side: str) -> Spread:
    bars = []
    for index, count in enumerate(_counts(values)):
        if count:
            height = max(1.0, round(HALF * count / tallest, 1))
            top = HALF - height if side == BASELINE else HALF
            bars.append((index * (BAR + GAP), round(top, 1), height, count))
    high = values[min(len(values) - 1, math.ceil(0.95 * len(values)) - 1)]
    return Spread(len(values), statistics.median(values), high, values[-1], tuple(bars))


@dataclass(frozen=True)
class Speed:
    """The seconds of one problem with both releases.

    Attributes:
        name: of the implementation.
        measured: the report's numbers.
        dot, left, right: where the ratio and its spread stand on the axis, in pixels.
        one, limit: where the ratio 1 and the policy's limit stand.
        word: what the ratio means.
        tone: how that is coloured.
        memory: what calls need of it with either side; empty where that is not known.
    """

    name: str
    measured: Mapping[str, Any]
    dot: float
    left: float
    right: float
    one: float
    limit: float
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
    span = max([math.log(SPAN), *widest])

    def place(ratio: float) -> float:
        at = AXIS / 2 * (1 + math.log(ratio) / span)
        return round(min(max(at, 0.0), float(AXIS)), 1)

    return [
        Speed(
            name,
            one,
            place(one["ratio"]),
            place(one["low"]),
            place(one["high"]),
            place(1.0),
            place(limit),
            *_word(one, limit),
            "; ".join(memory_sentences(one)),
        )
        for name, one in found
    ]


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
