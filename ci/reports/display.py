"""What a person sees of a run that has ended, on a terminal or in a log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ...impl.targets.registrations import Registration
from ...properties.findings.causes import Cause
from ...properties.findings.coverage import gaps_text
from ...properties.findings.report import ImplementationReport
from ...properties.findings.text_format import (
    PRINTED_LINES,
    law_names,
    printed_lines,
    trace_lines,
)
from ...properties.verdicts.memory_need import LIMIT_VARIABLE
from ...properties.verdicts.text import compact, count_of, one_line, printable
from .claims import claims_count, claims_text, lost_lines
from .summary import (
    Known,
    Summary,
    in_order,
    interpreted_text,
    known_causes,
    known_entries,
    laws_not_run,
    missing_of,
    new_findings,
    not_run,
    not_run_text,
    passed_text,
    reason_idle,
    rejected,
    replayed,
    seconds,
    state,
    unexplained_text,
)

FEW = 3
"""Most implementations that have a line each on what was reached, or on why nothing was."""
FEW_LEFT = 5
"""Most things that an implementation left behind which have a line each."""
TABLE_WIDTH = 72
"""Below this many columns there is no room for the table."""
EARLY = {
    "": "the run ended before all problems were judged",
    "time": "out of the run's time before all problems were judged",
    "interrupted": "interrupted before all problems were judged",
    "terminated": "terminated before all problems were judged",
}
"""Words on laws that the end of the run ended, by the reason why that ended."""
OWN_TIME = "fewer problems than planned, as the laws' share of the time was over"
"""Words on laws whose share of a run's time was over, though the run had more."""
NO_ROOM = "without room in memory at any time of the run"
"""Words on laws whose problems need more memory than others left."""
STYLES = {
    "PASS": "green",
    "KNOWN": "yellow",
    "INCOMPLETE": "yellow",
    "FLAKY": "yellow",
    "UNSUPPORTED": "dim",
    "UNJUDGED": "dim",
}


def print_summary(out: Console, summary: Summary, *, verbose: bool = False) -> None:
    """Print a run that has ended, in the order of ``outline``: the verdict is the first line.

    Args:
        out: where to.
        summary: of the run.
        verbose: print a line for each implementation, known finding and law that was not run too.
    """
    reports = in_order(summary.report.implementations)
    style = {"conforming": "bold green", "nonconforming": "bold red"}
    line(out, "", summary.sentence, style.get(summary.verdict, "bold yellow"))
    for report in reports:
        if report.error:
            say(out, f"ERROR  {report.name}", report.error, style="ERROR")
    print_broken(out, summary.report.broken)
    for told in lost_lines(summary.lost):
        line(out, "lost claim", told, style_of("LOST"))
    for report in reports:
        for cause in new_findings(report):
            print_finding(out, cause, verbose=verbose)
    _print_known(out, summary, verbose=verbose)
    _print_weak(out, reports, summary, verbose=verbose)
    _print_passed(out, reports, summary, verbose=verbose)
    if told := interpreted_text(summary, verbose=verbose):
        line(out, "interpreted", one_line(told), "yellow")
    if replayed(summary.report):
        line(out, "corpus", replayed(summary.report), "dim")
    _print_not_run(out, summary, verbose=verbose)


def _print_early(
    out: Console, reports: Sequence[ImplementationReport], ended: str, why: str, *, verbose: bool
) -> None:
    """Print which laws ended early for this reason; of many implementations, how many."""
    early = [(each.name, [k for k, v in each.coverage.early.items() if v == ended])
             for each in reports]  # fmt: skip
    early = [each for each in early if each[1]]
    if verbose or len(early) <= FEW:
        for name, laws in early:
            line(out, why, f"{name}: {', '.join(laws)}", "yellow")
    else:
        count = count_of(sum(len(laws) for _, laws in early), "law")
        line(out, why, f"{count} of {len(early)} implementations (-v names them)", "yellow")


def print_broken(out: Console, broken: Iterable[Registration]) -> None:
    """Print a line for each registration that cannot be used."""
    for each in broken:
        line(out, "left out", one_line(each.text), "yellow")


def _print_known(out: Console, summary: Summary, *, verbose: bool) -> None:
    """Print known failures: a line for each cause, and each entry of it where all is asked for."""
    for cause in known_causes(summary):
        if not verbose:
            known = cause.text(out.width - len("KNOWN "))
            line(out, "", f"KNOWN {known}", style_of("KNOWN"))
            continue
        for entry in cause.entries:
            replays = (
                finding.replay
                for report in summary.report.implementations
                if report.name == entry.implementation
                for finding in report.findings
                if finding.entry == entry.entry
            )
            print_known(out, entry, next(replays, ""))


