"""The benchmarks run and print; how fast a machine is, no test decides."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from kernelproof.ci.bench.results import Requirement, Results, Table
from kernelproof.reference import Arithmetic, paged_attention
from kernelproof.tests.bench import (
    experts as bench_experts,
)
from kernelproof.tests.bench import (
    oracle as bench_oracle,
)
from kernelproof.tests.bench.__main__ import bench
from kernelproof.tests.bench.memory import footprints, unmeasurable
from kernelproof.tests.bench.oracle import Case
from kernelproof.tests.bench.tightness import FEWEST_KEYS, Row, make_problem
from kernelproof.tests.bench.times import check_agreement


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, arguments, catch_exceptions=False)


class TestOracle:
    def test_it_prints_times_memory_and_requirements(self, tmp_path: Path) -> None:
        file = tmp_path / "oracle.json"
        small = ("--requests", "2", "--keys", "32", "--repetitions", "1", "--threads", "1")
        result = run("oracle", *small, "--json", str(file))
        assert result.exit_code in (0, 1)
        for text in (
            "2 decodes of 32 keys, 1 thread",
            "float32 loop",
            "oracle and bound, one pass",
            "1 prefills of 32 tokens",
            "oracle to loop, 1 thread",
        ):
            assert text in result.output
        assert "trace reference" in result.output  # its times, or why there are none
        data = json.loads(file.read_text(encoding="utf-8"))
        [benchmark] = data["benchmarks"]
        assert benchmark["met"] == (result.exit_code == 0)
        assert {each["met"] for each in benchmark["requirements"]} <= {True, False}

    def test_the_loop_it_compares_with_is_right(self) -> None:
        for case in (Case("decodes", 3, 1, 48), Case("prefills", 2, 32, 32)):
            inputs = bench_oracle._inputs(case)
            expected = paged_attention(inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata)
            difference = bench_oracle.float32_loop(inputs).double() - expected.out
            assert float(difference.abs().max()) < 1e-5

    def test_what_computes_something_else_is_not_timed(self) -> None:
        contenders = {
            bench_oracle.ORACLE: lambda: torch.zeros(2, dtype=torch.float64),
            "wrong": lambda: torch.ones(2),
        }
        with pytest.raises(RuntimeError, match="wrong is 1 off the oracle"):
            check_agreement(contenders, bench_oracle.ORACLE, bench_oracle.TOLERANCE)

    @pytest.mark.skipif(bool(unmeasurable()), reason="memory is measured on Linux alone")
    def test_memory_grows_with_the_keys(self) -> None:
        cases = (Case("short", 1, 1, 64), Case("long", 1, 1, 2048))
        small, large = footprints([(case.problem(), Arithmetic()) for case in cases])
        assert large.read == 8 * (32 * 128 + 2048 * 8 * 256)
        # At least the values of all heads in float64; the bound is slack, as for other allocators.
        assert large.peak > 2048 * 8 * 128 * 8 > small.peak
        assert large.ratio < 4

    def test_keys_are_whole_pages(self) -> None:
        result = run("oracle", "--keys", "40")
        assert result.exit_code == 2
        assert "--keys: 40 is no multiple of the page size, 16" in result.output


class TestExperts:
    def test_it_prints_times_memory_and_requirements(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        small = bench_experts.Case(1, top_k=2, experts=4, hidden=128, inter=128)
        monkeypatch.setitem(bench_experts.SHAPES, "8-of-128", small)
        file = tmp_path / "experts.json"
        tokens = ("--tokens", "3", "--tokens", "40", "--seconds", "0")
        dtypes = ("--dtype", "bfloat16", "--dtype", "float32")
        result = run("experts", *tokens, *dtypes, "--json", str(file))
        assert result.exit_code in (0, 1), result.output
        [benchmark] = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
        titles = [table["title"] for table in benchmark["tables"]]
        assert titles[:2] == [
            "2 of 4, 128 by 128, bfloat16, 1 thread, medians",
            "2 of 4, 128 by 128, float32, 1 thread, medians",
        ]
        assert [row[:2] for row in benchmark["tables"][0]["rows"]] == [[3, 3], [40, 3]]
        timed = [each for each in benchmark["requirements"] if "loop" in each["name"]]
        assert [each["high"] for each in timed] == [1.2, 2.0]  # of bfloat16 alone

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_the_loop_it_compares_with_is_right(self, dtype: torch.dtype) -> None:
        case = bench_experts.Case(9, top_k=3, experts=5, hidden=64, inter=96, dtype=dtype)
        contenders = bench_experts.contenders_of(
            bench_experts.weights_of(case), bench_experts.batch_of(case)
        )
        check_agreement(contenders, bench_experts.ORACLE, 1e-5)

    def test_memory_is_at_most_an_expert_in_float64(self) -> None:
        """Of one row, of more rows than are computed at once, and of a small expert."""
        cases = [
            bench_experts.Case(tokens, top_k, experts, hidden=1024, inter=1024)
            for tokens, top_k, experts in ((1, 1, 2), (200, 8, 16), (160, 2, 2), (600, 2, 2))
        ]
        cases.append(bench_experts.Case(1, 1, 2, hidden=128, inter=128))
        sizes = bench_experts.peaks(cases)
        assert sizes == bench_experts.peaks(cases)
        for case, size in zip(cases, sizes, strict=True):
            assert case.expert_bytes / 16 < size <= case.expert_bytes, case.name


class TestTightness:
    def test_it_prints_a_row_for_each_arithmetic_and_regime(self) -> None:
        result = run("tightness", "--problems", "4")
        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()
        assert sum(line.startswith("  bfloat16") for line in lines) == 14
        assert any(line.split()[:3] == ["float32", "float32", "iid"] for line in lines)

    def test_every_row_sees_enough_keys(self) -> None:
        for index in range(200):
            problem = make_problem(index, "bfloat16", "iid")
            for queries, keys in zip(problem.query_lens, problem.seq_lens, strict=True):
                assert keys - queries + 1 >= FEWEST_KEYS
            assert problem == make_problem(index, "bfloat16", "iid")

    def test_what_cannot_be_compared_misses_the_requirement(self) -> None:
        row = Row("bfloat16", "float32", "iid", [0.5], [0.1], broken="problem 3: out[0] is NaN")
        assert row.largest == float("inf")


class TestRoundTrip:
    def test_it_prints_a_row_for_each_request(self) -> None:
        result = run("roundtrip", "--repetitions", "20")
        assert result.exit_code in (0, 1)
        for name in ("nothing", "describe", "judge"):
            assert f"round trip in ms, {name}" in result.output


class TestResults:
    @pytest.mark.parametrize(
        ("value", "low", "high", "met"),
        [
            (0.5, 0.1, 0.6, True),
            (0.6, None, 0.6, True),
            (0.7, None, 0.6, False),
            (0.05, 0.1, None, False),
            (float("nan"), None, 1.0, False),
        ],
    )
    def test_a_requirement_is_met_between_its_limits(
        self, value: float, low: float | None, high: float | None, met: bool
    ) -> None:
        requirement = Requirement("share", value, low, high)
        assert requirement.met == met
        assert requirement.text().startswith("met" if met else "MISSED")
        assert Results("name", (), (requirement,)).met == met

    def test_a_table_is_aligned(self) -> None:
        table = Table("title", ("what", "ms"), (("a", 1.0), ("longer", 123.456)))
        assert table.text() == "title\n  what     ms\n  a         1\n  longer  123"


def test_json_belongs_behind_the_command() -> None:
    result = run("--json", "file", "roundtrip")
    assert result.exit_code == 2
    assert "--json goes after the command" in result.output


def test_it_runs_as_a_module() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "kernelproof.tests.bench", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(name in shown.stdout for name in ("oracle", "experts", "tightness", "roundtrip"))
