"""The parts of a run's report, in the order in which every form of it shows them.

The verdict, new findings, known ones by cause, what is incomplete, what passed, what was not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...impl.gpu.interpreted import CAVEATS, NOTE
from ...properties.findings.not_run import ENDED, JUDGED, LAWS, Reason, reason_of, reasons_text
from ...properties.findings.report import ImplementationReport, LawReport
from ...properties.verdicts.text import count_of
from .summary import Known, Summary, known_findings, state

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
        return ENDED
    return JUDGED if report.laws else LAWS


def not_run_text(reasons: Sequence[Reason], of: int) -> str:
    """Return how many implementations were not run and why, in one line."""
    return f"{len(reasons)} of {count_of(of, 'implementation')}: {reasons_text(reasons)}"


def interpreted_text(summary: Summary, *, verbose: bool = False) -> str:
    """Return which implementations Triton's interpreter ran, and what that leaves open.

    Args:
        summary: of the run.
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
