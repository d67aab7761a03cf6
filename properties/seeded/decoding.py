"""Honest reading of quantised caches, in steps any of which a seeded bug may replace.

It shares no code with the oracle: numbers are put together from their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ...reference.formats.cache_elements import (
    FP8,
    INT4,
    NVFP4,
    RECORDS,
    TABLE,
    TOKEN_SCALED,
    ZERO_POINTS,
)
from ...reference.tensors.inputs import AttentionInputs, PagedAttentionInputs, RaggedAttentionInputs

BLOCK = 16


def fp8_values(codes: torch.Tensor, element: str) -> torch.Tensor:
    """Read bytes as e4m3 (bias 7, no infinity) or e5m2 (bias 15)."""
    exponent_bits, bias = (4, 7) if "e4m3" in element else (5, 15)
    fraction_bits = 7 - exponent_bits
    bits = codes.to(torch.int32)
    exponent = (bits >> fraction_bits) & ((1 << exponent_bits) - 1)
    fraction = (bits & ((1 << fraction_bits) - 1)).float() / (1 << fraction_bits)
    normal = (1.0 + fraction) * torch.exp2((exponent - bias).float())
    subnormal = fraction * 2.0 ** (1 - bias)
    value = torch.where(exponent == 0, subnormal, normal)
    not_a_number = bits & 0x7F > (0x7E if "e4m3" in element else 0x7C)
    value = value.masked_fill(not_a_number, torch.nan)
    return torch.where(bits & 0x80 != 0, -value, value)


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return two 4-bit codes of each byte, the low one first."""
    return torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(-2)


def halves(codes: torch.Tensor) -> torch.Tensor:
    """Return two 4-bit codes of each byte: the low ones of all bytes first."""
    return torch.cat([codes & 0xF, codes >> 4], dim=-1)


def e2m1_values(codes: torch.Tensor) -> torch.Tensor:
    """Read 4-bit codes: sign, two bits of exponent, one of fraction."""
    bits = codes.to(torch.int32)
    exponent, fraction = (bits >> 1) & 3, (bits & 1).float()
    value = torch.where(
        exponent == 0, 0.5 * fraction, (1 + 0.5 * fraction) * torch.exp2((exponent - 1).float())
    )
    return torch.where(bits & 8 != 0, -value, value)


def block_scales(inputs: PagedAttentionInputs, which: int) -> torch.Tensor:
    """Return the block scales of K (0) or V (1) as numbers."""
    assert inputs.kv_cache_sf is not None  # noqa: S101  such a cache has them
    if element_of(inputs) in (*TOKEN_SCALED, INT4, *ZERO_POINTS):
        return inputs.kv_cache_sf[which]
    scales = fp8_values(inputs.kv_cache_sf[which].view(torch.uint8), "e4m3")
    return linear_v_scales(inputs, scales) if which else scales


def spread(scales: torch.Tensor) -> torch.Tensor:
    """Return the block scale of each channel."""
    return scales.repeat_interleave(BLOCK, dim=-1)


def queries(inputs: AttentionInputs) -> torch.Tensor:
    """Return the queries as numbers, scaled: FP8 ones in float32, others as they are."""
    if inputs.q.dtype.itemsize > 1:
        return inputs.q
    return query_values(inputs) * query_scales(inputs)


def query_values(inputs: AttentionInputs) -> torch.Tensor:
    """Read FP8 queries without their scale."""
    return fp8_values(inputs.q.contiguous().view(torch.uint8), str(inputs.q.dtype))


def query_scales(inputs: AttentionInputs) -> torch.Tensor:
    """Return q_scale as one number, [1, 1], or one for each query head, [H, 1]."""
    return torch.as_tensor(inputs.q_scale, dtype=torch.float32).reshape(-1, 1)


def linear_v_scales(inputs: PagedAttentionInputs, scales: torch.Tensor) -> torch.Tensor:
    """Bring V's block scales out of trtllm-gen's order: four tokens of one block side by side."""
    if not (inputs.kv_format and inputs.kv_format.v_scale_layout == "interleaved"):
        return scales
    rows = scales if inputs.kv_layout == "HND" else scales.transpose(1, 2)
    tokens, blocks = rows.shape[2:]
    token, block = torch.arange(tokens).unsqueeze(1), torch.arange(blocks)
    place = token // 4 * 4 * blocks + 4 * block + token % 4
    linear = rows.flatten(2)[..., place.to(rows.device)]
    return linear if inputs.kv_layout == "HND" else linear.transpose(1, 2)


def element_of(inputs: PagedAttentionInputs) -> str:
    """Return the element of the cache; empty for a cache of floats."""
    return inputs.kv_format.element if inputs.kv_format else ""


def zero_points(scales: torch.Tensor) -> torch.Tensor:
    """Return the zero points in the four lowest bits of int4's scales."""
    return (scales.contiguous().view(torch.int32) % 16).float()


def without_zero_points(scales: torch.Tensor) -> torch.Tensor:
    """Return int4's scales with the four lowest bits cleared."""
    bits = scales.contiguous().view(torch.int32)
    return torch.sub(bits, bits % 16).view(torch.float32)


