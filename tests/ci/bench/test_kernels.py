"""The kernel benchmark: what can be said without a GPU."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kernelproof.ci.bench import gpu as bench_gpu
from kernelproof.ci.bench import kernels as bench_kernels
from kernelproof.ci.bench import kernels_flashinfer as bench_flashinfer
from kernelproof.ci.bench.command import bench
from kernelproof.ci.bench.gpu import Call, turns
from kernelproof.ci.bench.kernels import TRITON, Measured
from kernelproof.ci.bench.kernels_cases import (
    DECODES,
    PREFILLS,
    TARGET_DECODES,
    TARGET_PREFILLS,
    TARGET_VERIFIES,
    VERIFIES,
    Case,
    Pool,
)
from kernelproof.ci.bench.kernels_flashinfer import CUDA_CORES, DECODE_FA2, FA2, FA3, XQA
from kernelproof.ci.bench.kernels_metadata import example, torch_sequence
from kernelproof.impl import Target
from kernelproof.impl.flashinfer import trtllm
from kernelproof.impl.targets.optional import missing
from kernelproof.impl.triton import attention as triton_attention
from kernelproof.reference import build_metadata, paged_attention
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

ABSENT = missing("triton", "triton")
INTERPRETED = """
from kernelproof.ci.bench.kernels import contenders
from kernelproof.ci.bench.kernels_cases import Case, Pool
from kernelproof.ci.bench.kernels_metadata import check as check_metadata, example

for case in (Case(2, 1, 48), Case(2, 4, 48), Case(2, 24, 48)):
    [batch, *_] = Pool.of((case,), "cpu").batches(case)
    assert list(contenders(case, [batch], {}, {}, with_flashinfer=False)) == ["Triton"]
