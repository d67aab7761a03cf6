"""The outline of a run: findings, what is known, what is weak, what passed, what was not run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree import ElementTree as ET

from rich.console import Console

from ...impl.gpu.interpreted import CAVEATS, NOTE
from ...properties.findings.causes import Cause, cause_of, causes_of
from ...properties.findings.coverage import gaps_text
from ...properties.findings.report import Finding, ImplementationReport, LawReport
from ...properties.findings.text_format import (
    PRINTED_LINES,
    element_lines,
    law_names,
    printed_lines,
    trace_lines,
)
from ...properties.laws import laws_of
from ...properties.verdicts.memory_need import LIMIT_VARIABLE
from ...properties.verdicts.text import compact, count_of, one_line
from .claims import claims_count, claims_text, lost_lines
from .display import print_outline
from .junit import case, document, printed, properties, result, suite
from .kernels import kernel_lines, kernel_text
from .law_times import fruitless_text, time_lines
from .outline import Block, Line, Part, Table
from .places import places, repository
from .published_calls import (
    finding_blocks,
    junit_suite,
    known_lines,
    left_out_lines,
    passed_lines,
    weak_lines,
)
from .summary import (
    KnownCause,
    Summary,
    in_order,
    interpreted_text,
    known_causes,
    known_entries,
    known_findings,
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
"""Most things that an implementation left behind which have a line each, unless all is asked."""
EARLY = {
    "": "the run ended before all problems were judged",
    "time": "out of the run's time before all problems were judged",
    "found": "not judged, as the run ended at its first finding",
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
        summary: the summary of the run.
        whole: whether to have a line for each implementation, known finding and law that was not
            run.
    """
    reports = in_order(summary.report.implementations)
    style = {"conforming": "bold green", "nonconforming": "bold red"}
    verdict = style.get(summary.verdict, "bold yellow")
    ran = kernel_lines(reports, whole=whole)
    shared = summary.report.target.get("mps")
    shares = [Line("GPU", shared)] if shared else []
    yield Part("Verdict", [Line("", summary.sentence, verdict), *ran, *shares], folded=False)
    yield Part("Errors", _errors(reports, summary))
    causes = [cause for each in reports for cause in new_findings(each)]
    of_laws = [finding_block(each, whole=whole) for each in causes]
    yield Part("New findings", [*of_laws, *finding_blocks(summary.published)])
    known = [each for cause in known_causes(summary) for each in _known(cause, summary, whole)]
    yield Part("Known findings", [*known, *known_lines(summary.published)])
    weak = [*_weak(reports, summary, whole=whole), *weak_lines(summary.published)]
    yield Part("Incomplete", weak)
    passed = [*_passed(reports, summary, whole=whole), *passed_lines(summary.published)]
    yield Part("What passed", passed)
    yield Part("Time by law", time_lines(summary) if whole else ())
    left_out = [*_not_run(summary, whole=whole), *left_out_lines(summary.published)]
    yield Part("What was not run", left_out)


def _errors(reports: Sequence[ImplementationReport], summary: Summary) -> Iterator[Line | Block]:
    for report in reports:
        if report.error:
            yield Block(f"ERROR  {report.name}", report.error, "ERROR")
    for each in summary.report.broken:
        yield Line("left out", one_line(each.text), "yellow")
    for told in lost_lines(summary.lost):
        yield Line("lost claim", told, "bold red")


def finding_block(cause: Cause, *, whole: bool) -> Block:
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
        about=cause,
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
            [("laws", ", ".join(known.laws)), *[("replay", each) for each in replays][:1]],
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
        for note in _notes(report, len(report.left) if whole else FEW_LEFT):
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


def _notes(report: ImplementationReport, most_left: int) -> Iterator[str]:
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
    yield from (f"it left {each.text}" for each in report.left[:most_left])
    if (more := len(report.left) - most_left) > 0:
        yield f"it left {more} more; the JSON report names them"


def _passed(
    reports: Sequence[ImplementationReport], summary: Summary, *, whole: bool
) -> Iterator[Line | Table]:
    """Yield what passed in one line, and what was reached where it is little or asked for."""
    if passed := passed_text(summary):
        yield Line("passed", passed)
    judged = [each for each in reports if each.judged]
    if whole and judged:
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
    if of_deck := sum(each.of_deck for each in reports):
        yield Line("deck", f"{count_of(of_deck, 'problem')} came from the deck", "dim")
    if told := fruitless_text(summary):
        yield Line("time", told, "dim")


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


def to_junit(summary: Summary) -> str:
    """Return a JUnit document with a suite for each implementation, those with findings first."""
    suites = []
    if summary.failure or summary.report.lost or not summary.report.implementations:
        suites.append(suite("kernelproof"))
        why = summary.failure or summary.report.lost
        result(case(suites[-1], "run", 0.0), "error", summary.sentence, why)
    if summary.lost:
        suites.append(suite("claims"))
        for told in lost_lines(summary.lost):
            result(case(suites[-1], told, 0.0), "failure", told)
    suites += [_suite(each, summary) for each in in_order(summary.report.implementations)]
    suites += [junit_suite(summary.published)] if summary.published else []
    return document("kernelproof", suites, time=f"{summary.report.seconds:.3f}")


