"""The chip by feature matrix as a page shows it: one line for each backend, and all lines of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .page_sides import chip_label

LETTERS = {"declared": "d", "reported": "", "compiled": "c", "run": "r"}
"""Evidence of a cell; a refusal has a footnote, which names its report."""
TONES = {"supported": "yes", "refused": "no", "unknown": "unknown"}
WORDS = {"supported": "yes", "refused": "no", "unknown": "–"}  # noqa: RUF001  a dash of its own


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        text: what stands in it.
        tone: how it is coloured: ``gained``, ``lost``, ``both``, ``yes``, ``some``, ``no`` or
            ``unknown``.
        small: evidence or footnote, set small.
    """

    text: str
    tone: str = ""
    small: str = ""


@dataclass(frozen=True)
class Backend:
    """The lines of one operation and backend.

    Attributes:
        name: operation and backend.
        total: on each chip, what is supported of its features, and what changed.
        rows: title and cells of each feature.
        notes: number and reason of each refusal.
        gained, lost: how many cells.
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
    text, change = WORDS.get(status, str(status)), each["change"]
    if change in ("gained", "lost"):
        before = WORDS.get(each["baseline"]["status"], str(each["baseline"]["status"]))
        return Cell(f"{before} → {text}", change, small)
    return Cell(text, TONES.get(status, ""), small)


def _total(column: Sequence[Mapping[str, Any]]) -> Cell:
    """Sum a column up: features that the candidate has, and what it gained and lost."""
    able = sum(each["candidate"]["status"] == "supported" for each in column)
    gained = sum(each["change"] == "gained" for each in column)
    lost = sum(each["change"] == "lost" for each in column)
    if not able and not lost:
        told = any(each["candidate"]["status"] == "refused" for each in column)
        return Cell("no" if told else WORDS["unknown"], "no" if told else "unknown")
    supported = "yes" if able == len(column) else "some"
    tone = "both" if gained and lost else "gained" if gained else "lost" if lost else supported
    levels = Counter(LETTERS.get(each["candidate"]["evidence"], "") for each in column)
    small = [f"{levels[letter]}{letter}" for letter in "rc" if levels[letter]]
    small += [f"+{gained}"] * bool(gained) + [f"−{lost}"] * bool(lost)  # noqa: RUF001  a minus
    return Cell(f"{able}/{len(column)}", tone, " ".join(small))
