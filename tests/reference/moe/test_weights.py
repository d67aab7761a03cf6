"""The tables of matrix elements and of problems' weights: complete, and read as written."""

from __future__ import annotations

import pytest
import torch

from kernelproof.impl.features import FEATURES
from kernelproof.impl.gating.of_problem import QUANTISATIONS
from kernelproof.reference import MatrixFormat
from kernelproof.reference.moe.matrix_elements import MatrixElement
from kernelproof.reference.moe.weights import MATRIX_ELEMENTS, WEIGHT_FORMATS
from kernelproof.reference.problems.moe import QUANTISED

# What rounding loses at most, as a share of the largest number that shares a scale: half a step
# at the largest, of e2m1 a sixth, and the saturation of a scale that is rounded down.
LOST = {
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "nvfp4": (1 + 2.0**-4) / 6,
    "mxfp4": 2.0**-2,
    "mxfp8": 2.0**-3,
    "int8": 0.0,
    "int4_g32": 1 / 14,
    "int4_g128": 1 / 14,
    "int4_zp_g32": 2 / 15,
    "int4_zp_g128": 2 / 15,
}
STEPS = {"int8": 0.5}
"""What is lost besides, in units of the scale, where steps are equal."""


@pytest.mark.parametrize("entry", MATRIX_ELEMENTS.values(), ids=MATRIX_ELEMENTS)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_every_element_is_read_as_written(entry: MatrixElement, scale: float) -> None:
    name = next(name for name, each in MATRIX_ELEMENTS.items() if each is entry)
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(40, 128, generator=generator)
    codes, *rest = entry.encode(values, scale)
    assert codes.dtype == entry.dtype
    assert codes.shape[-1] * entry.packed == 128
    scales = rest[0] if entry.block else torch.tensor(scale)
    third = rest[1] if entry.has_zero_points else scale
    read = entry.decode(codes, scales, third)
    amax = values.abs().unflatten(-1, (-1, entry.block or 1)).amax(dim=-1)
    room = LOST[name] * amax.repeat_interleave(entry.block or 1, dim=-1)
    assert ((read - values).abs() <= room + STEPS.get(name, 2.0**-9) * scale).all()
    if entry.block:
        assert scales.shape[-1] * entry.block == 128
        again = entry.encode(read, scale)
        third = again[2] if entry.has_zero_points else scale
        assert torch.equal(entry.decode(again[0], again[1], third), read)


def test_every_format_of_problems_has_its_entry_and_its_feature() -> None:
    assert ("", *WEIGHT_FORMATS) == QUANTISED
    assert set(QUANTISATIONS) == set(QUANTISED)
    assert {form.feature for form in WEIGHT_FORMATS.values()} <= set(FEATURES)


def test_an_unknown_element_is_an_error_that_names_the_table() -> None:
    table = r"\(MATRIX_ELEMENTS in kernelproof/reference/moe/weights.py\)"
    with pytest.raises(ValueError, match=f"element is 'int4'; it must be one of .* {table}"):
        MatrixFormat("int4")
