"""Quantising the matrices of MoE problems: codes and scales that kernels read.

Scales of FP8 and global scales have three significant bits, so that the numbers which codes stand
for fit into bfloat16: a matrix of these numbers can be given in its place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..formats.quantization import quantize_fp8, quantize_mxfp4, quantize_mxfp8, quantize_nvfp4
from ..moe.weights import SCALE_BLOCK, MatrixFormat
from .values import bits

E4M3 = "float8_e4m3fn"
LARGEST_E4M3, LARGEST_E2M1 = 448.0, 6.0
FORMATS = {
    "fp8_tensor": MatrixFormat(E4M3, "tensor"),
    "fp8_channel": MatrixFormat(E4M3, "channel"),
    "fp8_block": MatrixFormat(E4M3, "block"),
    "nvfp4": MatrixFormat("nvfp4"),
    "mxfp4": MatrixFormat("mxfp4"),
}
HIDDEN_FORMATS = {**FORMATS, "mxfp4": MatrixFormat("mxfp8")}
"""Of hidden states, by the format of the weights."""


class Codes(NamedTuple):
    """A quantised matrix before it is placed; the global scale is of nvfp4 alone."""

    codes: torch.Tensor
    scales: torch.Tensor
    format: MatrixFormat
    global_scale: torch.Tensor | None = None


def quantised_weights(values: torch.Tensor, quantized: str, key: int, first: int) -> Codes:
    """Quantise weights.

    Args:
        values: [experts, rows, columns], float32.
        quantized: one of ``FORMATS``.
        key: of the hash that chooses the scales' significant bits.
        first: global id of the first expert.
    """
    form = FORMATS[quantized]
    experts = torch.arange(first, first + len(values), device=values.device)
    largest = values.abs()
    if quantized == "fp8_tensor":
        scales = _scale(largest.amax(dim=(1, 2)), bits(key, experts, 1)[:, 0], LARGEST_E4M3)
        codes = _fp8(values, scales[:, None, None])
    elif quantized == "fp8_channel":
        hashes = bits(key, experts, values.shape[1])
        scales = _scale(largest.amax(dim=2), hashes, LARGEST_E4M3)
        codes = _fp8(values, scales.unsqueeze(2))
    elif quantized == "fp8_block":
        amax = _block_amax(_block_amax(largest, 1), 2)
        hashes = bits(key, experts, amax[0].numel()).view(amax.shape)
        scales = _scale(amax, hashes, LARGEST_E4M3)
        spread = _spread(_spread(scales, 1, values.shape[1]), 2, values.shape[2])
        codes = _fp8(values, spread)
    elif quantized == "nvfp4":
        room = LARGEST_E2M1 * LARGEST_E4M3
        hashes = 2 * bits(key, experts, 1)[:, 0]  # e2m1, e4m3 and two bits make eight
        scale = _scale(largest.amax(dim=(1, 2)), hashes, room)
        made = quantize_nvfp4(values, scale[:, None, None])
        return Codes(made.codes, made.block_scales, form, scale)
    else:
        codes, scales = quantize_mxfp4(values)
    return Codes(codes, scales, form)


def quantised_hidden(
    values: torch.Tensor, quantized: str, key: int, tokens: torch.Tensor, largest: float
) -> Codes:
    """Quantise hidden states.

    Args:
        values: [tokens, hidden], float32.
        quantized: format of the weights.
        key: of the hash that chooses the scales' significant bits.
        tokens: int64 identities.
        largest: bounds |values|: one scale for all must not depend on which tokens there are.
    """
    form = HIDDEN_FORMATS[quantized]
    bound = torch.tensor(largest, device=values.device)
    one = bits(key, torch.zeros(1, dtype=torch.int64, device=values.device), 1)[0, 0]
    if quantized == "fp8_tensor":
        scales = _scale(bound, one, LARGEST_E4M3)
        codes = _fp8(values, scales)
    elif quantized == "fp8_channel":
        scales = _scale(values.abs().amax(dim=1), bits(key, tokens, 1)[:, 0], LARGEST_E4M3)
        codes = _fp8(values, scales.unsqueeze(1))
    elif quantized == "fp8_block":
        amax = _block_amax(values.abs(), 1)
        scales = _scale(amax, bits(key, tokens, amax.shape[1]), LARGEST_E4M3)
        codes = _fp8(values, _spread(scales, 1, values.shape[1]))
    elif quantized == "nvfp4":
        scale = _scale(bound, 2 * one, LARGEST_E2M1 * LARGEST_E4M3)
        made = quantize_nvfp4(values, scale)
        return Codes(made.codes, made.block_scales, form, scale)
    else:
        codes, scales = quantize_mxfp8(values)
    return Codes(codes, scales, form)


def _fp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return quantize_fp8(values, torch.float8_e4m3fn, scales.expand_as(values))


def _scale(largest: torch.Tensor, hashes: torch.Tensor, room: float) -> torch.Tensor:
    """Give 1, 1.25, 1.5 or 1.75 times the least power of two that keeps all within room."""
    exponent = torch.frexp(largest / room).exponent
    return torch.ldexp(1.0 + (hashes % 4).to(torch.float32) / 4, exponent)


def _block_amax(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Give the largest of each 128 along an axis, the last of what is left."""
    parts = [part.amax(dim=dim, keepdim=True) for part in values.split(SCALE_BLOCK, dim=dim)]
    return torch.cat(parts, dim=dim)


def _spread(scales: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return scales.repeat_interleave(SCALE_BLOCK, dim=dim).narrow(dim, 0, size)
