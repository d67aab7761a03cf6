"""A comparison's report as one page that needs nothing else (docs/bump.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....properties.verdicts.text import count_of
from ...console.rendering import render
from ..sides.releases import SIDES
from ..verdicts.findings import engines_in_words
from .display import (
    alike,
    claims_of,
    package_of,
    side_name,
    stored_first,
    title,
    version_of,
)
from .page_findings import anchors, groups
from .page_matrix import backends, columns
from .page_numbers import compiled, speeds, spreads
from .page_sides import chip_label

TONES = {
    "bump": "good",
    "bump with conditions": "warn",
    "do not bump": "bad",
    "undecided": "warn",
}
MARKS = {"bump": "✓", "bump with conditions": "!", "do not bump": "✗", "undecided": "?"}
MEANT = {
    "declared": "no such chip was there: what the releases declare, and the support rules",
    "compiled": "what is declared, and modules that were compiled for the chip",
    "run": "what is declared, and calls on the chip itself, judged by the oracle",
}
"""What the evidence of a chip's verdict stands for."""


def to_page(report: Mapping[str, Any]) -> str:
    """Return a self-contained page: it loads nothing, and shows all values as text."""
    findings = report["findings"]
    names = anchors(findings)
    policy = report["policy"]
    return render(
        "bump.html.jinja",
        report=report,
        title=title(report),
        sides=[(side, side_name(report, side), report[side]) for side in SIDES],
        package=package_of(report),
        versions={side: version_of(report[side]) for side in SIDES},
        tones=TONES,
        marks=MARKS,
        meant=MEANT,
        chips=alike(report["chips"]),
        engines=engines_in_words(report),
        groups=groups(findings, names),
        anchors=names,
        changes=sorted({str(each["change"]).replace("-", " ") for each in findings}),
        every_chip=list(dict.fromkeys(chip_label(each["chip"]) for each in report["chips"])),
        counts=_counts(report),
        columns=columns(report["features"]),
        backends=list(backends(report["features"])),
        machines=[
            {
                "told": each,
                "stored": stored_first(each),
                "claims": claims_of(each),
                "name": chip_label(each["chip"]),
                "spreads": list(spreads(each)),
                "speeds": speeds(each, float(policy["slower"])),
                "compiled": compiled(each),
            }
            for each in report["machines"]
        ],
        policy=policy,
    )


def _counts(report: Mapping[str, Any]) -> str:
    """Return in a sentence what was found, and what was run for it."""
    actions = [each["action"] for each in report["findings"]]
    found = (
        f"{count_of(actions.count('block'), 'finding')} that block, "
        f"{count_of(actions.count('condition'), 'finding')} that set a condition, "
        f"{actions.count('report'):,} for information"
    )
    judged = sum(each["judged"] for each in report["machines"] if isinstance(each["judged"], int))
    run = [chip_label(each["chip"]) for each in report["machines"] if each["judged"]]
    where = f" on {', '.join(run)}" if run else ""
    return f"{found}. {count_of(judged, 'problem')} judged{where}."
