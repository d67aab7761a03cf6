"""The numbers of quantised weights and hidden states, against loops over the bytes of the codes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl.features import drawn_features
from kernelproof.impl.torch.moe import experts as in_torch
from kernelproof.reference import (
    MatrixFormat,
    MoEProblem,
    QuantizedMatrix,
    materialise,
    oracle,
)
from kernelproof.reference.formats.int4_groups import dequantize_int4_groups, quantize_int4_groups
from kernelproof.reference.formats.mx import quantize_e8m0
from kernelproof.reference.moe.weights import checked_matrix
from kernelproof.reference.tensors.moe_inputs import MoEInputs

SMALL = MoEProblem(num_tokens=3, hidden=128, inter=128, num_experts=2, top_k=2, seed=11)
BLOCKS = replace(SMALL, hidden=136, inter=72)
"""Two blocks of scales in each direction, the last ones short."""
FEATURES = {
    "int8_tensor": "int8_weights",
    "int8_channel": "int8_weights",
    "int8_block": "int8_weights",
    "fp8_block_ue8m0": "ue8m0_scales",
    "mxfp8": "mxfp8_weights",
    "int4_g32": "int4_weights",
    "int4_g128": "int4_weights",
    "int4_zp_g32": "int4_zero_points",
    "int4_zp_g128": "int4_zero_points",
    "nvfp4_gate_up": "nvfp4_gate_up_scales",
}
LOST = {"int4_g32": 0.25, "int4_g128": 0.25, "int4_zp_g32": 0.4, "int4_zp_g128": 0.4,
        "nvfp4_gate_up": 0.2}  # fmt: skip
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def inputs_of(problem: MoEProblem) -> MoEInputs:
    made = materialise(problem)
    assert isinstance(made, MoEInputs)
    return made


def codes_of(matrix: torch.Tensor | QuantizedMatrix) -> QuantizedMatrix:
    assert isinstance(matrix, QuantizedMatrix)
    return matrix


def e4m3(byte: int) -> float:
    """Return the number of a byte of e4m3."""
    sign, exponent, fraction = byte >> 7, byte >> 3 & 15, byte & 7
    size = math.ldexp(fraction, -9) if not exponent else math.ldexp(8 + fraction, exponent - 10)
    return -size if sign else size


def number(element: str, codes: list[int], column: int) -> float:
    """Return the number that a column's bits stand for, without scales; int4's from 0 to 15."""
    if element == "int8":
        return codes[column] - 256 if codes[column] > 127 else codes[column]
    if element in ("float8_e4m3fn", "mxfp8"):
        return e4m3(codes[column])
    nibble = codes[column // 2] >> (4 * (column % 2)) & 15
    if element == "nvfp4":
        return -E2M1[nibble - 8] if nibble > 7 else E2M1[nibble]
    return nibble


def factor(
    form: MatrixFormat,
    scales: Any,  # noqa: ANN401  numbers, in lists or alone
    row: int,
    column: int,
    weights: bool,
) -> float:
    """Return the scale of a number, from lists of the scales, or of their bytes."""
    element, kind = form.element, form.scales
    if kind == "tensor":
        return float(scales)
    if kind == "channel":
        return float(scales[row])
    narrow = {"nvfp4": 16, "mxfp8": 32, "int4_g32": 32, "int4_zp_g32": 32}
    of_row = scales[row // 128 if kind.startswith("block") and weights else row]
    scale = of_row[column // narrow.get(element, 128)]
    if element == "nvfp4":
        return e4m3(scale)
    powers = element == "mxfp8" or kind == "block_ue8m0"
    return math.ldexp(1.0, scale - 127) if powers else float(scale)


def by_hand(matrix: QuantizedMatrix, expert: int | None, *, interleaved: bool) -> list[list[float]]:
    """Return the numbers of an expert's weights, or of hidden states, one after another."""
    element, bytewise = matrix.format.element, matrix.scales.element_size() == 1
    given: list[Any] = [
        matrix.codes.view(torch.uint8),
        matrix.scales.view(torch.uint8) if bytewise else matrix.scales,
        matrix.zero_points,
        matrix.global_scale,
    ]
    lists = [each.tolist() if isinstance(each, torch.Tensor) else each for each in given]
    if expert is not None:
        lists = [each[expert] if isinstance(each, list) else each for each in lists]
    codes, scales, zeros, whole = lists
    width = 2 if element.startswith(("int4", "nvfp4")) else 1
    found = []
    for row, of_row in enumerate(codes):
        half = row % 2 if interleaved else 2 * row // len(codes)
        last = whole[half] if isinstance(whole, list) else whole
        numbers = []
        for column in range(width * len(of_row)):
            value = number(element, of_row, column)
            if element.startswith("int4"):
                group = 32 if element.endswith("g32") else 128
                value -= zeros[row][column // group] if zeros else 8
            value *= factor(matrix.format, scales, row, column, expert is not None) * last
            numbers.append(value)
        found.append(numbers)
    return found


def as_numbers(inputs: MoEInputs) -> MoEInputs:
    """Return the call with the numbers that ``by_hand`` reads in the place of codes."""
    numbers: dict[str, Any] = {}
    for name in ("w13", "w2"):
        matrix = codes_of(getattr(inputs, name))
        each = [
            by_hand(matrix, e, interleaved=inputs.interleaved) for e in range(len(matrix.codes))
        ]
        numbers[name] = torch.tensor(each, dtype=torch.float64)
    if isinstance(inputs.hidden, QuantizedMatrix):
        numbers["hidden"] = torch.tensor(
            by_hand(inputs.hidden, None, interleaved=False), dtype=torch.float64
        )
    return replace(inputs, **numbers)


@pytest.mark.parametrize("quantized", FEATURES)
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_weights_are_what_loops_over_bytes_read(
    quantized: str, hidden: bool, interleaved: bool
) -> None:
    base = BLOCKS if quantized.startswith(("int", "fp8")) else SMALL
    problem = replace(base, quantized=quantized, quantized_hidden=hidden, interleaved=interleaved)
    features = ["interleaved_w13"] if interleaved else []
    features += [FEATURES[quantized]] + (["quantized_hidden"] if hidden else [])
    assert drawn_features(problem) == features
    inputs = inputs_of(problem)
    wanted = oracle.experts(as_numbers(inputs))
    assert float((oracle.experts(inputs) - wanted).abs().max()) <= 1e-12
    assert float((in_torch(inputs) - wanted).abs().max()) <= 1e-5
    # The numbers of the weights come near those that no format has rounded.
    plain = inputs_of(replace(problem, quantized="", quantized_hidden=False)).w13
    assert isinstance(plain, torch.Tensor)
    checked = checked_matrix("w13", inputs.w13, "e r c", interleaved=interleaved)
    read = torch.stack([checked.weights(expert) for expert in range(2)])
    assert 0 < float((read - plain).norm() / plain.norm()) < LOST.get(quantized, 0.06)
    assert torch.equal(read.to(torch.bfloat16).double(), read), "bfloat16 holds them"


def test_formats_of_hidden_states() -> None:
    def hidden(quantized: str) -> QuantizedMatrix:
        problem = replace(SMALL, hidden=256, quantized=quantized, quantized_hidden=True)
        return codes_of(inputs_of(problem).hidden)

    assert list(hidden("int8_tensor").scales.shape) == [3]
    assert list(hidden("int8_block").scales.shape) == [3, 2]
    powers = hidden("fp8_block_ue8m0")
    assert list(powers.scales.shape) == [3, 2]
    assert powers.scales.dtype == getattr(torch, "float8_e8m0fnu", torch.uint8)
    assert hidden("mxfp8").scales.shape == (3, 8)
    assert (
        hidden("int4_g32").format == hidden("int4_zp_g32").format == MatrixFormat("int8", "channel")
    )
    assert hidden("int4_g128").format == MatrixFormat("float8_e4m3fn", "channel")


def test_scales_of_bytes_are_the_same_without_their_dtype() -> None:
    inputs = inputs_of(replace(BLOCKS, quantized="fp8_block_ue8m0"))
    w13 = codes_of(inputs.w13)
    plain = replace(inputs, w13=w13._replace(scales=w13.scales.view(torch.uint8)))
    assert torch.equal(oracle.experts(inputs), oracle.experts(plain))
    numbers = replace(inputs, w13=w13._replace(scales=w13.scales.view(torch.uint8).float()))
    with pytest.raises(ValueError, match=r"w13\.scales is torch\.float32; .* e8m0 bytes"):
        oracle.experts(numbers)


def test_bytes_of_exponents_are_not_read_as_numbers() -> None:
    inputs = inputs_of(replace(BLOCKS, quantized="fp8_block_ue8m0"))
    w13 = codes_of(inputs.w13)
    linear = w13._replace(format=MatrixFormat("float8_e4m3fn", "block"))
    for scales in (w13.scales, w13.scales.view(torch.uint8)):
        with pytest.raises(ValueError, match=r"w13\.scales is .* e8m0 bytes are 'block_ue8m0'"):
            oracle.experts(replace(inputs, w13=linear._replace(scales=scales)))
    made = inputs_of(replace(SMALL, quantized="mxfp8", quantized_hidden=True))
    hidden = codes_of(made.hidden)
    typed = hidden._replace(scales=hidden.scales.view(w13.scales.dtype))
    assert torch.equal(oracle.experts(made), oracle.experts(replace(made, hidden=typed)))


def test_scales_are_rounded_up_to_powers_of_two() -> None:
    exact = torch.tensor([2.0**-130, 2.0**-127, 0.25, 0.2500001, 0.3, 0.5, 1.0, 1.5, 448.0])
    codes = quantize_e8m0(exact).view(torch.uint8).tolist()
    assert codes == [0, 0, 125, 126, 126, 126, 127, 128, 136]
    for value, code in zip(exact.tolist()[1:], codes[1:], strict=True):
        assert math.ldexp(1.0, code - 128) < value <= math.ldexp(1.0, code - 127)
    for wrong in (torch.tensor([0.0]), torch.tensor([math.inf]), torch.tensor([1.5 * 2.0**127])):
        with pytest.raises(ValueError, match="x "):
            quantize_e8m0(wrong)


def test_nothing_saturates_under_a_scale_that_is_rounded_up() -> None:
    inputs = inputs_of(replace(BLOCKS, quantized="fp8_block_ue8m0"))
    plain = inputs_of(BLOCKS).w2
    assert isinstance(plain, torch.Tensor)
    matrix = codes_of(inputs.w2)
    read = checked_matrix("w2", matrix, "e r c")
    for expert in range(2):
        error = (read.weights(expert) - plain[expert]).abs()
        assert bool((error <= 2.0**-4 * plain[expert].abs() + 2.0**-9).all())


@pytest.mark.parametrize("group", [32, 128])
def test_int4_is_quantised_to_the_nearest_code_of_each_group(group: int) -> None:
    x = torch.randn(3, 240, generator=torch.Generator().manual_seed(2))
    for zero_points in (False, True):
        made = quantize_int4_groups(x, group, zero_points=zero_points)
        assert made.codes.shape == (3, 120)
        assert made.scales.shape == (3, -(-240 // group))
        read = dequantize_int4_groups(made.codes, group, made.scales, made.zero_points)
        steps = made.scales.repeat_interleave(group, dim=1)[:, :240]
        # A zero point that is rounded moves the range by up to half a step.
        assert float(((read - x).abs() / steps).max()) <= (1.0 if zero_points else 0.5) + 1e-6


def test_zero_points_vary_and_are_needed() -> None:
    inputs = inputs_of(replace(SMALL, quantized="int4_zp_g32"))
    w13 = codes_of(inputs.w13)
    assert w13.zero_points is not None
    assert w13.zero_points.unique().tolist() == list(range(3, 13))
    for wrong, said in (
        (w13._replace(zero_points=None), r"w13\.zero_points: .* needs them"),
        (w13._replace(zero_points=w13.zero_points + 8), "a zero point is 0 to 15"),
        (w13._replace(zero_points=w13.zero_points[:, :1]), "one for each scale"),
    ):
        with pytest.raises(ValueError, match=said):
            oracle.experts(replace(inputs, w13=wrong))
    plain = codes_of(inputs_of(replace(SMALL, quantized="int4_g32")).w13)
    assert plain.zero_points is None
    with pytest.raises(ValueError, match="has none"):
        oracle.experts(replace(inputs, w13=plain._replace(zero_points=w13.zero_points)))


def test_gate_and_up_have_global_scales_of_their_own() -> None:
    for interleaved in (False, True):
        problem = replace(SMALL, quantized="nvfp4_gate_up", interleaved=interleaved, num_experts=4)
        inputs = inputs_of(problem)
        scale = codes_of(inputs.w13).global_scale
        assert isinstance(scale, torch.Tensor)
        assert list(scale.shape) == [4, 2]
        assert bool((scale[:, 0] != scale[:, 1]).any())
        of_second = codes_of(inputs.w2).global_scale
        assert isinstance(of_second, torch.Tensor)
        assert list(of_second.shape) == [4]
    w13, w2 = codes_of(inputs.w13), codes_of(inputs.w2)
    with pytest.raises(ValueError, match=r"w2\.global_scale .* one of gate and one of up"):
        oracle.experts(replace(inputs, w2=w2._replace(global_scale=w13.global_scale)))
    alone = codes_of(inputs_of(replace(problem, interleaved=False, activation="relu2")).w13)
    assert isinstance(alone.global_scale, torch.Tensor)
    assert list(alone.global_scale.shape) == [4], "there is no gate"


@pytest.mark.parametrize("one_product", [False, True])
def test_global_scales_follow_rows_that_alternate(one_product: bool) -> None:
    problem = replace(
        SMALL, quantized="nvfp4_gate_up", interleaved=True, num_experts=4, one_product=one_product
    )
    inputs = inputs_of(problem)
    w13 = codes_of(inputs.w13)
    apart = w13._replace(
        codes=torch.cat([w13.codes[:, ::2], w13.codes[:, 1::2]], dim=1),
        scales=torch.cat([w13.scales[:, ::2], w13.scales[:, 1::2]], dim=1),
    )
    answer = oracle.experts(inputs)
    assert bool((answer != 0).any())
    assert torch.equal(answer, oracle.experts(replace(inputs, w13=apart, interleaved=False)))


def test_the_least_code_of_int8_is_read_as_it_is() -> None:
    codes = torch.full((1, 2, 4), -128, dtype=torch.int8)
    matrix = QuantizedMatrix(codes, torch.tensor([0.5]), MatrixFormat("int8", "tensor"))
    assert bool((checked_matrix("w2", matrix, "e r c").weights(0) == -64.0).all())
