"""What an implementation supports with one release, as one answer of the journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....impl.protocol import COMPILERS_A_BUILD
from ....properties.findings.report import ImplementationReport
from ....properties.search.preparation import survey
from ....properties.space.axes import Axes, all_axes, example
from ....properties.worker.requests import Address, refusals_of, verdict_of
from ..sides.plan import Plan
from .asking import Asker, Side


def surveyed(side: Side, address: Address, name: str, max_work: int, plan: Plan) -> dict[str, Any]:
    """Learn what an implementation supports on one side: its axes, or why there are none."""
    question = {
        "survey": address.request("survey"),
        "max_work": max_work,
        "only": {field: list(map(str, values)) for field, values in plan.only.values.items()},
    }
    known: dict[str, Any] = side.remember(
        question, lambda: _survey(side, address, name, max_work, plan)
    )
    return known


def _survey(side: Side, address: Address, name: str, max_work: int, plan: Plan) -> dict[str, Any]:
    report = ImplementationReport(name, address.reference)
    asker = Asker(side)
    found: dict[str, Any] = {"axes": None}
    reason = _refused_altogether(asker, address, report)
    axes = None
    if not reason and not report.error:
        axes = survey(asker, address, max_work, report, plan.only)
    if axes is not None:
        found["axes"] = axes_to_json(axes)
    declared = report.declared
    return {
        **found,
        "operation": report.operation,
        "backend": str(declared.get("backend", "")),
        "declares": declared.get("declares", []),
        "claims": declared.get("claims", []),
        "build_minutes": declared.get("build_minutes", 0.0) if declared.get("build_ahead") else 0.0,
        "build_compilers": declared.get("build_compilers", COMPILERS_A_BUILD),
        "error": report.error,
        "reason": reason or report.refusal or "",
    }


def _refused_altogether(asker: Asker, address: Address, report: ImplementationReport) -> str:
    """Return the one reason for which simple problems of every kind are refused, if there is one.

    Learning in full that a GPU is missing takes a hundred questions.
    """
    declared = asker.run(address.request("describe"))
    if declared.status != "done":
        # Importing that does not end is no HANG of a call; its process says no more than that.
        spoiled = declared.status == "error"
        why = declared.detail or declared.kind if spoiled else verdict_of(declared).message
        report.error = f"cannot be imported: {why.strip().splitlines()[-1]}"
        return ""
    described: dict[str, Any] = declared.result or {}
    if "error" in described:
        report.error = f"cannot be imported: {described['error']}"
        return ""
    report.declared, report.operation = described, str(described["operation"])
    axes = all_axes(report.operation)
    simplest = {name: values[0] for name, values in axes.items()}
    problems = [
        example(report.operation, {**simplest, name: value})
        for name, values in axes.items()
        for value in values
    ]
    asked = [problem.to_json() for problem in problems]
    reply: Any = asker.run(address.request("probe", problems=asked)).result or {}
    refusals = refusals_of(reply) if "refusals" in reply else [None]
    telling = {each for each in refusals if each is None or each.code != "feature"}
    return telling.pop() or "" if len(telling) == 1 else ""


def axes_to_json(axes: Axes) -> dict[str, Any]:
    """Return axes as JSON."""
    return {
        "operation": axes.operation,
        "values": {name: list(values) for name, values in axes.values.items()},
        "max_work": axes.max_work,
        "refused": dict(axes.refused),
        "simplest": dict(axes.simplest),
        "max_requests": axes.max_requests,
    }


def axes_from_json(data: Mapping[str, Any]) -> Axes:
    """Read back what ``axes_to_json`` gave: JSON's lists were tuples."""
    return Axes(
        data["operation"],
        {name: tuples(values) for name, values in data["values"].items()},
        data["max_work"],
        data["refused"],
        {name: tuples(value) for name, value in data["simplest"].items()},
        max_requests=data.get("max_requests", 0),
    )


def tuples(value: Any) -> Any:  # noqa: ANN401  JSON
    """Turn lists at any depth into tuples; of a mapping, those of its values."""
    if isinstance(value, dict):
        return {name: tuples(each) for name, each in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value
