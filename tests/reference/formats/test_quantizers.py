"""Quantising by definition, against torch's casts, exact fractions and cases worked by hand."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from kernelproof.reference import (
    Arithmetic,
    QuantizedFormat,
    QuantizeProblem,
    materialise,
    quantize,
    quantize_mxfp4,
    quantize_nvfp4,
)
from kernelproof.reference.formats.quantizers import (
    POWER_RULES,
    QUOTIENT_ERRORS,
    code_bounds,
    codes_of,
    order_of,
    scale_bounds,
)
from kernelproof.reference.tensors.quantize import QuantizeInputs, quantized

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FP8 = (E4M3, E5M2)
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of e2m1 that are not negative, by their codes."""


def row(*numbers: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([numbers], dtype=dtype)


def scales(x: torch.Tensor, to: QuantizedFormat) -> torch.Tensor:
    found = quantize(x, to).scales
    assert found is not None
    return found


def test_scales_of_each_block_by_hand() -> None:
    x = torch.tensor([[1.0, -8.0, 3.0], [448.0, 0.0, -2.0], [0.5, 0.25, 896.0]])
    ends = {
        (0, 0): [[2.0]],
        (1, 0): [[8 / 448], [1.0], [2.0]],
        (0, 2): [[1.0, 2.0]],
        (2, 2): [[1.0, 3 / 448], [0.5 / 448, 2.0]],
    }
    for block, wanted in ends.items():
        assert scales(x, QuantizedFormat(E4M3, block)).equal(torch.tensor(wanted)), block


def test_a_scale_is_the_exact_quotient_rounded_once() -> None:
    amax = torch.rand(200, 1, generator=torch.Generator().manual_seed(1))
    for dtype, largest in ((E4M3, 448), (E5M2, 57344), (INT8, 127)):
        found = scales(amax, QuantizedFormat(dtype, (1, 0), floor=1e-30))
        for number, scale in zip(amax.flatten().tolist(), found.flatten(), strict=True):
            exact = Fraction(number) / largest
            beside = (scale.nextafter(torch.tensor(end)).item() for end in (0.0, torch.inf))
            off = abs(Fraction(scale.item()) - exact)
            assert all(off <= abs(Fraction(each) - exact) for each in beside)


@pytest.mark.parametrize("dtype", FP8)
def test_codes_are_those_of_torchs_cast(dtype: torch.dtype) -> None:
    numbers = torch.cat([
        torch.arange(256, dtype=torch.uint8).view(dtype).float(),
        torch.randn(4000, generator=torch.Generator().manual_seed(2)) * 60,
    ])  # fmt: skip
    numbers = numbers[numbers.isfinite()]
    middle = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, middle])[None]
    largest = torch.finfo(dtype).max
    found = quantize(x, QuantizedFormat(dtype), scale=1.0).codes
    assert found.view(torch.uint8).equal(x.clamp(-largest, largest).to(dtype).view(torch.uint8))


def test_what_exceeds_the_largest_number() -> None:
    x = row(448, 456, 464, 464.001, -480, 1e30, -1e30)
    saturated = quantize(x, QuantizedFormat(E4M3), scale=1.0).codes.float()
    assert saturated.tolist() == [[448, 448, 448, 448, -448, 448, -448]]
    free = quantize(x, QuantizedFormat(E4M3, saturate=False), scale=1.0).codes
    assert free.view(torch.uint8).tolist() == [[0x7E, 0x7E, 0x7E, 0x7F, 0xFF, 0x7F, 0xFF]]
    x = row(57344, 61439, 61440, -65536)
    free = quantize(x, QuantizedFormat(E5M2, saturate=False), scale=1.0).codes.float()
    assert free.tolist() == [[57344, 57344, torch.inf, -torch.inf]]
    assert quantize(row(200, -200), QuantizedFormat(INT8), scale=1.0).codes.tolist() == [
        [127, -128]
    ]


def test_zeros_keep_their_sign_and_the_floor_gives_them_a_scale() -> None:
    found = quantize(row(0.0, -0.0), QuantizedFormat(E4M3, floor=0.5))
    assert found.codes.view(torch.uint8).tolist() == [[0, 0x80]]
    low, high = code_bounds(row(0.0, -0.0), torch.ones(1, 1), QuantizedFormat(E4M3))
    assert low.equal(high)
    assert found.tensors()["scales"].equal(torch.tensor([[0.5 / 448]]))
    assert quantize(row(), QuantizedFormat(E4M3, (1, 4))).codes.shape == (1, 0)


