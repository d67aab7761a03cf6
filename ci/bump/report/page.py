"""A comparison's report as one page that needs nothing else (docs/bump.md)."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from markupsafe import Markup

from ...binaries.flashinfer.changes import CALL_STATES
from ...console.rendering import number, render
from ...reports.outline import filled
from ...reports.pictures import histogram, time_ratio
from ..behaviour.speed import memory_sentences
from ..sides.releases import SIDES
from .kernels import kernels_of
from .outline import (
    LOOKS,
    NOBODY,
    advice_on_uses,
    alike,
    chip_label,
    finding_block,
    outline_of,
    package_of,
    side_name,
    title,
    version_of,
)
from .page_findings import anchors, details

MEANT = {
    "declared": "no such chip was there: what the releases declare, and the support rules",
    "compiled": "what is declared, and modules that were compiled for the chip",
    "run": "what is declared, and calls on the chip itself, judged by the oracle",
}
"""What the evidence of a chip's verdict stands for."""


def to_page(report: Mapping[str, Any]) -> str:
    """Return a self-contained page: the outline of the comparison, and what only a page can show.

    It loads nothing, and shows all values as text.
    """
    _, *parts = filled(outline_of(report, whole=True))
    elsewhere = ("Conditions", "Whom it concerns", NOBODY)  # the page has them in its own places
    outline = [part for part in parts if part.heading not in elsewhere]
    policy = report["policy"]
    return render(
        "bump.html.jinja",
        report=report,
        title=title(report),
        look=LOOKS[report["verdict"]],
        looks=LOOKS,
        outline=outline,
        advice=advice_on_uses(report),
        nobody=[part for part in parts if part.heading == NOBODY],
        finding_block=partial(finding_block, whole=True),
        details=details,
        anchors=anchors(report["findings"]),
        sides=[(side, side_name(report, side), report[side]) for side in SIDES],
        package=package_of(report),
        versions={side: version_of(report[side]) for side in SIDES},
        meant=MEANT,
        chips=alike(report["chips"]),
        changes=sorted({str(each["change"]).replace("-", " ") for each in report["findings"]}),
        every_chip=list(dict.fromkeys(chip_label(each["chip"]) for each in report["chips"])),
        columns=columns(report["features"]),
        backends=list(backends(report["features"])),
        machines=[
            {
                "told": each,
                "name": chip_label(each["chip"]),
                "spreads": list(spreads(each)),
                "speeds": speeds(each, float(policy["slower"])),
                "compiled": compiled(each),
            }
            for each in report["machines"]
        ],
        call_states=CALL_STATES,
        kernels=[each for chip in report.get("kernels", ()) for each in kernels_of(chip)],
        policy=policy,
    )


LETTERS = {"declared": "d", "reported": "", "compiled": "c", "selected": "s", "run": "r"}
"""Evidence of a cell; a refusal has a footnote, which names its report."""
CELL_TONES = {"supported": "yes", "refused": "no", "unknown": "unknown"}
CELL_WORDS = {"supported": "yes", "refused": "no", "unknown": "–"}  # noqa: RUF001  a dash of its own


class Cell(NamedTuple):
    """One cell: its text, its colour, and evidence or a footnote, set small."""

    text: str
    tone: str = ""
    small: str = ""


