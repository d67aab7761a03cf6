"""Layouts of weights and scales, by hand and by other definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernelproof.impl.torch.rearrange import rearrange as by_axes
from kernelproof.reference import RearrangeProblem, materialise, rearrange
from kernelproof.reference.tensors.rearrange import rearranged

PROBLEMS = [
    RearrangeProblem(rows=130, columns=5),
    RearrangeProblem(matrices=2, rows=260, columns=9, dtype="bfloat16"),
    RearrangeProblem("rows", rows=64, columns=3),
    RearrangeProblem("rows", rows=48, columns=3, tile=64),
    RearrangeProblem("rows_128x4", rows=256, columns=6),
    RearrangeProblem("scales_64x128", 2, 128, 8),
    RearrangeProblem("scales_64x128", 2, 128, 3, dtype="bfloat16", group=128),
    RearrangeProblem("int4_mixed", 2, 32, 64),
]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda each: each.id)
def test_places_and_axes_give_the_same(problem: RearrangeProblem) -> None:
    inputs: Any = materialise(problem)
    assert torch.equal(bits(rearranged(inputs)), bits(by_axes(inputs)))


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda each: each.id)
def test_nothing_is_lost_and_only_zeros_are_added(problem: RearrangeProblem) -> None:
    inputs: Any = materialise(problem)
    width = torch.uint8 if problem.dtype == "uint8" else torch.int16
    given = inputs.x.view(width).flatten().sort().values
    made = rearranged(inputs).view(width).flatten().sort().values
    zeros = made.new_zeros(made.numel() - given.numel())
    assert torch.equal(made, torch.cat([given, zeros]).sort().values)


def test_scales_lie_in_tiles_and_padding_is_zero() -> None:
    scales = (torch.arange(260 * 6).reshape(260, 6) % 251).to(torch.uint8)
    wanted = torch.zeros(3 * 2 * 512, dtype=torch.uint8)
    for row in range(260):
        for column in range(6):
            tile = row // 128 * 2 + column // 4
            place = row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            wanted[tile * 512 + place] = scales[row, column]
    assert torch.equal(rearrange(scales, "scales_128x4"), wanted)


def test_rows_of_a_block_are_shuffled() -> None:
    rows = torch.arange(32, dtype=torch.uint8).unsqueeze(1)
    assert rearrange(rows, "rows").flatten()[:4].tolist() == [0, 4, 8, 12]
    assert rearrange(rows, "rows", tile=64).flatten()[:9].tolist() == [*range(0, 16, 2), 1]


def test_scales_of_far_rows_lie_side_by_side() -> None:
    scales = torch.arange(64 * 4, dtype=torch.int16).reshape(1, 64, 4).to(torch.uint8)
    made = rearrange(scales, "scales_64x128")
    assert made.shape == (1, 1, 1, 16, 16)
    wanted = [4 * row + scale for row in (1, 17, 33, 49) for scale in range(4)]
    assert made[0, 0, 0, 1].tolist() == wanted


def test_two_rows_share_their_words() -> None:
    words = torch.arange(16 * 16, dtype=torch.int16).reshape(1, 16, 16)
    made = rearrange(words.view(torch.uint8), "int4_mixed").view(torch.int16)
    first = [0, 128, 1, 129, 2, 130, 3, 131, 8, 136, 9, 137, 10, 138, 11, 139]
    assert made[0, 0].tolist() == first
    assert made[0, 8].tolist() == [each + 4 for each in first]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"arrangement": "columns"}, "arrangement"),
        ({"arrangement": "rows", "rows": 33}, "a multiple of 32"),
        ({"arrangement": "rows", "rows": 32, "matrices": 2}, "0 where rows are shuffled"),
        ({"arrangement": "rows_128x4", "rows": 64}, "a multiple of 128"),
        ({"arrangement": "scales_64x128", "rows": 64, "columns": 4}, "at least 1"),
        ({"arrangement": "scales_64x128", "matrices": 1, "group": 48}, "a divisor of 128"),
        (
            {"arrangement": "int4_mixed", "matrices": 1, "dtype": "bfloat16"},
            "two weights a byte",
        ),
    ],
)
def test_what_no_call_looks_like(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RearrangeProblem(**fields)


def test_what_is_no_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="arrangement is 'columns'"):
        rearrange(torch.zeros(2, 2), "columns")
    with pytest.raises(ValueError, match="one an expert"):
        rearrange(torch.zeros(2), "rows")
    with pytest.raises(ValueError, match="one an expert"):
        rearrange(torch.zeros(0, 4), "scales_128x4")


@pytest.mark.parametrize(
    ("arrangement", "rows", "columns", "options", "said"),
    [
        ("rows", 33, 2, {}, "33 rows; they must be a multiple of 32"),
        ("rows", 40, 2, {}, "multiple of 32"),
        ("rows", 40, 2, {"tile": 64}, "multiple of 16"),
        ("rows", 32, 2, {"tile": 0}, "at least 1"),
        ("rows_128x4", 64, 4, {}, "multiple of 128"),
        ("int4_mixed", 16, 16, {}, "16 columns; they must be a multiple of 32"),
        ("int4_mixed", 8, 32, {}, "multiple of 16"),
        ("scales_64x128", 32, 4, {}, "multiple of 64"),
        ("scales_64x128", 64, 6, {}, "multiple of 4"),
        ("scales_64x128", 64, 4, {"group": 48}, "group is 48"),
        ("scales_64x128", 64, 4, {"group": 4}, "group is 4"),
        ("scales_64x128", 64, 4, {"group": 0}, "at least 1"),
    ],
)
def test_a_call_that_no_kernel_has_is_refused(
    arrangement: str, rows: int, columns: int, options: dict[str, int], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        rearrange(torch.zeros(1, rows, columns, dtype=torch.uint8), arrangement, **options)
