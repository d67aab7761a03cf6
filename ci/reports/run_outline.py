"""The outline of a run: findings, what is known, what is weak, what passed, what was not run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

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
from ...properties.verdicts.text import compact, count_of, one_line
from .claims import claims_count, claims_text, lost_lines
from .display import print_outline
from .outline import Block, Line, Part, Table
from .summary import (
    KnownCause,
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
HEADS = (
    "implementation", "judged", "laws", "lengths", "unsupported", "rejected", "new", "known",
    "seconds",
)  # fmt: skip


def print_summary(out: Console, summary: Summary, *, verbose: bool = False) -> None:
    """Print a run that has ended: the verdict is the first line."""
    print_outline(out, outline_of(summary, whole=verbose))


def outline_of(summary: Summary, *, whole: bool) -> Iterator[Part]:
    """Yield the parts of a run's report.

    Args:
        summary: of the run.
        whole: have a line for each implementation, known finding and law that was not run.
    """
    reports = in_order(summary.report.implementations)
    style = {"conforming": "bold green", "nonconforming": "bold red"}
    verdict = style.get(summary.verdict, "bold yellow")
    yield Part("Verdict", [Line("", summary.sentence, verdict)], folded=False)
    yield Part("Errors", _errors(reports, summary))
    causes = [cause for each in reports for cause in new_findings(each)]
    yield Part("New findings", [_finding(each, whole=whole) for each in causes])
    known = [each for cause in known_causes(summary) for each in _known(cause, summary, whole)]
    yield Part("Known findings", known)
    yield Part("Incomplete", _weak(reports, summary, whole=whole))
    yield Part("What passed", _passed(reports, summary, whole=whole))
    yield Part("What was not run", _not_run(summary, whole=whole))


def _errors(reports: Sequence[ImplementationReport], summary: Summary) -> Iterator[Line | Block]:
    for report in reports:
        if report.error:
            yield Block(f"ERROR  {report.name}", report.error, "ERROR")
    for each in summary.report.broken:
        yield Line("left out", one_line(each.text), "yellow")
    for told in lost_lines(summary.lost):
        yield Line("lost claim", told, "bold red")


def _finding(cause: Cause, *, whole: bool) -> Block:
    """Return what is said of findings with one cause that no ledger entry explains."""
    finding, verdict = cause.finding, cause.finding.verdict
    title = f"{verdict.status} {verdict.kind}".strip()
    notes = [
        *(("printed", each) for each in printed_lines(verdict)[-PRINTED_LINES:]),
        ("cause", cause.sentence if cause.telling else ""),
        ("ignored", cause.ignored),
        ("problem", compact(finding.problem)),
        ("replay", finding.replay),
    ]
    return Block(
        f"{title}  {finding.implementation}  {law_names(cause.laws, verbose=whole)}",
        verdict.message,
        verdict.status,
        [note for note in notes if note[1] or note[0] == "printed"],
        list(trace_lines(verdict)),
    )


def _known(cause: KnownCause, summary: Summary, whole: bool) -> Iterator[Line | Block]:  # noqa: FBT001
    """Yield a line on a known cause, or on each entry of it and how to see it."""
    if not whole:
        yield Line("", lambda width: f"KNOWN {cause.text(width - len('KNOWN '))}", "yellow")
        return
    for known in cause.entries:
        replays = (
            finding.replay
            for report in summary.report.implementations
            if report.name == known.implementation
            for finding in report.findings
            if finding.entry == known.entry and finding.replay
        )
        count = count_of(known.count, "problem")
        issue = f" ({known.issue})" if known.issue else ""
        yield Block(
            f"KNOWN {known.entry}  {known.implementation}: {count}: ",
            f"{' '.join(known.reason.split())}{issue}",
            "KNOWN",
            [("replay", each) for each in replays][:1],
            inline=True,
        )


def _weak(
    reports: Sequence[ImplementationReport], summary: Summary, *, whole: bool
) -> Iterator[Line]:
    """Yield what is incomplete, what ended early, and what was left behind."""
    weak = [each for each in reports if missing_of(each)]
    # The signal is why: what each of many lacks would hide what was learned until then.
    if summary.report.interrupted and len(weak) > FEW and not whole:
        told = f"{len(weak)} implementations (-v says what is missing of each)"
        yield Line("INCOMPLETE", told, "yellow")
    else:
        for report in weak:
            told = f"{report.name}: {gaps_text(missing_of(report))}"
            yield Line("INCOMPLETE", told, "yellow")
    reasons = {"time": OWN_TIME, "stopped": EARLY[summary.report.ended], "room": NO_ROOM}
    for ended, why in reasons.items():
        yield from _early(reports, ended, why, whole=whole)
    for report in reports:
        for note in _notes(report):
            yield Line("note", f"{report.name}: {note}", "yellow")
    for left in summary.report.left:
        told = f"left behind, by which implementation is not known: {left.text}"
        yield Line("note", told, "yellow")


def _early(
    reports: Sequence[ImplementationReport], ended: str, why: str, *, whole: bool
) -> Iterator[Line]:
    """Yield which laws ended early for this reason; of many implementations, how many."""
    laws = {
        each.name: [name for name, reason in each.coverage.early.items() if reason == ended]
        for each in reports
    }
    early = {name: ended_laws for name, ended_laws in laws.items() if ended_laws}
    if whole or len(early) <= FEW:
        for name, names in early.items():
            yield Line(why, f"{name}: {', '.join(names)}", "yellow")
    else:
        count = count_of(sum(map(len, early.values())), "law")
        yield Line(why, f"{count} of {len(early)} implementations (-v names them)", "yellow")


def _notes(report: ImplementationReport) -> Iterator[str]:
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


def _passed(
    reports: Sequence[ImplementationReport], summary: Summary, *, whole: bool
) -> Iterator[Line | Table]:
    """Yield what passed in one line, and what was reached where it is little or asked for."""
    if passed := passed_text(summary):
        yield Line("passed", passed)
    judged = [each for each in reports if each.judged]
    if whole:
        yield Table(HEADS, [_row(each) for each in judged], [_in_words(each) for each in judged])
    for report in judged if whole or len(judged) <= FEW else ():
        yield Line("coverage", f"{report.name}: {report.coverage.text}", "dim")
    asked = [each for each in reports if each.claimed_space]
    for report in asked if whole or len(asked) <= FEW else ():
        yield Line("claims", f"{report.name}: {claims_text(report, whole=whole)}", "dim")
    if len(asked) > FEW and not whole:
        yield Line("claims", f"{claims_count(asked)} (-v names them)", "dim")
    if told := interpreted_text(summary, verbose=whole):
        yield Line("interpreted", one_line(told), "yellow")
    if told := replayed(summary.report):
        yield Line("corpus", told, "dim")


def _row(report: ImplementationReport) -> list[tuple[str, str]]:
    new, known = len(new_findings(report)), len(known_entries(report))
    return [
        (report.name, ""),
        (f"{report.judged:,}", ""),
        (report.coverage.laws if report.laws else "", ""),
        (report.coverage.longest, ""),
        (f"{report.unsupported:,}", ""),
        (f"{rejected(report):,}", ""),
        (f"{new}", "bold red" if new else ""),
        (f"{known}", "yellow" if known else ""),
        (f"{seconds(report):.1f}", ""),
    ]


def _in_words(report: ImplementationReport) -> tuple[str, str, str]:
    """Return what the table holds of an implementation, where there is no room for one."""
    numbers = zip(HEADS, _row(report), strict=True)
    told = [f"{text} {head}" for head, (text, _) in numbers if head not in ("laws", "lengths")]
    return report.name, state(report), ", ".join(told[1:])


def _not_run(summary: Summary, *, whole: bool) -> Iterator[Line | Block]:
    """Yield what was not run and why: in one line, or a line each where it is little or asked."""
    idle = not_run(summary)
    laws = [
        (report.name, law.law, why)
        for report in summary.report.implementations
        for law, why in laws_not_run(report)
    ]
    each = whole or len(idle) <= FEW
    told = []
    if idle and not each:
        reasons = [reason for _, reason in idle]
        told.append(not_run_text(reasons, len(summary.report.implementations)))
    if laws and not whole:
        told.append(f"{count_of(len(laws), 'law')} with nothing to judge, or unsupported")
    if told:
        yield Line("not run", f"{'; '.join(told)} (-v names them)", "dim")
    for report, _ in idle if each else ():
        yield Block(f"{state(report)}  {report.name}", reason_idle(report, summary), "UNSUPPORTED")
    for name, law, why in laws if whole else ():
        yield Line("not run", f"{name}  {law}: {why}", "dim")