def test_powers_of_two_are_the_least_that_are_large_enough() -> None:
    to = QuantizedFormat(E4M3, (1, 0), "ue8m0")
    x = torch.tensor([[448.0], [448.0001], [447.9], [1.0]])
    assert scales(x, to).flatten().tolist() == [1.0, 2.0, 1.0, 2.0**-8]
    low, high = scale_bounds(x, to, Arithmetic(scales="reciprocal", powers="logarithm"))
    assert (low.flatten().tolist(), high.flatten().tolist()) == (
        [1.0, 1.0, 1.0, 2.0**-8], [2.0, 2.0, 1.0, 2.0**-8],
    )  # fmt: skip


def test_arithmetics_differ_next_to_a_tie_only_and_by_one_code() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 512, generator=generator).bfloat16()
    for dtype in (*FP8, INT8):
        to = QuantizedFormat(dtype, (1, 64))
        by = scales(x, to)
        for name, error in QUOTIENT_ERRORS.items():
            low, high = code_bounds(x, by, to, Arithmetic(quotients=name))
            apart = high - low
            assert 0 <= int(apart.min()) <= int(apart.max()) <= (1 if error else 0), name
            assert apart.float().mean() < 0.01


def test_powers_of_two_divide_exactly_whatever_the_arithmetic() -> None:
    problem = QuantizeProblem(9, 128, regime="ties")
    inputs = materialise(problem)
    by = scales(inputs.x, inputs.to)  # type: ignore[union-attr]
    assert (torch.frexp(by).mantissa == 0.5).all()
    for name in QUOTIENT_ERRORS:
        low, high = code_bounds(inputs.x, by, inputs.to, Arithmetic(quotients=name))  # type: ignore[union-attr]
        assert low.equal(high)


def test_halves_in_int8() -> None:
    x = row(0.5, 1.5, -2.5, 2.499, -3.75)
    to, one = QuantizedFormat(INT8), torch.ones(1, 1)
    wanted = {"even": [0, 2, -2, 2, -4], "away": [1, 2, -3, 2, -4], "cut": [0, 1, -2, 2, -3]}
    for ties, codes in wanted.items():
        assert code_bounds(x, one, to, Arithmetic(ties=ties))[0].tolist() == [codes]


def test_one_rounding_differs_from_two() -> None:
    # 17 / 16 is halfway between 1 and 1.125; the quotient in float32 is that, and less exactly.
    x, by = row(1.0625 * 3 * (1 - 2.0**-24)).double(), torch.tensor([[3.0]])
    to = QuantizedFormat(E4M3)
    order = [
        int(code_bounds(x * (1 + 2.0**-30), by, to, Arithmetic(quotients=name))[0])
        for name in ("division", "once")
    ]
    assert codes_of(torch.tensor(order, dtype=torch.int16), E4M3).float().tolist() == [1.0, 1.0]
    x = row(1.1875 * 3).double() * (1 - 2.0**-40)  # halfway to 1.25, which is even
    order = [
        int(code_bounds(x, by, to, Arithmetic(quotients=name))[0]) for name in ("division", "once")
    ]
    assert codes_of(torch.tensor(order, dtype=torch.int16), E4M3).float().tolist() == [1.25, 1.125]


@pytest.mark.parametrize(
    ("amax", "code"),
    [
        (0.0, 0),
        (448 * 2.0**-126, 1),
        (448 * 2.0**-127, 0),
        (449 * 2.0**-126, 2),
        (447.0, 127),
        (448.0, 127),
        (450.0, 128),
        (1.0, 119),
        (3.0e38, 247),
    ],
)
def test_an_e8m0_scale_is_the_least_power_with_room(amax: float, code: int) -> None:
    to = QuantizedFormat(E4M3, (1, 0), "e8m0", 2.0**-126)
    x = torch.tensor([[amax, -amax / 2]], dtype=torch.float32)
    codes, scales = quantize(x, to)
    assert scales is not None
    assert scales.dtype == torch.uint8
    assert scales.tolist() == [[code]]
    assert codes.double().mul(2.0 ** (code - 127)).allclose(x.double(), rtol=2.0**-4)


