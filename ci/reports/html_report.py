"""The results of a run as one page that needs nothing else, and that no message can break."""

from __future__ import annotations

from ...properties.findings.cases import versions
from ...properties.findings.coverage import gaps_text
from ...properties.findings.report import ImplementationReport, LawReport
from ...properties.findings.text_format import element_lines
from ...properties.verdicts.text import compact, printable
from ..console.rendering import render
from .summary import (
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

ENDED = {
    "": "",
    "time": "out of time",
    "stopped": "the run ended",
    "idle": "nothing to judge",
    "rare": "too little to judge",
}
"""Why a law ended before it had its problems, in words."""
TONES = {"conforming": "good", "nonconforming": "bad", "incomplete": "warn", "error": "bad"}


def to_html(summary: Summary) -> str:
    """Return a self-contained page with the verdict, the tables and every finding."""
    report = summary.report
    facts = [
        ("command", summary.command),
        ("date", summary.date),
        ("profile", report.profile),
        ("seed", report.seed),
        ("device", " ".join(str(report.target.get(n) or "") for n in ("device", "device_name"))),
        *([("corpus", replayed(report))] if replayed(report) else []),
        *((name, value) for name, value in versions(report.target).items() if value),
    ]
    return render(
        "check.html.jinja",
        verdict=summary.verdict,
        tone=TONES[summary.verdict],
        sentence=summary.sentence,
        facts=facts,
        implementations=[_row(each, summary) for each in report.implementations],
        findings=[
            {
                "verdict": cause.finding.verdict,
                "title": f"{cause.finding.verdict.status} {cause.finding.verdict.kind}".strip(),
                "who": f"{each.name}, {', '.join(cause.laws)}",
                "cause": cause.sentence if cause.telling else "",
                "problem": compact(cause.finding.problem),
                "wrong": "\n".join(element_lines(cause.finding.verdict)),
                "printed": printable(cause.finding.verdict.printed),
                "replay": cause.finding.replay,
            }
            for each in report.implementations
            for cause in new_findings(each)
        ],
        known=[
            (k.implementation, k.entry, ", ".join(k.laws), k.count, k.reason, k.issue)
            for each in report.implementations
            for k in known_findings(each, summary.ledger)
        ],
        laws=[
            (each.name, each.coverage.text, [_law(law) for law in each.laws])
            for each in report.implementations
            if each.laws
        ],
    )


def _row(report: ImplementationReport, summary: Summary) -> tuple[object, ...]:
    new = len(new_findings(report))
    return (
        report.name,
        state(report),
        report.judged,
        report.coverage.laws if report.laws else "",
        report.coverage.longest,
        report.unsupported,
        rejected(report),
        new,
        len(known_entries(report)),
        round(seconds(report), 1),
        "; ".join(
            filter(
                None,
                (
                    reason_idle(report, summary) or gaps_text(report.coverage.gaps),
                    *(f"left {each.text}" for each in report.left),
                ),
            )
        ),
    )


def _law(law: LawReport) -> tuple[object, ...]:
    return (
        law.law,
        law.verdict,
        law.judged,
        law.unsupported,
        law.vacuous,
        law.rejected,
        law.worst_ratio,
        law.seconds,
        ENDED[law.ended],
    )