def less_zero(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Take zero points [..., 2], beside the scales, off codes, and multiply by the scales."""
    pairs = scales.float()
    return (codes.float() - pairs[..., 1:]) * pairs[..., :1]


def record_values(record: torch.Tensor, element: str) -> torch.Tensor:
    """Read [..., 576] float32 of the bytes of a latent record."""
    if element == RECORDS[0]:
        tiles = fp8_values(record[..., :512], "e4m3") * float32_tiles(record[..., 512:528])
        return torch.cat([tiles, bfloat16_values(record[..., 528:])], dim=-1)
    blocks = e2m1_values(nibbles(record[..., :256])) * transposed_blocks(record[..., 320:])
    return torch.cat([blocks, fp8_values(record[..., 256:320], "e4m3")], dim=-1)


def float32_tiles(scales: torch.Tensor) -> torch.Tensor:
    """Return the scale of each of 512 channels, of 16 bytes of four float32."""
    return words(scales, 4).view(torch.float32).repeat_interleave(128, dim=-1)


def transposed_blocks(scales: torch.Tensor) -> torch.Tensor:
    """Return the scale of each of 512 channels, of 32 bytes of e4m3: four rows of eight blocks."""
    rows: torch.Tensor = torch.unflatten(fp8_values(scales, "e4m3"), -1, (4, 8))
    return rows.transpose(-1, -2).flatten(-2).repeat_interleave(BLOCK, dim=-1)


def bfloat16_values(pairs: torch.Tensor) -> torch.Tensor:
    """Read bfloat16 of pairs of bytes: the upper half of a float32."""
    return (words(pairs, 2) << 16).view(torch.float32)


def words(parts: torch.Tensor, size: int) -> torch.Tensor:
    """Put little-endian bytes together to int32."""
    whole: torch.Tensor = torch.unflatten(parts, -1, (-1, size)).to(torch.int32)
    return (whole << 8 * torch.arange(size, device=parts.device)).sum(dim=-1, dtype=torch.int32)


@dataclass(frozen=True)
class Reading:
    """The steps; the defaults are right."""

    element: Callable[[PagedAttentionInputs], str] = element_of
    fp8: Callable[[torch.Tensor, str], torch.Tensor] = fp8_values
    nibbles: Callable[[torch.Tensor], torch.Tensor] = nibbles
    e2m1: Callable[[torch.Tensor], torch.Tensor] = e2m1_values
    scales: Callable[[PagedAttentionInputs, int], torch.Tensor] = block_scales
    spread: Callable[[torch.Tensor], torch.Tensor] = spread
    record: Callable[[torch.Tensor, str], torch.Tensor] = record_values
    zeros: Callable[[torch.Tensor], torch.Tensor] = zero_points
    steps: Callable[[torch.Tensor], torch.Tensor] = without_zero_points
    halves: Callable[[torch.Tensor], torch.Tensor] = halves
    less_zero: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = less_zero
    queries: Callable[[AttentionInputs], torch.Tensor] = queries


HONEST_READING = Reading()


def widened(
    inputs: PagedAttentionInputs, reading: Reading = HONEST_READING
) -> PagedAttentionInputs:
    """Return the same call on a float32 cache, and with FP8 queries read in float32."""
    element = reading.element(inputs)
    if not element:
        return inputs
    if element in RECORDS:
        keys = reading.record(inputs.k_cache, element)
        return replace(inputs, k_cache=keys, v_cache=keys[..., :512], kv_format=None)
    caches = []
    for which, cache in enumerate((inputs.k_cache, inputs.v_cache)):
        codes = cache.view(torch.uint8)
        if element == NVFP4:
            values = reading.e2m1(reading.nibbles(codes))
            caches.append(values * reading.spread(reading.scales(inputs, which)))
        elif element in TOKEN_SCALED:
            values = cache.float() if cache.dtype == torch.int8 else reading.fp8(codes, "e4m3")
            caches.append(values * reading.scales(inputs, which))
        elif element == INT4:
            scales = reading.scales(inputs, which)
            values = reading.nibbles(codes).float() - reading.zeros(scales)
            caches.append(values * reading.steps(scales))
        elif element in ZERO_POINTS:
            codes = codes if element == ZERO_POINTS[0] else reading.halves(codes)
            caches.append(reading.less_zero(codes, reading.scales(inputs, which)))
        elif element in FP8:
            caches.append(reading.fp8(codes, element))
        else:
            message = f"this module reads no cache of {element!r}, of {TABLE}"
            raise ValueError(message)
    plain = replace(inputs, q=reading.queries(inputs), q_scale=1.0, kv_format=None)
    return replace(plain, k_cache=caches[0], v_cache=caches[1], kv_cache_sf=None)


def widened_rows(
    inputs: RaggedAttentionInputs, reading: Reading = HONEST_READING
) -> RaggedAttentionInputs:
    """Return the same call on float32 keys and values, and with FP8 queries read in float32."""
    element = str(inputs.k.dtype).removeprefix("torch.")
    if element not in FP8:
        return inputs
    k, v = (reading.fp8(each.view(torch.uint8), element) for each in (inputs.k, inputs.v))
    return replace(inputs, q=reading.queries(inputs), q_scale=1.0, k=k, v=v)
