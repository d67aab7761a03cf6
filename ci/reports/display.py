"""What a person sees: the table, the findings, the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...properties.findings.causes import Cause
from ...properties.findings.coverage import gaps_text
from ...properties.findings.report import ImplementationReport
from ...properties.findings.text_format import PRINTED_LINES, printed_lines, trace_lines
from ...properties.verdicts.text import compact, count_of, one_line, printable
from .summary import (
    Known,
    Summary,
    known_entries,
    known_findings,
    new_findings,
    reason_idle,
    rejected,
    replayed,
    seconds,
    state,
)

FEW = 3
"""Implementations of which each has a line on what was reached."""
FEW_LEFT = 5
"""Most things that an implementation left behind which have a line each."""
TABLE_WIDTH = 72
"""Below this many columns there is no room for the table."""
EARLY = {
    "": "out of time",
    "time": "out of the run's time",
    "interrupted": "interrupted",
    "terminated": "terminated",
}
"""Words on a law that ended early, by the reason why the run ended."""
STYLES = {
    "PASS": "green",
    "KNOWN": "yellow",
    "INCOMPLETE": "yellow",
    "FLAKY": "yellow",
    "UNSUPPORTED": "dim",
    "UNJUDGED": "dim",
}


def print_summary(out: Console, summary: Summary) -> None:
    """Print a run that has ended: a table, each finding, the verdict in one line."""
    reports = summary.report.implementations
    if out.width >= TABLE_WIDTH and reports:
        out.print(implementation_table(reports))
    else:
        print_implementations(out, reports)
    print_notes(out, summary)
    for report in reports:
        for cause in new_findings(report):
            print_finding(out, cause)
    for report in reports:
        for known in known_findings(report, summary.ledger):
            replays = (f.replay for f in report.findings if f.entry == known.entry)
            print_known(out, known, next(replays, ""))
    if replayed(summary.report):
        out.print(Text(f"corpus: {replayed(summary.report)}", "dim"), soft_wrap=True)
    out.print(Text("\n".join(map(one_line, coverage_lines(reports))), "dim"), soft_wrap=True)
    style = {"conforming": "bold green", "nonconforming": "bold red"}
    out.print(
        Text(one_line(summary.sentence), style.get(summary.verdict, "bold yellow")), soft_wrap=True
    )


def print_notes(out: Console, summary: Summary) -> None:
    """Print why implementations were not judged, what weakens results, and what was left behind."""
    for report in summary.report.implementations:
        reason = reason_idle(report, summary)
        if reason:
            say(out, f"{state(report)}  {report.name}", reason, style=state(report))
        for note in notes(report, summary.report.ended):
            out.print(Text(one_line(f"note: {report.name}: {note}"), "yellow"), soft_wrap=True)
    for left in summary.report.left:
        told = f"note: left behind, by which implementation is not known: {left.text}"
        out.print(Text(printable(told), "yellow"), soft_wrap=True)


def coverage_lines(reports: Sequence[ImplementationReport]) -> list[str]:
    """Return what was reached: a line for each of a few implementations, one for many."""
    judged = [each for each in reports if each.judged]
    if len(judged) <= FEW:
        return [f"coverage: {each.name}: {each.coverage.text}" for each in judged]
    laws = sum(sum(map(bool, each.coverage.judged.values())) for each in judged)
    asked = sum(each.coverage.asked for each in judged)
    early = sum(len(each.coverage.early) for each in judged)
    short = sum(bool(each.coverage.gaps) for each in judged)
    told = f"coverage: {laws} of {asked} laws judged problems, {early} ended early"
    return [f"{told}; {short} of {len(judged)} implementations below a floor"]


def implementation_table(reports: Iterable[ImplementationReport]) -> Table:
    """Return one row an implementation."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, safe_box=True)
    table.add_column("implementation", overflow="fold")
    headings = ("judged", "laws", "lengths", "unsupported", "rejected", "new", "known", "seconds")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        new = len(new_findings(report))
        known = len(known_entries(report))
        table.add_row(
            Text(one_line(report.name)),
            f"{report.judged:,}",
            report.coverage.laws if report.laws else "",
            report.coverage.longest,
            f"{report.unsupported:,}",
            f"{rejected(report):,}",
            Text(f"{new}", "bold red" if new else ""),
            Text(f"{known}", "yellow" if known else ""),
            f"{seconds(report):.1f}",
        )
    return table


