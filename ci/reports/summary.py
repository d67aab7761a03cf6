"""The summary of a run: its exit code, its verdict in one line, and facts that reports share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from ...properties.findings.causes import Cause, causes_of
from ...properties.findings.coverage import Gap, gaps_text
from ...properties.findings.ledger import Ledger
from ...properties.findings.report import EARLY, ImplementationReport, RunReport
from ...properties.laws import LAWS
from ...properties.verdicts.text import count_of
from ..console.errors import (
    CONFORMING,
    INCOMPLETE,
    INTERRUPTED,
    MACHINE,
    NONCONFORMING,
    TERMINATED,
    USAGE,
)
from .claims import LostClaim

VERDICTS = {CONFORMING: "conforming", NONCONFORMING: "nonconforming", INCOMPLETE: "incomplete"}
WORDS = {
    "conforming": "CONFORMING",
    "nonconforming": "NOT CONFORMING",
    "incomplete": "INCOMPLETE",
    "error": "ERROR",
}
"""Verdicts as a person reads them."""
FEW_SHORT = 3
"""Implementations that the verdict names of those of which too little was judged."""


@dataclass(frozen=True)
class Known:
    """A ledger entry and how often it explained a failure of an implementation."""

    implementation: str
    entry: str
    count: int
    laws: tuple[str, ...]
    reason: str
    issue: str


@dataclass(frozen=True)
class Summary:
    """A run that has ended.

    Attributes:
        report: what the engine learned.
        ledger: what it was allowed to know.
        verdict: one of ``WORDS``.
        code: exit code.
        sentence: the verdict in one line.
        command: that was given.
        laws: names that ``--law`` selected; all if empty.
        failure: what stopped the suite, if something did.
        lost: what was claimed once and is refused now.
    """

    report: RunReport
    ledger: Ledger
    verdict: str
    code: int
    sentence: str
    command: str
    laws: tuple[str, ...] = ()
    failure: str = ""
    date: str = ""
    lost: tuple[LostClaim, ...] = ()


def summarise(
    report: RunReport,
    ledger: Ledger,
    *,
    gate: bool,
    command: str,
    laws: tuple[str, ...] = (),
    failure: str = "",
    allow_incomplete: bool = False,
    lost: Sequence[LostClaim] = (),
) -> Summary:
    """Return the summary of a run, with its verdict as a whole."""
    code, why = _exit_of(report, gate=gate, failure=failure)
    if lost:
        why = f"{count_of(len(lost), 'claim')} lost; {why}"
        code = NONCONFORMING if code in (CONFORMING, INCOMPLETE) else code
    verdict = VERDICTS.get(code, "error")
    if report.interrupted:
        why = f"{report.ended}, this is what was learned until then: {why}"
        code = TERMINATED if report.ended == "terminated" else INTERRUPTED
    elif code == INCOMPLETE and allow_incomplete:
        code = CONFORMING
    count = count_of(report.judged, "problem")
    sentence = f"{WORDS[verdict]}: {why}; {count} judged in {report.seconds:.1f} s"
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Summary(
        report, ledger, verdict, code, sentence, command, laws, failure, date, tuple(lost)
    )


def _exit_of(report: RunReport, *, gate: bool, failure: str) -> tuple[int, str]:
    """Return the exit code of an undisturbed run with this verdict, and the reason for it."""
    broken = [each for each in report.implementations if each.error]
    unfound = [each for each in broken if not each.operation]
    idle = [each for each in report.implementations if not each.judged]
    new = sum(len(new_findings(each)) for each in report.implementations)
    known = sum(len(known_entries(each)) for each in report.implementations)
    if failure or report.lost:
        return MACHINE, failure or f"the device was lost: {report.lost}"
    if broken:
        named = next((each for each in unfound if not each.suite_failed), broken[0])
        usage = not gate and named in unfound and not named.suite_failed
        others = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        first = named.error.splitlines()[0]
        if new and all(each.suite_failed for each in broken):  # which hides no other's finding
            found = f"{count_of(new, 'new finding')}, {known} known"
            return NONCONFORMING, f"{found}; {named.name}: {first}{others}"
        return USAGE if usage else MACHINE, f"{named.name}: {first}{others}"
    if new:
        return NONCONFORMING, f"{count_of(new, 'new finding')}, {known} known"
    if not report.interrupted and (not report.judged or (idle and not gate)):
        names = ", ".join(each.name for each in idle) or "no implementation"
        return MACHINE, f"no problem at all was judged of {names}"
    return _floors(report, f"no new finding, {known} known")


def _floors(report: RunReport, found: str) -> tuple[int, str]:
    """Return the exit code of a run without new findings, and the reason for it."""
    if report.interrupted:
        return INCOMPLETE, found
    if short := [each for each in report.implementations if missing_of(each)]:
        names = ", ".join(each.name for each in short[:FEW_SHORT])
        names += ", ..." if len(short) > FEW_SHORT else ""
        missing = f"too little was judged of {count_of(len(short), 'implementation')}: {names}"
        if len(short) == 1:
            missing = f"{names}: {gaps_text(missing_of(short[0]))}"
        return INCOMPLETE, f"{missing}; {found}"
    return CONFORMING, f"{found}; {laws_left_out(report)}"


def missing_of(report: ImplementationReport) -> tuple[Gap, ...]:
    """Return the floors that were missed, those of laws also where coverage was not measured."""
    gaps = report.coverage.gaps
    named = {gap.name for gap in gaps if gap.code == "law"}
    return gaps + tuple(
        Gap("law", law.law, "", law.judged, law.floor)
        for law in report.laws
        if law.incomplete and law.law not in named
    )


def laws_left_out(report: RunReport) -> str:
    """Return how many laws time cut short, and how many had nothing to judge.

    Laws count once for each implementation that was judged. Both numbers are there always: a 0
    says that nothing was left out.
    """
    laws = [law for each in report.implementations if each.judged for law in each.laws]
    cut = sum(law.ended in EARLY for law in laws)
    idle = sum(not law.judged and law.ended not in EARLY for law in laws)
    return f"laws cut short by time: {cut}, with nothing to judge: {idle}"


def reason_idle(report: ImplementationReport, summary: Summary) -> str:
    """Return why no problem was judged of an implementation; empty if some was."""
    if report.error or report.judged:
        return report.error
    if report.refusal:
        return report.refusal
    if summary.failure or summary.report.lost or summary.report.ended:
        return "the run ended before its first law did"
    if not report.laws:
        return f"none of the laws that were to run speaks of {report.operation or 'it'}"
    if not report.unsupported:
        nothing = "no law had anything to judge, such as one that needs what is not declared"
        return _undeclared(report) or nothing
    said = next(
        (f" ({law.unsupported_reason})" for law in report.laws if law.unsupported_reason), ""
    )
    unsupported = f"{report.unsupported} problems unsupported{said}"
    return f"{unsupported}, on the others no law had anything to judge"


def _undeclared(report: ImplementationReport) -> str:
    """Return a note on the features that all laws of a run need and an implementation lacks."""
    declares = report.declared.get("declares", ())
    laws = [law for law in LAWS if law.name in {each.law for each in report.laws}]
    if not laws or any(law.concerns(declares) for law in laws):
        return ""
    missing = "; ".join(f"{' or '.join(law.needs)} ({law.name})" for law in laws)
    return f"it does not declare what the laws need: {missing}"


def state(report: ImplementationReport) -> str:
    """Return one word on an implementation."""
    if report.error:
        return "ERROR"
    if any(not finding.entry for finding in report.findings):
        return "FINDINGS"
    if not report.judged:
        return "UNSUPPORTED" if report.refusal or report.unsupported else "UNJUDGED"
    if missing_of(report):
        return "INCOMPLETE"
    return "KNOWN" if known_entries(report) else "PASS"


def rejected(report: ImplementationReport) -> int:
    """Count the problems that it claimed and then refused."""
    return sum(law.rejected for law in report.laws)


def seconds(report: ImplementationReport) -> float:
    """Add up what its laws took; from its first to its last one, others have had their turns."""
    return sum(law.seconds for law in report.laws)


def replayed(report: RunReport) -> str:
    """Return how many stored cases were replayed, in words; empty if none was."""
    corpus = report.corpus
    if not corpus.replayed:
        return ""
    counts = {
        "of known findings": corpus.of_ledger,
        "known otherwise": corpus.known,
        "not judged here": corpus.unjudged,
        "others left out": corpus.left_out,
    }
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    stored = f"{count_of(corpus.replayed, 'stored case')} replayed first in {corpus.seconds:.1f} s"
    return f"{stored} ({told})" if told else stored


def new_findings(report: ImplementationReport) -> list[Cause]:
    """Return the findings that the ledger does not explain, those with one cause as one."""
    return [cause for cause in causes_of(report) if not cause.finding.entry]


def known_entries(report: ImplementationReport) -> list[str]:
    """Return the ids of the ledger entries that explained something, over all laws."""
    counted = [name for law in report.laws for name in law.known]
    found = [finding.entry for finding in report.findings if finding.entry]
    return list(dict.fromkeys([*counted, *found]))


def known_findings(report: ImplementationReport, ledger: Ledger) -> Iterator[Known]:
    """Return the ledger entries that explained something, over all laws."""
    entries = {entry.id: entry for entry in ledger.entries}
    for name in known_entries(report):
        entry = entries.get(name)
        yield Known(
            implementation=report.name,
            entry=name,
            count=sum(law.known[name] for law in report.laws),
            laws=tuple(law.law for law in report.laws if law.known[name]),
            reason=entry.reason if entry else "",
            issue=entry.issue if entry else "",
        )


def unexplained_text(report: ImplementationReport) -> str:
    """Return how many problems fail for none of the causes that were found; empty if all do."""
    count = report.separation.unexplained
    why = "failed for no cause that was found in time"
    return f"{count_of(count, 'problem')} {why}" if count else ""
