"""Modules of both releases, compiled for chips that need not be here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click

from ....impl.gating.rules import ABSENT, COMPILED, UNJUDGED
from ...answers.journal import Journal
from ...compile.compiling import compile_support
from ...console.errors import UsageRefusedError
from ...releases.sandboxes import Tell
from ..sides.releases import BASELINE, CANDIDATE, SIDES, Release
from ..verdicts.findings import Finding, finding
from ..verdicts.verdict import chip_name
from .records import Comparison


@dataclass(frozen=True)
class Compilation:
    """What was asked for.

    Attributes:
        chips: the chips as ``parse_capability`` reads them.
        units: names of modules; all if empty.
        jobs: compilers at a time; one a core if 0.
    """

    chips: tuple[str, ...]
    units: tuple[str, ...] = ()
    jobs: int = 0


def compare_compiled(
    comparison: Comparison, asked: Compilation | None, journal: Journal, tell: Tell
) -> Comparison:
    """Compile both releases' modules for chips that were asked for."""
    if asked is None:
        return comparison.skipping({"compile": "not asked for (--compile)"})
    if set(comparison.releases) != set(SIDES):
        return comparison.skipping({"compile": "one of the releases could not be had"})
    started = time.monotonic()
    try:
        compiled = compile_both(asked, comparison.releases, journal, tell)
        comparison = replace(comparison, compiled=compiled).with_findings(
            compile_findings(compiled)
        )
    except click.ClickException as error:
        flag = "" if isinstance(error, UsageRefusedError) else "--compile: "  # which names its own
        comparison = comparison.failing(f"{flag}{error.message}", error.exit_code)
    return comparison.timed("compile", started)


def compile_both(
    asked: Compilation,
    releases: Mapping[str, Release],
    journal: Journal,
    tell: Tell,
) -> list[dict[str, Any]]:
    """Compile the modules of both releases; a record for each side, chip and module.

    Raises:
        click.ClickException: there is no compiler, or nothing could be judged.
    """

    def records() -> list[dict[str, Any]]:
        return [
            {"side": side, **asdict(record)}
            for side in SIDES
            for record in compile_support(
                [str(releases[side].folder)],
                asked.chips,
                units=asked.units,
                jobs=asked.jobs,
                tell=tell,
            ).records
        ]

    question = {"compile": sorted(asked.chips), "units": sorted(asked.units)}
    found: list[dict[str, Any]] = journal.ask(question, records)
    return found


def compile_findings(records: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Return modules that compiled with one release and do not with the other."""
    by_cell: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for each in records:
        by_cell.setdefault((each["unit"], each["sm"]), {})[each["side"]] = each
    for (unit, sm), sides in by_cell.items():
        if len(sides) < len(SIDES) or UNJUDGED in (each["status"] for each in sides.values()):
            continue
        old, new = (sides[side]["status"] for side in (BASELINE, CANDIDATE))
        if (old == COMPILED) == (new == COMPILED):
            continue
        lost = old == COMPILED
        name = chip_name(sm)
        why = sides[CANDIDATE if lost else BASELINE]["message"]
        yield finding(
            "compile-failed" if lost else "compile-fixed",
            unit,
            f"{unit} on {name}: {old} with the baseline, {new} with the candidate: {why}",
            detail=name,
            chips=(sm,),
            rule=f"do not use {unit} on {name}" if lost else "",
            baseline={"status": old, "message": sides[BASELINE]["message"]},
            candidate={"status": new, "message": sides[CANDIDATE]["message"]},
        )


def compiled_chips(records: Sequence[Mapping[str, Any]]) -> set[int]:
    """Return the chips of which some module was judged for both releases: it must be there."""
    judged = {
        side: {
            each["sm"]
            for each in records
            if each["side"] == side and each["status"] not in (ABSENT, UNJUDGED)
        }
        for side in SIDES
    }
    return judged[BASELINE] & judged[CANDIDATE]
