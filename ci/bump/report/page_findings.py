"""What only the page says of a finding: both sides beside each other, its links, its problem."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NamedTuple

from ....properties.verdicts.verdict import EXACTLY
from ...console.rendering import number, seconds
from ..verdicts.findings import CHANGES
from .outline import chip_label

SAME, GONE, NEW = "", "del", "ins"
Pieces = tuple[tuple[str, str], ...]
"""A text in pieces, each with ``SAME``, or with whether it is gone or new."""
LEAST_SAME = 4
"""Fields that are the same on both sides, from which on they are shown in one line."""


class Row(NamedTuple):
    """A field, its values in pieces on both sides, and what the oracle says of it.

    ``code``: whether the values are code rather than words.
    """

    name: str
    baseline: Pieces
    candidate: Pieces
    oracle: str = ""
    code: bool = False


def side_by_side(found: Mapping[str, Any], *, judged: bool) -> tuple[list[Row], str]:
    """Return the lines of a finding, and in a sentence what is the same on both sides.

    Args:
        found: a report's finding.
        judged: whether its sides are verdicts, which the oracle has numbers to.
    """
    rows, same = _rows(found["baseline"], found["candidate"], judged=judged)
    rows = [each._replace(name=_within(each.name, found["subject"])) for each in rows]
    if found["area"] == "speed":  # more seconds are nothing new
        rows = [
            each._replace(baseline=_plain(each.baseline), candidate=_plain(each.candidate))
            for each in rows
        ]
    return rows, same


def _plain(parts: Pieces) -> Pieces:
    return tuple((text, SAME) for text, _ in parts)


def _within(name: str, subject: str) -> str:
    """Name a field without the subject that stands above it."""
    return name.removeprefix(f"{subject}.") if name != subject else "itself"


def _rows(old: Mapping[str, Any], new: Mapping[str, Any], *, judged: bool) -> tuple[list[Row], str]:
    if judged:
        return list(_judged_rows(old, new)), ""
    names = [*old, *(name for name in new if name not in old)]
    same = [name for name in names if name in old and name in new and old[name] == new[name]]
    if len(same) < LEAST_SAME:
        same = []
    rows = [_row(name, old, new) for name in names if name not in same]
    return rows, ", ".join(f"{name} {_text(name, old[name])}" for name in same)


def _row(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Row:
    first, second = old.get(name), new.get(name)
    if isinstance(first, str) and isinstance(second, str) and first[:1] == second[:1] == "(":
        return Row(name, *differing(parameters(first), parameters(second)), code=True)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        before, after = ([_text(name, each) for each in side] for side in (first, second))
        return Row(name, *differing(_listed(before), _listed(after)))
    before_, after_ = (_text(name, side[name]) if name in side else "" for side in (old, new))
    changed = before_ != after_ and name != "source" and after_ != "gone"
    code = any(isinstance(each, str) and each[:1] == "(" for each in (first, second))
    return Row(
        name,
        ((before_, GONE if changed and before_ else SAME),),
        ((after_, NEW if changed and after_ else SAME),),
        code=code,
    )


def _listed(values: Sequence[str]) -> list[str]:
    return [each + (", " if i < len(values) - 1 else "") for i, each in enumerate(values)] or [
        "none"
    ]


def _judged_rows(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Row]:
    """Return what two verdicts on one problem have, and the oracle's own numbers."""
    plain = [{name: _text(name, side.get(name)) for name in (*old, *new)} for side in (old, new)]
    states = [f"{side.get('status', '')} {side.get('kind', '')}".strip() for side in plain]
    yield Row("verdict", ((states[0], SAME),), ((states[1], SAME),))
    places: dict[str, list[Mapping[str, str] | None]] = {}
    for index, side in enumerate((old, new)):
        if found := side.get("element"):
            places.setdefault(found["where"], [None, None])[index] = found
    for where, both in places.items():
        values = [
            found["got"] if found else "" if side.get("status") != "PASS" else "inside the bound"
            for found, side in zip(both, plain, strict=True)
        ]
        # A NaN is shown without the bound, which the other side's message may have.
        told = max(filter(None, both), key=lambda found: bool(found["bound"]))
        bound = ", exactly" if told["bound"] == EXACTLY else f" ± {told['bound']}"
        oracle = told["expected"] + (bound if told["bound"] else "")
        yield Row(where, ((values[0], SAME),), ((values[1], SAME),), oracle)
    if any(side.get("ratio") for side in plain):
        ratios = [side.get("ratio", "") for side in plain]
        yield Row("error over bound", ((ratios[0], SAME),), ((ratios[1], SAME),), "at most 1")
    done = {"status", "kind", "ratio", "element"}
    if places and len({side["message"] for side in plain if side.get("message")}) == 1:
        done.add("message")  # it is the finding's own
    for name in dict.fromkeys((*old, *new)):
        if name not in done and any(side.get(name) for side in plain):
            first, second = (side.get(name, "") for side in plain)
            yield Row(name, ((first, SAME),), ((second, SAME),))


