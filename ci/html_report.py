"""The results of a run as one page that needs nothing else, and that no message can break."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ..properties.cases import versions
from ..properties.report import Finding, ImplementationReport
from ..properties.telling import compact
from .junit import legal
from .summary import (
    Summary,
    known_findings,
    new_findings,
    reason_idle,
    rejected,
    seconds,
    state,
)

STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; display: block; overflow-x: auto; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #8884; text-align: left; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { padding: .5rem .75rem; background: #8881; overflow-x: auto; }
.PASS, .conforming { color: #1a7f37; } .KNOWN, .UNSUPPORTED { color: #9a6700; }
.FINDINGS, .ERROR, .FAIL, .HANG, .CRASH, .REJECTED, .FLAKY, .nonconforming, .error
{ color: #cf222e; }
"""


def to_html(summary: Summary) -> str:
    """Give a self-contained page with the verdict, the tables and every finding."""
    report = summary.report
    facts = [
        ("command", summary.command),
        ("date", summary.date),
        ("profile", report.profile),
        ("seed", report.seed),
        ("device", " ".join(str(report.target.get(n) or "") for n in ("device", "device_name"))),
        *((name, value) for name, value in versions(report.target).items() if value),
    ]
    new = [finding for each in report.implementations for finding in new_findings(each)]
    known = [
        (k.implementation, k.entry, ", ".join(k.laws), k.count, k.reason, k.issue)
        for each in report.implementations
        for k in known_findings(each, summary.ledger)
    ]
    parts = [
        f'<h1>Kernelproof: <span class="{summary.verdict}">{summary.verdict}</span></h1>',
        f"<p>{_text(summary.sentence)}</p>",
        table(("", ""), facts),
        "<h2>Implementations</h2>",
        table(
            ("implementation", "status", "judged", "unsupported", "rejected", "new", "known",
             "seconds", ""),
            [_row(each, summary) for each in report.implementations],
        ),
        *(["<h2>New findings</h2>", *map(_finding, new)] if new else []),
    ]  # fmt: skip
    if known:
        heads = ("implementation", "entry", "laws", "problems", "reason", "issue")
        parts += ["<h2>Known findings</h2>", table(heads, known)]
    parts.append("<h2>Laws</h2>")
    for each in report.implementations:
        if each.laws:
            parts += [f"<h3>{_text(each.name)}</h3>", _laws(each)]
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Kernelproof: {summary.verdict}</title>\n<style>{STYLE}</style></head>\n"
        "<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Give a table; every cell is escaped, numbers stand to the right."""
    head = "".join(f"<th>{_text(each)}</th>" for each in heads)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, (int, float)):
        shown = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
        return f'<td class="number">{shown}</td>'
    kind = str(value)
    coloured = f' class="{kind}"' if kind.isascii() and kind.isalpha() and kind.isupper() else ""
    return f"<td{coloured}>{_text(kind)}</td>"


def _row(report: ImplementationReport, summary: Summary) -> tuple[object, ...]:
    new = len(new_findings(report))
    return (
        report.name,
        state(report),
        report.judged,
        report.unsupported,
        rejected(report),
        new,
        len(report.findings) - new,
        round(seconds(report), 1),
        reason_idle(report, summary),
    )


def _laws(report: ImplementationReport) -> str:
    heads = ("law", "verdict", "judged", "unsupported", "nothing to look at", "rejected",
             "worst error / bound", "seconds", "")  # fmt: skip
    return table(
        heads,
        [
            (law.law, law.verdict, law.judged, law.unsupported, law.vacuous, law.rejected,
             law.worst_ratio, law.seconds, "ended early" if law.truncated else "")
            for law in report.laws
        ],
    )  # fmt: skip


def _finding(finding: Finding) -> str:
    verdict = finding.verdict
    title = f"{verdict.status} {verdict.kind}".strip()
    who = f"{finding.implementation}, {finding.law}"
    trace = f"<details><summary>trace</summary><pre>{_text(verdict.trace)}</pre></details>"
    return (
        f'<h3><span class="{_text(verdict.status)}">{_text(title)}</span> {_text(who)}</h3>\n'
        f"<p>{_text(verdict.message)}</p>\n<pre>{_text(compact(finding.problem))}\n"
        f"{_text(finding.replay)}</pre>\n{trace if verdict.trace else ''}"
    )


def _text(value: object) -> str:
    return escape(legal(str(value)))
