"""Laws of quantisers: what is right passes, and what they say of faults."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernelproof.impl import Implementation, Target, implementation
from kernelproof.impl.torch.quantize import quantize
from kernelproof.properties.laws import find_law
from kernelproof.properties.seeded import fp4_quantize_bugs as fp4_bugs
from kernelproof.properties.seeded import mx_quantize_bugs as mx_bugs
from kernelproof.properties.seeded import quantize_bugs as bugs
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import Arithmetic, QuantizeProblem, materialise
from kernelproof.reference.tensors.quantize import QuantizeInputs

GROUPS = QuantizeProblem(5, 96, block_rows=1, block_channels=48, seed=1)
GIVEN = QuantizeProblem(5, 40, block_rows=0, block_channels=0, scale=0.0372, seed=2)
SQUARES = QuantizeProblem(
    9, 100, block_rows=4, block_channels=40, codes="int8", scale_layout="columns", seed=3
)
MX = QuantizeProblem(
    5, 96, block_rows=1, block_channels=32, scale_format="e8m0", scale_layout="swizzled", seed=4
)
NVFP4 = QuantizeProblem(
    5, 96, block_rows=1, block_channels=16, codes="e2m1", scale_format="e4m3",
    scale_layout="swizzled", global_scale=0.0372, seed=6,
)  # fmt: skip
MXFP4 = replace(
    NVFP4, block_channels=32, scale_format="e8m0", global_scale=1.0, power_rule="rounded"
)
LAWS = ("parity", "not_finite", "rows", "signs", "again")


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


def verdict(law: str, implementation: Implementation, problem: QuantizeProblem) -> Verdict:
    subject = Subject(implementation, Target.here("cpu"), Stages())
    name = f"quantize_{law}" if law in LAWS else law
    try:
        return find_law(name).check(subject, problem)
    except Stop as stop:
        return stop.verdict


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("problem", [GROUPS, GIVEN, SQUARES])
@pytest.mark.parametrize("implementation", [quantize, bugs.honest_quantiser])
def test_what_is_right(law: str, problem: QuantizeProblem, implementation: Implementation) -> None:
    found = verdict(law, implementation, problem)
    assert found.status == "PASS", found.message
    assert found.vacuous == (law == "rows" and problem is SQUARES)


@pytest.mark.parametrize(
    ("law", "bug", "problem", "said"),
    [
        ("parity", bugs.first_code_lower, GROUPS, "codes[0, 0] is"),
        ("parity", bugs.last_code_higher, GROUPS, "1 codes apart (1 of 480 differ)"),
        ("parity", bugs.scale_one_unit_up, GROUPS, "scales[4, 1] is"),
        ("parity", bugs.scales_row_by_row, SQUARES, "strides (3, 1), not (1, 3) (columns)"),
        ("parity", bugs.scales_in_float64, GROUPS, "scales is torch.float64"),
        ("not_finite", bugs.nan_for_a_tile, replace(GROUPS, seed=7), "in row 0, elsewhere: codes"),
        ("rows", bugs.rows_of_a_cut_tile, GROUPS, "codes have other bits"),
        ("signs", bugs.amax_of_positive_numbers, GROUPS, "of the negated matrix"),
        ("again", bugs.scales_of_an_earlier_call, GROUPS, "repeated after another batch"),
        ("integer_inputs_unchanged", bugs.reciprocal_in_place, GIVEN, "changed its input scale"),
    ],
)
def test_a_finding_says_what_is_wrong(
    law: str, bug: Implementation, problem: QuantizeProblem, said: str
) -> None:
    found = verdict(law, bug, problem)
    assert found.status == "FAIL", found
    assert said in found.message


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("layout", ["rows", "swizzled"])
@pytest.mark.parametrize("implementation", [quantize, mx_bugs.honest_mx_quantiser])
def test_what_is_right_in_e8m0(law: str, layout: str, implementation: Implementation) -> None:
    for regime in ("ties", "faint", "large", "zeros"):
        for floor in (1e-10, 2.0**-126):
            problem = replace(MX, scale_layout=layout, regime=regime, floor=floor)
            found = verdict(law, implementation, problem)
            assert found.status == "PASS", found.message


@pytest.mark.parametrize(
    ("bug", "problem", "said"),
    [
        (mx_bugs.mx_bias_of_128, MX, "scales[0, 0] is"),
        (mx_bugs.mx_padding_of_nan, MX, "scales that tiles are padded with are not 0"),
        (mx_bugs.mx_rows_of_a_tile_exchanged, MX, "scales that tiles are padded with are not 0"),
        (
            mx_bugs.mx_second_tile_forgotten,
            replace(MX, num_tokens=140, regime="outliers"),
            "scales[",
        ),
        (mx_bugs.mx_least_code_is_one, replace(MX, regime="zeros", floor=2.0**-126), "scales["),
    ],
)
def test_a_finding_of_e8m0_says_what_is_wrong(
    bug: Implementation, problem: QuantizeProblem, said: str
) -> None:
    found = verdict("parity", bug, problem)
    assert found.status == "FAIL", found
    assert said in found.message


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("problem", [NVFP4, MXFP4])
@pytest.mark.parametrize("implementation", [quantize, fp4_bugs.honest_fp4_quantiser])
def test_what_is_right_in_four_bits(
    law: str, problem: QuantizeProblem, implementation: Implementation
) -> None:
    for regime in ("ties", "faint", "large", "zeros"):
        for floor in (1e-10, 2.0**-126):
            found = verdict(law, implementation, replace(problem, regime=regime, floor=floor))
            assert found.status == "PASS", found.message


@pytest.mark.parametrize(
    ("bug", "problem", "said"),
    [
        (fp4_bugs.fp4_nibbles_exchanged, NVFP4, "codes[0, 0] is"),
        (fp4_bugs.fp4_sign_of_zero_lost, MXFP4, "is 0 (0x00), expected exactly -0 (0x08), 1 codes"),
        (fp4_bugs.nvfp4_scale_cut_off, NVFP4, "scales[0, 0] is"),
        (fp4_bugs.nvfp4_scale_of_a_negative_zero, replace(NVFP4, regime="zeros"), "is nan"),
        (fp4_bugs.mxfp4_always_down, replace(MXFP4, power_rule="up"), "scales["),
    ],
)
def test_a_finding_of_four_bits_says_what_is_wrong(
    bug: Implementation, problem: QuantizeProblem, said: str
) -> None:
    found = verdict("parity", bug, problem)
    assert found.status == "FAIL", found
    assert said in found.message


def test_zeros_without_a_sign_are_right_where_the_arithmetic_says_so() -> None:
    unsigned = partial(
        implementation, "quantize", features=fp4_bugs.FEATURES,
        arithmetic=Arithmetic(zeros="unsigned"),
    )  # fmt: skip

    @unsigned(name="plain")
    def plain(inputs: QuantizeInputs) -> object:
        return fp4_bugs.fp4_sign_of_zero_lost(inputs)

    @unsigned(name="signed")
    def signed(inputs: QuantizeInputs) -> object:
        return fp4_bugs.honest_fp4_quantiser(inputs)

    for law in LAWS:
        assert verdict(law, plain, MXFP4).status == "PASS"
    found = verdict("parity", signed, MXFP4)
    assert found.status == "FAIL"
    assert "is -0 (0x08), expected exactly 0 (0x00)" in found.message


def test_codes_of_scales_are_bytes_of_a_whole_tile() -> None:
    @implementation("quantize", name="floats", features=mx_bugs.FEATURES)
    def floats(inputs: QuantizeInputs) -> object:
        codes, scales = mx_bugs.honest_mx_quantiser(inputs)
        return codes, scales.float()

    @implementation("quantize", name="cut", features=mx_bugs.FEATURES)
    def cut(inputs: QuantizeInputs) -> object:
        codes, scales = mx_bugs.honest_mx_quantiser(inputs)
        return codes, scales[: len(codes)]

    assert "scales is torch.float32, not torch.uint8" in verdict("parity", floats, MX).message
    assert "scales has shape [5, 4], not [128, 4]" in verdict("parity", cut, MX).message


def test_scales_of_one_group_may_have_any_stride_across() -> None:
    problem = QuantizeProblem(5, 16, scale_layout="padded_columns")
    for law in LAWS:
        assert verdict(law, quantize, problem).status == "PASS"
    found = verdict("rows", bugs.scale_one_unit_up, problem)
    assert "scales have other bits" in found.message


def test_one_block_has_no_others() -> None:
    assert verdict("not_finite", quantize, QuantizeProblem()).vacuous
    assert verdict("rows", quantize, QuantizeProblem()).vacuous


@pytest.mark.parametrize("codes", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("place", range(0, 24, 5))
def test_one_wrong_code_is_found_wherever_it_is(codes: str, place: int) -> None:
    @implementation("quantize", name="one-off")
    def one_off(inputs: QuantizeInputs) -> object:
        found, scales = bugs.honest_quantiser(inputs)
        order = found.view(torch.uint8)
        order[place // 8, place % 8] ^= 1
        return found, scales

    found = verdict("parity", one_off, QuantizeProblem(3, 8, codes=codes, seed=place))
    assert found.status == "FAIL"
    assert f"codes[{place // 8}, {place % 8}]" in found.message


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_amaxes_are_divided_by_no_number(scale_format: str) -> None:
    """On a GPU torch multiplies by the reciprocal of a number, which rounds twice."""
    divisors: list[object] = []

    class Divisions(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]

        def __torch_dispatch__(
            self,
            func: Any,  # noqa: ANN401  torch's
            types: Any,  # noqa: ANN401
            args: Any = (),  # noqa: ANN401
            kwargs: Any = None,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            if func is torch.ops.aten.div.Tensor:
                divisors.append(args[1])
            return func(*args, **(kwargs or {}))

    inputs: Any = materialise(replace(GROUPS, scale_format=scale_format))
    with Divisions():
        quantize(inputs)
    assert len(divisors) == 2
    assert all(isinstance(each, torch.Tensor) for each in divisors)