def _text(name: str, value: object) -> str:
    if value is None:
        return ""
    if name == "chips" and not isinstance(value, list | tuple):
        return chip_label(value)
    if name == "seconds":
        return seconds(value)
    if isinstance(value, list | tuple):
        return ", ".join(_text(name, each) for each in value) or "none"
    if isinstance(value, Mapping):
        return json.dumps(value, default=str)
    return str(value) if isinstance(value, int) else number(value)


def parameters(signature: str) -> list[str]:
    """Split a signature after the commas that stand between parameters."""
    parts, depth, start, quote = [], 0, 0, ""
    for position, char in enumerate(signature):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 1:
            parts.append(signature[start : position + 1] + " ")
            start = position + 1
    parts.append(signature[start:])
    return [parts[0], *(part.lstrip() for part in parts[1:])]


def differing(first: Sequence[str], second: Sequence[str]) -> tuple[Pieces, Pieces]:
    """Mark what is gone of the first and new in the second; the rest is the same, in order."""

    def bare(parts: Sequence[str]) -> list[str]:  # the last one has no comma, and is the same
        return [part.strip(", ()") for part in parts]

    old: list[tuple[str, str]] = []
    new: list[tuple[str, str]] = []
    matcher = SequenceMatcher(None, bare(first), bare(second), autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        same = tag == "equal"
        old += [("".join(first[a:b]), SAME if same else GONE)] if b > a else []
        new += [("".join(second[c:d]), SAME if same else NEW)] if d > c else []
    return tuple(old), tuple(new)


MOST_CHIPS = 3


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


def details(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what only the page says of a finding: both sides beside each other, and its links.

    ``where`` names its chips in short, ``everywhere`` all of them; ``same`` names fields that are
    the same on both sides, ``judged`` whether the oracle has a column; ``problem`` is JSON.
    """
    change = CHANGES.get(found["change"])
    chips = [chip_label(chip) for chip in found["chips"]]
    judged = "status" in found["baseline"] or "status" in found["candidate"]
    judged = judged and found["area"] in ("behaviour", "liveness")
    rows, same = side_by_side(found, judged=judged)
    return {
        "means": change.means if change else "",
        "where": (", ".join(chips) if len(chips) <= MOST_CHIPS else f"{len(chips)} chips")
        or "everywhere",
        "everywhere": ", ".join(chips) or "everywhere",
        "rows": rows,
        "same": same,
        "judged": judged,
        "problem": problem_json(found["problem"]),
        "issue": link(found["issue"]),
    }


def link(text: object) -> str:
    """Return an address that a page may link to; empty for any other text."""
    address = str(text)
    return address if re.fullmatch(r"https?://[^\s\"'<>]+", address) else ""


def problem_json(problem: Mapping[str, Any] | None) -> str:
    """Return a problem as JSON on one line, without what tells it in words."""
    kept = {name: value for name, value in (problem or {}).items() if name != "told"}
    return json.dumps(kept, default=str) if kept else ""
