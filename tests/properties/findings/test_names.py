"""Of implementations with one name, each has its MODULE:NAME in the report."""

from __future__ import annotations

import pytest

from kernelproof.properties.findings.names import Names, shared_names, tell_apart
from kernelproof.properties.findings.report import Finding, ImplementationReport
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import MergeProblem


def test_while_a_run_goes_on_the_second_of_a_name_has_its_file_in_it() -> None:
    names = Names()
    assert names.tell("mine", "one.py:a") == "mine"
    assert names.tell("mine", "two.py:a") == "mine (two.py:a)"
    assert names.tell("mine", "one.py:a") == "mine"
    assert names.tell("other", "two.py:b") == "other"


def test_a_name_is_shared_by_several_references_not_by_one_given_twice() -> None:
    assert shared_names([("a", "x:1"), ("a", "x:2"), ("b", "x:3"), ("b", "x:3")]) == {"a"}


@pytest.mark.parametrize("first", [0, 1])
def test_a_report_tells_two_of_one_name_apart_whichever_came_first(first: int) -> None:
    reports = [ImplementationReport("mine", f"one.py:{name}") for name in "ab"]
    reports.append(ImplementationReport("other", "one.py:c"))
    reports[1 - first].name = f"mine (one.py:{'ab'[1 - first]})"
    for report in reports[:2]:
        report.declared = {"name": "mine"}
        report.replayed = [Finding("mine", "parity", Verdict("FAIL"), MergeProblem())]
    for _ in range(2):
        tell_apart(reports)
        assert [each.name for each in reports] == ["mine (one.py:a)", "mine (one.py:b)", "other"]
        assert all(each.findings[0].implementation == each.name for each in reports[:2])
