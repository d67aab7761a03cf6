"""Codecs against torch's casts, exact fractions, hand-written loops and FlashInfer's references."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

import pytest
import torch

from kernelproof.reference import (
    KVLayout,
    deinterleave_v_scales,
    dequantize_e2m1,
    dequantize_e8m0,
    dequantize_fp8,
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_nvfp4,
    interleave_v_scales,
    pack_e2m1,
    quantize_e2m1,
    quantize_fp8,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
    swizzle_scales_128x4,
    unpack_e2m1,
    unswizzle_scales_128x4,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BYTES = torch.arange(256, dtype=torch.uint8)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1_ALL = E2M1 + [-value for value in E2M1]

fp8_dtypes = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3fn", "e5m2"])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View as bytes: NaN equals itself and -0.0 is not 0.0 only there."""
    at_least_1d = tensor.reshape(1) if tensor.dim() == 0 else tensor
    return at_least_1d.contiguous().view(torch.uint8)


def randoms(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Draw numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-12, 9, shape, generator=generator).double())
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * sizes).to(dtype)


def grid(dtype: torch.dtype) -> list[float]:
    """List a format's finite numbers from 0 up, in the order of their codes, by torch's cast."""
    values = BYTES[:128].view(dtype).float().tolist()
    return [value for value in values if math.isfinite(value)]


def nearest(exact: Fraction, numbers: list[float]) -> float:
    """Round a magnitude onto a grid by comparing distances; ties to the even code; saturate."""
    last = len(numbers) - 1
    code = min(range(last + 1), key=lambda i: (abs(Fraction(numbers[i]) - exact), i % 2))
    return numbers[last] if exact > Fraction(numbers[last]) else numbers[code]


def flashinfer(module: str, name: str) -> Callable[..., Any]:
    """Find one of FlashInfer's pure-PyTorch references, or skip."""
    found = pytest.importorskip(module, reason="flashinfer-python is not installed")
    if not hasattr(found, name):
        pytest.skip(f"the installed FlashInfer has no {module}.{name}")
    reference: Callable[..., Any] = getattr(found, name)
    return reference


# FP8


@fp8_dtypes
def test_every_code_decodes_as_torch_decodes_it(dtype: torch.dtype) -> None:
    theirs = BYTES.view(dtype).double()
    got = dequantize_fp8(BYTES.view(dtype))
    assert got.dtype == torch.float64
    assert torch.equal(got.isnan(), theirs.isnan())  # NaN's payload is nobody's business
    assert torch.equal(bits(got.nan_to_num(7.0)), bits(theirs.nan_to_num(7.0)))
    number = ~got.isnan()
    for wide in (torch.float32, torch.bfloat16, torch.float16):
        ours = dequantize_fp8(BYTES.view(dtype), dtype=wide)
        assert torch.equal(bits(ours[number]), bits(BYTES.view(dtype).to(wide)[number]))