@pytest.mark.parametrize(
    ("amax", "codes"),
    [  # of the rules up, down and rounded
        (6.0, (127, 127, 127)),
        (6.5, (128, 127, 127)),
        (7.0, (128, 127, 128)),
        (4.0, (127, 127, 127)),
        (3.0, (126, 126, 126)),
        (0.0, (0, 0, 0)),
        (6 * 2.0**-126, (1, 1, 1)),
        (7 * 2.0**-127, (1, 0, 1)),
        (3.3e38, (253, 252, 253)),
    ],
)
def test_the_rules_of_powers_of_two(amax: float, codes: tuple[int, ...]) -> None:
    x = torch.tensor([[amax, -amax]], dtype=torch.float32)
    for rule, code in zip(POWER_RULES, codes, strict=True):
        to = QuantizedFormat(torch.uint8, (1, 0), "e8m0", 2.0**-126, power_rule=rule)
        found = quantize(x, to)
        assert found.scales is not None
        assert found.scales.tolist() == [[code]], rule
        number = amax / 2.0 ** (code - 127)
        size = min(range(8), key=lambda each: (abs(FOUR_BITS[each] - number), each % 2))
        assert found.codes.tolist() == [[size + 16 * (size + 8)]]


def test_codes_of_four_bits_are_those_of_the_formats() -> None:
    x = (torch.rand((40, 64), generator=torch.Generator().manual_seed(0)) - 0.5) * 20
    mx = quantize(x, QuantizedFormat(torch.uint8, (1, 32), "e8m0", 2.0**-126, power_rule="down"))
    wanted = quantize_mxfp4(x)
    assert mx.scales is not None
    assert mx.codes.equal(wanted.codes)
    assert mx.scales.equal(wanted.block_scales)
    for factor in (1.0, 0.0372, 3.3e-5, 17.0):
        nv = quantize(
            x, QuantizedFormat(torch.uint8, (1, 16), "e4m3", 2.0**-126), global_scale=factor
        )
        named = quantize_nvfp4(x, factor)
        assert nv.scales is not None
        assert nv.codes.equal(named.codes)
        assert nv.scales.view(torch.uint8).equal(named.block_scales.view(torch.uint8))


@pytest.mark.parametrize(
    ("ties", "sizes"),
    [
        ("even", (0, 2, 2, 4, 4, 6, 6)),
        ("away", (1, 2, 3, 4, 5, 6, 7)),
        ("zero", (0, 1, 2, 3, 4, 5, 6)),
    ],
)
def test_ties_of_four_bits(ties: str, sizes: tuple[int, ...]) -> None:
    to = QuantizedFormat(torch.uint8, (1, 0), "e4m3")
    halves = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]])
    for sign in (1, -1):
        for bound in code_bounds(sign * halves, torch.ones(1, 1), to, Arithmetic(ties=ties)):
            wanted = [size if sign > 0 else -1 - size for size in sizes]
            assert bound.tolist() == [wanted]


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (1.0625, 0x38), (1.1875, 0x3A), (448.0, 0x7E), (1000.0, 0x7E), (2.0**-9, 1),
        (2.0**-10, 0), (2.0**-10 * 1.01, 1), (0.0, 0),
    ],
)  # fmt: skip
def test_scales_in_e4m3(raw: float, code: int) -> None:
    to = QuantizedFormat(torch.uint8, (1, 0), "e4m3", 2.0**-126)
    for factor in (1.0, 2.0**-7):
        x = torch.tensor([[6 * raw * factor, 0.0]], dtype=torch.float64)
        found = quantize(x, to, global_scale=factor)
        assert found.scales is not None
        assert found.scales.view(torch.uint8).tolist() == [[code]]
        if code == 0:
            assert found.codes.tolist() == [[0]]
    wide = scale_bounds(torch.tensor([[6 * 1.0625, 0.0]]), to, Arithmetic(scales="approximate"))
    assert [each.item() for each in wide] == [1.0, 1.125]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_channels": 15, "scale_format": "e8m0"}, "num_channels"),
        ({"scale_format": "float32"}, "scale_format"),
        ({"codes": "int8", "scale_format": "e4m3"}, "scale_format"),
        ({"scale_format": "e4m3", "power_rule": "down"}, "power_rule"),
        ({"codes": "int8", "power_rule": "down"}, "power_rule"),
        ({"scale_format": "e8m0", "global_scale": 2.0}, "global_scale"),
        ({"scale_format": "e4m3", "global_scale": 0.0}, "global_scale"),
        ({"scale_format": "e4m3", "saturate": False}, "saturate"),
    ],
)
def test_a_problem_that_four_bits_cannot_have_is_refused(
    fields: dict[str, object], name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        QuantizeProblem(**{"codes": "e2m1", **fields})  # type: ignore[arg-type]


def test_a_format_of_four_bits_checks_its_arguments() -> None:
    to = QuantizedFormat(torch.uint8, (1, 0), "e4m3")
    with pytest.raises(ValueError, match="scale_format"):
        QuantizedFormat(torch.uint8)
    with pytest.raises(ValueError, match="power_rule"):
        QuantizedFormat(E4M3, power_rule="down")
    with pytest.raises(ValueError, match="N even"):
        quantize(torch.ones(1, 3), to)
    with pytest.raises(ValueError, match="scale is given"):
        quantize(torch.ones(1, 2), to, scale=1.0)
    with pytest.raises(ValueError, match="global_scale"):
        quantize(torch.ones(1, 2), to, global_scale=-1.0)


def test_swizzled_scales_lie_as_tensor_cores_read_them() -> None:
    problem = QuantizeProblem(
        130, 160, block_channels=32, scale_format="e8m0", scale_layout="swizzled", seed=5
    )
    inputs = materialise(problem)
    assert isinstance(inputs, QuantizeInputs)
    assert inputs.scale_shape == (256, 8)
    scales = quantized(inputs).scales
    rows = quantized(replace(inputs, scale_layout="rows")).scales
    assert scales is not None
    assert rows is not None
    flat = scales.flatten()
    for row, column in ((0, 0), (33, 1), (127, 3), (5, 4), (128, 0), (129, 4)):
        tile = row // 128 * 2 + column // 4
        place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        assert flat[place] == rows[row, column]
    assert int((flat != 0).sum()) == rows.numel()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"scale_format": "e8m0", "scale_layout": "columns"}, "rows or swizzled where scales are"),
        ({"scale_layout": "swizzled"}, "unless scales are bytes and of one row each"),
        (
            {"scale_format": "e8m0", "scale_layout": "swizzled", "block_rows": 4},
            "unless scales are bytes and of one row each",
        ),
    ],
)
def test_an_order_that_no_scales_have_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match="scale_layout") as error:
        QuantizeProblem(**fields)  # type: ignore[arg-type]
    assert said in str(error.value)


