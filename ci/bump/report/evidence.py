"""Comparisons that are kept: what of their report, and what the page of evidence says of them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ...console.evidence_file import as_evidence
from ..sides.releases import SIDES
from .display import side_name

HEADING = (
    "## Two releases compared",
    "",
    "`kernelproof bump A B` ([comparison](bump.md)) gives the same problems to both. Wrong answers",
    "are counted by how they changed. The ratio is the worst error over its bound. The time is the",
    "candidate's over the baseline's.",
    "",
)
COLUMNS = ("implementation", "judged", "what changed", "worst ratio", "time")


def kept(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report without replay commands, traces and paths of the machine."""
    found: dict[str, Any] = as_evidence(report)
    found["findings"] = [{**each, "replay": {}} for each in found["findings"]]
    return found


def about(name: str, report: Mapping[str, Any]) -> Iterator[str]:
    """Return the heading of a report that was kept in the file of this name."""
    sides = " to ".join(side_name(report, side) for side in SIDES)
    yield from (f"### {sides}, {report['date'][:10]}", "", f"`{name}`: {report['message']}.", "")


def about_machine(machine: Mapping[str, Any]) -> Iterator[str]:
    """Return the lines before the table of a machine that ran."""
    versions = machine["versions"].get(SIDES[1], {})
    told = ", ".join(
        f"{package} {versions[package]}"
        for package in ("torch", "triton", "cuda")
        if versions.get(package)
    )
    seconds = machine["timings"]["seconds"]
    yield f"{machine['device_name']}, {told}; {machine['judged']:,} judged in {seconds:.0f} s."
    yield from ("", "```console", f"$ {machine['command']}", "```", "")


def rows(machine: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Return a row for each implementation that ran on a machine."""
    times = {each["name"]: each["measurements"] for each in machine["timings"]["speed"]}
    for each in machine["implementations"]:
        changes: Counter[str] = Counter()
        worst = dict.fromkeys(each["runs"], 0.0)
        for law in each["laws"]:
            changes.update(law["changes"])
            for side in worst:
                worst[side] = max(worst[side], float(law["worst_ratio"].get(side, 0.0)))
        why = "; ".join(f"{side}: {reason}" for side, reason in each["reasons"].items())
        told = ", ".join(f"{count} {change}" for change, count in changes.most_common())
        ratios = [measured["ratio"] for measured in times.get(each["name"], ())]
        yield (
            f"`{each['name']}`",
            f"{each['judged']:,}",
            "; ".join(filter(None, (told, why))) or "nothing",
            " / ".join(f"{ratio:.2f}" for ratio in worst.values()),
            f"{statistics.median(ratios):.2f}" if ratios else "",
        )
