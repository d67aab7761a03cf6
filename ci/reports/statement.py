"""The lines at the start of a run: what is judged and built, what is not, and the deadline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from ...properties.findings.report import ImplementationReport
from ...properties.search.module_plan import Chosen
from ...properties.search.plan import Plan
from ...properties.verdicts.text import count_of
from .outline import not_run_text, refused


def opening(plan: Plan, seed: int, now: datetime) -> str:
    """Return the line on what was asked for, with the deadline of the run."""
    until = ""
    if plan.seconds < math.inf:
        end = now + timedelta(seconds=plan.seconds)
        until = f", until {end:%H:%M:%S} ({plan.seconds / 60:g} minutes)"
    return (
        f"{count_of(len(plan.implementations), 'implementation')} on {plan.device}, profile "
        f"{plan.profile.name}, seed {seed}{until}"
    )


def to_be_judged(
    reports: Sequence[ImplementationReport], modules: Mapping[str, Chosen]
) -> list[ImplementationReport]:
    """Return the implementations that were surveyed, refuse nothing, and have a module."""
    return [
        each
        for each in reports
        if each.operation and not each.error and not each.refusal and not _too_dear(each, modules)
    ]


def statement(
    reports: Sequence[ImplementationReport], modules: Mapping[str, Chosen], laws: int
) -> Iterator[str]:
    """Yield the lines on what will be judged and built, and what will not.

    Args:
        reports: of all implementations.
        modules: that were chosen, by implementation.
        laws: that will run, each counted once an implementation.
    """
    judged = to_be_judged(reports, modules)
    counted = count_of(len(judged), "implementation")
    if len(judged) == 1:
        yield f"to be judged: {counted} under {count_of(laws, 'law')}"
    else:
        yield f"to be judged: {counted}, each under the laws of its operation: {laws:,} in all"
    libraries = {
        module.library: module.exists for each in modules.values() for module in each.modules
    }
    if libraries:
        minutes = sum(each.minutes for each in modules.values())
        yield (
            f"modules: {sum(libraries.values())} exist, {len(libraries) - sum(libraries.values())} "
            f"to be built, in about {minutes:.0f} minutes of one core"
        )
    dear = [
        f"{each.name} ({modules[each.name].missing:.0f} minutes of one core)"
        for each in reports
        if _too_dear(each, modules)
    ]
    if dear:
        yield f"not built, for they take longer than the run may: {', '.join(dear)}"
    if reasons := refused(reports):
        yield f"not run: {not_run_text(reasons, len(reports))}"


def _too_dear(report: ImplementationReport, modules: Mapping[str, Chosen]) -> bool:
    chosen = modules.get(report.name)
    return chosen is not None and bool(chosen.missing) and not chosen.modules