@fp8_dtypes
@pytest.mark.parametrize("wide", [torch.float16, torch.float32, torch.float64])
def test_every_float16_encodes_as_torch_casts_it(dtype: torch.dtype, wide: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    largest = torch.finfo(dtype).max
    expected = every.float().clamp(-largest, largest).to(dtype)
    got = quantize_fp8(every.to(wide), dtype)
    assert got.dtype == dtype
    nan = every.isnan()
    assert torch.equal(bits(got)[~nan], bits(expected)[~nan])
    assert got.float()[nan].isnan().all()


@fp8_dtypes
def test_ties_and_their_neighbours(dtype: torch.dtype) -> None:
    numbers = grid(dtype)
    for code, (below, above) in enumerate(itertools.pairwise(numbers)):
        tie = torch.tensor((below + above) / 2, dtype=torch.float64)
        inf = torch.tensor(math.inf, dtype=torch.float64)
        around = [tie.nextafter(-inf), tie, tie.nextafter(inf)]
        narrow = tie.float()
        around += [narrow.nextafter(-inf.float()).double(), narrow.nextafter(inf.float()).double()]
        expected = [code, code + code % 2, code + 1, code, code + 1]
        for value, want in zip(around, expected, strict=True):
            for sign in (1, -1):
                got = int(bits(quantize_fp8((sign * value).reshape(1), dtype)))
                assert got == want + (128 if sign < 0 else 0), (sign * value.item(), got, want)
        for value in (around[1], *around[3:]):  # float32 numbers: torch's cast rounds them once
            single = value.float().reshape(1)
            assert torch.equal(bits(quantize_fp8(single, dtype)), bits(single.to(dtype)))


def test_double_rounding_would_be_wrong() -> None:
    by_float32 = torch.tensor([1.0625 + 2**-40], dtype=torch.float64)
    by_float16 = torch.tensor([1.0625 + 2**-20])
    assert quantize_fp8(by_float32).item() == quantize_fp8(by_float16).item() == 1.125
    assert by_float32.float().to(E4M3).item() == by_float16.half().to(E4M3).item() == 1.0


@fp8_dtypes
def test_saturation_infinity_nan_and_zeros(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, largest * 1.2, 1e30, math.inf, math.nan, 0.0, 1e-30])
    expected = torch.tensor([largest] * 4 + [math.nan, 0.0, 0.0])
    for sign in (1, -1):
        got = quantize_fp8(sign * x, dtype).float()
        assert torch.equal(bits(got)[:16], bits(sign * expected)[:16])
        assert got[4].isnan()
        assert torch.equal(bits(got)[20:], bits(sign * expected)[20:])


@fp8_dtypes
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_division_and_rounding_are_one_rounding(dtype: torch.dtype, wide: torch.dtype) -> None:
    # Quotients as near to ties as the dtype of x allows: ties times the scale, and neighbours.
    numbers = grid(dtype)
    generator = torch.Generator().manual_seed(1)
    naive_errors = 0
    for scale in (0.1, 1 / 3, 0.7853981633974483, *torch.rand(6, generator=generator).tolist()):
        ties = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(numbers[:60])])
        x = (ties.double() * scale).to(wide)
        inf = torch.tensor(math.inf, dtype=wide)
        x = torch.cat((x, x.nextafter(inf), x.nextafter(-inf)))
        expected = [nearest(Fraction(v) / Fraction(scale), numbers) for v in x.tolist()]
        assert quantize_fp8(x, dtype, scale).float().tolist() == expected
        naive_errors += (x.double() / scale).to(dtype).float().tolist() != expected
    assert naive_errors or wide == torch.float32  # in float64 the plain division does not do


def test_scales_by_head() -> None:
    x = randoms(5, 3, 8)
    scale = torch.tensor([0.5, 3.0, 0.1]).unsqueeze(-1)
    codes = quantize_fp8(x, scale=scale)
    for head in range(3):
        alone = quantize_fp8(x[:, head], scale=scale[head].item())
        assert torch.equal(bits(codes[:, head]), bits(alone))
    expected = codes.double() * scale.double()
    assert torch.equal(dequantize_fp8(codes, scale), expected)
    assert torch.equal(dequantize_fp8(codes[:, 1], 3.0), expected[:, 1])


@fp8_dtypes
def test_dequantisation_is_exact_and_other_dtypes_round_once(dtype: torch.dtype) -> None:
    codes = torch.tensor(grid(dtype)).to(dtype)
    scale = torch.tensor(0.1)  # 24 significant bits
    exact = [Fraction(v) * Fraction(scale.item()) for v in codes.tolist()]
    assert [Fraction(v) for v in dequantize_fp8(codes, scale).tolist()] == exact
    for narrow in (torch.float16, torch.bfloat16):
        every = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(narrow).float()
        numbers = every[every.isfinite()].tolist()
        got = dequantize_fp8(codes, scale, narrow).tolist()
        for value, want in zip(got[::9], exact[::9], strict=True):
            assert value == nearest(want, numbers) or want > numbers[-1]


