"""What there is to judge of an implementation: what both releases support, laws, stored cases."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....impl.protocol import COMPILERS_A_BUILD
from ....properties.findings.corpus import Case, cases_of, load_case
from ....properties.findings.ledger import Entry
from ....properties.findings.report import ImplementationReport
from ....properties.laws import Law, find_law, laws_of
from ....properties.search.preparation import survey
from ....properties.space.axes import Axes
from ....properties.space.drawers import Drawers
from ....properties.space.profiles import on_device
from ....properties.worker.requests import Address, HarnessError
from ....reference import Problem
from ...console.errors import UsageRefusedError
from ..sides.plan import BumpPlan
from ..sides.releases import BASELINE, CANDIDATE, SIDES
from .asking import Asker, Bench, Side
from .records import Planned, Surveyed


def survey_both(name: str, reference: str, bench: Bench) -> Surveyed:
    """Learn what an implementation supports with each release."""
    plan = bench.plan
    max_work = plan.max_work(name, reference, on_device(plan.profile, plan.device).max_work)
    address = Address(reference, None, plan.device, soak=plan.soak)
    known = {side: surveyed(bench.sides[side], address, name, max_work, plan) for side in SIDES}
    axes = {
        side: Axes.from_json(each["axes"])
        for side, each in known.items()
        if each["axes"] is not None and not each["error"]
    }
    every = known.values()
    return Surveyed(
        name,
        reference,
        operation=_last(each["operation"] for each in every),
        backend=_last(each["backend"] for each in every),
        declares=frozenset().union(*(each["declares"] for each in every)),
        claims=tuple(dict.fromkeys(claim for each in every for claim in each["claims"])),
        reasons={
            side: each["reason"]
            for side, each in known.items()
            if side not in axes and not each["error"]
        },
        errors={side: each["error"] for side, each in known.items() if each["error"]},
        unimported=frozenset(
            side for side, each in known.items() if each["error"] and not each["operation"]
        ),
        axes=axes.get(CANDIDATE) or axes.get(BASELINE),
        refused=_refused_on_one(axes),
        addresses=dict.fromkeys(axes, address),
        build_minutes=max(each["build_minutes"] for each in every),
        build_compilers=known[CANDIDATE]["build_compilers"],
    )


def _refused_on_one(axes: Mapping[str, Axes]) -> dict[str, dict[str, str]]:
    """Return by side, where both have axes, the values that are refused there only."""
    if len(axes) < len(SIDES):
        return {}
    return {
        side: {k: v for k, v in axes[side].refused.items() if k not in axes[other].refused}
        for side, other in (SIDES, SIDES[::-1])
    }


def _last(words: Iterable[str]) -> str:
    """Return the last of some words that is not empty."""
    return next(filter(None, reversed([*words])), "")


def surveyed(
    side: Side, address: Address, name: str, max_work: int, plan: BumpPlan
) -> dict[str, Any]:
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


def _survey(
    side: Side, address: Address, name: str, max_work: int, plan: BumpPlan
) -> dict[str, Any]:
    report, axes = ImplementationReport(name, address.reference), None
    try:
        axes = survey(Asker(side), address, max_work, report, plan.only)
    except HarnessError as error:  # its process, say, does not start
        report.error = str(error)
    declared = report.declared
    imported = "" if report.operation else "cannot be imported: "
    return {
        "axes": axes and axes.to_json(),
        "operation": report.operation,
        "backend": str(declared.get("backend", "")),
        "declares": declared.get("declares", []),
        "claims": declared.get("claims", []),
        "build_minutes": declared.get("build_minutes", 0.0) if declared.get("build_ahead") else 0.0,
        "build_compilers": declared.get("build_compilers", COMPILERS_A_BUILD),
        "error": report.error and f"{imported}{report.error}",
        "reason": report.refusal or "",
    }


def cases_to_judge(found: Surveyed, plan: BumpPlan) -> list[tuple[Case, Entry | None]]:
    """Return the stored cases of an implementation, each with the entry of the ledger it is of."""
    entries = [(entry, load_case(entry.case)) for entry in _entries_of(found, plan) if entry.case]
    return [
        *((case, entry) for entry, case in entries if not entry.quarantine),
        *((case, None) for case in _further_cases(found, plan)),
        # Whether a hang or a death was fixed is what a bump is about; they come last all the same.
        *((case, entry) for entry, case in entries if entry.quarantine),
    ]


def laws_to_judge(found: Surveyed, plan: BumpPlan) -> dict[Law, int]:
    """Return the laws that judge an implementation, and the number of problems that each draws."""
    every = laws_of(found.operation)
    return {
        law: plan.count(law, first=law is every[0], sides=len(found.runs))
        for law in every
        if (not plan.laws or law.name in plan.laws)
        and law.concerns(found.declares)
        and (found.axes is None or _axes_for(law, found) is not None)
    }


def to_judge(found: Surveyed, plan: BumpPlan, **chosen: Any) -> Planned:  # noqa: ANN401  fields
    """Return what is to be judged of an implementation, with what was chosen of its modules."""
    planned = Planned.after(found, **chosen)
    laws = {law.name: count for law, count in laws_to_judge(planned, plan).items()}
    return replace(planned, planned={"": len(cases_to_judge(planned, plan)), **laws})


def refuse_laws(compared: Sequence[Surveyed], laws: Sequence[str]) -> None:
    """Refuse a law that speaks of no operation of what is compared.

    Raises:
        UsageRefusedError: names it.
    """
    operations = {each.operation for each in compared}
    if not operations or "" in operations:  # what does not import may be of any
        return
    for name in laws:
        spoken = find_law(name).operations
        if operations.isdisjoint(spoken):
            message = (
                f"--law {name}: speaks of {', '.join(sorted(spoken))}; what is compared is "
                f"{', '.join(sorted(operations))}"
            )
            raise UsageRefusedError(message)


def draw(law: Law, count: int, found: Surveyed, plan: BumpPlan, drawers: Drawers) -> list[Problem]:
    """Draw the problems of a law."""
    axes = _axes_for(law, found)
    if axes is None:
        return []
    return drawers.problems(axes, plan.profile, _seed(law, found, plan), count)


def _axes_for(law: Law, found: Surveyed) -> Axes | None:
    """Return what holds something for a law; None if nothing does."""
    return found.axes and found.axes.within(law.looks_at)


def _entries_of(found: Surveyed, plan: BumpPlan) -> list[Entry]:
    """Return the ledger's entries of an implementation, whatever versions they speak of."""
    return [
        entry
        for entry in plan.ledger.entries
        if entry.implementation == found.name
        and entry.device in ("", plan.device)
        and (not plan.laws or any(map(entry.of_law, plan.laws)))
    ]


def _further_cases(found: Surveyed, plan: BumpPlan) -> list[Case]:
    """Return the stored cases of an implementation that no entry of the ledger speaks of."""
    cases = cases_of(found.reference, plan.corpus, _entries_of(found, plan))
    return [case for case in cases if not plan.laws or case.law in plan.laws]


def _seed(law: Law, found: Surveyed, plan: BumpPlan) -> int:
    text = f"bump|{law.name}|{found.name}|{plan.seed}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
