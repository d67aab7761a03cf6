"""What a run says at its start."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

from kernelproof.ci.reports.progress import opening, statement
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.findings.report import ImplementationReport
from kernelproof.properties.search.module_plan import Chosen
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.space.module_selection import Module
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.reference import AttentionProblem

NOON = datetime(2026, 1, 1, 12, 0, tzinfo=timezone.utc)
FIRST = AttentionProblem()


def named(name: str, refusal: Refusal | None = None) -> ImplementationReport:
    return ImplementationReport(name, name, "moe", refusal=refusal)


def test_the_opening_says_until_when() -> None:
    plan = Plan(["a", "b"], PROFILES["gate"], device="cuda")
    assert opening(plan, 0, NOON) == "2 implementations on cuda, profile gate, seed 0"
    until = opening(replace(plan, seconds=900.0), 0, NOON)
    assert until.endswith(", until 12:15:00 (15 minutes)")


def test_what_is_judged_and_built_is_said_and_what_is_not() -> None:
    reports = [
        named("decode"),
        named("prefill"),
        named("cutlass-moe"),
        named("cute-moe", Refusal("without cutlass", "package", "nvidia-cutlass-dsl")),
        named("xqa", Refusal("another chip", "rules", "xqa")),
    ]
    shared = Module("a", {}, FIRST, "fa2 a")
    modules = {
        "decode": Chosen([shared, Module("b", {}, FIRST, "fa2 b", exists=True)], 5.5),
        "prefill": Chosen([shared]),
        "cutlass-moe": Chosen([], 0.0, 432.0),
    }
    refused = "1 needs nvidia-cutlass-dsl, 1 refused by the support rules"
    assert list(statement(reports, modules, 40)) == [
        "to be judged: 2 implementations, each under the laws of its operation: 40 in all",
        "modules: 1 exist, 1 to be built, in about 6 minutes of one core",
        "not built, for they take longer than the run may: cutlass-moe (432 minutes of one core)",
        f"not run: 2 of 5 implementations: {refused}",
    ]
