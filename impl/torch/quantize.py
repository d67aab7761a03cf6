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


@implementation(
    "quantize", name="torch-quantize", features=("large_rows", "e8m0_scales", "swizzled_scales")
)
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
        scales = raw = amax.clamp(min=to.floor) / amax.new_full((), to.largest)
        if to.scale_format != "float32":
            scales = (
                (scales.view(torch.int32) + MANTISSA).bitwise_and_(EXPONENT).view(torch.float32)
            )
        stored = scales
        if to.scale_format == "e8m0":
            scales = torch.where(raw <= LEAST_E8M0, LEAST_E8M0, scales)
            # A subnormal float32 has the exponent 0, as the code of 2^-127.
            stored = (scales.view(torch.int32) >> EXPONENT_SHIFT).to(torch.uint8)
        if inputs.scale_layout == "swizzled":
            stored = _in_tiles(stored)
        computed = torch.empty_strided(
            tuple(stored.shape), inputs.scale_strides, dtype=stored.dtype, device=x.device
        )
        computed.copy_(stored)
        token = torch.arange(tokens, device=x.device) // rows
        channel = torch.arange(channels, device=x.device) // columns
        divisor = scales[token][:, channel]
    quotients = x.float() / divisor
    if to.dtype == torch.int8:
        return quotients.round_().clamp_(-128, 127).to(torch.int8), computed
    largest = torch.finfo(to.dtype).max
    codes = quotients.clamp(-largest, largest)
    if not to.saturate:
        most, beyond = OVERFLOW[to.dtype]
        overflow = torch.full_like(codes, beyond).copysign_(quotients)
        codes = torch.where(quotients.abs() > most, overflow, codes)
    return codes.to(to.dtype), computed


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
