"""Kernels that changed with a release are listed, with the names of both."""

from __future__ import annotations

from typing import Any

from kernelproof.ci.bump.behaviour.launched import launched_findings
from kernelproof.ci.bump.behaviour.records import Compared, Tried
from kernelproof.ci.bump.sides.releases import SIDES
from kernelproof.ci.bump.verdicts.findings import CHANGES, REPORT
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import MergeProblem

PROBLEM = MergeProblem(num_states=2, num_tokens=1)


def verdict(*kernels: str, size: int = 3) -> Verdict:
    call: dict[str, Any] = {"id": f"{len(kernels):010x}", "step": "run", "module": "m"}
    call |= {"features": [], "size": size, "kernels": list(kernels)}
    return Verdict("PASS", launched={"calls": [call]})


def tried(old: Verdict, new: Verdict) -> Tried:
    return Tried("parity", PROBLEM, dict(zip(SIDES, (old, new), strict=True)))


def test_other_kernels_of_one_call_are_named() -> None:
    members = [
        tried(verdict("void ns::old<1>(int)", "merge"), verdict("void ns::new_one<2>()", "merge")),
        tried(verdict("same", size=4), verdict("void same<8>(int)", size=4)),
    ]
    (found,) = launched_findings([Compared("mine", "made.up:mine", tried=members)], ())
    assert CHANGES[found.change].action == REPORT
    assert found.message == (
        "mine: other kernels in 1 of 2 specialisations: ns::new_one in the place of ns::old"
    )
    assert found.baseline == {"kernels": ["run m 3: ns::old, merge"]}
    assert found.problem
    assert found.problem["id"] == PROBLEM.id


def test_the_same_kernels_and_unknown_ones_are_no_change() -> None:
    members = [
        tried(verdict("same"), verdict("same")),
        tried(verdict("seen", size=9), Verdict("PASS")),
    ]
    assert not [*launched_findings([Compared("mine", "made.up:mine", tried=members)], ())]
