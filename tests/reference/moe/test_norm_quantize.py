"""Norms that quantise, by definition: against torch's norm, by hand, and what the bounds allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.reference import (
    Arithmetic,
    NormQuantizeProblem,
    QuantizedFormat,
    materialise,
    norm_and_quantize,
)
from kernelproof.reference.moe.norm_quantize import norm_bounds, norm_scale_bounds, summed

PROBLEM = NormQuantizeProblem(7, 96, block_channels=32, residual=True, gamma_offset=1.0, seed=3)
REGIMES = ("iid", "ties", "outliers", "faint", "large", "zeros")


def norm_by_torch(inputs: Any, dtype: torch.dtype = torch.float64) -> torch.Tensor:  # noqa: ANN401
    """Return torch's own norm of the same rows."""
    h = (inputs.x.float() + inputs.before.float()).to(dtype)
    gain = (inputs.gamma.float() + inputs.gamma_offset).to(dtype)
    return torch.nn.functional.rms_norm(h, h.shape[1:], gain, inputs.eps)


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bounds_hold_torchs_norm(regime: str, dtype: str) -> None:
    inputs: Any = materialise(replace(PROBLEM, regime=regime, dtype=dtype))
    low, high = norm_bounds(inputs.x, inputs.gamma, **inputs.keywords())
    for each in (torch.float64, torch.float32):
        found = norm_by_torch(inputs, each).double()
        assert ((found >= low) & (found <= high)).all()
    assert (high - low).max() <= 1e-4 * norm_by_torch(inputs).abs().max()


def test_rows_of_one_power_of_two_have_no_rounding() -> None:
    inputs: Any = materialise(replace(PROBLEM, regime="ties"))
    low, high = norm_bounds(inputs.x, inputs.gamma, **inputs.keywords())
    assert low.equal(high)
    gain = inputs.gamma.double() + 1
    assert low.abs().equal(gain.abs().expand_as(low))
    least, most = norm_scale_bounds((low, high), inputs.to)
    assert least.equal(most)
    by_gpu = Arithmetic(roots="approximate")
    low, high = norm_bounds(inputs.x, inputs.gamma, **inputs.keywords(), arithmetic=by_gpu)
    assert (low < high)[:, gain != 0].all()


def test_a_row_by_hand() -> None:
    x = torch.tensor([[3.0, -4.0], [0.0, -0.0]])
    residual = torch.tensor([[1.0, 0.0], [0.0, -0.0]])
    # 4 and -4 have the root 4: the norm is 1 and -1, times the gains 1 + 1 and 1 + 5.
    found = norm_and_quantize(
        x, torch.tensor([1.0, 5.0]), QuantizedFormat(), residual=residual, gamma_offset=1.0,
        eps=1e-30, scale=0.25,
    )  # fmt: skip
    assert found.codes.float().tolist() == [[8.0, -24.0], [0.0, -0.0]]
    assert found.codes.view(torch.uint8)[1].tolist() == [0, 0x80]
    assert found.scales is None
    assert found.residual is not None
    assert found.residual.tolist() == [[4.0, -4.0], [0.0, 0.0]]
    tokens = norm_and_quantize(x, torch.ones(2), QuantizedFormat(block=(1, 0)), eps=1e-30)
    assert tokens.scales is not None
    assert tokens.scales[0].item() == pytest.approx(4 / 12.5**0.5 / 448, rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_of_16_bits_is_rounded_as_once(dtype: torch.dtype) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    y = (x.flip(0).float() * 2.0 ** torch.arange(-24, 24).repeat(6)[:256]).to(dtype)
    y = y.nan_to_num(nan=0.0, posinf=1.0, neginf=1.0)
    exact = x.double() + y.double()
    found = summed(x, y).to(dtype)
    near = torch.stack([found, found.nextafter(found + 1), found.nextafter(found - 1)]).double()
    assert ((near - exact).abs().min(0).values == (found.double() - exact).abs()).all()


def test_what_is_rounded_to_16_bits_is_one_of_two() -> None:
    inputs: Any = materialise(PROBLEM)
    wide = Arithmetic(intermediate="inputs")
    low, high = norm_bounds(inputs.x, inputs.gamma, **inputs.keywords(), arithmetic=wide)
    assert low.to(torch.bfloat16).double().equal(low)
    assert (low < high).any()
    ends = (each.to(torch.bfloat16) for each in (low, high))
    near, far = ends
    assert ((near == far) | (near.nextafter(far) == far)).all()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"codes": "int8"}, "codes"),
        ({"saturate": False}, "codes"),
        ({"block_rows": 4}, "block_rows"),
        ({"gamma_offset": 0.5}, "gamma_offset"),
        ({"eps": 0.0}, "eps"),
    ],
)
def test_a_problem_is_refused_by_its_field(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"problem field {said}"):
        NormQuantizeProblem(**fields)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"x": torch.ones(3)}, "x has shape"),
        ({"residual": torch.ones(2, 5)}, "residual has shape"),
        ({"gamma": torch.ones(5)}, "gamma has shape"),
    ],
)
def test_a_call_is_refused_by_its_argument(given: dict[str, Any], said: str) -> None:
    arguments = {"x": torch.ones(2, 4), "gamma": torch.ones(4), "to": QuantizedFormat(), **given}
    with pytest.raises(ValueError, match=said):
        norm_and_quantize(**arguments)