def test_two_byte_results_are_not_rounded_by_way_of_float32() -> None:
    # 1.875 * scale is just above a tie of bfloat16, nearer to it than float32 resolves.
    tie = Fraction(257, 256)
    scale = float(tie / Fraction(15, 8)) * (1 + 2**-40)
    codes = torch.tensor([1.875]).to(E4M3)
    assert dequantize_fp8(codes, scale, torch.bfloat16).item() == 1 + 2**-7
    assert dequantize_fp8(codes, scale).to(torch.bfloat16).item() == 1.0
    assert dequantize_fp8(torch.tensor([448.0]).to(E4M3), 1000.0, torch.float16).item() == math.inf


# FP4


def test_all_sixteen_values_of_e2m1() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    expected = torch.tensor(E2M1_ALL, dtype=torch.float64)
    assert torch.equal(bits(dequantize_e2m1(codes)), bits(expected))
    assert torch.equal(quantize_e2m1(expected), codes)


def test_e2m1_rounding_by_hand() -> None:
    # The seven ties go to the even code; so do the comparisons in FlashInfer's page.cuh.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    inf = torch.tensor(math.inf, dtype=torch.float64)
    below, above = ties.nextafter(-inf), ties.nextafter(inf)
    assert quantize_e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert quantize_e2m1(below).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert quantize_e2m1(above).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert quantize_e2m1(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]
    special = torch.tensor([6.0, 7.0, 1e30, math.inf, -math.inf, math.nan, 0.0, -0.0, -1e-30])
    assert quantize_e2m1(special).tolist() == [7, 7, 7, 7, 15, 0, 0, 8, 8]


def test_even_elements_are_in_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 3, 15], [8, 0, 7, 9]], dtype=torch.uint8)
    packed = pack_e2m1(codes)
    assert packed.tolist() == [[0x21, 0xF3], [0x08, 0x97]]
    assert torch.equal(unpack_e2m1(packed), codes)
    assert torch.equal(pack_e2m1(unpack_e2m1(BYTES)), BYTES)
    assert unpack_e2m1(torch.zeros(3, 0, dtype=torch.uint8)).shape == (3, 0)


# NVFP4


def test_nvfp4_dequantisation_is_exact() -> None:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (4, 32, 8), generator=generator, dtype=torch.uint8)
    scales = BYTES[:128].clamp(max=126).view(E4M3).reshape(4, 32, 1)
    for scale in (1.0, torch.tensor(0.1), torch.tensor(3e-38), torch.tensor(3e38)):
        got = dequantize_nvfp4(codes, scales, scale)
        assert got.dtype == torch.float64
        assert got.shape == (4, 32, 16)
        factor = Fraction(float(scale))
        for row, column in itertools.product(range(4), range(32)):
            block = Fraction(scales[row, column].item())
            for i, value in enumerate(got[row, column].tolist()):
                byte = int(codes[row, column, i // 2])
                code = byte >> 4 if i % 2 else byte & 15
                assert Fraction(value) == Fraction(E2M1_ALL[code]) * block * factor


@pytest.mark.parametrize("global_scale", [1.0, 0.37, 1 / 448])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_nvfp4_quantisation_by_definition(global_scale: float, dtype: torch.dtype) -> None:
    x = randoms(3, 64, dtype=dtype)
    x[1, 16:32] = 0.0
    made = quantize_nvfp4(x, global_scale)
    assert made.global_scale.dtype == torch.float32
    factor = Fraction(made.global_scale.item())
    numbers = grid(E4M3)
    unpacked = unpack_e2m1(made.codes)
    for row, block in itertools.product(range(3), range(4)):
        values = [Fraction(v) for v in x[row, 16 * block : 16 * block + 16].tolist()]
        scale = nearest(max(abs(v) for v in values) / 6 / factor, numbers)
        assert made.block_scales[row, block].item() == scale
        for i, value in enumerate(values):
            expected = nearest(abs(value) / Fraction(scale) / factor, E2M1) if scale else 0.0
            code = int(unpacked[row, 16 * block + i])
            assert E2M1[code & 7] == expected
            assert code & 8 == 8 * (value < 0)


def test_nvfp4_block_scales_on_ties() -> None:
    numbers = grid(E4M3)
    ties = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(numbers)], dtype=torch.float64)
    inf = torch.tensor(math.inf, dtype=torch.float64)
    reciprocal_errors = 0
    for factor in (0.37, 0.71, 1.3, 49 / 2**6, 0.0123):
        divisor = 6 * torch.tensor(factor).double()
        exact = divisor * ties
        reciprocal_errors += int((exact * (1 / divisor) != ties).sum())
        for amax, expected in (
            (exact, [numbers[code + code % 2] for code in range(len(ties))]),
            (exact.nextafter(inf), numbers[1:]),
            (exact.nextafter(-inf), numbers[:-1]),
        ):
            x = torch.zeros(len(ties), 16, dtype=torch.float64)
            x[:, 7] = -amax
            scales = quantize_nvfp4(x, factor).block_scales
            assert scales.float().flatten().tolist() == expected
    assert reciprocal_errors  # a product with the reciprocal does not do


