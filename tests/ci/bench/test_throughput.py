"""Problems a second and the stages of a judgement are printed; how many, no test decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kernelproof.ci.bench import throughput
from kernelproof.ci.bench.command import bench
from kernelproof.reference import AttentionProblem


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, arguments, catch_exceptions=False)


def test_it_prints_rates_and_stages(tmp_path: Path) -> None:
    file = tmp_path / "throughput.json"
    arguments = ("torch-sdpa-paged", "--seconds", "0.5", "--jobs", "2", "--json", str(file))
    result = run("throughput", *arguments)
    assert result.exit_code == 0, result.output  # on a CPU nothing is required
    for stage in throughput.STAGES:
        assert f"torch-sdpa-paged  {stage}" in result.output
    [benchmark] = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
    rates, stages = benchmark["tables"]
    assert [row[:2] for row in rates["rows"]] == [
        ["torch-sdpa-paged", 1],
        ["torch-sdpa-paged", 2],
    ]
    assert all(row[2] > 0 and row[3] > 0 for row in rates["rows"])
    assert sum(row[3] for row in stages["rows"]) == pytest.approx(100, abs=1)


@pytest.mark.parametrize(
    ("jobs", "rate", "line"),
    [
        (1, 299.0, "MISSED  problems a second, mine: 299 (at least 300)"),
        (1, 300.0, "met     problems a second, mine: 300 (at least 300)"),
        (12, 1234.5, "MISSED  problems a second, mine: 1234 (at least 1300)"),
        (12, 1300.0, "met     problems a second, mine: 1300 (at least 1300)"),
    ],
)
def test_a_rate_below_the_goal_is_printed_as_missed(jobs: int, rate: float, line: str) -> None:
    low = throughput.ONE_WORKER if jobs == 1 else throughput.SEVERAL_WORKERS
    [required] = throughput._required("mine", rate, low, "cuda")
    assert required.text() == line
    assert required.met == line.startswith("met")
    assert not throughput._required("mine", rate, low, "cpu")


def test_problems_are_small_batches_of_four() -> None:
    drawn = AttentionProblem(query_lens=(7, 1), seq_lens=(700, 20))
    problem = throughput._of_four(drawn)
    assert problem.query_lens == (7, 1, 7, 1)
    assert problem.seq_lens == (300, 20, 300, 20)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing-of-the-kind", "no registered implementation"),
        ("flashinfer-trace-merge-state", "merge_state"),
    ],
)
def test_what_cannot_be_judged_is_refused(name: str, message: str) -> None:
    result = run("throughput", name, "--seconds", "0.1")
    assert result.exit_code == 2
    assert message in result.output
