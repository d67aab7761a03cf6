"""The general laws find FlashInfer's faults by themselves, with no case written for them.

They need flashinfer-python 0.7.2.post1, whose faults these are; a later release may mend them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernelproof.impl.targets.optional import missing
from kernelproof.impl.targets.target import installed_version
from kernelproof.properties.findings.ledger import Ledger, load_ledger
from kernelproof.properties.findings.report import Finding, ImplementationReport
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.reference import AttentionProblem, MergeProblem

VERSION = "0.7.2.post1"
LAWS = ("parity", "well_formed", "unused_memory", "merge_identity", "merge_commutativity")
PROFILE = replace(PROFILES["quick"], problems=40)
NAMES = (
    "flashinfer-triton-merge-state",
    "flashinfer-trace-merge-state",
    "flashinfer-trace-paged-decode",
)


def _reason() -> str | None:
    absent = missing("triton", "triton") or missing("flashinfer", "flashinfer")
    if absent is None and installed_version("flashinfer-python") != VERSION:
        return f"these are the faults of flashinfer-python {VERSION}"
    return absent


pytestmark = pytest.mark.skipif(_reason() is not None, reason=str(_reason()))


def test_their_faults_are_found() -> None:
    """In one test: the run takes most of a minute, and tests of a file are in several processes."""
    reports = judged()
    for name in NAMES[:2]:
        assert_merging_two_empty_states_gives_nan(reports[name])
    assert_the_whole_last_page_is_counted(reports["flashinfer-trace-paged-decode"])


def judged() -> dict[str, ImplementationReport]:
    run = Run(Plan(NAMES, PROFILE, ledger=Ledger(), laws=LAWS, jobs=2)).execute()
    reports = {report.name: report for report in run.implementations}
    assert tuple(reports) == NAMES
    for report in reports.values():
        assert not report.error, report.error
        assert report.judged >= 20
        assert all(finding.entry is None for finding in report.findings)
    return reports


def finding(report: ImplementationReport, law: str, kind: str) -> Finding:
    found = {(each.law, each.verdict.kind): each for each in report.findings}
    assert (law, kind) in found, sorted(found)
    assert found[law, kind].verdict.status == "FAIL"
    return found[law, kind]


def assert_merging_two_empty_states_gives_nan(report: ImplementationReport) -> None:
    # Under whichever law: the first that parity meets may be bfloat16, which Triton's interpreter
    # stores inexactly.
    found = [each for each in report.findings if each.verdict.kind == "nan"]
    assert found
    assert {each.verdict.status for each in found} == {"FAIL"}
    problem = min(found, key=lambda each: each.problem.work).problem
    assert isinstance(problem, MergeProblem)
    assert problem.empty in ("some", "all")
    assert (problem.num_states, problem.num_tokens, problem.num_heads) == (2, 1, 1)
    assert problem.dtype == "float32"
    assert problem.regime == "iid"


def assert_the_whole_last_page_is_counted(report: ImplementationReport) -> None:
    found = finding(report, "parity", "numeric")
    problem = found.problem
    assert isinstance(problem, AttentionProblem)
    assert problem.partial_last_page
    assert (problem.query_lens, problem.num_qo_heads) == ((1,), 1)
    assert problem.seq_lens[0] < problem.page_size
    assert problem.page_size == 2
    plain = AttentionProblem(
        seq_lens=problem.seq_lens, page_size=2, dtype="bfloat16", causal=problem.causal
    )
    assert replace(problem, seed=0) == plain
    poisoned = finding(report, "unused_memory", "nan").problem
    assert isinstance(poisoned, AttentionProblem)
    assert poisoned.partial_last_page


def test_the_shipped_ledger_explains_what_is_found() -> None:
    plan = Plan(NAMES, PROFILE, ledger=load_ledger(), laws=LAWS, jobs=2)
    run = Run(plan).execute()
    assert run.unknown == []
    assert {each.implementation for each in run.findings} == set(NAMES)
