"""The map of the error over its bound: every element counts in one cell, the worst is kept."""

from __future__ import annotations

import math

import torch

from kernelproof.properties.verdicts.comparison import bitwise, error_map, within
from kernelproof.properties.verdicts.verdict import Verdict


def test_a_small_tensor_has_a_cell_for_each_token_and_head() -> None:
    ratio = torch.zeros(3, 2, 4)
    ratio[2, 0, 3], ratio[1, 1, 0] = 7.0, 0.25
    made = error_map("out", ratio)
    assert made == {
        "tensor": "out",
        "shape": [3, 2, 4],
        "step": [1, 1],
        "worst": [[0.0, 0.0], [0.0, 0.25], [7.0, 0.0]],
    }


def test_of_a_large_tensor_neighbours_share_a_cell_and_the_worst_counts() -> None:
    ratio = torch.zeros(130, 33)
    ratio[129, 32], ratio[2, 1], ratio[0, 0] = 3.0, 2.0, 1.0
    made = error_map("lse", ratio)
    assert made is not None
    assert (made["shape"], made["step"]) == ([130, 33], [3, 2])
    assert (len(made["worst"]), len(made["worst"][0])) == (44, 17)
    assert (made["worst"][0][0], made["worst"][43][16]) == (2.0, 3.0)
    assert sum(map(sum, made["worst"])) == 5.0


def test_what_is_just_outside_of_the_bound_stays_outside() -> None:
    found = error_map("out", torch.tensor([[1.003, 1.0, 0.9999]]))
    assert found is not None
    assert found["worst"] == [[1.01, 1.0, 1.0]]


def test_other_shapes() -> None:
    assert error_map("x", torch.tensor(1.0)) is None
    assert error_map("x", torch.zeros(0, 4)) is None
    made = error_map("x", torch.tensor([0.0, math.inf]))
    assert made is not None
    assert made["worst"] == [[0.0], [math.inf]]


def test_a_verdict_by_bounds_has_it_and_a_pass_has_none() -> None:
    expected, bound = torch.zeros(2, 2, dtype=torch.float64), torch.full((2, 2), 0.5)
    wrong = torch.tensor([[0.25, 4.0], [torch.nan, -math.inf]])
    verdict = within("out", wrong, expected, bound.double())
    assert verdict.kind == "nan"
    assert verdict.error_map is not None
    assert verdict.error_map["worst"] == [[0.5, 8.0], [math.inf, math.inf]]
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert "error_map" not in within("out", expected, expected, bound.double()).to_json()
    exact = bitwise("out", expected + torch.eye(2), expected)
    assert exact.error_map is not None
    assert exact.error_map["worst"] == [[math.inf, 0.0], [0.0, math.inf]]
    agreed = expected.masked_fill(torch.eye(2, dtype=torch.bool), torch.nan)
    found = within("out", agreed + 1.0, agreed, bound.double())
    assert found.error_map is not None
    assert found.error_map["worst"] == [[0.0, 2.0], [2.0, 0.0]]