def _print_weak(
    out: Console, reports: Sequence[ImplementationReport], summary: Summary, *, verbose: bool
) -> None:
    """Print what is incomplete, what ended early, and what was left behind."""
    weak = [each for each in reports if missing_of(each)]
    # The signal is why: what each of many lacks would hide what was learned until then.
    if summary.report.interrupted and len(weak) > FEW and not verbose:
        told = f"{len(weak)} implementations (-v says what is missing of each)"
        line(out, "INCOMPLETE", told, style_of("INCOMPLETE"))
    else:
        for report in weak:
            told = f"{report.name}: {gaps_text(missing_of(report))}"
            line(out, "INCOMPLETE", told, style_of("INCOMPLETE"))
    reasons = {"time": OWN_TIME, "stopped": EARLY[summary.report.ended], "room": NO_ROOM}
    for ended, why in reasons.items():
        _print_early(out, reports, ended, why, verbose=verbose)
    for report in reports:
        for note in notes(report):
            line(out, "note", f"{report.name}: {note}", "yellow")
    for left in summary.report.left:
        told = f"left behind, by which implementation is not known: {left.text}"
        line(out, "note", told, "yellow")


def _print_passed(
    out: Console, reports: Sequence[ImplementationReport], summary: Summary, *, verbose: bool
) -> None:
    """Print what passed in one line, and what was reached where it is little or asked for."""
    if passed := passed_text(summary):
        line(out, "passed", passed)
    judged = [each for each in reports if each.judged]
    if verbose and out.width >= TABLE_WIDTH:
        out.print(implementation_table(judged))
    elif verbose:
        print_implementations(out, judged)
    for report in judged if verbose or len(judged) <= FEW else ():
        line(out, "coverage", f"{report.name}: {report.coverage.text}", "dim")
    asked = [each for each in reports if each.claimed_space]
    for report in asked if verbose or len(asked) <= FEW else ():
        line(out, "claims", f"{report.name}: {claims_text(report, whole=verbose)}", "dim")
    if len(asked) > FEW and not verbose:
        line(out, "claims", f"{claims_count(asked)} (-v names them)", "dim")


def _print_not_run(out: Console, summary: Summary, *, verbose: bool) -> None:
    """Print what was not run and why: in one line, or a line each where it is little or asked."""
    idle = not_run(summary)
    laws = [
        (report.name, law.law, why)
        for report in summary.report.implementations
        for law, why in laws_not_run(report)
    ]
    each = verbose or len(idle) <= FEW
    told = []
    if idle and not each:
        reasons = [reason for _, reason in idle]
        told.append(not_run_text(reasons, len(summary.report.implementations)))
    if laws and not verbose:
        told.append(f"{count_of(len(laws), 'law')} with nothing to judge, or unsupported")
    if told:
        line(out, "not run", f"{'; '.join(told)} (-v names them)", "dim")
    for report, _ in idle if each else ():
        say(out, f"{state(report)}  {report.name}", reason_idle(report, summary), style="dim")
    for name, law, why in laws if verbose else ():
        line(out, "not run", f"{name}  {law}: {why}", "dim")


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


def notes(report: ImplementationReport) -> Iterator[str]:
    """Yield what an implementation claims, failures that went away, and what it left behind."""
    yield from report.claims
    flaky = sum(law.flaky for law in report.laws)
    if flaky:
        yield f"{count_of(flaky, 'failure')} not confirmed when the same problem was run again"
    if without := sum(len(law.without_room) for law in report.laws):
        fixed = any(law.too_large for law in report.laws)
        limit = f"; {LIMIT_VARIABLE} raises a worker's limit" if fixed else ""
        yield f"{count_of(without, 'problem')} not judged, for there was no room in memory{limit}"
    if told := unexplained_text(report):
        yield told
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


def print_finding(out: Console, cause: Cause, *, verbose: bool = False) -> None:
    """Print findings with one cause that no ledger entry explains; all laws where verbose."""
    finding, verdict = cause.finding, cause.finding.verdict
    title = f"{verdict.status} {verdict.kind}".strip()
    say(
        out,
        f"{title}  {finding.implementation}  {law_names(cause.laws, verbose=verbose)}",
        verdict.message,
        style=verdict.status,
    )
    for line in trace_lines(verdict):
        out.print(Text(f"    {one_line(line)}", "dim"), soft_wrap=True)
    for line in printed_lines(verdict)[-PRINTED_LINES:]:
        command(out, "printed", line)
    if cause.telling:
        command(out, "cause", cause.sentence)
    if cause.ignored:
        command(out, "ignored", cause.ignored)
    command(out, "problem", compact(finding.problem))
    if finding.replay:
        command(out, "replay", finding.replay)
    out.print()


def print_known(out: Console, known: Known, replay: str) -> None:
    """Print how often a ledger entry explained a failure, in one line, and how to see it."""
    issue = f" ({known.issue})" if known.issue else ""
    told = f"KNOWN {known.entry}  {known.implementation}: {count_of(known.count, 'problem')}: "
    line(out, "", f"{told}{' '.join(known.reason.split())}{issue}", style_of("KNOWN"))
    if replay:
        command(out, "replay", replay)


def line(out: Console, label: str, text: str, style: str = "") -> None:
    """Print a label and its text in one line, whatever they hold."""
    out.print(Text(one_line(f"{label}: {text}" if label else text), style), soft_wrap=True)


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
        Text.assemble((f"  {label + ': ':<9}", "dim"), one_line(text)),
        soft_wrap=True,
    )


def style_of(status: str) -> str:
    """Return the colour of a status."""
    return STYLES.get(status, "bold red")
