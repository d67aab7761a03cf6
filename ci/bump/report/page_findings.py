"""Findings as a page shows them: grouped, each with all that is known of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..verdicts.findings import BLOCK, CHANGES, CONDITION, REPORT, UNUSED
from .display import REPORTED_IN_FULL
from .page_sides import Row, chip_label, side_by_side

MOST_OPEN = 5
MOST_CHIPS = 3


@dataclass(frozen=True)
class Card:
    """One finding.

    Attributes:
        anchor: its id in the page.
        found: the report's finding.
        label: what it does, in a word.
        tone: how that is coloured.
        change: the kind of change, in words.
        means: what that kind of change means.
        said: its message.
        where: chips, in short.
        everywhere: chips, all of them.
        rows: side by side.
        same: fields that are the same on both sides.
        judged: whether the oracle has a column.
        problem: as JSON; empty where there is none.
        issue: a link that can be followed; empty where there is none.
    """

    anchor: str
    found: Mapping[str, Any]
    label: str
    tone: str
    change: str
    means: str
    said: str
    where: str
    everywhere: str
    rows: tuple[Row, ...]
    same: str
    judged: bool
    problem: str
    issue: str


@dataclass(frozen=True)
class Group:
    """Findings that stand together under a heading; those that are many, folded by their change.

    Attributes:
        key: of the group's anchor.
        title: its heading.
        cards: its findings.
        parts: findings by change, folded; each with its title.
        opened: whether its findings are open at first.
    """

    key: str
    title: str
    cards: tuple[Card, ...] = ()
    parts: tuple[tuple[str, str, tuple[Card, ...]], ...] = ()
    opened: bool = False

    @property
    def count(self) -> int:
        """How many findings it has."""
        return len(self.cards) + sum(len(cards) for _, _, cards in self.parts)


def anchors(findings: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return each finding's id in the page: the same in every run."""
    given: dict[str, str] = {}
    for each in findings:
        plain = wanted = "f-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", str(each["id"]))[:120]
        number_ = 1
        while wanted in given.values():
            number_ += 1
            wanted = f"{plain}-{number_}"
        given.setdefault(str(each["id"]), wanted)
    return given


def groups(findings: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[Group]:
    """Group findings: what blocks, what sets conditions, what is accepted, and what informs.

    Args:
        findings: of a report.
        names: anchors by id.
    """
    made: dict[str, list[Card]] = {}
    for each in findings:
        made.setdefault(_group(each), []).append(_card(each, names[str(each["id"])]))
    titles = {
        BLOCK: "What blocks the bump",
        CONDITION: "What sets conditions",
        "accepted": "Accepted by the policy",
        "unused": "Not used by the engine's source",
        "behaviour": "Behaviour and speed, for information",
        "notable": "New refusals and callables, for information",
    }
    found = [
        Group(key, title, tuple(made[key]), opened=key == BLOCK and len(made[key]) <= MOST_OPEN)
        for key, title in titles.items()
        if key in made
    ]
    rest = made.get("rest", [])
    if rest:
        by_change: dict[str, list[Card]] = {}
        for card in rest:
            by_change.setdefault(card.change, []).append(card)
        parts = tuple((name, cards[0].means, tuple(cards)) for name, cards in by_change.items())
        found.append(Group("rest", "Other changes, for information", parts=parts))
    return found


def _group(found: Mapping[str, Any]) -> str:
    if found["accepted"]:
        return "accepted"
    if found["action"] in (BLOCK, CONDITION):
        return str(found["action"])
    if (found.get("uses") or {}).get("status") == UNUSED and CHANGES[
        found["change"]
    ].action != REPORT:
        return "unused"
    if found["area"] in ("behaviour", "speed", "liveness"):
        return "behaviour"
    return "notable" if found["change"] in REPORTED_IN_FULL else "rest"


def _card(found: Mapping[str, Any], anchor: str) -> Card:
    label, tone = {
        BLOCK: ("blocks", "bad"),
        CONDITION: ("condition", "warn"),
        "accepted": ("accepted", "dim"),
        "unused": ("not used", "dim"),
    }.get(_group(found), ("info", "dim"))
    if label == "info" and found["change"] == "fixed":
        label, tone = "fixed", "good"
    change = CHANGES.get(found["change"])
    chips = [chip_label(chip) for chip in found["chips"]]
    judged = "status" in found["baseline"] or "status" in found["candidate"]
    judged = judged and found["area"] in ("behaviour", "liveness")
    rows, same = side_by_side(found, judged=judged)
    return Card(
        anchor,
        found,
        label,
        tone,
        str(found["change"]).replace("-", " "),
        change.means if change else "",
        str(found["message"]),
        (", ".join(chips) if len(chips) <= MOST_CHIPS else f"{len(chips)} chips") or "everywhere",
        ", ".join(chips) or "everywhere",
        tuple(rows),
        same,
        judged,
        problem_json(found["problem"]),
        link(found["issue"]),
    )


def link(text: object) -> str:
    """Return an address that a page may link to; empty for any other text."""
    address = str(text)
    return address if re.fullmatch(r"https?://[^\s\"'<>]+", address) else ""


def problem_json(problem: Mapping[str, Any] | None) -> str:
    """Return a problem as JSON on one line, without what tells it in words."""
    kept = {name: value for name, value in (problem or {}).items() if name != "told"}
    return json.dumps(kept, default=str) if kept else ""