def notes(report: ImplementationReport, ended: str = "") -> Iterator[str]:
    """Yield the reasons why an implementation's result is weaker than its counts suggest.

    Args:
        report: of the implementation.
        ended: what ended the run early, see ``RunReport``.
    """
    if early := report.coverage.early:
        yield f"{EARLY[ended]} before all problems were judged: {', '.join(early)}"
    if report.coverage.gaps:
        yield f"INCOMPLETE: {gaps_text(report.coverage.gaps)}"
    flaky = sum(law.flaky for law in report.laws)
    if flaky:
        yield f"{count_of(flaky, 'failure')} not confirmed when the same problem was run again"
    yield from (f"it left {each.text}" for each in report.left[:FEW_LEFT])
    if (more := len(report.left) - FEW_LEFT) > 0:
        yield f"it left {more} more; the JSON report names them"


def print_implementations(out: Console, reports: Iterable[ImplementationReport]) -> None:
    """Print what the table holds where there is no room for one."""
    for report in reports:
        new = len(new_findings(report))
        out.print(Text(one_line(report.name), style_of(state(report))), soft_wrap=True)
        told = (
            f"{report.judged:,} judged, {report.unsupported:,} unsupported, "
            f"{rejected(report):,} rejected, {new} new, {len(known_entries(report))} known, "
            f"{seconds(report):.1f} seconds"
        )
        out.print(Padding(Text(told), (0, 0, 0, 2)))


def print_finding(out: Console, cause: Cause) -> None:
    """Print findings with one cause that no ledger entry explains."""
    finding, verdict = cause.finding, cause.finding.verdict
    title = f"{verdict.status} {verdict.kind}".strip()
    say(
        out,
        f"{title}  {finding.implementation}  {', '.join(cause.laws)}",
        verdict.message,
        style=verdict.status,
    )
    for line in trace_lines(verdict):
        out.print(Text(f"    {one_line(line)}", "dim"), soft_wrap=True)
    for line in printed_lines(verdict)[-PRINTED_LINES:]:
        command(out, "printed", line)
    if cause.telling:
        command(out, "cause", cause.sentence)
    command(out, "problem", compact(finding.problem))
    if finding.replay:
        command(out, "replay", finding.replay)
    out.print()


def print_known(out: Console, known: Known, replay: str) -> None:
    """Print how often a ledger entry explained a failure, in one line, and how to see it."""
    issue = f" ({known.issue})" if known.issue else ""
    title = f"KNOWN {known.entry}  {known.implementation}"
    told = f": {count_of(known.count, 'problem')}: {known.reason}{issue}"
    line = Text.assemble((one_line(title), style_of("KNOWN")), " ".join(told.split()))
    out.print(line, soft_wrap=True)
    if replay:
        command(out, "replay", replay)


def say(out: Console, title: str, message: str, *, style: str) -> None:
    """Print a title and, indented, what it is about."""
    out.print(Text(one_line(title), style_of(style)), soft_wrap=True)
    body = Text(printable(message.strip()))
    if out.is_terminal:
        out.print(Padding(body, (0, 0, 0, 2)))
    else:  # a log is searched line by line
        out.print(Text("\n").join(Text("  ") + line for line in body.split()), soft_wrap=True)


def command(out: Console, label: str, text: str) -> None:
    """Print something to be copied: it is never wrapped."""
    out.print(
        Text.assemble((f"  {label + ':':<9}", "dim"), one_line(text)),
        soft_wrap=True,
    )


def style_of(status: str) -> str:
    """Return the colour of a status."""
    return STYLES.get(status, "bold red")
