"""Judging codes and scales of a quantiser by what its arithmetic may give."""

from __future__ import annotations

import torch

from ...impl import Implementation
from ...reference import Arithmetic
from ...reference.formats.mx import dequantize_e8m0
from ...reference.formats.quantizers import (
    code_bounds,
    codes_of,
    given_scale,
    order_of,
    scale_bounds,
)
from ...reference.formats.scale_layouts import swizzle_scales_128x4, unswizzle_scales_128x4
from ...reference.moe.norm_quantize import norm_bounds, norm_scale_bounds, summed
from ...reference.tensors.norm_quantize import NormQuantizeInputs
from ...reference.tensors.quantize import QuantizeInputs
from .comparison import Check, Result, bitwise, fail, listed, off
from .verdict import EXACTLY, Verdict

NEGATIVE_ZERO = -1
"""The code of -0 in the order of the numbers of codes."""
LARGEST_E4M3 = 0x7E
"""The code of the largest number in e4m3; NaN and negative numbers follow it."""


def judge_quantised(
    implementation: Implementation, inputs: QuantizeInputs, result: Result
) -> Verdict:
    """Judge (codes, scales) of a call; scales are None where one was given."""
    return judge_answer(implementation.arithmetic_of(0), inputs, result)


def judge_answer(
    arithmetic: Arithmetic,
    inputs: QuantizeInputs,
    result: Result,
    numbers: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Verdict:
    """Judge (codes, scales) as a call returned them, of x or of numbers between these."""
    codes, scales = result
    if codes.dtype != inputs.to.dtype or codes.shape != inputs.codes_shape:
        return fail("shape", f"codes are {codes.dtype} of shape {list(codes.shape)}")
    codes = inputs.to.elements_of(codes)
    if inputs.scale is not None:
        return compare_quantised(inputs, arithmetic, None, (codes, None), numbers)
    shape, dtype = inputs.scale_shape, inputs.scale_dtype
    if scales is None or scales.dtype != dtype or tuple(scales.shape) != shape:
        return fail("shape", "scales are missing, or of another dtype or shape")
    bounds = (
        scale_bounds(inputs.x, inputs.to, arithmetic, inputs.factor)
        if numbers is None
        else norm_scale_bounds(numbers, inputs.to, arithmetic)
    )
    linear = linear_scales(inputs, scales)
    if isinstance(linear, Verdict):
        return linear
    return compare_quantised(inputs, arithmetic, bounds, (codes, linear), numbers)


def judge_normed(
    implementation: Implementation, inputs: NormQuantizeInputs, result: Result
) -> Verdict:
    """Judge (codes, scales) of a call of a norm, and the residual in its record."""
    arithmetic = implementation.arithmetic_of(0)
    numbers = norm_bounds(inputs.x, inputs.gamma, **inputs.keywords(), arithmetic=arithmetic)
    return judge_residual(inputs) or judge_answer(arithmetic, inputs, result, numbers)


def judge_residual(inputs: NormQuantizeInputs) -> Verdict | None:
    """Return the FAIL of a residual that is not the sum to the last bit; None if it is."""
    if inputs.residual is None or inputs.before is None:
        return None
    wanted = summed(inputs.x, inputs.before).to(inputs.residual.dtype)
    found = bitwise("residual", inputs.residual, wanted)
    return found if found.bad else None


def linear_scales(inputs: QuantizeInputs, scales: torch.Tensor) -> torch.Tensor | Verdict:
    """Return scales row after row, or the FAIL of a tile whose padding is not 0."""
    if inputs.scale_layout != "swizzled":
        return scales
    codes = scales.view(torch.uint8)
    linear = unswizzle_scales_128x4(codes, *inputs.to.scales_of(tuple(inputs.x.shape)))
    if not swizzle_scales_128x4(linear).equal(codes):
        return fail("numeric", "scales that tiles are padded with are not 0")
    return linear.view(scales.dtype)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Return scales of any format as float32; NaN for one in e4m3 that has a sign."""
    if scales.dtype == torch.float8_e4m3fn:
        return scales.float().masked_fill(scales.view(torch.uint8) > LARGEST_E4M3, torch.nan)
    return dequantize_e8m0(scales).float() if scales.dtype == torch.uint8 else scales


def compare_quantised(
    inputs: QuantizeInputs,
    arithmetic: Arithmetic,
    bounds: tuple[torch.Tensor, torch.Tensor] | None,
    answer: tuple[torch.Tensor, torch.Tensor | None],
    numbers: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Verdict:
    """Check every scale by its bounds, and every code by the scale that the call gave.

    Zeros of both signs are codes of their own, unless the arithmetic has unsigned ones.

    Args:
        inputs: what the call was given, unchanged.
        arithmetic: the roundings of the implementation.
        bounds: the least and the largest scale of each block.
        answer: codes one by one, and scales where they are computed, of the right shapes and
            dtypes.
        numbers: the least and the greatest that each element may be that is quantised; None: x.
    """
    codes, scales = answer
    scales = None if scales is None else scale_values(scales)
    if scales is not None and bounds is not None:
        verdict = between("scales", scales, *bounds)
        if verdict.bad:
            return verdict
    by = scales
    if by is None:
        assert inputs.scale is not None  # noqa: S101  it is given where none is computed
        by = given_scale(inputs.x, inputs.scale)
    low, high = code_bounds(
        inputs.x if numbers is None else numbers[0], by, inputs.to, arithmetic, inputs.factor
    )
    if numbers is not None:
        high = code_bounds(numbers[1], by, inputs.to, arithmetic)[1]
    order = order_of(codes)
    wrong = (order < low) | (order > high)
    if inputs.to.is_fp4 and arithmetic.zeros == "unsigned":
        low, high = (each.masked_fill(each == NEGATIVE_ZERO, 0) for each in (low, high))
        wrong = (order < low) | (order > high) | (order == NEGATIVE_ZERO)
    if not wrong.any():
        return Verdict("PASS", ratio=0.0)
    expected = codes_of(low, inputs.to.dtype)
    pair = inputs.to.numbers_of(codes), inputs.to.numbers_of(expected)
    return _wrong_code((codes, expected), pair, wrong, (order - low).abs().double())


def between(
    name: str,
    actual: torch.Tensor,
    least: torch.Tensor,
    most: torch.Tensor,
    wrong: torch.Tensor | None = None,
) -> Verdict:
    """Check that each number is one of those from ``least`` to ``most``; NaN is none.

    Args:
        name: what a finding calls the tensor.
        actual, least, most: the numbers, and the ends of what each may be.
        wrong: which are outside, where more than the numbers says so, as of -0; None: by them.
    """
    wrong = ~((actual >= least) & (actual <= most)) if wrong is None else wrong
    if not wrong.any():
        return Verdict("PASS", ratio=0.0)
    where = tuple(int(i) for i in wrong.nonzero()[0])
    apart = (actual.double() - least.double()).abs().nan_to_num(nan=torch.inf)
    ends = f"{least[where].item():.9g}", f"{most[where].item():.9g}"
    return off(
        "numeric",
        f"{name}{list(where)}",
        f"{actual[where].item():.9g}",
        ends[0] if ends[0] == ends[1] else " to ".join(ends),
        bound=EXACTLY if ends[0] == ends[1] else "",
        more=f" ({int(wrong.sum())} of {wrong.numel()} differ)",
        worst=listed(Check(name, actual, least, most - least), wrong, apart),
    )


def _wrong_code(
    pair: tuple[torch.Tensor, torch.Tensor],
    numbers_of_pair: tuple[torch.Tensor, torch.Tensor],
    wrong: torch.Tensor,
    apart: torch.Tensor,
) -> Verdict:
    """Return the FAIL of the first wrong code, of actual and expected ones, and count them."""
    where = tuple(int(i) for i in wrong.nonzero()[0])
    (codes, expected), (numbers, wanted) = pair, numbers_of_pair

    def shown(code: torch.Tensor, number: torch.Tensor) -> str:
        byte = int(code[where].view(torch.uint8))
        return f"{number[where].item():.9g} (0x{byte:02x})"

    return off(
        "numeric",
        f"codes{list(where)}",
        shown(codes, numbers),
        shown(expected, wanted),
        bound=EXACTLY,
        more=f", {int(apart[where])} codes apart ({int(wrong.sum())} of {wrong.numel()} differ)",
        worst=listed(Check("codes", numbers, wanted, torch.zeros_like(wanted)), wrong, apart),
    )