def test_nvfp4_of_what_it_represents_is_the_identity() -> None:
    codes = torch.tensor(E2M1_ALL).repeat(4, 2)  # 6, the largest, is in every block
    scales = torch.tensor([[0.25, 448.0], [1.0, 2**-9], [1.75, 2.0], [3.5, 7 * 2**-9]])
    x = (codes.unflatten(-1, (2, 16)) * scales.unsqueeze(-1)).flatten(-2) * 0.5
    made = quantize_nvfp4(x, 0.5)
    assert torch.equal(made.block_scales.float(), scales)
    assert torch.equal(dequantize_nvfp4(*made), x.double())
    assert torch.equal(unpack_e2m1(made.codes), torch.arange(16).repeat(4, 2).byte())


def test_nvfp4_special_blocks() -> None:
    x = torch.ones(6, 16)
    x[0] = 0.0
    x[1] = 1e-6  # the block scale underflows
    x[2, 3] = math.inf
    x[3, 5] = math.nan
    x[4] = 1e5  # the block scale saturates, and with it the elements
    x[5] = -1e-6
    made = quantize_nvfp4(x)
    assert made.block_scales.float()[[0, 1, 2, 4, 5], 0].tolist() == [0, 0, 448, 448, 0]
    got = dequantize_nvfp4(*made)
    assert (got[[0, 1, 5]] == 0).all()
    assert (made.codes[[0, 1]] == 0).all()
    assert (made.codes[5] == 0x88).all()
    assert got[2].tolist() == [2688.0 if i == 3 else 0.0 for i in range(16)]
    assert got[3].isnan().all()
    assert (got[4] == 2688).all()


def test_nvfp4_global_scales_by_head() -> None:
    x = randoms(4, 2, 32)
    scale = torch.tensor([0.5, 0.01]).unsqueeze(-1)
    made = quantize_nvfp4(x, scale)
    for head in range(2):
        alone = quantize_nvfp4(x[:, head], scale[head].item())
        assert torch.equal(made.codes[:, head], alone.codes)
        assert torch.equal(dequantize_nvfp4(*made)[:, head], dequantize_nvfp4(*alone))


# MX


def test_all_256_codes_of_e8m0() -> None:
    got = dequantize_e8m0(BYTES)
    assert [Fraction(v) for v in got[:255].tolist()] == [
        Fraction(2) ** (c - 127) for c in range(255)
    ]
    assert got[255].isnan()
    if hasattr(torch, "float8_e8m0fnu"):
        theirs = BYTES.view(torch.float8_e8m0fnu)
        assert torch.equal(got[:255], theirs.double()[:255])
        assert torch.equal(dequantize_e8m0(theirs)[:255], got[:255])


