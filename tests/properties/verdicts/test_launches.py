"""Which kernels a call launched, by a profiler that tests stand in for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.gpu import launch_names
from kernelproof.impl.targets.kernel_names import (
    Claim,
    backend_of,
    kernels_in,
    short_name,
    unclaimed,
)
from kernelproof.properties.verdicts.launches import MOST_TRIES, Launches, claim_of
from kernelproof.reference import AttentionProblem

FA2 = "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::A<(B)1>, P>(P)"
FA3 = "void flashinfer::PrefillWithKVCacheKernel<flashinfer::A<128>>(flashinfer::P)"
FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>(int)"
GEMM = "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"
PROBLEM = AttentionProblem(query_lens=(1,), seq_lens=(5,))


class Profiler:
    """Names these kernels in each block."""

    def __init__(self, *names: str) -> None:
        self.names, self.blocks = names, 0

    @contextmanager
    def __call__(self) -> Iterator[list[str]]:
        self.blocks += 1
        found: list[str] = []
        yield found
        found += self.names


def call(
    launches: Launches, *, tuned: bool = False, triton: Sequence[tuple[str, str]] = ()
) -> None:
    with launches.of("", PROBLEM) as tell:
        for name, compiled in triton:
            launch_names.note(name, compiled)
        tell(SimpleNamespace(tuned=tuned))


def of(profiler: Profiler | None, backend: str = "fa2", compiler: str = "") -> Launches:
    return Launches(Claim(backend, compiler, attends=True), lambda _: "module", profiler)


@pytest.mark.parametrize(
    ("name", "short", "backend"),
    [
        (FA2, "flashinfer::BatchPrefillWithPagedKVCacheKernel", "fa2"),
        (FA3, "flashinfer::PrefillWithKVCacheKernel", "fa3"),
        ("kernel_mha(unsigned int, float)", "kernel_mha", "xqa"),
        ("void at::native::(anonymous namespace)::sum<int>(int)", "at::native::sum", ""),
        ("void pytorch_flash::flash_fwd_kernel<A>(B)", "pytorch_flash::flash_fwd_kernel",
         "torch-sdpa"),
        (GEMM, GEMM, "torch"),
        ("<>", "<>", ""),
    ],
)  # fmt: skip
def test_names_are_short_and_of_a_backend(name: str, short: str, backend: str) -> None:
    assert short_name(name) == short
    assert backend_of(name) == backend


def test_fills_are_the_suite_s_and_copies_no_kernels() -> None:
    assert kernels_in([FILL, FA2, FA2, "Memcpy HtoD (Pageable -> Device)"]) == (FA2,)


def test_another_backend_is_named_with_the_claimed_one() -> None:
    found = unclaimed(Claim("fa3", attends=True), [FA2, GEMM])
    assert found is not None
    assert found.message == (
        "it claims the backend fa3; the call launched "
        f"flashinfer::BatchPrefillWithPagedKVCacheKernel, {GEMM}, of fa2, torch"
    )
    beside = unclaimed(Claim("fa3", attends=True), [FA3, FA2, GEMM])
    assert beside is not None
    assert beside.kernels == ("flashinfer::BatchPrefillWithPagedKVCacheKernel",)


@pytest.mark.parametrize(
    ("claim", "kernels"),
    [
        (Claim("fa3", attends=True), [FA3, GEMM]),
        (Claim("fa3", attends=True), ["cub::DeviceScan"]),
        (Claim("fa3"), [FA2]),
        (Claim("cuda", attends=True), [FA2]),
        (Claim("torch-sdpa", attends=True), [GEMM]),
        (Claim("", "triton"), [GEMM]),
        (Claim(runs=frozenset({"_mine"})), ["_mine", FA2]),
        (Claim(runs=frozenset({"_mine"})), ["void at::native::copy<int>(int)"]),
    ],
)
def test_what_is_claimed_and_what_is_unknown_is_no_finding(
    claim: Claim, kernels: list[str]
) -> None:
    assert unclaimed(claim, kernels) is None


def test_a_cascade_runs_either_of_two_backends() -> None:
    cascade = claim_of(find_implementation("flashinfer-cascade"), Target(90))
    assert unclaimed(cascade, [FA2]) is None
    assert unclaimed(cascade, [FA3, FA2]) is None
    assert unclaimed(cascade, [GEMM]) is not None


def test_triton_s_kernels_are_known_by_their_launch() -> None:
    assert unclaimed(Claim("triton", "triton"), ["_gemm"], {"_gemm"}) is None
    assert unclaimed(Claim("triton", "triton"), ["_gemm"]) is not None
    assert unclaimed(Claim("", "triton"), [FA2]) is not None


def test_a_specialisation_is_profiled_once() -> None:
    launches = of(profiler := Profiler(FILL, FA2))
    call(launches)
    call(launches)
    assert profiler.blocks == 1
    (seen,) = launches.to_json()["calls"]
    assert (seen["module"], seen["kernels"]) == ("module", [FA2])
    assert launches.to_json()["called"] == launches.to_json()["known"] == [seen["id"]]
    launches.begin(())
    call(launches)
    assert (profiler.blocks, launches.to_json()["calls"]) == (1, [])
    elsewhere = of(profiler)
    elsewhere.begin([seen["id"]])
    call(elsewhere)
    assert profiler.blocks == 1


def test_a_call_of_another_backend_is_profiled_each_time() -> None:
    launches = of(profiler := Profiler(FA2), "fa3")
    for count in range(1, MOST_TRIES + 3):
        launches.begin(())
        call(launches)
        assert (profiler.blocks, launches.to_json()["known"]) == (count, [])
        assert launches.wrong is not None


def test_a_call_that_tunes_or_launches_nothing_is_looked_at_again() -> None:
    launches = of(profiler := Profiler(FA2))
    call(launches, tuned=True)
    assert not launches.calls
    call(launches)
    assert launches.to_json()["calls"]
    idle = of(profiler := Profiler())
    for _ in range(MOST_TRIES + 2):
        call(idle)
    assert profiler.blocks == MOST_TRIES
    assert [each["kernels"] for each in idle.to_json()["calls"]] == [[]]


def test_a_call_that_launches_nothing_is_named_at_once() -> None:
    launches = of(Profiler())
    call(launches)  # perhaps the only one of its specialisation
    (told,) = launches.to_json()["calls"]
    assert told["kernels"] == []
    assert told["id"] in launches.to_json()["called"]
    assert not launches.to_json()["known"]


def test_what_triton_compiled_tells_its_calls_apart() -> None:
    launches = of(profiler := Profiler("_mine"), "triton", "triton")
    for compiled in ("a", "b", "a"):
        call(launches, triton=[("_mine", compiled)])
    assert [each["kernels"] for each in launches.to_json()["calls"]] == [["_mine"], ["_mine"]]
    assert profiler.blocks == 1


def test_a_profiler_that_fails_is_a_sentence() -> None:
    @contextmanager
    def late() -> Iterator[list[str]]:
        yield []
        message = "CUPTI_ERROR_UNKNOWN"
        raise RuntimeError(message)

    def early() -> None:
        message = "no CUPTI"
        raise OSError(message)

    for profiler, why in (
        (late, "RuntimeError: CUPTI_ERROR_UNKNOWN"),
        (early, "OSError: no CUPTI"),
    ):
        launches = Launches(Claim("fa2"), lambda _: "", profiler)  # type: ignore[arg-type]
        call(launches)
        call(launches)
        assert launches.why == f"torch's profiler raised {why}"
        assert not launches.to_json()["calls"]
        assert len(launches.to_json()["called"]) == 1
        assert launches.wrong is None


def test_a_fault_of_the_call_is_not_the_profiler_s() -> None:
    @contextmanager
    def faulting() -> Iterator[list[str]]:
        yield []
        raise torch.AcceleratorError

    launches = Launches(Claim("fa2"), lambda _: "", faulting)
    call(launches)
    assert launches.why == ""


def test_a_call_that_raises_is_not_noted() -> None:
    launches = of(Profiler(FA2))
    with pytest.raises(KeyError), launches.of("", PROBLEM):
        raise KeyError
    assert launches.to_json() == {}


def test_without_a_profiler_only_triton_names_kernels() -> None:
    launches = of(None, "", "")
    call(launches)
    assert launches.to_json() == {}
    call(launches, triton=[("_mine", "")])
    assert [each["kernels"] for each in launches.to_json()["calls"]] == [["_mine"]]
