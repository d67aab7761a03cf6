"""Products of FP8 that are cut off, not rounded: what is lost where they have one sign."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernelproof.properties.seeded.attention.tensor_cores import multiplied
from kernelproof.reference import (
    Arithmetic,
    MatrixFormat,
    QuantizedMatrix,
    moe,
    moe_error_bound,
    ragged_attention,
    ragged_attention_error_bound,
)

FP8 = torch.float8_e4m3fn
CUT = Arithmetic(fp8_products="fixed_point")


@pytest.mark.parametrize(("keys", "left"), [(8192, 0.789), (16384, 0.570), (32768, 0.285)])
def test_what_an_h100_leaves_of_equal_values_is_within_the_bound(keys: int, left: float) -> None:
    """FA3 multiplies probabilities of 1 as 448; the shares were measured."""
    p, v = torch.full((1, 1, keys), 448.0), torch.ones(1, keys, 1)
    found = multiplied(p, v).item() / (448 * keys)
    assert found == pytest.approx(left, abs=0.002)
    call: Any = {
        "q": torch.zeros(1, 1, 16).to(FP8),
        # All different: equal keys are bounded by the worst case, whatever their values.
        "k": torch.randn(keys, 1, 16, generator=torch.Generator().manual_seed(1)).to(FP8),
        "v": torch.ones(keys, 1, 1).to(FP8),
        "qo_indptr": torch.tensor([0, 1], dtype=torch.int32),
        "kv_indptr": torch.tensor([0, keys], dtype=torch.int32),
    }
    assert ragged_attention(**call).out.item() == pytest.approx(1)
    bound = ragged_attention_error_bound(**call, arithmetic=CUT, out_dtype=torch.float16)
    assert 1 - found <= bound.out.item()
    call["v"] = torch.ones(keys, 1, 1).index_fill_(0, torch.arange(0, keys, 2), -1).to(FP8)
    mixed = ragged_attention_error_bound(**call, arithmetic=CUT, out_dtype=torch.float16)
    assert mixed.out.item() < bound.out.item() / 5


@pytest.mark.parametrize("one_sign", [False, True])
@pytest.mark.parametrize("hidden", [512, 4096, 16384])
def test_experts_of_many_channels(hidden: int, *, one_sign: bool) -> None:
    generator = torch.Generator().manual_seed(hidden)

    def draw(*shape: int) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=generator)
        return (numbers.abs() if one_sign else numbers).to(FP8)

    x, w = draw(3, hidden), draw(1, 16, hidden)
    per_tensor = MatrixFormat("float8_e4m3fn", "tensor")
    call: Any = (
        QuantizedMatrix(x, torch.tensor(1.0), per_tensor),
        QuantizedMatrix(w, torch.ones(1), per_tensor),
        torch.eye(16).unsqueeze(0),
        torch.zeros(3, 1, dtype=torch.int32),
        torch.ones(3, 1),
    )
    expected = moe(*call, activation="identity")
    bound = moe_error_bound(*call, activation="identity", arithmetic=CUT, out_dtype=torch.float32)
    right = multiplied(x.float().unsqueeze(0), w[0].float().T.unsqueeze(0))[0]
    assert ((right - expected).abs() <= bound).all()
    kept = torch.arange(hidden) % 128 != 0
    dropped = multiplied((x.float() * kept).unsqueeze(0), w[0].float().T.unsqueeze(0))[0]
    assert ((dropped - expected).abs() > bound).any() != one_sign
    # Of one sign, nothing is promised once 8,192 products are cut off.
    assert bool((bound >= expected.abs()).all()) == (one_sign and hidden == 16384)
