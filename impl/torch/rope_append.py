"""Turning, quantising and appending with torch operations only; no code is the oracle's."""

from __future__ import annotations

import torch

from ...reference.tensors.rope_append import RopeAppendInputs
from ..protocol import implementation


@implementation("rope_and_append", name="torch-rope-append", features=("large_rows",))
def rope_and_append(inputs: RopeAppendInputs) -> torch.Tensor:
    """Turn rows in float32, one step after another, and write the slots that are not negative."""
    kept = (inputs.slots >= 0).nonzero().flatten()
    slots = inputs.slots[kept]
    page, slot = slots // inputs.page_size, slots % inputs.page_size
    for cache, rows, scale in zip(
        inputs.caches,
        (turned(inputs, inputs.k), inputs.v),
        (inputs.k_scale, inputs.v_scale),
        strict=False,
    ):
        assert rows is not None  # noqa: S101  as many rows as caches
        by_slot = cache if inputs.kv_layout == "NHD" else cache.transpose(1, 2)
        stored = quantised(rows[kept], cache.dtype, scale)
        by_slot.view(torch.uint8)[page, slot] = stored.view(torch.uint8)
    return quantised(turned(inputs, inputs.q), inputs.q_dtype, inputs.q_scale)


def turned(inputs: RopeAppendInputs, x: torch.Tensor) -> torch.Tensor:
    """Return rows in float32 with their rotary channels turned."""
    found = x.float()
    half = inputs.rope_dim // 2
    both = inputs.cos_sin[inputs.positions].unsqueeze(1)
    cos, sin = both[..., :half], both[..., half:]
    part = found[..., inputs.rotary]
    if inputs.interleaved:
        first, second = part[..., ::2], part[..., 1::2]
    else:
        first, second = part[..., :half], part[..., half:]
    pair = first * cos - second * sin, second * cos + first * sin
    new = torch.stack(pair, dim=-1).flatten(2) if inputs.interleaved else torch.cat(pair, dim=-1)
    parts = [found[..., inputs.plain], new]
    return torch.cat(parts if inputs.latent else parts[::-1], dim=-1)


def quantised(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Divide by a scale in float32 and round to FP8, which saturates; or round to 16 bits."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    # By a tensor: on a GPU torch multiplies by the reciprocal of a number.
    quotients = x.float() / torch.full((), scale, device=x.device)
    return quotients.clamp(-largest, largest).to(dtype)