class Backend(NamedTuple):
    """The lines of one operation and backend.

    ``total`` sums up its features by chip; ``rows`` has a title and cells of each, ``notes`` number
    and reason of each refusal; ``gained`` and ``lost`` count cells.
    """

    name: str
    total: tuple[Cell, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    notes: tuple[tuple[int, str], ...]
    gained: int
    lost: int


def backends(features: Mapping[str, Any] | None) -> Iterator[Backend]:
    """Return the matrix by operation and backend, in the report's order."""
    made: dict[str, list[Mapping[str, Any]]] = {}
    for row in (features or {}).get("rows", ()):
        made.setdefault(f"{row['operation']} {row['backend']}", []).append(row)
    rules: Mapping[str, Any] = (features or {}).get("rules", {})
    for name, rows in made.items():
        notes: dict[str, int] = {}
        lines = tuple(
            (str(row["title"]), tuple(_cell(each, notes, rules) for each in row["cells"]))
            for row in rows
        )
        columns = zip(*(row["cells"] for row in rows), strict=True)
        cells = [each for row in rows for each in row["cells"]]
        yield Backend(
            name,
            tuple(_total(column) for column in columns),
            lines,
            tuple((number, str(rules.get(rule, rule))) for rule, number in notes.items()),
            sum(each["change"] == "gained" for each in cells),
            sum(each["change"] == "lost" for each in cells),
        )


def columns(features: Mapping[str, Any] | None) -> list[str]:
    """Name the matrix's chips."""
    return [chip_label(chip) for chip in (features or {}).get("chips", ())]


def _cell(each: Mapping[str, Any], notes: dict[str, int], rules: Mapping[str, Any]) -> Cell:
    candidate = each["candidate"]
    status, rule = candidate["status"], candidate["rule"]
    small = LETTERS.get(candidate["evidence"], "")
    if status == "refused" and rule in rules:
        small = f"{notes.setdefault(rule, len(notes) + 1)}"
    text, change = CELL_WORDS.get(status, str(status)), each["change"]
    if change in ("gained", "lost"):
        before = CELL_WORDS.get(each["baseline"]["status"], str(each["baseline"]["status"]))
        return Cell(f"{before} → {text}", change, small)
    return Cell(text, CELL_TONES.get(status, ""), small)


def _total(column: Sequence[Mapping[str, Any]]) -> Cell:
    """Sum a column up: features that the candidate has, and what it gained and lost."""
    able = sum(each["candidate"]["status"] == "supported" for each in column)
    gained = sum(each["change"] == "gained" for each in column)
    lost = sum(each["change"] == "lost" for each in column)
    if not able and not lost:
        told = any(each["candidate"]["status"] == "refused" for each in column)
        return Cell("no" if told else CELL_WORDS["unknown"], "no" if told else "unknown")
    supported = "yes" if able == len(column) else "some"
    tone = "both" if gained and lost else "gained" if gained else "lost" if lost else supported
    levels = Counter(LETTERS.get(each["candidate"]["evidence"], "") for each in column)
    small = [f"{levels[letter]}{letter}" for letter in "rc" if levels[letter]]
    small += [f"+{gained}"] * bool(gained) + [f"−{lost}"] * bool(lost)  # noqa: RUF001  a minus
    return Cell(f"{able}/{len(column)}", tone, " ".join(small))


EDGES = tuple(10 ** (exponent / 2) for exponent in range(-10, 1))
"""Edges of the bars, from 1e-5 to the bound itself, two a decade; smaller ratios come before."""
SPAN = 2.0
"""The speed's axis goes from half to twice the baseline's seconds, or as far as it must."""


@dataclass(frozen=True)
class Spread:
    """How error over bound is spread on one side; ``high`` is the 95th percentile.

    ``counts`` are problems by bar.
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
            bars = [_by_bar(found) for found in values.values()]
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


def _by_bar(values: Sequence[float]) -> list[int]:
    """Count values by bar; the first bar has all that is smaller than the first edge."""
    counts = [0] * len(EDGES)
    for value in values:
        counts[sum(value > edge for edge in EDGES[:-1])] += 1
    return counts


def _spread(values: Sequence[float]) -> Spread:
    high = values[min(len(values) - 1, math.ceil(0.95 * len(values)) - 1)]
    counts = tuple(_by_bar(values))
    return Spread(len(values), statistics.median(values), high, values[-1], counts)


class Speed(NamedTuple):
    """The seconds of one problem with both releases: numbers, picture, and what the ratio means.

    ``memory`` is what calls need with either side, empty where that is not known.
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
        machine: the machine of a report.
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
