"""Which codes and scales of new rows are honest: one, or two where both are right."""

from __future__ import annotations

import pytest
import torch

from kernelproof.reference import Arithmetic, quantize_nvfp4
from kernelproof.reference.formats.code_ends import Part, fp8_record_ends, int4_ends, nvfp4_ends
from kernelproof.reference.formats.int4 import quantize_int4
from kernelproof.reference.formats.latent_records import encode_fp8_record

EXACT, GPU = Arithmetic(), Arithmetic(scales="approximate", quotients="reciprocal")


def rows(seed: int = 0, count: int = 200, channels: int = 64) -> torch.Tensor:
    return torch.randn(count, channels, generator=torch.Generator().manual_seed(seed)).bfloat16()


def outside(parts: tuple[Part, ...]) -> dict[str, int]:
    return {
        part.name: int(((part.found < part.ends[0]) | (part.found > part.ends[1])).sum())
        for part in parts
    }


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_what_the_oracle_writes_is_the_only_honest_nvfp4(scale: float) -> None:
    x = rows()
    codes, scales, _ = quantize_nvfp4(x, scale)
    parts = nvfp4_ends(x, codes, scales, scale, EXACT)
    assert outside(parts) == {"scales": 0, "codes": 0}
    for part in parts:
        assert part.ends[0].equal(part.ends[1])
    by_name = {part.name: part for part in parts}
    assert by_name["scales"].numbers(by_name["scales"].found).equal(scales.double())


def test_one_code_or_scale_of_nvfp4_beside_it_is_found() -> None:
    x = rows()
    codes, scales, _ = quantize_nvfp4(x)
    other = codes.clone()
    other[3, 5] ^= 1
    assert outside(nvfp4_ends(x, other, scales, 1.0, GPU))["codes"] == 1
    beside = scales.clone()
    beside.view(torch.uint8)[3, 1] += 1
    assert outside(nvfp4_ends(x, codes, beside, 1.0, GPU))["scales"] == 1
    beside.view(torch.uint8)[3, 1] = 0x7F  # NaN
    assert outside(nvfp4_ends(x, codes, beside, 1.0, GPU)) == {"scales": 1, "codes": 0}


def test_codes_are_judged_by_the_scale_that_was_written() -> None:
    """A neighbouring scale is one finding of its own, and codes by the right one are others."""
    x = torch.full((1, 16), 6.0)
    codes, scales, _ = quantize_nvfp4(x)
    assert scales.item() == 1.0
    half = (scales.float() / 2).to(torch.float8_e4m3fn)
    assert outside(nvfp4_ends(x, codes, half, 1.0, EXACT)) == {"scales": 1, "codes": 0}
    twice = (scales.float() * 2).to(torch.float8_e4m3fn)
    assert outside(nvfp4_ends(x, codes, twice, 1.0, EXACT)) == {"scales": 1, "codes": 16}


def test_a_gpu_may_write_the_neighbour_of_a_scale_next_to_a_tie() -> None:
    amax = 6 * (1.0 + 1 / 16)  # halfway between 1 and 1.125
    x = torch.zeros(1, 16)
    x[0, 0] = amax
    codes, scales, _ = quantize_nvfp4(x)
    other = scales.clone()
    other.view(torch.uint8)[0, 0] += 1
    assert outside(nvfp4_ends(x, codes, other, 1.0, EXACT))["scales"] == 1
    assert outside(nvfp4_ends(x, codes, other, 1.0, GPU))["scales"] == 0


def test_a_block_of_zeros_has_the_scale_zero() -> None:
    x = torch.zeros(2, 16)
    x[1, 3] = -0.0
    codes, scales, _ = quantize_nvfp4(x)
    assert scales.float().tolist() == [[0.0], [0.0]]
    assert outside(nvfp4_ends(x, codes, scales, 1.0, EXACT)) == {"scales": 0, "codes": 0}
    one = torch.ones_like(scales.float()).to(scales)
    assert outside(nvfp4_ends(x, codes, one, 1.0, GPU))["scales"] == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_the_oracle_writes_is_honest_int4(dtype: torch.dtype) -> None:
    x = rows().to(dtype)
    codes, scales = quantize_int4(x)
    parts = int4_ends(x, codes, scales, 1.0, EXACT)
    assert outside(parts) == {"scales": 0, "zero points": 0, "codes": 0}
    # Ties, of numbers of eight bits: which way float32 goes is open.
    open_codes = (parts[2].ends[0] != parts[2].ends[1]).double().mean()
    assert open_codes < 5e-3


def test_what_is_wrong_in_int4_is_found_by_its_part() -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    codes, scales = quantize_int4(x)
    bits = scales.view(torch.int32)
    for part, change in (("scales", 64), ("zero points", 1)):
        other = torch.where(bits & 15 == 15, bits - change, bits + change)
        found = outside(int4_ends(x, codes, other.view(torch.float32), 1.0, EXACT))
        assert found[part] == len(x)
    for flipped in (1, 16):
        found = outside(int4_ends(x, codes ^ flipped, scales, 1.0, EXACT))
        assert codes.numel() - 10 < found["codes"] <= codes.numel()  # the others are next to ties


def test_two_zero_points_are_right_where_the_range_is_balanced() -> None:
    """-3 to 3 is 15 steps of 0.4, and -3 is 7.5 of them below 0: which way float32 goes is open."""
    x = torch.linspace(-3, 3, 16).unsqueeze(0)
    codes, scales = quantize_int4(x)
    for zero_point in (7, 8):
        bits = scales.view(torch.int32) & ~15 | zero_point
        found = int4_ends(x, codes, bits.view(torch.float32), 1.0, EXACT)
        assert outside(found)["zero points"] == 0
    bits = scales.view(torch.int32) & ~15 | 6
    assert outside(int4_ends(x, codes, bits.view(torch.float32), 1.0, EXACT))["zero points"] == 1


def test_what_the_oracle_writes_is_the_only_honest_record() -> None:
    x = rows(channels=576)
    record = encode_fp8_record(x)
    parts = fp8_record_ends(x, record, None, 1.0, EXACT)
    assert outside(parts) == {"scales": 0, "codes": 0, "rotary channels": 0}
    for part in parts:
        assert part.ends[0].equal(part.ends[1])
    latent = {part.name: part.numbers(part.found) for part in parts}
    assert latent["rotary channels"].equal(x[:, 512:].double())
    read = latent["codes"].unflatten(1, (4, 128)) * latent["scales"].unsqueeze(2)
    assert (read.flatten(1) - x[:, :512].double()).abs().max() < 0.2


@pytest.mark.parametrize(
    ("byte", "part"),
    [(0, "codes"), (511, "codes"), (514, "scales"), (527, "scales"), (528, "rotary channels"),
     (655, "rotary channels")],
)  # fmt: skip
def test_one_bit_of_a_record_is_found_in_its_part(byte: int, part: str) -> None:
    x = rows(channels=576)
    record = encode_fp8_record(x)
    record[7, byte] ^= 1
    assert outside(fp8_record_ends(x, record, None, 1.0, EXACT))[part] >= 1


def test_a_tile_of_zeros_has_the_least_scale_of_a_record() -> None:
    x = torch.zeros(1, 576)
    record = encode_fp8_record(x)
    assert outside(fp8_record_ends(x, record, None, 1.0, GPU))["scales"] == 0
    record[:, 512:528] = 0
    assert outside(fp8_record_ends(x, record, None, 1.0, GPU))["scales"] == 4