@pytest.mark.parametrize(
    ("numbers", "emax", "quantize", "dequantize"),
    [
        (grid(E4M3), 8, lambda x: quantize_mxfp8(x, E4M3), dequantize_mxfp8),
        (grid(E5M2), 15, lambda x: quantize_mxfp8(x, E5M2), dequantize_mxfp8),
        (E2M1, 2, quantize_mxfp4, dequantize_mxfp4),
    ],
    ids=["mxfp8-e4m3", "mxfp8-e5m2", "mxfp4"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_mx_by_definition(
    numbers: list[float],
    emax: int,
    quantize: Callable[..., Any],
    dequantize: Callable[..., torch.Tensor],
    dtype: torch.dtype,
) -> None:
    x = randoms(2, 96, seed=3, dtype=dtype)
    x[0, :32] = 0.0
    x[1, :32] = 2.0**-126  # below what the scale reaches
    made = quantize(x)
    got = dequantize(*made)
    for row, block in itertools.product(range(2), range(3)):
        part = slice(32 * block, 32 * block + 32)
        values = x[row, part].tolist()
        amax = max(abs(v) for v in values)
        exponent = math.frexp(amax)[1] - 1 - emax if amax else -127
        exponent = max(exponent, -127)
        assert int(made.block_scales[row, block]) == exponent + 127
        step = Fraction(2) ** exponent
        for value, result in zip(values, got[row, part].tolist(), strict=True):
            assert (
                abs(Fraction(result))
                == Fraction(nearest(abs(Fraction(value)) / step, numbers)) * step
            )
            assert result == 0 or (result < 0) == (value < 0)


@pytest.mark.parametrize("quantize", [quantize_mxfp8, quantize_mxfp4])
def test_mx_special_blocks(quantize: Callable[..., Any]) -> None:
    x = torch.ones(3, 32)
    x[0] = 0.0
    x[1, 4] = math.nan
    x[2, 4] = math.inf
    made = quantize(x)
    assert made.block_scales.flatten().tolist() == [0, 255, 254]
    got = (dequantize_mxfp8 if quantize is quantize_mxfp8 else dequantize_mxfp4)(*made)
    assert (got[0] == 0).all()
    assert got[1].isnan().all()
    assert got[2, 4] == 2.0**127 * (448 if quantize is quantize_mxfp8 else 6)
    assert dequantize_mxfp8(*quantize_mxfp8(x), dtype=torch.float32)[2, 4] == math.inf


# Layouts


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [4, 16, 32])
@pytest.mark.parametrize("blocks", [4, 8])
def test_interleaved_v_scales_by_hand(kv_layout: KVLayout, page_size: int, blocks: int) -> None:
    pages, heads = 2, 3
    generator = torch.Generator().manual_seed(4)
    linear = torch.randint(0, 127, (pages, heads, page_size, blocks), generator=generator).byte()
    expected = torch.zeros_like(linear)
    for page, head in itertools.product(range(pages), range(heads)):
        for t, s in itertools.product(range(page_size), range(blocks)):
            place = (t // 4) * 4 * blocks + s * 4 + t % 4
            expected[page, head].view(-1)[place] = linear[page, head, t, s]
    if kv_layout == "NHD":
        linear, expected = linear.transpose(1, 2), expected.transpose(1, 2)
    got = interleave_v_scales(linear.view(E4M3), kv_layout=kv_layout)
    assert got.dtype == E4M3
    assert torch.equal(bits(got), expected)
    assert torch.equal(bits(deinterleave_v_scales(got, kv_layout=kv_layout)), linear)
    assert not torch.equal(expected, linear)


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (1, 1), (200, 7), (384, 8), (0, 4)])
def test_swizzled_scales_by_hand(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(5)
    linear = torch.randint(1, 127, (2, rows, columns), generator=generator).byte()
    padded_rows, padded_columns = -(-rows // 128) * 128, -(-columns // 4) * 4
    got = swizzle_scales_128x4(linear.view(E4M3))
    assert got.shape == (2, padded_rows, padded_columns)
    expected = torch.zeros(2, padded_rows * padded_columns, dtype=torch.uint8)
    for batch, r, c in itertools.product(range(2), range(rows), range(columns)):
        tile = (r // 128) * (padded_columns // 4) + c // 4
        place = tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4
        expected[batch, place] = linear[batch, r, c]
    assert torch.equal(bits(got).view(2, -1), expected)
    assert torch.equal(bits(unswizzle_scales_128x4(got, rows, columns)), linear)


# FlashInfer's published references


def test_flashinfer_dequantises_nvfp4_and_mxfp4_alike() -> None:
    module = "flashinfer.quantization.fp4_quantization"
    theirs = flashinfer(module, "_e2m1_and_ufp8sf_scale_to_float_cpu")
    codes = torch.randint(0, 256, (255, 64), dtype=torch.uint8)
    e4m3 = BYTES[:127].repeat(9)[: 255 * 4].reshape(255, 4)
    expected = theirs(codes[:, :32], e4m3, torch.tensor([0.37]), 16, 1, False)  # noqa: FBT003 - theirs
    got = dequantize_nvfp4(codes[:, :32], e4m3.view(E4M3), torch.tensor(0.37), torch.float32)
    assert torch.equal(got, expected)
    e8m0 = BYTES[1:250].repeat(5)[: 255 * 4].reshape(255, 4)
    expected = theirs(codes, e8m0, None, 32, 0, False)  # noqa: FBT003 - theirs
    assert torch.equal(dequantize_mxfp4(codes, e8m0, torch.float32), expected)


def test_flashinfer_unpacks_alike() -> None:
    theirs = flashinfer("flashinfer.trace.templates.moe", "_unpack_fp4_e2m1")
    expected = theirs(BYTES.view(16, 16))
    assert torch.equal(
        bits(dequantize_e2m1(unpack_e2m1(BYTES.view(16, 16))).float()), bits(expected)
    )


def test_flashinfer_quantises_nvfp4_alike_but_for_ties_and_the_reciprocal() -> None:
    # Its reference multiplies by the global scale where its KV kernels divide, and rounds ties
    # towards zero where they round to even: a power of two as scale, and no ties, avoid both.
    theirs = flashinfer("flashinfer.trace.templates.quantize", "_nvfp4_kv_quantize_reference")
    x = randoms(16, 128, seed=6)
    made = quantize_nvfp4(x, 0.25)
    packed, scales = theirs(x, torch.tensor([4.0]))
    assert torch.equal(bits(made.block_scales), bits(scales))
    step = (made.block_scales.double() * 0.25).repeat_interleave(16, -1)
    scaled = torch.where(step == 0, 0.0, x.abs() / step)
    tie = torch.isin(scaled, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).double())
    same = unpack_e2m1(made.codes) == unpack_e2m1(packed)
    assert (same | tie | (step == 0)).all()
    assert same.float().mean() > 0.99


def test_flashinfer_interleaves_v_scales_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "flashinfer.quantization.fp4_quantization"
    theirs = flashinfer(name, "nvfp4_quantize_paged_kv_cache")
    k, v = randoms(2, 3, 8, 64, dtype=torch.bfloat16), randoms(2, 3, 8, 64, seed=7)

    def on_cpu(x: torch.Tensor, reciprocal: torch.Tensor, **_: object) -> tuple[Any, Any]:
        made = quantize_nvfp4(x, 1 / reciprocal.item())
        return made.codes, made.block_scales.view(torch.uint8)

    monkeypatch.setattr(importlib.import_module(name), "fp4_quantize", on_cpu)  # a GPU kernel
    for kv_layout in ("HND", "NHD"):
        layout = (k, v) if kv_layout == "HND" else (k.transpose(1, 2), v.transpose(1, 2))
        codes, scales, k_scale, v_scale = theirs(*layout, kv_layout=kv_layout)
        for x, tensor, scale in zip(layout, codes, (k_scale, v_scale), strict=True):
            assert torch.equal(tensor, quantize_nvfp4(x, scale).codes)
        assert torch.equal(bits(scales[0]), bits(quantize_nvfp4(layout[0], k_scale).block_scales))
        linear = quantize_nvfp4(layout[1], v_scale).block_scales
        assert torch.equal(bits(scales[1]), bits(interleave_v_scales(linear, kv_layout=kv_layout)))


def test_flashinfer_unswizzles_alike() -> None:
    theirs = flashinfer("flashinfer.trace.templates.gemm", "_unswizzle_sf_128x4")
    linear = torch.randint(0, 256, (200, 7), dtype=torch.uint8)
    assert torch.equal(theirs(swizzle_scales_128x4(linear), 200, 7), linear)


# Arguments


BLOCK_FORMATS: list[tuple[Callable[..., Any], Callable[..., torch.Tensor]]] = [
    (quantize_nvfp4, dequantize_nvfp4),
    (quantize_mxfp8, dequantize_mxfp8),
    (quantize_mxfp4, dequantize_mxfp4),
]


@pytest.mark.parametrize("shape", [(3, 500, 160), (1, 70_000, 32), (2, 2, 2**16)])
def test_large_tensors_are_as_their_parts(shape: tuple[int, ...]) -> None:
    x = randoms(*shape, dtype=torch.bfloat16)
    parts = [x[:, i : i + 50] for i in range(0, shape[1], 50)]
    scale = torch.tensor([0.3, 7.0, 1e-3])[: shape[0]].view(-1, 1, 1)
    whole = quantize_fp8(x, scale=scale)
    apart = torch.cat([bits(quantize_fp8(part, scale=scale)) for part in parts], dim=1)
    assert torch.equal(bits(whole), apart)
    for quantize, dequantize in BLOCK_FORMATS:
        made = quantize(x)
        assert torch.equal(
            made[0].view(torch.uint8), torch.cat([bits(quantize(p)[0]) for p in parts], 1)
        )
        low = dequantize(*made, dtype=torch.bfloat16)
        assert torch.equal(
            low, torch.cat([dequantize(*quantize(p), dtype=torch.bfloat16) for p in parts], 1)
        )


def test_fp8_and_empty_inputs() -> None:
    x = BYTES.view(E4M3)[:96].reshape(3, 32)
    empty = torch.zeros(2, 0, 32)
    assert quantize_fp8(empty).shape == dequantize_fp8(quantize_fp8(empty)).shape == (2, 0, 32)
    assert torch.equal(bits(quantize_fp8(x)), bits(x))
    for quantize, dequantize in BLOCK_FORMATS:
        made, same = quantize(x), quantize(x.double())
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(made, same, strict=True))
        assert dequantize(*quantize(empty)).shape == (2, 0, 32)
        assert dequantize(*quantize(torch.zeros(2, 0))).shape == (2, 0)


def test_strided_inputs_with_gradients_are_read_and_left_alone() -> None:
    x = randoms(64, 4, 32).transpose(0, 1).requires_grad_()
    before = x.detach().clone()
    for quantize, dequantize in BLOCK_FORMATS:
        made = quantize(x)
        again = quantize(before)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(made, again, strict=True))
        assert not made[0].requires_grad
        strided = [t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() else t for t in made]
        assert torch.equal(dequantize(*strided), dequantize(*made))
    codes = quantize_fp8(x)
    assert torch.equal(bits(codes), bits(quantize_fp8(before)))
    assert torch.equal(dequantize_fp8(codes.mT), dequantize_fp8(codes).mT)
    assert torch.equal(x, before)


