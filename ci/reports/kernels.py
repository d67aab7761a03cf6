"""What reports say of the lines of Triton kernels that a run ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ...properties.findings.kernels import (
    Kernel,
    KernelRuns,
    kernels_text,
    share_of,
    source_of,
)
from ...properties.findings.launched import (
    Launched,
    LaunchedCall,
    launched_text,
    together,
)
from ...properties.findings.report import ImplementationReport
from ...properties.verdicts.launches import SIZE_BASE
from ...properties.verdicts.text import count_of
from .outline import Line

FEW = 3
"""Most implementations that have a line each."""
MARKS = {"ran": " ", "never": "!"}
"""Character in front of a line of source, for those who see no colour, by its tone."""


Row = tuple[str, str]
"""A specialisation, and its kernels."""


class Source(NamedTuple):
    """A kernel on a page: title, facts, and its lines with their number, tone and mark."""

    title: str
    facts: list[tuple[str, str]]
    lines: list[tuple[int, str, str, str]]


def kernel_text(report: ImplementationReport) -> str:
    """Return what ran of an implementation's kernels in a line; empty where none was seen."""
    return kernels_text(report.kernels, report.unset_flags)


def launched_in(reports: Iterable[ImplementationReport]) -> Launched:
    """Return what the calls of several implementations launched."""
    return together(each.launched for each in reports)


def launched_line(reports: Sequence[ImplementationReport]) -> str:
    """Return in a line how many kernels ran; empty where none was to be named."""
    seconds = sum(law.seconds for each in reports for law in each.laws)
    return launched_text(launched_in(reports), seconds)


def launched_rows(reports: Sequence[ImplementationReport]) -> list[tuple[str, str, list[Row]]]:
    """Return the kernels of each specialisation of those that had some named."""
    return [
        (each.name, launched_line([each]), [_row(call) for call in each.launched.calls.values()])
        for each in reports
        if each.launched.calls
    ]


def _row(call: LaunchedCall) -> Row:
    about = [call.step, call.module, *call.features, f"work {SIZE_BASE}^{call.size}"]
    return ", ".join(filter(None, about)), ", ".join(call.names) or "none"


def kernel_lines(reports: Sequence[ImplementationReport], *, whole: bool) -> Iterator[Line]:
    """Yield what ran of the kernels, of each implementation where they are few or it is asked."""
    told = [(each.name, text) for each in reports if (text := kernel_text(each))]
    if text := launched_line(reports):
        yield Line("", text, "dim")
    if len(told) <= FEW or whole:
        for name, text in told:
            yield Line("", text if len(reports) == 1 else f"{name}: {text}", "dim")
        yield from (Line("", text, "dim") for text in shared_kernels(reports))
        return
    shares = [share_of(each.kernels) for each in reports]
    seen = sorted(100 * each.run // each.lines for each in shares if each.lines)
    if seen:
        of = count_of(len(seen), "implementation")
        yield Line("", f"kernel lines {seen[0]} to {seen[-1]} % of {of} (-v names them)", "dim")


def shared_kernels(reports: Sequence[ImplementationReport]) -> Iterator[str]:
    """Yield, of each file whose kernels several implementations ran, what ran in one of them.

    Forms of one kernel that adapters share out (numbers, FP8, swapped operands) are judged together
    only.
    """
    together, of = KernelRuns(), Counter[str]()
    for each in reports:
        together.include(each.kernel_runs)
        of.update({kernel.file for kernel in each.kernels if kernel.run})
    functions = together.functions()
    for file, count in of.items():
        text = kernels_text([each for each in functions if each.file == file])
        if count > 1 and text:
            yield f"{_short(file)}, {count} implementations together: {text}"


def kernel_sources(reports: Sequence[ImplementationReport]) -> list[tuple[str, str, list[Source]]]:
    """Return the kernels that were launched or called, with their source, by implementation."""
    told = [(each.name, kernel_text(each), each.kernels) for each in reports]
    return [
        (name, text, [_source(each) for each in kernels if each.role != "not launched"])
        for name, text, kernels in told
        if text
    ]


def _source(kernel: Kernel) -> Source:
    ran = f"{kernel.run} of {count_of(kernel.lines, 'line')}"
    facts = [
        ("file", _short(kernel.file)),
        *([("branches", f"{kernel.taken} of {kernel.branches}")] if kernel.interpreted else []),
        *((name, ", ".join(values)) for name, values in kernel.constexprs.items()),
    ]
    if kernel.specialisations is not None:
        ran = count_of(kernel.specialisations, "specialisation")
    elif not kernel.run:
        ran += ", never called"
    return Source(
        f"{kernel.function}: {ran}", facts, list(_lines(kernel)) if kernel.interpreted else []
    )


def _lines(kernel: Kernel) -> Iterator[tuple[int, str, str, str]]:
    never = {line for each in kernel.never_run for line in range(each.first, each.last + 1)}
    lines = source_of(kernel.file).splitlines()
    for number in range(kernel.line, min(kernel.last, len(lines)) + 1):
        tone = "never" if number in never else "ran"
        yield number, tone, MARKS[tone], lines[number - 1]


def _short(file: str) -> str:
    """Return a file's path from its outermost package on: where it lies is no one's concern."""
    path = Path(file)
    top = path.parent
    while (top / "__init__.py").is_file():
        top = top.parent
    return str(path.relative_to(top))
