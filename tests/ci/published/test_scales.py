"""Codes of blocks whose scale may be one of two: right by the answered scale, and by no other."""

from __future__ import annotations

import pytest
import torch

from kernelproof.ci.published.answers import Said, ask
from kernelproof.ci.published.arithmetic import CODES
from kernelproof.ci.published.comparing import compare
from kernelproof.ci.published.expected import Expected, Scales
from kernelproof.ci.published.faults import seeded
from kernelproof.ci.published.scales import changes, given, pairs_of

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def numbers(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return the numbers of blocks that a reference quantises, rounded to 16 bits."""
    made = (x.to(torch.float32) * 1.003).to(torch.bfloat16).to(torch.float32)
    return made.reshape(len(x), -1, block)


def power_of_two(sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of scales that are rounded up to powers of two, and their numbers."""
    exponents = sizes.log2().ceil().to(torch.int32)
    return (exponents + 127).to(torch.uint8), torch.exp2(exponents.to(torch.float32))


def packed(scaled: torch.Tensor) -> torch.Tensor:
    """Return numbers rounded to e2m1, two a byte."""
    values = torch.tensor(E2M1, dtype=torch.float32)
    places = (scaled.abs().unsqueeze(-1) - values).abs().argmin(-1)
    codes = (places | ((scaled < 0).to(torch.int64) << 3)).flatten(1)
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)


def mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to FP8 with a power of two for each 32 numbers, as a reference does."""
    blocks = numbers(x, 32)
    codes, scales = power_of_two(blocks.abs().amax(-1) / 448)
    scaled = blocks / scales.unsqueeze(-1)
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1), codes


def mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e2m1 with a power of two for each 32 numbers, as a reference does."""
    blocks = numbers(x, 32)
    codes, scales = power_of_two(blocks.abs().max(-1).values / 6)
    return packed(blocks / scales.unsqueeze(-1)), codes


def nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e2m1 with a scale in FP8 for each 16 numbers, as a reference does."""
    blocks = numbers(x, 16)
    codes = (blocks.abs().amax(-1) / 6 * 40).to(torch.float8_e4m3fn)
    scales = codes.to(torch.float32).unsqueeze(-1)
    return packed(blocks * 40 / scales), codes


REFERENCES = {"mxfp8": mxfp8, "mxfp4": mxfp4, "nvfp4": nvfp4}


def said_of(name: str) -> Said:
    """Return what a reference says of many blocks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 2048, generator=generator).to(torch.bfloat16)
    return ask(REFERENCES[name], {"x": x})


def scales_of(expected: Expected) -> Scales:
    """Return the scales of an output's codes."""
    assert expected.scales is not None
    return expected.scales


def answer_of(codes: torch.Tensor) -> torch.Tensor:
    """Return codes as a call answers them."""
    return codes.clamp(-448, 448).to(torch.float8_e4m3fn) if codes.is_floating_point() else codes


@pytest.mark.parametrize("name", REFERENCES)
def test_codes_are_right_by_the_scale_that_was_answered(name: str) -> None:
    said = said_of(name)
    expected, scale = said.outputs
    assert scales_of(expected).name == scale.name
    assert compare(expected, expected.honest, said.own_scales(expected)) is None
    for fault, faulty in seeded(expected).items():
        assert compare(expected, faulty, said.own_scales(expected)) is not None, fault
    (scales, _), *others = scales_of(expected).bases
    for other, codes in others:
        changed = (other.view(torch.uint8) != scales.view(torch.uint8)).sum()
        assert 0 < changed < scales.numel() // 2
        assert compare(expected, answer_of(codes), other) is None
        # The codes of the one scale are wrong beside the other.
        assert compare(expected, answer_of(codes), scales) is not None
        assert compare(expected, answer_of(expected.exact), other) is not None


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_one_block_with_the_codes_of_another_scale_is_refused(name: str) -> None:
    expected, _ = said_of(name).outputs
    (scales, exact), (other, codes), _ = scales_of(expected).bases
    row, block = (scales != other).nonzero()[0].tolist()
    size = exact.shape[-1] // scales.shape[-1]
    mixed, answer = scales.clone(), answer_of(exact).clone()
    mixed[row, block] = other[row, block]
    assert compare(expected, answer, mixed) is not None
    part = slice(block * size, block * size + size)
    answer[row, part] = answer_of(codes)[row, part]
    assert compare(expected, answer, mixed) is None
    assert compare(expected, answer, scales) is not None


def test_a_scale_that_no_rounding_gives_excuses_no_code() -> None:
    expected, _ = said_of("mxfp8").outputs
    scales, exact = scales_of(expected).bases[0]
    halved = answer_of(exact / 2)
    assert compare(expected, halved, scales + 1) is not None
    assert given(expected, scales[:, 1:]) is expected
    assert given(expected, None) is expected


def test_scales_are_known_by_shape_and_format() -> None:
    codes = torch.zeros(4, 64, dtype=torch.uint8)
    assert pairs_of({"0": codes, "1": codes[:, :4]}) == {"0": "1"}
    assert pairs_of({"0": codes.to(CODES[0]), "1": codes[:, :2].to(CODES[0])}) == {"0": "1"}
    for other in (codes[:2, :4], codes[:, :5], codes[0], codes[:, :4].float()):
        assert not pairs_of({"0": codes, "1": other})
    assert not pairs_of({"0": codes, "1": codes[:, :4], "2": codes[:, :2]}).get("0")


def test_other_maxima_in_disturbed_evaluations_give_no_other_scale() -> None:
    one = torch.ones(3)
    assert changes([one], [[one], [one[:2]]], 0.0) is None
    found = (changes([one], [[one * 1.001], [one * 0.9995]], 0.0) or [one])[0]
    assert torch.allclose(found, torch.full((3,), 6 * 0.001), rtol=1e-2)
