"""What Triton's interpreter ran is known, wherever Triton was imported, and called interpreted."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from kernelproof.ci.reports.html_report import to_html
from kernelproof.ci.reports.json_report import to_json
from kernelproof.ci.reports.run_outline import print_summary, to_junit
from kernelproof.ci.reports.summary import Summary, interpreted_text, summarise
from kernelproof.impl.gpu.interpreted import CAVEATS, NOTE
from kernelproof.properties.findings.ledger import Ledger
from kernelproof.properties.findings.report import ImplementationReport, LawReport, RunReport
from kernelproof.properties.isolation.workers import Deadlines, Worker
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.pools import open_pool
from kernelproof.reference import MergeProblem

LATE = '''
import functools
import importlib.util

import torch

from kernelproof.impl import implementation


@functools.cache
def kernel():
    spec = importlib.util.spec_from_file_location("late_kernel", {path!r})
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.weigh


@implementation("merge_state", name="late")
def late(inputs):
    """Merge states, one element a program, by a kernel whose file imports Triton in the call."""
    import triton

    lse = inputs.lses.logsumexp(0)
    weights = (inputs.lses - lse).exp().nan_to_num(0.0)
    outs = inputs.outs.contiguous()
    states, tokens, heads, dim = outs.shape
    out = torch.empty(tokens, heads, dim, dtype=inputs.out_dtype)
    if out.numel():
        rows, size = tokens * heads, triton.next_power_of_2(dim)
        kernel()[(rows,)](outs, weights, out, states, rows, dim, size)
    return out, lse


@implementation("merge_state", name="plain")
def plain(inputs):
    lse = inputs.lses.logsumexp(0)
    weights = (inputs.lses - lse).exp().nan_to_num(0.0)
    summands = inputs.outs.float().nan_to_num(0.0) * weights[..., None]
    return summands.sum(0).to(inputs.out_dtype), lse
'''
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def weigh(outs, weights, out, states, rows, dim, size: tl.constexpr):
    row = tl.program_id(0)
    places = tl.arange(0, size)
    kept = places < dim
    total = tl.zeros([size], tl.float32)
    for state in range(states):
        weight = tl.load(weights + state * rows + row)
        number = tl.load(outs + (state * rows + row) * dim + places, mask=kept, other=0.0)
        total += tl.where(weight > 0, number.to(tl.float32) * weight, 0.0)
    tl.store(out + row * dim + places, total, mask=kept)
"""


@pytest.fixture
def worker() -> Iterator[Worker]:
    with open_pool("cpu", standby=False) as pool, pool.lease() as worker:
        yield worker


def judged(worker: Worker, name: str, problem: MergeProblem) -> Verdict:
    payload = {
        "task": "judge",
        "implementation": name,
        "operation": "merge_state",
        "law": "parity",
        "problem": problem.to_json(),
        "device": "cpu",
    }
    outcome = worker.run(payload, Deadlines())
    assert outcome.status == "done", outcome
    return Verdict.from_json(outcome.result or {})


def test_a_kernel_that_imports_triton_in_its_call_is_right_and_interpreted(
    worker: Worker, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    (tmp_path / "late_kernel.py").write_text(KERNEL)
    file = tmp_path / "late.py"
    file.write_text(LATE.format(path=str(tmp_path / "late_kernel.py")))
    problem = MergeProblem(num_states=3, num_tokens=4, head_dim=64, dtype="bfloat16")
    verdict = judged(worker, f"{file}:late", problem)  # the first call of its process
    assert (verdict.status, verdict.interpreted) == ("PASS", True), verdict
    verdict = judged(worker, f"{file}:plain", problem)
    assert (verdict.status, verdict.interpreted) == ("PASS", False), verdict
    assert "interpreted" not in verdict.to_json()


def run_of(*names: str) -> Summary:
    reports = [
        ImplementationReport(
            name, name, "merge_state", laws=[LawReport("parity", judged=7, interpreted=True)]
        )
        for name in names
    ]
    compiled = ImplementationReport(
        "compiled", "compiled", "merge_state", laws=[LawReport("parity", judged=7)]
    )
    run = RunReport("quick", 3, {"device": "cpu", "device_name": "x"}, [*reports, compiled])
    return summarise(run, Ledger(), gate=False, command="kernelproof check x")


def screen(summary: Summary, *, verbose: bool = False) -> str:
    stream = io.StringIO()
    print_summary(Console(file=stream, width=100), summary, verbose=verbose)
    return stream.getvalue()


def test_every_form_of_the_report_says_interpreted_and_what_that_leaves_open() -> None:
    summary = run_of("mine")
    assert f"interpreted: mine: {NOTE}\n" in screen(summary)
    for caveat in CAVEATS:
        assert caveat in screen(summary, verbose=True)
        assert caveat.replace("'", "&#39;") in to_html(summary)
        assert caveat in to_junit(summary)
    assert "<strong>interpreted:</strong> mine: " in to_html(summary)
    mine, compiled = to_json(summary)["implementations"]
    assert (mine["interpreted"], mine["caveats"]) == (True, list(CAVEATS))
    assert (compiled["interpreted"], compiled["caveats"]) == (False, [])


def test_one_line_tells_of_all_and_of_none() -> None:
    assert interpreted_text(run_of()) == ""
    assert "interpreted" not in screen(run_of())
    several = run_of(*"abcde")
    assert interpreted_text(several) == f"5 implementations (-v names them): {NOTE}"
    assert interpreted_text(several, verbose=True).startswith(f"a, b, c, d, e: {NOTE}: ")
