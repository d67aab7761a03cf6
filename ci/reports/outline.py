"""The parts of a run's report, in the order in which every form of it shows them.

The verdict, new findings, known ones by cause, what is incomplete, what passed, what was not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...properties.findings.report import ImplementationReport, LawReport
from ...properties.verdicts.text import count_of
from .summary import Known, Summary, known_findings, reason_idle, state

ORDER = ("ERROR", "FINDINGS", "KNOWN", "INCOMPLETE", "PASS", "UNJUDGED", "UNSUPPORTED")
"""States of implementations, see ``state``, in the order of a report."""
REASONS = {
    "rules": "refused by the support rules",
    "supports": "refused by their own supports",
    "time": "with modules that take longer to build than the run may",
    "module": "without a module that was built",
    "only": "without what --only asks for",
    "feature": "without a feature that every problem has",
    "operation": "of another operation",
    "device": "for another device",
    "package": "without an optional package",
    "ended": "not begun when the run ended",
    "laws": "of an operation that no selected law speaks of",
    "judged": "with nothing to judge",
}
"""Words on implementations that were not run, by the code of their refusal; the last three are of
those that refuse nothing."""
NEEDED = ("device", "package")
"""Codes of refusals that name what is needed in ``about``."""
LONGEST_REASON = 88
"""Characters of a known cause's reason where it has one line; ``-v`` prints all of it."""
_ISSUE = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)")


@dataclass(frozen=True)
class NotRun:
    """Implementations that were not run for the same reason.

    Attributes:
        code: of the refusal, or one of the last three of ``REASONS``.
        about: what is needed, where the refusal names it.
        reports: of the implementations.
    """

    code: str
    about: str
    reports: tuple[ImplementationReport, ...]

    @property
    def text(self) -> str:
        """How many they are, and why."""
        count = len(self.reports)
        if self.about:
            return f"{count} need{'s' if count == 1 else ''} {self.about}"
        return f"{count} {REASONS.get(self.code, self.code)}"


@dataclass(frozen=True)
class KnownCause:
    """Ledger entries about one cause: one public issue, or one reason where there is none."""

    entries: tuple[Known, ...]

    @property
    def text(self) -> str:
        """How many problems it explains, of what, and why, in one line."""
        who = list(dict.fromkeys(each.implementation for each in self.entries))
        more = f" and {len(who) - 1} more" if len(who) > 1 else ""
        first = self.entries[0]
        reason = " ".join(first.reason.split()) or first.entry
        if len(reason) > LONGEST_REASON:
            reason = f"{reason[:LONGEST_REASON].rpartition(' ')[0]} ..."
        issue = f" ({short_issue(first.issue)})" if first.issue else ""
        count = count_of(sum(each.count for each in self.entries), "problem")
        return f"{count} of {who[0]}{more}: {reason}{issue}"


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


def refused(reports: Iterable[ImplementationReport]) -> list[NotRun]:
    """Return the implementations that refuse everything, by reason, the most frequent one first."""
    return _grouped(
        (each.refusal.code, each.refusal.about if each.refusal.code in NEEDED else "", each)
        for each in reports
        if each.refusal
    )


def not_run(summary: Summary) -> list[NotRun]:
    """Return the implementations of which nothing was judged, but for errors, by reason."""
    idle = [
        each
        for each in summary.report.implementations
        if not each.error and reason_idle(each, summary)
    ]
    ended = bool(summary.failure or summary.report.lost or summary.report.ended)
    others = _grouped(
        ("ended" if ended else "judged" if each.laws else "laws", "", each)
        for each in idle
        if not each.refusal
    )
    return [*refused(idle), *others]


def not_run_text(groups: Sequence[NotRun], of: int) -> str:
    """Return how many implementations were not run and why, in one line."""
    count = sum(len(each.reports) for each in groups)
    return f"{count} of {count_of(of, 'implementation')}: {', '.join(e.text for e in groups)}"


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
    but = f", {known} but for what is known" if known else ""
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


def _grouped(each: Iterable[tuple[str, str, ImplementationReport]]) -> list[NotRun]:
    groups: dict[tuple[str, str], list[ImplementationReport]] = {}
    for code, about, report in each:
        groups.setdefault((code, about), []).append(report)
    made = [NotRun(code, about, tuple(reports)) for (code, about), reports in groups.items()]
    return sorted(made, key=lambda group: -len(group.reports))
