"""The findings of a run as SARIF 2.1.0, which code scanning shows beside the lines of a change."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from ... import __version__
from ...properties.laws import LAWS
from ...properties.verdicts.text import compact, printable
from .places import Located, Place, located, of_the_run
from .summary import Summary, known_findings


def to_sarif(summary: Summary) -> dict[str, Any]:
    """Return a SARIF log of one run: a rule for each law, a result for each cause of findings."""
    judged = {law.law for each in summary.report.implementations for law in each.laws}
    found = list(located(summary))
    # GitHub takes no file in which a result has no place.
    results = [_result(each, summary) for each in found if each.places or each.outside]
    named = judged | {each.cause.finding.law for each in found}
    rules = [
        {
            "id": law.name,
            "shortDescription": {"text": f"{law.statement[0].upper()}{law.statement[1:]}."},
        }
        for law in LAWS
        if law.name in named
    ]
    notes = [
        {"level": level, "message": {"text": printable(text)}}
        for level, text in of_the_run(summary)
    ]
    notes += [
        {
            "level": each.level,
            "message": {"text": text_of(each)},
            "associatedRule": {"id": each.cause.finding.law},
        }
        for each in found
        if not (each.places or each.outside)
    ]
    driver = {"name": "Kernelproof", "semanticVersion": __version__, "rules": rules}
    invocation = {
        "commandLine": summary.command,
        "exitCode": summary.code,
        "executionSuccessful": summary.verdict != "error",
        "toolExecutionNotifications": notes,
    }
    run = {"tool": {"driver": driver}, "invocations": [invocation], "results": results}
    return {"version": "2.1.0", "runs": [run]}


def _result(found: Located, summary: Summary) -> dict[str, Any]:
    cause, finding = found.cause, found.cause.finding
    places = [_location(each) for each in found.places or found.outside]
    known = [
        {"kind": "external", "justification": each.reason}
        for report in summary.report.implementations
        for each in known_findings(report, summary.ledger)
        if report.name == finding.implementation and each.entry == finding.entry
    ]
    return {
        "ruleId": finding.law,
        "level": found.level,
        "message": {"text": text_of(found)},
        "locations": places[:1],
        **({"relatedLocations": places[1:]} if places[1:] else {}),
        **({"suppressions": known} if known else {}),
        "properties": {
            "implementation": finding.implementation,
            "laws": list(cause.laws),
            "status": finding.verdict.status,
            "kind": finding.verdict.kind,
            "problem": finding.problem.to_json(),
            "replay": finding.replay,
        },
    }


def _location(place: Place) -> dict[str, Any]:
    path = quote(place.file, errors="replace")
    inside = {"uri": path, "uriBaseId": "%SRCROOT%"}
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": f"file://{path}"} if path.startswith("/") else inside,
            "region": {"startLine": place.line},
        }
    }


def text_of(found: Located) -> str:
    """Return what is wrong, on which problem, and how to see it again."""
    finding = found.cause.finding
    lines = [
        f"{finding.implementation}: {finding.verdict.message}",
        f"problem: {compact(finding.problem)}",
        f"replay: {finding.replay}" if finding.replay else "",
    ]
    return printable("\n".join(filter(None, lines)))