X, U8 = torch.zeros(2, 32), torch.zeros(2, 16, dtype=torch.uint8)
S4, S8 = torch.zeros(2, 2).to(E4M3), torch.zeros(2, 1, dtype=torch.uint8)
V = torch.zeros(2, 3, 8, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_fp8(U8), "x must be a tensor of a floating dtype, not torch.uint8"),
        (lambda: quantize_fp8(X, torch.float16), "dtype is torch.float16"),
        (lambda: quantize_fp8(X, scale=0.0), "scale is 0.0"),
        (lambda: quantize_fp8(X, scale=torch.tensor([[1.0], [-2.0]])), "scale is -2.0"),
        (lambda: quantize_fp8(X, scale=math.inf), "scale is inf"),
        (lambda: quantize_fp8(X, scale=torch.ones(3)), r"shape \(3,\), which does not broadcast"),
        (lambda: quantize_fp8(X, scale=torch.ones(1, 1, 1)), "does not broadcast"),
        (lambda: dequantize_fp8(U8), "codes.dtype is torch.uint8"),
        (lambda: dequantize_fp8(S4, dtype=torch.int32), "dtype is torch.int32"),
        (lambda: dequantize_fp8(S4, math.nan), "scale is nan"),
        (lambda: quantize_e2m1(U8), "x must be a tensor of a floating dtype"),
        (lambda: pack_e2m1(U8 + 16), "codes holds 16"),
        (lambda: pack_e2m1(U8[:, :3]), r"codes has shape \(2, 3\); its last dim must be even"),
        (lambda: pack_e2m1(X), "codes must be uint8, not torch.float32"),
        (lambda: unpack_e2m1(X), "packed must be uint8"),
        (lambda: dequantize_e2m1(U8, torch.int8), "dtype is torch.int8"),
        (lambda: quantize_nvfp4(X[:, :24]), r"x has shape \(2, 24\); .* multiple of 16"),
        (lambda: quantize_nvfp4(U8), "x must be a tensor of a floating dtype"),
        (lambda: quantize_nvfp4(X, 0.0), "global_scale is 0.0"),
        (lambda: quantize_nvfp4(X, 1e-60), "global_scale is 0.0"),
        (lambda: quantize_nvfp4(X, math.nan), "global_scale is nan"),
        (lambda: dequantize_nvfp4(U8, S4, -1.0), "global_scale is -1.0"),
        (lambda: dequantize_nvfp4(X, S4), "codes must be uint8"),
        (lambda: dequantize_nvfp4(U8, S8), "block_scales must be float8_e4m3fn, not torch.uint8"),
        (lambda: dequantize_nvfp4(U8, S4[:1]), r"have block scales of shape \(2, 2\)"),
        (
            lambda: dequantize_nvfp4(U8[:, :4], S4),
            "8 elements in the last dim, not a multiple of 16",
        ),
        (lambda: quantize_mxfp8(X[:, :16]), r"x has shape \(2, 16\); .* multiple of 32"),
        (lambda: quantize_mxfp8(X, torch.uint8), "dtype is torch.uint8"),
        (lambda: quantize_mxfp4(U8), "x must be a tensor of a floating dtype"),
        (lambda: dequantize_mxfp8(U8, S8), "codes.dtype is torch.uint8"),
        (lambda: dequantize_mxfp8(X.to(E4M3), S4[:, :1]), "block_scales must hold e8m0 codes"),
        (lambda: dequantize_mxfp4(U8, S8[:1]), r"have block scales of shape \(2, 1\)"),
        (lambda: interleave_v_scales(V[:, :, :6]), "multiples of 4"),
        (lambda: interleave_v_scales(V, kv_layout="NHD"), "multiples of 4"),
        (lambda: deinterleave_v_scales(V[0]), "scales must have four dims"),
        (lambda: interleave_v_scales(V, kv_layout=cast("Any", "hnd")), "kv_layout is 'hnd'"),
        (lambda: swizzle_scales_128x4(X[0]), r"scales must be \[..., rows, columns\]"),
        (lambda: unswizzle_scales_128x4(X, 2, 32), r"padded to \(128, 32\)"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