check_metadata(example(5, 7, "cpu"))
"""


def batch_of(case: Case) -> PagedAttentionInputs:
    return Pool.of((case,), "cpu").batches(case)[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = CliRunner().invoke(bench, ["kernels", "--device", "cuda", "--quick"])
    assert result.exit_code == 3
    assert "bench kernels needs a CUDA device, and torch sees none" in result.output


def test_a_cpu_is_no_device_for_it() -> None:
    result = CliRunner().invoke(bench, ["kernels", "--device", "cpu"])
    assert result.exit_code == 2
    assert "'cpu' is not 'cuda'" in result.output


class TestCases:
    def test_what_a_decode_moves_and_does(self) -> None:
        case = Case(64, 1, 8192)
        assert case.bytes_moved == 2 * 64 * 8192 * 8 * 128 * 2 + 2 * 64 * 32 * 128 * 2
        assert case.operations == 4 * 64 * 32 * 8192 * 128

    def test_a_causal_prefill_does_half_of_a_square(self) -> None:
        case = Case(1, 4, 6, qo_heads=1)
        assert case.operations == 4 * 128 * (3 + 4 + 5 + 6)

    def test_the_requirements_are_about_cases_of_the_grid(self) -> None:
        assert set(TARGET_DECODES) <= set(DECODES)
        assert set(TARGET_PREFILLS) <= set(PREFILLS)
        assert set(TARGET_VERIFIES) <= set(VERIFIES)
        for part, cases in (("verify", VERIFIES), ("attention", (*DECODES, *PREFILLS))):
            assert bench_kernels._timed(quick=False, only=[part]) == cases
        assert bench_kernels._timed(quick=True, only=["verify", "moe"]) == TARGET_VERIFIES

    def test_small_batches_take_turns_until_no_cache_holds_them(self) -> None:
        assert turns(2**40) == 1
        assert turns(64 * 2**20) == 4
        assert turns(1) == 32

    def test_batches_differ_in_their_pages_alone(self) -> None:
        case = Case(3, 2, 32)
        first, second, *_ = Pool.of((case,), "cpu").batches(case)
        assert first.metadata is second.metadata
        assert first.k_cache.shape == second.k_cache.shape == (6, 16, 8, 128)
        assert not torch.equal(first.k_cache, second.k_cache)
        assert sorted(first.metadata.paged_kv_indices.tolist()) == list(range(6))


class TestContenders:
    """Of FlashInfer's calls in a verify step, by a stand-in."""

    def test_a_verify_has_the_calls_that_decode_several_tokens(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given: dict[str, Any] = {}

        class Wrapper:
            def __init__(self, name: str, **_: object) -> None:
                self.name, self.run = name, print

            def plan(self, **keywords: object) -> None:
                given[self.name] = keywords

        def called(**keywords: object) -> torch.Tensor:
            given[XQA] = keywords
            return batch.q

        target = Target(sm=90, flashinfer="0.7.2.post1", cuda="13.0", device="cuda")
        library = SimpleNamespace(trtllm_batch_decode_with_kv_cache=called)
        monkeypatch.setattr(trtllm, "flashinfer", lambda _: library)
        monkeypatch.setattr(trtllm, "WORKSPACE_BYTES", 64)
        monkeypatch.setattr(Target, "here", lambda _: target)
        monkeypatch.setattr(bench_flashinfer, "fa3_here", lambda: True)
        monkeypatch.setattr(
            bench_flashinfer, "new_wrapper", lambda name, _, **more: Wrapper(name, **more)
        )
        case = Case(3, 4, 48)
        batch = batch_of(case)
        makers = bench_flashinfer.contenders(case, [batch])
        assert list(makers) == [FA2, FA3, DECODE_FA2, XQA]
        racing = {name: make() for name, make in makers.items()}
        assert given["BatchDecodeWithPagedKVCacheWrapper"]["q_len_per_req"] == 4
        racing[XQA][0]()
        assert (given[XQA]["q_len_per_req"], given[XQA]["mask"].shape) == (4, (3, 4, 2))
        monkeypatch.setattr(Target, "here", lambda _: replace(target, flashinfer="0.6.13"))
        assert list(bench_flashinfer.contenders(case, [batch])) == [FA2, FA3, XQA]
        assert list(bench_flashinfer.contenders(Case(3, 24, 48), [batch])) == [FA2, FA3]

    def test_a_call_that_cannot_run_is_named_and_not_timed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        case = Case(2, 4, 48)
        batch = batch_of(case)
        right = paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata).out

        def refused() -> list[Call]:
            message = "no kernel of this shape"
            raise ValueError(message)

        makers = {
            FA2: lambda: [lambda: right],
            FA3: refused,
            DECODE_FA2: lambda: [lambda: torch.zeros_like(right)],
            XQA: refused,
        }
        monkeypatch.setattr(triton_attention, "split_kv", lambda _: (right, None))
        monkeypatch.setattr(bench_flashinfer, "contenders", lambda *_: makers)
        absent = {XQA: "not built"}
        failed: dict[str, str] = {}
        racing = bench_kernels.contenders(case, [batch], absent, failed, with_flashinfer=True)
        assert list(racing) == [TRITON, FA2]
        assert absent == {XQA: "not built"}
        assert failed[f"{FA3}, {case},"] == "ValueError: no kernel of this shape"
        assert "off the oracle" in failed[f"{DECODE_FA2}, {case},"]

    def test_quick_builds_what_verify_steps_need_and_leaves_fa3_out(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        built: list[str] = []

        def prefiller(_: object, backend: str) -> None:
            built.append(backend)
            if backend == "fa2":
                message = "nvcc is not there"
                raise RuntimeError(message)

        on_cpu = functools.partial(Pool.of, device="cpu")
        monkeypatch.setattr(bench_flashinfer, "Pool", SimpleNamespace(of=on_cpu))
        monkeypatch.setattr(bench_flashinfer, "prefiller", prefiller)
        monkeypatch.setattr(bench_flashinfer, "_run", lambda _: built.append("xqa"))
        monkeypatch.setattr(bench_flashinfer, "fa3_here", lambda: True)
        target = Target(sm=90, flashinfer="0.7.2.post1", cuda="13.0", device="cuda")
        monkeypatch.setattr(Target, "here", lambda _: target)
        for exists, wanted in ((False, {"fa2", "xqa"}), (True, {"fa2", "fa3", "xqa"})):
            monkeypatch.setattr(
                bench_flashinfer,
                "attention_library",
                lambda *_, exists=exists: lambda _: ("name", exists),
            )
            built.clear()
            absent = bench_flashinfer.build(TARGET_VERIFIES, quick=True)
            assert set(built) == wanted
            assert built.count("xqa") == 2, "a module for each group of heads"
            assert absent[FA2] == "RuntimeError: nvcc is not there"
            assert (FA3 in absent) == (not exists)
        monkeypatch.setattr(bench_flashinfer, "attention_library", lambda *_: lambda _: ("", False))
        assert FA3 not in bench_flashinfer.build(TARGET_PREFILLS, quick=True), "it is required"


class TestAgreement:
    def test_the_oracle_agrees_with_itself(self) -> None:
        for case in (Case(2, 1, 48), Case(2, 4, 48), Case(2, 24, 48)):
            batch = batch_of(case)
            out = paged_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata).out
            bench_kernels.check(batch, {"oracle": functools.partial(torch.clone, out)})

    def test_what_computes_something_else_is_not_timed(self) -> None:
        batch = batch_of(Case(2, 1, 48))
        for wrong in (torch.zeros_like(batch.q), torch.full_like(batch.q, float("nan"))):
            with pytest.raises(RuntimeError, match=r"wrong is .* off the oracle"):
                bench_kernels.check(batch, {"wrong": functools.partial(torch.clone, wrong)})

    def test_the_torch_sequence_is_the_oracles_metadata(self) -> None:
        inputs = example(9, 5, "cpu")
        built = torch_sequence(inputs)
        expected = build_metadata(
            inputs.query_lens, inputs.seq_lens, inputs.block_table, inputs.page_size
        )
        count = len(expected.paged_kv_indices)
        for name, wanted in expected.tensors().items():
            found = getattr(built, name)
            assert torch.equal(found[:count] if name == "paged_kv_indices" else found, wanted)

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


