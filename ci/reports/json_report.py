"""The results of a run as JSON."""

from __future__ import annotations

from typing import Any

from ... import __version__
from ...properties.findings.cases import versions
from ...properties.findings.causes import causes_of
from ...properties.findings.launched import kernels_of
from ...properties.findings.report import RATIO_EDGES
from .kernels import launched_in
from .law_times import law_times, worth
from .shape import SCHEMA
from .summary import Summary, known_findings, rejected, reused, seconds, state


def to_json(summary: Summary) -> dict[str, Any]:
    """Return everything that a run learned."""
    report = summary.report
    known = [
        each
        for implementation in report.implementations
        for each in known_findings(implementation, summary.ledger)
    ]
    run_seconds = sum(map(seconds, report.implementations))
    reasons = {each.entry: {"reason": each.reason, "issue": each.issue} for each in known}
    return {
        "schema": SCHEMA,
        "verdict": summary.verdict,
        "message": summary.sentence,
        "exit_code": summary.code,
        "judged": report.judged,
        "unsupported": sum(each.unsupported for each in report.implementations),
        "rejected": sum(rejected(each) for each in report.implementations),
        "corpus": report.corpus.to_json(),
        "seconds": round(report.seconds, 3),
        "build_seconds": round(sum(each.build_seconds for each in report.implementations), 3),
        "run_seconds": round(run_seconds, 3),
        "time_by_law": law_times(summary),
        "launched": launched_in(report.implementations).numbers(),
        "reused": reused(report),
        "findings": [
            {
                **cause.to_json(),
                "declared_name": each.declared_name,
                "problem_id": cause.finding.problem.id,
                "kernels": kernels_of(each.launched, cause.finding.verdict.launched),
                **reasons.get(cause.finding.entry or "", {}),
            }
            for each in report.implementations
            for cause in causes_of(each)
        ],
        "known": [vars(each) for each in known],
        "implementations": [
            {
                **each.to_json(),
                "status": state(each),
                "rejected": rejected(each),
                "run_seconds": round(seconds(each), 3),
                **worth(each, run_seconds),
            }
            for each in report.implementations
        ],
        "lost_claims": [each.to_json() for each in summary.lost],
        "broken": [vars(each) for each in report.broken],
        "ratio_edges": RATIO_EDGES,
        "profile": report.profile,
        "seed": report.seed,
        "device": report.target.get("device"),
        "target": {**report.target, **versions(report.target)},
        "respawns": report.respawns,
        "left": [vars(each) for each in report.left],
        "interrupted": report.interrupted,
        "ended": report.ended,
        "milestones": vars(report.milestones),
        "lost": report.lost,
        "error": summary.failure,
        "kernelproof": __version__,
        "date": summary.date,
        "command": summary.command,
        **({"published": dict(summary.published)} if summary.published else {}),
    }
