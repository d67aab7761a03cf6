"""The MoE's part of the kernel benchmark: what can be said without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from kernelproof.ci.bench import kernels_moe as bench_kernels_moe
from kernelproof.ci.bench.command import bench
from kernelproof.ci.bench.kernels import PARTS
from kernelproof.ci.bench.kernels_moe import (
    CASES,
    SHAPES,
    TARGETS,
    TRITON,
    Case,
    Measured,
    Weights,
    batches,
    check,
)
from kernelproof.ci.bench.kernels_moe_others import CUTLASS, GROUPED, grouped, grouped_absent
from kernelproof.impl.targets.optional import missing
from kernelproof.reference import moe

ABSENT = missing("triton", "triton")
SMALL = Case(9, 2, 5, 64, 48)
INTERPRETED = """
from kernelproof.ci.bench.kernels_moe import Case, Weights, batches, check
from kernelproof.impl.triton.moe import experts

case = Case(9, 2, 5, 64, 48)
batch = batches(case, Weights.of(case, "cpu"))[0]
check(batch, {"Triton": lambda: experts(batch.inputs)})
"""


def test_a_part_has_a_name() -> None:
    result = CliRunner().invoke(bench, ["kernels", "--only", "experts"])
    assert result.exit_code == 2
    assert all(f"'{part}'" in result.output for part in PARTS)


class TestCases:
    def test_what_a_case_does_and_reads(self) -> None:
        case = Case(1, 8, 128, 2048, 768)
        assert case.operations == 2 * 8 * (2048 * 1536 + 768 * 2048)
        assert case.bytes_read == 8 * (2048 * 1536 + 768 * 2048) * 2
        everywhere = Case(8192, 8, 128, 2048, 768)
        assert everywhere.bytes_read == pytest.approx(128 * (2048 * 1536 + 768 * 2048) * 2)

    def test_the_requirements_are_about_cases_of_the_grid(self) -> None:
        assert set(TARGETS) < set(CASES)
        assert {case.tokens for case in TARGETS} == {1024, 2048, 4096, 8192}
        assert len({case.name for case in TARGETS}) == len(SHAPES)

    def test_batches_differ_in_their_experts(self) -> None:
        first, second, *_ = batches(SMALL, Weights.of(SMALL, "cpu"))
        assert first.w13 is second.w13
        assert not torch.equal(first.ids, second.ids)
        assert torch.allclose(first.weights.sum(dim=1), torch.ones(SMALL.tokens))


class TestAgreement:
    def test_what_computes_something_else_is_not_timed(self) -> None:
        batch = batches(SMALL, Weights.of(SMALL, "cpu"))[0]
        right = moe(batch.hidden, batch.w13, batch.w2, batch.ids, batch.weights)
        check(batch, {"oracle": lambda: right, "in a list": lambda: [right]})
        swapped = batch.w13.roll(SMALL.inter, dims=1)
        wrong = moe(batch.hidden, swapped, batch.w2, batch.ids, batch.weights)
        with pytest.raises(RuntimeError, match=r"wrong is .* off the oracle"):
            check(batch, {"wrong": lambda: wrong})

    @pytest.mark.skipif(grouped_absent() is not None, reason=str(grouped_absent()))
    def test_torchs_grouped_products_compute_the_same(self) -> None:
        batch = batches(SMALL, Weights.of(SMALL, "cpu"))[0]
        check(batch, {GROUPED: grouped(batch.w13, batch.w2)(batch)})

    @pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
    def test_kernelproofs_kernels_pass_in_the_interpreter(self) -> None:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", INTERPRETED],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


def test_the_table_has_a_column_for_each_contender() -> None:
    measured = Measured(TARGETS[0], {TRITON: 0.5, CUTLASS: 0.4, GROUPED: 0.6})
    table = bench_kernels_moe._table([measured], [CUTLASS, GROUPED], 8e14)
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row[f"to {CUTLASS}"] == pytest.approx(0.8)
    assert row[f"to {GROUPED}"] == pytest.approx(1.2)
    assert row["TFLOP/s"] == pytest.approx(TARGETS[0].operations / 0.5e-3 / 1e12)
    assert row["of matrix"] == pytest.approx(TARGETS[0].operations / 0.5e-3 / 8e14)
    assert row["GB/s of weights"] == pytest.approx(TARGETS[0].bytes_read / 0.5e-3 / 1e9)
    alone = Measured(TARGETS[0], {TRITON: 0.5})
    assert alone.ratio(CUTLASS) is None
