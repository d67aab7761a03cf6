"""What became of a chip's precompiled kernels: a picture, and a sentence on what it means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from ...binaries.flashinfer.changes import (
    CALL_STATES,
    DIES_NOW,
    GONE,
    KEPT,
    NEW,
    RAISES_NOW,
    REBUILT,
    RUNS_NOW,
    SAME,
    STATES,
)
from ...reports.pictures import shares
from ..verdicts.verdict import chip_name

TONES = {KEPT: "rest", REBUILT: "rebuilt", GONE: "gone", NEW: "new"}
"""Class of each state of a precompiled kernel in a picture."""


class ChipKernels(NamedTuple):
    """What became of one list of the precompiled kernels for a chip.

    ``told`` is a sentence, ``counts`` has class, state and number, ``calls`` a row by function.
    """

    name: str
    picture: Markup
    counts: tuple[tuple[str, str, int], ...]
    told: str
    builds: Sequence[Mapping[str, Any]]
    calls: Sequence[Mapping[str, Any]]


def kernels_of(chip: Mapping[str, Any]) -> Iterator[ChipKernels]:
    """Yield the pictures of a chip's precompiled kernels, with the sentence that goes with each."""
    for name, listed in _lists_of(chip):
        counts = _counts(listed)
        said = ", ".join(f"{count:,} {state}" for state, count in counts.items())
        tones = [(TONES[state], counts[state]) for state in STATES]
        yield ChipKernels(
            name,
            shares(f"Precompiled kernels for {name}", said, tones),
            tuple((TONES[state], state, counts[state]) for state in STATES),
            _meaning(name, listed),
            listed["builds"],
            [each for each in listed["calls"] if any(each[state] for state in CALL_STATES)],
        )


def meanings(chip: Mapping[str, Any]) -> Iterator[str]:
    """Yield what became of each list of a chip's kernels, and what it means for their callers."""
    for name, listed in _lists_of(chip):
        yield _meaning(name, listed)


def _lists_of(chip: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each list of a chip's kernels, attention's first, with what its kernels are for."""
    name = chip_name(chip["chip"])
    yield name, chip
    for each in chip.get("gemms", ()):
        yield f"{name}, {each['title']}", {"calls": (), **each}


def _counts(listed: Mapping[str, Any]) -> dict[str, int]:
    return {state: sum(each[state] for each in listed["builds"]) for state in STATES}


def _meaning(name: str, listed: Mapping[str, Any]) -> str:
    counts = _counts(listed)
    before = counts[KEPT] + counts[REBUILT] + counts[GONE]
    if not before:
        return f"The baseline lists no kernel for {name}, so that nothing known of it is lost."
    if counts[KEPT] == before and not counts[NEW]:
        return f"All kernels for {name} are the same bits: what ran with the baseline still holds."
    kept = f"Of {before:,} kernels for {name}, {counts[KEPT]:,} are the same bits"
    if not listed["calls"]:
        return f"{kept}; runs with the baseline are evidence for these only."
    total = Counter({s: sum(each[s] for each in listed["calls"]) for s in CALL_STATES})
    same, launched = total[SAME], total.total() - total[RUNS_NOW]
    failing = total[RAISES_NOW] + total[DIES_NOW]
    fail = f", and {failing:,} fail now" if failing else ""
    return (
        f"{kept}; {same:,} of {launched:,} kinds of call still launch the same ones{fail}. Runs "
        "with the baseline are evidence for those only."
    )