@pytest.mark.parametrize("dtype", [*FP8, INT8])
def test_the_order_of_codes_is_that_of_their_numbers(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    codes = codes[~codes.float().isnan()] if dtype != INT8 else codes
    order = order_of(codes)
    assert codes_of(order, dtype).view(torch.uint8).equal(codes.view(torch.uint8))
    numbers = codes.float()[order.argsort()]
    assert (numbers.diff() >= 0).all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dtype": torch.float16}, "dtype is torch.float16; it must be one of float8_e4m3fn"),
        ({"block": (1, -1)}, "block is (1, -1); it must be two sizes"),
        ({"scale_format": "e4m3"}, "scale_format is 'e4m3'; it must be one of"),
        ({"floor": 0.0}, "floor is 0.0; it must be positive and finite"),
        ({"dtype": INT8, "saturate": False}, "saturate is False; int8 has neither"),
    ],
)
def test_what_is_no_format_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        QuantizedFormat(**given)  # type: ignore[arg-type]
    assert said in str(error.value)


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x has shape \(3,\); it must be a matrix"):
        quantize(torch.ones(3), QuantizedFormat())
    with pytest.raises(ValueError, match="scale is -1"):
        quantize(torch.ones(3, 3), QuantizedFormat(), scale=-1.0)


def test_each_regime_has_what_it_says() -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        made = {
            regime: materialise(QuantizeProblem(12, 256, dtype, regime=regime, seed=4))
            for regime in ("ties", "faint", "large", "zeros")
        }
        x = {regime: inputs.x.float() for regime, inputs in made.items()}  # type: ignore[union-attr]
        assert all(each.isfinite().all() for each in x.values())
        assert x["faint"].abs().max() < 1e-5
        assert x["large"].abs().max() > torch.finfo(getattr(torch, dtype)).max / 16
        assert (x["zeros"] == 0).all(1).any()
        assert x["zeros"].signbit().logical_and(x["zeros"] == 0).any()
        ties = x["ties"] / scales(x["ties"], QuantizedFormat(E4M3, (1, 0)))
        to = QuantizedFormat(E4M3)
        nudged = [
            code_bounds(ties * by, torch.ones(1, 1), to)[0] for by in (1 - 2.0**-8, 1 + 2.0**-8)
        ]
        assert (nudged[0] != nudged[1]).float().mean() > 0.4  # others lie one number beside
