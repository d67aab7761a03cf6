"""Records of latent attention, read with torch's own views; no code of the oracle's."""

from __future__ import annotations

from collections.abc import Callable

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp8_record(record: torch.Tensor) -> torch.Tensor:
    """Return [..., 576] float32 of 512 e4m3 codes, 4 float32 scales and 64 bfloat16 channels."""
    flat = record.reshape(-1, record.shape[-1])
    codes = flat[:, :512].contiguous().view(torch.float8_e4m3fn).float()
    scales = flat[:, 512:528].contiguous().view(torch.float32)
    rotary = flat[:, 528:656].contiguous().view(torch.bfloat16).float()
    compressed = (codes.view(-1, 4, 128) * scales[:, :, None]).reshape(-1, 512)
    return torch.cat([compressed, rotary], dim=1).view(*record.shape[:-1], 576)


def fp4_record(record: torch.Tensor) -> torch.Tensor:
    """Return [..., 576] float32 of 512 e2m1 codes, 64 e4m3 channels and 32 e4m3 scales.

    The scale of block s stands at byte 8 (s % 4) + s // 4 of the last 32.
    """
    flat = record.reshape(-1, record.shape[-1])
    table = torch.tensor([*E2M1, *(-each for each in E2M1)], device=record.device)
    compressed = record.new_empty((len(flat), 512), dtype=torch.float32)
    compressed[:, 0::2] = table[flat[:, :256].remainder(16).long()]
    compressed[:, 1::2] = table[flat[:, :256].div(16, rounding_mode="floor").long()]
    rotary = flat[:, 256:320].contiguous().view(torch.float8_e4m3fn).float()
    stored = flat[:, 320:352].contiguous().view(torch.float8_e4m3fn).float()
    places = torch.tensor([8 * (block % 4) + block // 4 for block in range(32)])
    scales = stored[:, places.to(record.device)]
    compressed = (compressed.view(-1, 32, 16) * scales[:, :, None]).reshape(-1, 512)
    return torch.cat([compressed, rotary], dim=1).view(*record.shape[:-1], 576)


RECORDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp8_ds_mla": fp8_record,
    "nvfp4_ds_mla": fp4_record,
}
"""Readers of records, by the element of the cache."""
