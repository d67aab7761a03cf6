"""What runs in a process of its own: finding an implementation's kernels, and judging mutants.

    python -m kernelproof.ci.mutate.trial MODULE...

It reads requests, a line of JSON each, and writes a line of JSON for each. It never imports a
mutant: workers do, which are new ones for each request.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from ...impl import ImplementationNotFoundError
from ...properties.findings.expectations import read_expectations
from ...properties.findings.report import EARLY, Finding, ImplementationReport
from ...properties.isolation.outcome import is_forceful
from ...properties.laws import LAWS
from ...properties.search.engine import Run
from ...properties.search.plan import Plan
from ...properties.space.profiles import PROFILES, Cost
from ...properties.space.restrictions import Only
from ...properties.worker.pools import PRELOAD, open_pool
from .finding_kernels import find_kernels
from .trials import READY

MOST_CHARACTERS = 300
"""Most characters of a message that is kept."""
LEAST_WORKERS = 2
"""Workers of whose time laws have their share: a check of one kernel has as many on two cores."""


def judge(request: dict[str, Any]) -> dict[str, Any]:
    """Run the laws, and return what they found.

    Args:
        request: the reference, the profile, the seed and the seconds of the run; the names of laws
            that are asked, all if none, and of those left out; what restricts problems; the cost
            class, where it is known; whether the run ends at its first finding; modules that
            workers have at their start.
    """
    profile = PROFILES[request["profile"]]
    seconds = profile.seconds * max(1, LEAST_WORKERS // request["jobs"])
    profile = replace(profile, shrink_seconds=0.0, seconds=seconds)
    asked = request["laws"] or [law.name for law in LAWS]
    reference, costs = request["reference"], request["costs"]
    plan = Plan(
        [reference],
        profile,
        seed=request["seed"],
        ledger=read_expectations(None),
        jobs=request["jobs"],
        laws=[law for law in asked if law not in request["without"]],
        only=Only.read(request["only"]),
        shrink_all=False,
        first_only=request["first_only"],
        exit_first=request["first_only"],
        confirm=False,
        costs={name: Cost(**cost) for name, cost in costs.items()},
        seconds=request["seconds"],
        preload=request["preload"],
    )
    run = Run(plan)
    report = run.execute().implementations[0]
    return {
        "judged": report.judged,
        "error": report.error or (report.refusal and str(report.refusal)) or "",
        "findings": [_shown(each) for each in _findings(report)],
        "costs": {name: vars(cost) for name, cost in run.costs.items()},
        "cut": [law.law for law in report.laws if law.ended in EARLY],
        "seconds": run.report.seconds,
        "preload": _installed({each.name for each in run.read(report) if each.kind == "module"}),
    }


def _installed(modules: Iterable[str]) -> list[str]:
    """Return those of some modules that no mutant is a part of: what else is installed."""
    places = {Path(sysconfig.get_path(each)) for each in ("purelib", "platlib")}
    own = str(__package__).partition(".")[0]

    @cache
    def of_others(package: str) -> bool:
        spec = find_spec(package) if package != own else None
        return spec is not None and any(
            Path(place).is_relative_to(each)
            for place in [spec.origin or "", *(spec.submodule_search_locations or ())]
            for each in places
        )

    return sorted(name for name in modules if of_others(name.partition(".")[0]))


def _findings(report: ImplementationReport) -> list[Finding]:
    found = [*report.replayed, *(law.finding for law in report.laws if law.finding)]
    shown = [each for each in found if each.verdict.bad or each.verdict.status == "FLAKY"]
    return [each for each in shown if not each.entry]


def _shown(finding: Finding) -> dict[str, Any]:
    verdict = finding.verdict
    return {
        "law": finding.law,
        "status": verdict.status,
        "kind": verdict.kind,
        "message": verdict.message[:MOST_CHARACTERS],
        "raised": verdict.status == "CRASH" and not is_forceful(verdict.kind),
        "trace": verdict.trace,
    }


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request, whatever it is."""
    try:
        if "find" in request:
            return find_kernels(request["find"], request["file"])
        answer = judge(request)
    except ImplementationNotFoundError as error:
        return {"refused": str(error)}
    # This process and the one whose forks the workers are have the same modules. Where a kernel is
    # among them, the next mutant needs others.
    loaded = {getattr(each, "__file__", None) for each in [*sys.modules.values()]}
    return {**answer, "last": not loaded.isdisjoint(request["files"])}


def main(preload: Sequence[str]) -> int:
    """Answer requests until there are no more.

    Args:
        preload: further modules that workers will have at their start.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what is printed is no answer
    with open_pool("cpu", preload=preload) as pool, pool.lease() as worker:
        for name in PRELOAD:
            importlib.import_module(name)
        worker.run({"task": "target", "device": "cpu"})  # the server of its forks has started
    for answer in chain([READY], map(answer_to, map(json.loads, sys.stdin))):
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
