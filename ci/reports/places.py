"""What a run says of places in source files: findings at their kernels, and the run as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from ...properties.findings.causes import Cause, causes_of
from ...properties.findings.report import ImplementationReport, LawReport
from ..console.errors import INCOMPLETE
from .summary import Summary, in_order

Level = Literal["error", "warning"]
INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages, whose files are in no repository, even below it."""


class Place(NamedTuple):
    """A line of a file; its path is relative to the repository, with slashes."""

    file: str
    line: int


class Located(NamedTuple):
    """A cause, how grave it is, and the places of its kernels; there may be none."""

    cause: Cause
    level: Level
    places: Sequence[Place]


def located(summary: Summary) -> Iterator[Located]:
    """Yield each cause of findings; one that the ledger explains is a warning."""
    root = repository()
    for report in in_order(summary.report.implementations):
        for cause in causes_of(report):
            level: Level = "warning" if cause.finding.entry else "error"
            yield Located(cause, level, places(report, cause.finding.law, root))


def of_the_run(summary: Summary) -> Iterator[tuple[Level, str]]:
    """Yield what is said of implementations that could not be judged, and of a weak run."""
    failed = [each for each in in_order(summary.report.implementations) if each.error]
    for report in failed:
        yield "error", f"{report.name}: {report.error}"
    if summary.code == INCOMPLETE:
        yield "warning", summary.sentence
    elif summary.lost or (summary.verdict == "error" and not failed):
        yield "error", summary.sentence


def places(report: ImplementationReport, law: str, root: Path) -> list[Place]:
    """Return the places in the repository of what a law ran of an implementation.

    These are the Triton kernels that were launched under the law, or else under any one, or else
    the implementation's own function.
    """
    of_law = [each for each in report.laws if each.law == law]
    return (
        _launched(of_law, root)
        or _launched(report.laws, root)
        or _within(root, [report.declared.get("place")])
    )


def repository() -> Path:
    """Return the folder of the repository around the current folder; itself where there is none."""
    here = Path.cwd().resolve()
    return next((each for each in (here, *here.parents) if (each / ".git").exists()), here)


def _launched(laws: Sequence[LawReport], root: Path) -> list[Place]:
    files = [each for law in laws for each in law.kernels.files.items()]
    return _within(root, [(file, line) for file, run in files for line in sorted(run.launched)])


def _within(root: Path, found: Sequence[tuple[str, int] | None]) -> list[Place]:
    """Return the places in files of the repository, each once."""
    inside: dict[Place, None] = {}
    for file, line in filter(None, found):
        if not Path(file).is_file():  # a cell of a notebook, or what `exec` has compiled
            continue
        path = Path(file).resolve()
        if path.is_relative_to(root) and not set(INSTALLED) & set(path.parts):
            inside[Place(path.relative_to(root).as_posix(), line)] = None
    return [*inside]