class TestTables:
    decode = Measured(TARGET_DECODES[0], {TRITON: 0.6, CUDA_CORES: 0.5, FA2: 0.54})
    verify = Measured(TARGET_VERIFIES[0], {TRITON: 0.5, FA2: 0.45, FA3: 0.6, XQA: 0.44})
    prefill = Measured(TARGET_PREFILLS[0], {TRITON: 2.0, FA2: 1.8, FA3: 1.0})

    def test_ratios_are_to_the_better_backend(self) -> None:
        table = bench_kernels._decode_table("decode", [self.decode], 4e12)
        row = dict(zip(table.columns, table.rows[0], strict=True))
        assert row["ratio"] == pytest.approx(0.5 / 0.6)
        assert row["GB/s"] == pytest.approx(TARGET_DECODES[0].bytes_moved / 0.6e-3 / 1e9)
        assert row["of copy"] == pytest.approx(TARGET_DECODES[0].bytes_moved / 0.6e-3 / 4e12)
        table = bench_kernels._prefill_table([self.prefill], 8e14)
        row = dict(zip(table.columns, table.rows[0], strict=True))
        assert row["to fa2"] == pytest.approx(0.9)
        assert row["to fa3"] == pytest.approx(0.5)
        assert row["of matrix"] == pytest.approx(TARGET_PREFILLS[0].operations / 2e-3 / 8e14)

    def test_requirements(self) -> None:
        wanted = bench_kernels._requirements([self.decode, self.verify, self.prefill])
        assert [(each.value, each.low, each.met) for each in wanted] == [
            (pytest.approx(0.5 / 0.6), 0.85, False),
            (pytest.approx(0.88), 0.85, True),
            (0.5, 0.6, False),
        ]
        assert "decode to FlashInfer's better backend, 64 of 8192 keys, 32/8" in wanted[0].text()
        assert "verify to FlashInfer's better backend, 64 of 8192 keys, 32/8" in wanted[1].text()

    def test_each_kind_of_case_has_its_table(self) -> None:
        every = bench_kernels._tables([self.prefill, self.verify, self.decode], 4e12, 8e14)
        assert [table.title.partition(",")[0] for table in every] == [
            "decode",
            "verify of 4 tokens",
            "prefill",
        ]
        assert XQA in every[1].columns
        assert len(bench_kernels._tables([self.verify], 4e12, 8e14)) == 1

    def test_who_was_not_timed_in_a_case_has_no_number_there(self) -> None:
        other = Measured(TARGET_VERIFIES[1], {TRITON: 0.5, FA2: 0.45})
        table = bench_kernels._decode_table("verify", [other, self.verify], 4e12)
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        assert rows[0][XQA] != rows[0][XQA]
        assert rows[1][XQA] == 0.44
        assert rows[0]["ratio"] == pytest.approx(0.9)

    def test_without_flashinfer_its_columns_are_absent(self) -> None:
        alone = Measured(TARGET_DECODES[0], {TRITON: 0.6})
        table = bench_kernels._decode_table("decode", [alone], 4e12)
        assert table.columns == ("heads", "batch", "keys", TRITON, "GB/s", "of copy")
        assert bench_kernels._requirements([alone]) == []


class TestRace:
    """Of the order of what is timed; a stand-in records it where there is no GPU."""

    def test_contenders_take_turns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replayed: list[str] = []

        class Graph:
            def __init__(self, name: str) -> None:
                self.name = name

            def replay(self) -> None:
                replayed.append(self.name)

        def elapsed(call: Call) -> float:
            call()
            return 6.0 if replayed[-1] == "slow" else 2.0

        monkeypatch.setattr(bench_gpu, "_captured", lambda calls: (Graph(calls[0]()), 2))
        monkeypatch.setattr(bench_gpu, "_elapsed", elapsed)
        found = bench_gpu.race({"a": [lambda: "slow"], "b": [lambda: "quick"]}, replays=3)
        assert found == {"a": 3.0, "b": 1.0}
        assert replayed == ["slow", "quick"] * 3
