"""What a benchmark measured, as data: tables, requirements met or missed, and notes."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

Cell = str | int | float
WHOLE = 999.5
"""Least number that is printed without decimals: three digits would make a power of it."""


@dataclass(frozen=True)
class Table:
    """Measurements.

    Attributes:
        title: what they are, with their units.
        columns: their names.
        rows: one cell a column; a float is printed with three significant digits or more.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def text(self) -> str:
        """Lay it out for a terminal: words to the left, numbers to the right."""
        cells = [self.columns, *(tuple(_plain(cell) for cell in row) for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        numeric = [
            all(not isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))
        ]
        lines = [
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, numeric, strict=True)
            ).rstrip()
            for row in cells
        ]
        return "\n".join([self.title, *(f"  {line}" for line in lines)])


@dataclass(frozen=True)
class Requirement:
    """A number that must lie between two others, both included."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def met(self) -> bool:
        """Whether it does; a NaN does not lie anywhere."""
        above = self.low is None or self.value >= self.low
        below = self.high is None or self.value <= self.high
        return above and below

    def text(self) -> str:
        """Return it as one line."""
        limits = [f"at least {self.low:g}"] if self.low is not None else []
        limits += [f"at most {self.high:g}"] if self.high is not None else []
        state = "met   " if self.met else "MISSED"
        return f"{state}  {self.name}: {_plain(self.value)} ({' and '.join(limits)})"


@dataclass(frozen=True)
class Results:
    """What one benchmark gave."""

    name: str
    tables: tuple[Table, ...]
    requirements: tuple[Requirement, ...]
    notes: tuple[str, ...] = ()

    @property
    def met(self) -> bool:
        """Whether all requirements are."""
        return all(requirement.met for requirement in self.requirements)

    def text(self) -> str:
        """Lay all of it out for a terminal."""
        parts = [table.text() for table in self.tables]
        if self.notes:
            parts.append("\n".join(self.notes))
        parts.append("\n".join(requirement.text() for requirement in self.requirements))
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "benchmark": self.name,
            "met": self.met,
            "tables": [asdict(table) for table in self.tables],
            "requirements": [
                {**asdict(requirement), "met": requirement.met} for requirement in self.requirements
            ],
            "notes": list(self.notes),
        }


def machine() -> dict[str, Cell]:
    """Return what the numbers were measured on."""
    return {
        "system": platform.platform(),
        "processors": os.cpu_count() or 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _plain(cell: Cell) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.0f}" if abs(cell) >= WHOLE else f"{cell:.3g}"
