"""The summary of a run: its exit code, its verdict in one line, and what every report says of it.

Reports have one order: the verdict, new findings, known ones by cause, what is incomplete, what
passed, what was not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Any

from ...impl.features import INTERPRETED
from ...impl.gpu.interpreted import CAVEATS, NOTE
from ...properties.findings import not_run as idle_reasons
from ...properties.findings.causes import Cause, causes_of
from ...properties.findings.coverage import Gap, gaps_text
from ...properties.findings.ledger import Ledger
from ...properties.findings.not_run import Reason, reason_of, reasons_text
from ...properties.findings.report import EARLY, ImplementationReport, LawReport, RunReport
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
from .published_calls import exit_code
from .published_calls import failure as published_failure
from .published_calls import sentence as published_sentence

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
        command: the command that was given.
        laws: names that ``--law`` selected; all if empty.
        failure: what stopped the suite, if something did.
        lost: what was claimed once and is refused now.
        published: what became of published calls; empty where they are no part of the run.
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
    published: Mapping[str, Any] = field(default_factory=dict)


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
    published: Mapping[str, Any] = MappingProxyType({}),
) -> Summary:
    """Return the summary of a run, with its verdict as a whole."""
    code, why = _exit_of(report, gate=gate, failure=failure)
    if told := published_failure(published) or published_sentence(published):
        why, code = f"{why}; {told}", exit_code(published, code)
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
    if (earlier := reused(report))["laws"]:
        sentence += f"; laws: {earlier['laws']} of {earlier['of']} reused from {earlier['since']}"
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Summary(
        report,
        ledger,
        verdict,
        code,
        sentence,
        command,
        laws,
        failure,
        date,
        tuple(lost),
        published,
    )


def reused(report: RunReport) -> dict[str, Any]:
    """Return how many laws were not asked again, of how many, and since when they are known."""
    laws = [law for each in report.implementations for law in each.laws]
    dates = [law.reused for law in laws if law.reused]
    return {"laws": len(dates), "of": len(laws), "since": min(dates, default="")}


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
        Gap("law", law.law, "", law.drawn, law.floor)
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
    if all(law.needs == (INTERPRETED,) for law in laws):
        return f"Triton's interpreter runs no kernel of it ({', '.join(law.name for law in laws)})"
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


ORDER = ("ERROR", "FINDINGS", "KNOWN", "INCOMPLETE", "PASS", "UNJUDGED", "UNSUPPORTED")
"""States of implementations, see ``state``, in the order of a report."""
MOST_NAMED = 3
"""Most implementations that a line on all of them names."""
LEAST_REASON = 40
"""Characters of a known cause's reason that its line always has; ``-v`` prints all of it."""
_ISSUE = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)")


@dataclass(frozen=True)
class KnownCause:
    """Ledger entries about one cause: one public issue, or one reason where there is none."""

    entries: tuple[Known, ...]

    def text(self, width: int) -> str:
        """Return the entries, how many problems they explain, and why, in one line.

        Args:
            width: most characters, to which the reason is cut; some of it always stays.
        """
        first = self.entries[0]
        more = f" and {len(self.entries) - 1} more" if len(self.entries) > 1 else ""
        count = count_of(sum(each.count for each in self.entries), "problem")
        title = f"{first.entry}{more}: {count}"
        issue = f" ({short_issue(first.issue)})" if first.issue else ""
        room = max(LEAST_REASON, width - len(title) - len(issue) - len(": "))
        reason = shortened(" ".join(first.reason.split()), room)
        return f"{title}: {reason}{issue}" if reason else f"{title}{issue}"


def shortened(text: str, room: int) -> str:
    """Return a text, cut behind a word where it has more characters than there is room for."""
    return text if len(text) <= room else f"{text[: room - len(' ...')].rpartition(' ')[0]} ..."


def short_issue(link: str) -> str:
    """Return a link to an issue of GitHub as owner/name#number; any other text as it is."""
    return _ISSUE.sub(r"\1#\2", link)


def in_order(reports: Iterable[ImplementationReport]) -> list[ImplementationReport]:
    """Return the implementations in the order of a report."""
    return sorted(reports, key=lambda each: ORDER.index(state(each)))


def known_causes(summary: Summary) -> list[KnownCause]:
    """Return the ledger entries that explained something, those about one cause together."""
    causes: dict[str, list[Known]] = {}
    for report in summary.report.implementations:
        for known in known_findings(report, summary.ledger):
            causes.setdefault(known.issue or known.reason or known.entry, []).append(known)
    return [KnownCause(tuple(entries)) for entries in causes.values()]


def refused(reports: Iterable[ImplementationReport]) -> list[Reason]:
    """Return the reasons of the implementations that refuse everything."""
    return [reason_of(each.refusal) for each in reports if each.refusal]


def not_run(summary: Summary) -> list[tuple[ImplementationReport, Reason]]:
    """Return the implementations without a judged problem, error or finding, and why."""
    ended = bool(summary.failure or summary.report.lost or summary.report.ended)
    return [
        (each, reason_of(each.refusal) if each.refusal else (_idle(each, ended=ended), ""))
        for each in in_order(summary.report.implementations)
        if not each.error and not each.judged and not each.findings
    ]


def _idle(report: ImplementationReport, *, ended: bool) -> str:
    if ended:
        return idle_reasons.ENDED
    return idle_reasons.JUDGED if report.laws else idle_reasons.LAWS


def not_run_text(reasons: Sequence[Reason], of: int) -> str:
    """Return how many implementations were not run and why, in one line."""
    return f"{len(reasons)} of {count_of(of, 'implementation')}: {reasons_text(reasons)}"


def interpreted_text(summary: Summary, *, verbose: bool = False) -> str:
    """Return which implementations Triton's interpreter ran, and what that leaves open.

    Args:
        summary: the summary of the run.
        verbose: give all names, however many there are, and each caveat.
    """
    names = [each.name for each in summary.report.implementations if each.interpreted]
    if not names:
        return ""
    named = len(names) <= MOST_NAMED or verbose
    who = ", ".join(names) if named else f"{len(names)} implementations (-v names them)"
    if not verbose:
        return f"{who}: {NOTE}"
    return f"{who}: {NOTE}: {'; '.join(CAVEATS)}"


def passed_text(summary: Summary) -> str:
    """Return how many implementations and laws passed, in one line; empty if nothing was judged."""
    judged = [each for each in summary.report.implementations if each.judged]
    if not judged:
        return ""
    laws = [law for each in judged for law in each.laws]
    passed = sum(law.verdict == "PASS" for law in laws)
    text = f"{passed} of {count_of(len(laws), 'law')}"
    if len(judged) == 1:
        return f"{text} of {judged[0].name}"
    states = [state(each) for each in judged]
    known = states.count("KNOWN")
    but = f", {known} with known findings only" if known else ""
    return f"{states.count('PASS')} of {count_of(len(judged), 'implementation')}{but}; {text}"


def laws_not_run(report: ImplementationReport) -> Iterator[tuple[LawReport, str]]:
    """Yield the laws that judged nothing of an implementation that was judged, and why."""
    if not report.judged:
        return
    for law in report.laws:
        if law.verdict == "UNSUPPORTED":
            if law.unsupported:
                counts = f"{law.unsupported} unsupported, {law.vacuous} with nothing to judge"
                yield law, f"{law.unsupported_reason} ({counts})".strip()
            else:
                yield law, "nothing to judge"
