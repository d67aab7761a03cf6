"""Quantising with torch operations only, in float32; it shares no code with the oracle."""

from __future__ import annotations

import torch

from ...reference.tensors.quantize import QuantizeInputs
from ..protocol import implementation

OVERFLOW = {
    torch.float8_e4m3fn: (464.0, torch.nan),
    torch.float8_e5m2: (
        torch.nextafter(torch.tensor(61440.0), torch.tensor(0.0)).item(),
        torch.inf,
    ),
}
"""The largest float32 that a cast without saturation rounds to a number, and what is beyond it."""
MANTISSA, EXPONENT, EXPONENT_SHIFT = 0x7FFFFF, 0x7F800000, 23
"""Bits of a float32."""
LEAST_E8M0 = 2.0**-127


FEATURES = (
    "large_rows", "e8m0_scales", "swizzled_scales", "e2m1_codes", "e4m3_scales", "power_rules",
)  # fmt: skip
E2M1 = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True),
        (5.0, False))  # fmt: skip
"""Numbers at which e2m1 codes change, and whether the larger code, an even one, is theirs."""


@implementation("quantize", name="torch-quantize", features=FEATURES)
def quantize(inputs: QuantizeInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Divide the matrix by its scales in float32, and round once more to codes."""
    x, to = inputs.x, inputs.to
    tokens, channels = x.shape
    computed = None
    if inputs.scale is not None:
        divisor = inputs.scale
    else:
        down, across = to.scales_of((tokens, channels))
        rows, columns = to.block[0] or max(tokens, 1), to.block[1] or channels
        room = (0, across * columns - channels, 0, down * rows - tokens)
        wide = torch.nn.functional.pad(x.float().abs(), room)
        amax = wide.unflatten(1, (across, columns)).unflatten(0, (down, rows)).amax((1, 3))
        # By a tensor: on a GPU torch multiplies by the reciprocal of a number.
        amax = amax.clamp(min=to.floor)
        scales = raw = amax / amax.new_full((), to.largest)
        if to.scale_format == "e4m3":
            return _to_nvfp4(inputs, amax)
        if to.power_rule != "up":
            scales = raw = _exponent_of(amax, rounded=to.power_rule == "rounded")
        elif to.scale_format != "float32":
            scales = (
                (scales.view(torch.int32) + MANTISSA).bitwise_and_(EXPONENT).view(torch.float32)
            )
        stored = scales
        if to.scale_format == "e8m0":
            scales = torch.where(raw <= LEAST_E8M0, LEAST_E8M0, scales)
            # A subnormal float32 has the exponent 0, as the code of 2^-127.
            stored = (scales.view(torch.int32) >> EXPONENT_SHIFT).to(torch.uint8)
        computed = _stored(inputs, stored)
        divisor = _spread(inputs, scales)
    quotients = x.float() / divisor
    if to.is_fp4:
        return _packed(quotients), computed
    if to.dtype == torch.int8:
        return quotients.round_().clamp_(-128, 127).to(torch.int8), computed
    largest = torch.finfo(to.dtype).max
    codes = quotients.clamp(-largest, largest)
    if not to.saturate:
        most, beyond = OVERFLOW[to.dtype]
        overflow = torch.full_like(codes, beyond).copysign_(quotients)
        codes = torch.where(quotients.abs() > most, overflow, codes)
    return codes.to(to.dtype), computed


def _to_nvfp4(inputs: QuantizeInputs, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise by scales in e4m3 and a global one; in float64, where products are exact."""
    assert inputs.global_scale is not None  # noqa: S101  it is there where scales are e4m3
    factor = inputs.global_scale.double()
    raw = (amax.double() / (inputs.to.largest * factor)).clamp(max=448.0)
    # Through float32 it would be rounded twice: cut off, the last bit set, it is beside halfway.
    near = raw.float()
    cut = torch.where(near > raw, torch.nextafter(near, near.new_zeros(())), near)
    odd = (cut.view(torch.int32) | (cut != raw).int()).view(torch.float32)
    scales = odd.to(torch.float8_e4m3fn)
    steps = _spread(inputs, scales.double() * factor)
    quotients = inputs.x.double() / steps.masked_fill(steps == 0, torch.inf)
    return _packed(quotients.float()), _stored(inputs, scales)


def _exponent_of(amax: torch.Tensor, *, rounded: bool) -> torch.Tensor:
    """Return the power of two of amax, perhaps rounded to a bit behind the point, over 4."""
    bits = amax.view(torch.int32) + (0x200000 if rounded else 0)
    # A subnormal one is 0 here, and the least scale then.
    exponent = bits.bitwise_and_(EXPONENT) - (2 << EXPONENT_SHIFT)
    return exponent.clamp_(min=0).view(torch.float32)


def _packed(quotients: torch.Tensor) -> torch.Tensor:
    """Round numbers to e2m1 codes, and put two into a byte."""
    size = quotients.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for least, included in E2M1:
        code += (size >= least) if included else (size > least)
    code += torch.signbit(quotients).to(torch.uint8) << 3
    return code[:, ::2] + (code[:, 1::2] << 4)


def _spread(inputs: QuantizeInputs, scales: torch.Tensor) -> torch.Tensor:
    """Return the scale of each element."""
    tokens, channels = inputs.x.shape
    rows, columns = inputs.to.block[0] or max(tokens, 1), inputs.to.block[1] or channels
    token = torch.arange(tokens, device=scales.device) // rows
    channel = torch.arange(channels, device=scales.device) // columns
    return scales[token][:, channel]


def _stored(inputs: QuantizeInputs, scales: torch.Tensor) -> torch.Tensor:
    """Return scales as they are to lie."""
    stored = scales.view(torch.uint8) if scales.element_size() == 1 else scales
    if inputs.scale_layout == "swizzled":
        stored = _in_tiles(stored)
    shape = tuple(stored.shape)
    found = torch.empty_strided(
        shape, inputs.scale_strides, dtype=stored.dtype, device=stored.device
    )
    return found.copy_(stored).view(scales.dtype)


def _in_tiles(codes: torch.Tensor) -> torch.Tensor:
    """Return codes of scales in the order in which tensor cores read them, padded with 0."""
    down, across = codes.shape
    row = torch.arange(down, device=codes.device).unsqueeze(1)
    column = torch.arange(across, device=codes.device)
    tiles_down, tiles_across = -(-down // 128), -(-across // 4)
    tile = row // 128 * tiles_across + column // 4
    place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    flat = codes.new_zeros(tiles_down * tiles_across * 512)
    flat[place.flatten()] = codes.flatten()
    return flat.view(tiles_down * 128, tiles_across * 4)
