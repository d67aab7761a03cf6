"""Count the kernels with two faults whose report has two findings with true conditions.

python tests/properties/findings/two_fault_measure.py [--kept-aside] [--profile P] [PAIR ...]
"""

# ruff: noqa: T201  a command
from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from kernelproof.impl import Target
from kernelproof.properties.findings.causes import Cause, causes_of
from kernelproof.properties.findings.ledger import holds
from kernelproof.properties.laws import find_law
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.space.axes import Axes, narrow
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.space.rounds import draw_problems
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.operations import OPERATIONS
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import Problem

KERNELS = Path(__file__).parents[1] / "two_fault_kernels.py"
"""File of the kernels, which is no module of a package."""
SAMPLE, SEED = 400, 20_260_417
"""Problems on which conditions are measured, and their seed: no run draws the same."""
NEARLY = 0.9
"""Least share of problems that a true condition selects rightly, each way."""
SIZES = {"most_keys", "most_queries", "num_requests", "num_pages"}
"""Names that any condition may have beside its option, as long as it selects rightly."""


def _loaded() -> Any:  # noqa: ANN401  a module
    spec = importlib.util.spec_from_file_location("two_fault_kernels", KERNELS)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


kernels = _loaded()


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


@cache
def sample(operation: str, features: tuple[str, ...]) -> tuple[Problem, ...]:
    """Return problems that a kernel with these features takes."""
    made = kernels.kernel_of("sample", [kernels.Fault("", operation, bool, frozenset(), features)])
    target = Target.here("cpu")
    axes = narrow(operation, lambda asked: [made.refusal(each, target) for each in asked], 50_000)
    assert isinstance(axes, Axes)
    drawn = draw_problems(axes, PROFILES["quick"], SEED, SAMPLE)
    return tuple(each for each in drawn if made.refusal(each, target) is None)


@cache
def failing(name: str) -> frozenset[str]:
    """Return the ids of problems on which a kernel with only this fault is wrong."""
    fault = kernels.FAULTS[name]
    law = find_law(OPERATIONS[fault.operation].law)
    bad = set()
    for problem in sample(fault.operation, fault.features):
        subject = Subject(kernels.kernel_of(name, [fault]), Target.here("cpu"), Stages())
        try:
            verdict = law.check(subject, problem)
        except Stop as stop:
            verdict = stop.verdict
        if verdict.bad:
            bad.add(problem.id)
    return frozenset(bad)


def share(cause: Cause, name: str) -> tuple[float, float]:
    """Return which share of a fault's problems a condition selects, and of what it selects.

    A problem of which the fault is triggered, but cannot be seen, is selected rightly too.
    """
    fault = kernels.FAULTS[name]
    problems = sample(fault.operation, fault.features)
    wrong = [each for each in problems if each.id in failing(name)]
    selected = [each for each in problems if holds(each, cause.values)]
    recall = sum(holds(each, cause.values) for each in wrong) / max(len(wrong), 1)
    precision = sum(map(fault.triggered, selected)) / max(len(selected), 1)
    return recall, precision


def is_true(cause: Cause, name: str) -> bool:
    """Whether a condition names the option of a fault and no other, and selects its problems."""
    named = set(cause.values) <= kernels.FAULTS[name].names | SIZES
    return named and min(share(cause, name)) >= NEARLY


def told(found: Sequence[Cause], pair: Sequence[str]) -> bool:
    """Whether two findings name both faults."""
    if len(found) != len(pair):
        return False
    first, second = pair
    one, other = found
    return (is_true(one, first) and is_true(other, second)) or (
        is_true(one, second) and is_true(other, first)
    )


def findings_on(pair: Sequence[str], profile: str = "quick", laws: Sequence[str] = ()) -> Run:
    """Run all laws on the kernel with these faults."""
    reference = f"{KERNELS}:{kernels.title(pair)}"
    run = Run(Plan([reference], PROFILES[profile], laws=laws))
    run.execute()
    return run


def main() -> None:
    """Print a line for each finding, and the number of pairs with two true findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="*", help="names as of kernels.title; all if none")
    parser.add_argument("--kept-aside", action="store_true")
    parser.add_argument("--profile", default="quick")
    parser.add_argument("--laws", default="")
    asked = parser.parse_args()
    chosen = [
        pair
        for pair in (kernels.KEPT_ASIDE if asked.kept_aside else kernels.PAIRS)
        if not asked.pairs or kernels.title(pair) in asked.pairs
    ]
    right = 0
    for pair in chosen:
        start = time.monotonic()
        laws = tuple(filter(None, asked.laws.split(",")))
        (report,) = findings_on(pair, asked.profile, laws).report.implementations
        found = causes_of(report)
        good = told(found, pair)
        right += good
        seconds = time.monotonic() - start
        print(f"{'right' if good else 'WRONG'}  {kernels.title(pair)}  {seconds:.1f} s", flush=True)
        if report.error:
            print(f"    {report.error}")
        for cause in found:
            shares = [tuple(round(each, 2) for each in share(cause, name)) for name in pair]
            print(f"    {cause.finding.law}: {cause.sentence}  {shares}; {', '.join(cause.laws)}")
    print(f"{right} of {len(chosen)} kernels: both faults named, with true conditions")


if __name__ == "__main__":
    main()
