"""FlashInfer's functions that lay weights and scales out: what they take, and what is compiled."""

from __future__ import annotations

import pytest

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.flashinfer import moe
from kernelproof.impl.targets.optional import missing
from kernelproof.reference import RearrangeProblem

pytestmark = pytest.mark.skipif(
    missing("flashinfer", "flashinfer") is not None, reason="flashinfer is not installed"
)
PROBLEMS = {
    "block-scale-interleave": RearrangeProblem(rows=130, columns=5),
    "shuffle-matrix-sf-a": RearrangeProblem("rows_128x4", rows=128, columns=6),
    "interleave-moe-weights": RearrangeProblem("int4_mixed", 2, 32, 64),
}


def on(sm: int) -> Target:
    return Target(sm=sm, flashinfer="0.7.2.post1", cuda="13.0", device="cuda")


@pytest.mark.parametrize(
    ("name", "least"),
    [("block-scale-interleave", 90), ("shuffle-matrix-sf-a", 90), ("interleave-moe-weights", 89)],
)
def test_chips_that_nothing_is_built_for_are_refused(name: str, least: int) -> None:
    found, problem = find_implementation(f"flashinfer-{name}"), PROBLEMS[name]
    for sm in (75, 80, 86, 89, 90, 100, 120):
        refusal = found.refusal(problem, on(sm))
        assert (refusal is None) == (sm >= least), sm
        assert refusal is None or f"SM{least}" in refusal
    other = RearrangeProblem("rows", rows=64, columns=3)
    assert found.refusal(other, on(90)) is not None
    assert find_implementation("flashinfer-shuffle-matrix-a").refusal(other, on(75)) is None


def test_weights_are_interleaved_by_the_module_of_the_experts() -> None:
    found = find_implementation("flashinfer-interleave-moe-weights")
    assert (found.compile_key, found.library) == (moe.CUTLASS.compile_key, moe.CUTLASS.library)
    assert found.build_ahead
    assert found.build_minutes == moe.CUTLASS.build_minutes


def test_scales_are_laid_out_by_one_module_that_is_built_ahead() -> None:
    names = ("block-scale-interleave", "shuffle-matrix-sf-a")
    first, second = (find_implementation(f"flashinfer-{name}") for name in names)
    assert first.library is not None
    assert (first.compile_key, first.library) == (second.compile_key, second.library)
    assert first.build_ahead
    assert second.build_ahead
    assert find_implementation("flashinfer-shuffle-matrix-a").compile_key is None
