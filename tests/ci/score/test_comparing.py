"""Usual comparisons, measured on seeded bugs: what they accept and what they miss."""

from __future__ import annotations

import torch

from kernelproof.ci.score.comparing import Compared, Comparison, comparable, compare
from kernelproof.properties.seeded import SeededBug
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.worker.tolerance_baselines import NAMES, PARITY, YARDSTICKS

NVFP4 = {"0.5 for 90 % (FlashInfer, NVFP4)", "1.0 (vLLM, NVFP4)"}
"""What tests of NVFP4 caches accept: twice the right answer, and the one with its sign turned."""
MOE = {"atol=0.1, rtol=0.85 on 92.5 % (FlashInfer, vLLM: MoE)"}
ONES = torch.ones(1000, dtype=torch.float64)


def accepted(out: torch.Tensor, expected: torch.Tensor, low: torch.Tensor) -> set[str]:
    return {name for name, accepts in YARDSTICKS.items() if accepts(out, expected, low)}


def test_the_right_answer_is_accepted_by_all() -> None:
    assert accepted(ONES, ONES, ONES + 1e-3) == set(YARDSTICKS)
    empty = ONES[:0]
    assert accepted(empty, empty, empty) == set(YARDSTICKS)


def test_each_looks_at_what_its_name_says() -> None:
    few = ONES.clone()
    few[:40] = 2.0  # 4 % of the elements are wrong
    mostly = {"allclose at 1e-2, 95 % of the elements"}
    assert accepted(few, ONES, ONES + 1e-3) == mostly | NVFP4 | MOE
    doubled = 2.0 * ONES
    assert accepted(doubled, ONES, ONES + 1e-3) == {"cosine at least 0.999"} | NVFP4
    assert accepted(1.9 * ONES, ONES, ONES + 1e-3) >= MOE
    assert accepted(-ONES, ONES, ONES + 1e-3) == {"1.0 (vLLM, NVFP4)"}
    slightly = ONES + 5e-3
    assert "twice the low-precision error" not in accepted(slightly, ONES, ONES + 1e-3)
    assert "twice the low-precision error" in accepted(slightly, ONES, ONES + 3e-3)


def test_nothing_accepts_nan() -> None:
    assert accepted(ONES * torch.nan, ONES, ONES + 1e-3) == set()


def test_a_bug_is_caught_and_an_honest_control_is_not_accused() -> None:
    names = ["lse-base-2", "masked-row-averages", "merge", "quantised-rounded"]
    found = compare(comparable(names), PROFILES["quick"], jobs=1)
    assert [each.judged for each in found.compared] == [20, 20, 20, 20]
    cosine = "cosine at least 0.999"
    assert found.accused(PARITY) == []
    # One that rejects right answers with declared roundings, or in FP8, says nothing by rejecting
    # a bug's.
    assert set(found.accused("allclose at 1e-2")) == {"quantised-rounded", "merge"}
    # Of 20. An LSE to another base does not show in out, where all usual comparisons look: what
    # one of them rejects is a right answer, of many roundings.
    rejected = found.compared[names.index("lse-base-2")].rejected
    assert rejected[cosine] <= 2
    assert rejected[PARITY] >= 15
    assert found.to_json()["problems"] == 80


def test_experts_are_compared_too() -> None:
    names = ["activation-in-bfloat16", "shared-weight-ignored", "experts-in-float32"]
    found = compare(comparable(names), PROFILES["quick"], jobs=1)
    assert all(found.accused(name) == [] for name in (PARITY, *MOE))
    assert set(found.caught(PARITY, "moe")) == {"activation-in-bfloat16", "shared-weight-ignored"}
    # What the tests of serving stacks and libraries allow hides such a rounding.
    assert "activation-in-bfloat16" not in found.caught(*MOE)
    assert found.to_json()["moe_bugs"] == 2


def test_metadata_is_not_compared() -> None:
    assert comparable(["indptr-in-int64"]) == []
    bug = SeededBug("bug", "module:bug", "merge_state", "Merge wrongly.")
    assert Comparison((Compared(bug, 3),)).caught(NAMES[0]) == []
