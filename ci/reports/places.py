"""What a run says of places in source files: findings at their kernels, and the run as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from ...properties.findings.causes import Cause, causes_of
from ...properties.findings.report import ImplementationReport, LawReport
from ..console.errors import INCOMPLETE
from .published_calls import finding_texts
from .summary import Summary, in_order

Level = Literal["error", "warning"]
INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed packages, whose files are in no repository, even below it."""


class Place(NamedTuple):
    """A line of a file, whose path is relative to the repository; of one elsewhere, absolute."""

    file: str
    line: int


class Located(NamedTuple):
    """A cause, how grave it is, and the places of its kernels.

    Those in the repository are ``places``, else those elsewhere ``outside``; there may be none.
    """

    cause: Cause
    level: Level
    places: Sequence[Place]
    outside: Sequence[Place]


def located(summary: Summary) -> Iterator[Located]:
    """Yield each cause of findings; one that the ledger explains is a warning."""
    root = repository()
    for report in in_order(summary.report.implementations):
        for cause in causes_of(report):
            level: Level = "warning" if cause.finding.entry else "error"
            law = cause.finding.law
            inside = places(report, law, root)
            outside = [] if inside else places(report, law, None)
            yield Located(cause, level, inside, outside)


def of_the_run(summary: Summary) -> Iterator[tuple[Level, str]]:
    """Yield what is said of implementations not judged, of published calls, and of a weak run."""
    failed = [each for each in in_order(summary.report.implementations) if each.error]
    for report in failed:
        yield "error", f"{report.name}: {report.error}"
    for text in finding_texts(summary.published):
        yield "error", text
    if summary.code == INCOMPLETE:
        yield "warning", summary.sentence
    elif summary.lost or (summary.verdict == "error" and not failed):
        yield "error", summary.sentence


def places(report: ImplementationReport, law: str, root: Path | None) -> list[Place]:
    """Return the places of what a law ran of an implementation.

    These are the Triton kernels that were launched under the law, or else under any one, or else
    the implementation's own function.

    Args:
        report: the report of the implementation.
        law: the name of the law.
        root: the folder of the repository in which they must lie; anywhere if None.
    """
    of_law = [each for each in report.laws if each.law == law]
    own = [report.declared.get("place")]
    for each in (_launched(of_law), _launched(report.laws), own):
        if found := _within(root, each):
            return found
    return []


def repository() -> Path:
    """Return the folder of the repository around the current folder; itself where there is none."""
    here = Path.cwd().resolve()
    return next((each for each in (here, *here.parents) if (each / ".git").exists()), here)


def _launched(laws: Sequence[LawReport]) -> list[tuple[str, int]]:
    files = [each for law in laws for each in law.kernels.files.items()]
    return [(file, line) for file, run in files for line in sorted(run.launched)]


def _within(root: Path | None, found: Sequence[tuple[str, int] | None]) -> list[Place]:
    """Return the places in files below a folder, each once."""
    inside: dict[Place, None] = {}
    for file, line in filter(None, found):
        if not Path(file).is_file():  # a cell of a notebook, or what `exec` has compiled
            continue
        path = Path(file).resolve()
        if root is None:
            inside[Place(str(path), line)] = None
        elif path.is_relative_to(root) and not set(INSTALLED) & set(path.parts):
            inside[Place(path.relative_to(root).as_posix(), line)] = None
    return [*inside]
