"""Reading what a worker answers, which the code under test may have written itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kernelproof.properties.findings.report import Finding
from kernelproof.properties.findings.text_format import element_lines
from kernelproof.properties.isolation.outcome import Outcome
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.distrust import GARBLED
from kernelproof.properties.worker.requests import verdict_of
from kernelproof.reference import MergeProblem

ELEMENT = {"where": "out[0]", "got": "1", "expected": "2", "bound": "0.1"}
MAP = {"tensor": "out", "shape": [4, 2], "step": [1, 1], "worst": [[0.5, 2.0]] * 4}
FAIL: dict[str, Any] = {
    "status": "FAIL",
    "kind": "numeric",
    "message": "out[0] is 1, expected 2",
    "ratio": float("inf"),
    "element": ELEMENT,
    "error_map": MAP,
    "worst": [{**ELEMENT, "at": {"token": 0}}],
    "about": MergeProblem().to_json(),
}


def said(result: dict[str, Any]) -> Verdict:
    return verdict_of(Outcome("done", json.loads(json.dumps(result))))


def test_a_verdict_is_read_as_it_was_written() -> None:
    written = Verdict(**FAIL)
    assert said(written.to_json()) == written


@pytest.mark.parametrize(
    "odd",
    [
        {"status": "GOOD"},
        {"status": ["PASS"]},
        {"kind": 3},
        {"message": None},
        {"seconds": -1.0},
        {"seconds": float("nan")},
        {"calls": -1},
        {"judged": True},
        {"worst": 3},
        {"worst": ["out"]},
        {"worst": [ELEMENT]},
        {"worst": [{**ELEMENT, "at": [0]}]},
        {"element": {"where": "out"}},
        {"error_map": {}},
        {"error_map": {**MAP, "worst": []}},
        {"error_map": {**MAP, "worst": [[]]}},
        {"error_map": {**MAP, "worst": [["1"]]}},
        {"error_map": {**MAP, "worst": [[1.0]] * 65}},
        {"error_map": {**MAP, "shape": []}},
        {"error_map": {**MAP, "step": [0, 1]}},
        {"error_map": {**MAP, "step": [1]}},
        {"about": {"type": "none"}},
        {"about": 3},
        {"kernels": {"kernel.py": {"ran": "-1", "launched": {}, "compiled": {}}}},
        {"kernels": {"kernel.py": {"ran": "", "launched": {"none": {}}, "compiled": {}}}},
        {"kernels": {"kernel.py": {"ran": "ff"}}},
        {"ended": []},
        {"ended": {"status": "done", "result": {"status": "PASS"}}},
        {"ended": {"status": "hang", "limit": "long"}},
    ],
    ids=str,
)
def test_what_is_no_verdict_is_a_crash_of_the_kernel(odd: dict[str, Any]) -> None:
    verdict = said({**FAIL, **odd})
    assert (verdict.status, verdict.kind) == ("CRASH", GARBLED)
    finding = Finding("odd", "parity", verdict, MergeProblem())
    json.dumps(finding.to_json())
    assert not element_lines(verdict)


def test_a_fork_that_hung_is_a_hang() -> None:
    ended = {"status": "hang", "kind": "run", "stage": "run", "limit": 2.0}
    assert said({"ended": ended}).status == "HANG"