def _suite(report: ImplementationReport, summary: Summary) -> ET.Element:
    made = suite(report.name, time=f"{seconds(report):.3f}", timestamp=summary.date)
    properties(
        made,
        operation=report.operation,
        reference=report.reference,
        profile=summary.report.profile,
        seed=summary.report.seed,
        replayed=report.corpus.replayed,
        coverage=report.coverage.text,
        **({"kernels": text} if (text := kernel_text(report)) else {}),
        **({"claims": "; ".join(report.claims)} if report.claims else {}),
        **({"interpreted": "; ".join((NOTE, *CAVEATS))} if report.interpreted else {}),
        **({"incomplete": gaps_text(missing_of(report))} if missing_of(report) else {}),
        **({"unexplained": left} if (left := report.separation.unexplained) else {}),
        **({"left": "; ".join(each.text for each in report.left)} if report.left else {}),
        **{f"target.{name}": value for name, value in summary.report.target.items() if value},
    )
    causes, root = causes_of(report), repository()

    def case_of(law: str, name: str, seconds: float = 0.0) -> ET.Element:
        first = next(iter(places(report, law, root)), None)
        return case(made, name, seconds, first and first._asdict())

    for law in report.laws:
        _law(case_of(law.law, law.law, law.seconds), report, law, summary, causes)
    for finding in report.replayed:
        whose = "ledger" if finding.contradicts else "corpus"
        name = f"{finding.law} ({whose} case {finding.problem.id})"
        _failure(case_of(finding.law, name), finding, cause_of(causes, finding))
    for finding in report.separation.further:
        if not finding.entry:
            name = f"{finding.law} ({finding.problem.id})"
            _failure(case_of(finding.law, name), finding, cause_of(causes, finding))
    idle = reason_idle(report, summary)
    if report.error:
        result(case(made, "run", 0.0), "error", report.error.splitlines()[0], report.error)
    elif idle and not report.laws:
        names = [law.name for law in laws_of(report.operation)]
        for name in [name for name in names if not summary.laws or name in summary.laws] or ["run"]:
            result(case(made, name, 0.0), "skipped", idle)
    return made


def _law(
    case: ET.Element,
    report: ImplementationReport,
    law: LawReport,
    summary: Summary,
    causes: Sequence[Cause],
) -> None:
    properties(
        case,
        judged=law.judged,
        unsupported=law.unsupported,
        vacuous=law.vacuous,
        rejected=law.rejected,
        flaky=law.flaky,
        worst_ratio=f"{law.worst_ratio:.4g}",
        floor=law.floor,
        ended=law.ended,
        **{f"known.{entry}": count for entry, count in law.known.items()},
    )
    if law.finding and not law.finding.entry:
        _failure(case, law.finding, cause_of(causes, law.finding))
    elif law.known:
        told = [
            f"{each.entry}: {count_of(law.known[each.entry], 'problem')}: {each.reason}"
            for each in known_findings(report, summary.ledger)
            if law.known[each.entry]
        ]
        result(case, "skipped", "KNOWN " + "; ".join(told), kind="known")
    elif law.incomplete:
        counts = f"{law.drawn} of {law.floor} problems in {law.seconds:.0f} s"
        result(case, "skipped", f"INCOMPLETE: judged {counts}", kind="incomplete")
    elif not law.judged:
        reason = next(iter(report.refused.values()), "the law had nothing to judge")
        counts = f"{law.unsupported} unsupported, {law.vacuous} with nothing to judge"
        result(case, "skipped", f"no problem was judged ({counts}): {reason}")


def _failure(case: ET.Element, finding: Finding, cause: Cause | None) -> None:
    """Add a failure; one with the cause of another says so, and no more of it."""
    verdict = finding.verdict
    title = f"{verdict.status} {verdict.kind}".strip()
    if cause is not None and finding is not cause.finding:
        told = f"{title}: the same cause as under {cause.finding.law}"
        lines = [compact(finding.problem), finding.replay]
        result(case, "failure", told, "\n".join(filter(None, lines)), kind=title)
        return
    notes = finding_block(cause, whole=True).notes if cause else ()
    lines = [
        verdict.message,
        *(f"{label}: {text}" for label, text in notes if label != "printed"),
        *(f"wrong: {line}" for line in element_lines(verdict)),
        *(["", verdict.trace] if verdict.trace else []),
    ]
    first = (verdict.message.splitlines() or [""])[0]
    result(case, "failure", f"{title}: {first}", "\n".join(lines), kind=title)
    if verdict.printed:
        printed(case, verdict.printed)
