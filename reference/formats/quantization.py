"""Quantised number formats: FP8, and the block formats NVFP4, MXFP8 and MXFP4.

Codes and scales here are the bits that kernels read. Dequantisation into float64 is exact; that is
what makes an oracle on quantised inputs possible. Quantisation follows the published rules, but
kernels that use approximate reciprocals may choose a neighbouring code.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..validation import check_values
from .block_scales import check_block_scales, scale_blocks, split_blocks
from .fp4 import (
    check_packed,
    dequantize_e2m1,
    encode_e2m1,
    pack_e2m1,
    packed_values,
    quantize_e2m1,
    unpack_e2m1,
)
from .fp8 import check_scale, check_wide_dtype, dequantize_fp8, quantize_fp8
from .mx import (
    MX_BLOCK,
    MXTensor,
    dequantize_e8m0,
    dequantize_mxfp4,
    dequantize_mxfp8,
    quantize_e8m0,
    quantize_mxfp4,
    quantize_mxfp8,
)
from .scale_layouts import (
    deinterleave_v_scales,
    interleave_v_scales,
    swizzle_scales_128x4,
    unswizzle_scales_128x4,
)
from .small_floats import E4M3, elementwise, quotient, round_to_format

__all__ = [
    "MX_BLOCK",
    "NVFP4_BLOCK",
    "MXTensor",
    "NVFP4Tensor",
    "deinterleave_v_scales",
    "dequantize_e2m1",
    "dequantize_e8m0",
    "dequantize_fp8",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "interleave_v_scales",
    "pack_e2m1",
    "quantize_e2m1",
    "quantize_e8m0",
    "quantize_fp8",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "swizzle_scales_128x4",
    "unpack_e2m1",
    "unswizzle_scales_128x4",
]

NVFP4_BLOCK = 16
"""Elements of one e4m3 block scale."""


class NVFP4Tensor(NamedTuple):
    """A tensor in NVFP4, its scales in linear order.

    Attributes:
        codes: uint8 [..., n / 2], two e2m1 codes a byte, the even element in the low nibble.
        block_scales: float8_e4m3fn [..., n / 16].
        global_scale: float32, positive; it multiplies at dequantisation.
    """

    codes: torch.Tensor
    block_scales: torch.Tensor
    global_scale: torch.Tensor


@torch.no_grad()
def quantize_nvfp4(x: torch.Tensor, global_scale: float | torch.Tensor = 1.0) -> NVFP4Tensor:
    """Quantise blocks of 16 to e2m1 with an e4m3 scale a block and a global scale.

    block_scale = e4m3(amax(block) / (6 * global_scale)), code = e2m1(x / (block_scale *
    global_scale)), each rounded once, to nearest even, saturating. So the global scale divides
    here and multiplies at dequantisation, as in FlashInfer's KV caches (``page.cuh``:
    ``nvfp4_append_quantize_block``; ``fp4_kv_quantization.cu``); its ``fp4_quantize`` and
    ``nvfp4_quantize_paged_kv_cache`` take the reciprocal, and the latter returns what is meant
    here. amax(x) / (6 * 448) uses the whole range of the block scales.

    A block scale that is rounded down lets the block's largest elements saturate at 6. A block of
    zeros, and one whose scale underflows to 0, gets scale 0 and codes of zeros. Infinity gives the
    block scale 448 and code 6; a NaN makes its block's scale NaN, and so the whole block.

    Args:
        x: any floating dtype, [..., n]; n is a multiple of 16.
        global_scale: positive and finite, a float or a tensor that broadcasts to [..., n / 16];
            rounded to float32, which is what kernels take.

    Returns:
        NVFP4Tensor.

    Raises:
        ValueError: an x that is not floating, an n that is no multiple of 16, or a global scale
            that is not positive and finite in float32 or does not broadcast.
    """
    blocks = split_blocks(x, NVFP4_BLOCK)
    amax = blocks.abs().amax(-1)
    if isinstance(global_scale, torch.Tensor):
        check_values("global_scale", global_scale)
    narrow = torch.as_tensor(global_scale, dtype=torch.float32, device=x.device).detach()
    factor = check_scale("global_scale", narrow, amax)
    scales = round_to_format(quotient(amax, 6 * factor), E4M3)
    step = torch.where(scales == 0, torch.inf, scales * factor)

    def encode(part: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return encode_e2m1(quotient(part, by))

    codes = elementwise(encode, torch.uint8, blocks, step.unsqueeze(-1))
    return NVFP4Tensor(pack_e2m1(codes.flatten(-2)), scales.to(torch.float8_e4m3fn), narrow)


@torch.no_grad()
def dequantize_nvfp4(
    codes: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: float | torch.Tensor = 1.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the numbers of an NVFP4 tensor: e2m1 value * block scale * global scale.

    In float64 the product is exact where the global scale has at most 47 significant bits, as
    every float32 has. Another ``dtype`` is rounded to from there, once (FlashInfer's kernels round
    the product to float32 first). The convention is FlashInfer's (``fp4_kv_dequantization.cu``:
    ``dequant_fp4x4_to_float2x2``; its k_scale and v_scale).

    Args:
        codes: uint8 [..., n / 2], the element of even index in the low nibble.
        block_scales: float8_e4m3fn [..., n / 16] in linear order.
        global_scale: positive and finite, a float or a tensor that broadcasts to the block scales.
        dtype: float64, float32, float16 or bfloat16.

    Returns:
        Numbers of ``dtype``, [..., n]; blocks with a NaN scale are NaN.

    Raises:
        ValueError: codes, scales or a dtype of another type, shapes that disagree, or a global
            scale that is not positive and finite or does not broadcast.
    """
    check_packed("codes", codes)
    check_wide_dtype(dtype)
    if block_scales.dtype != torch.float8_e4m3fn:
        message = f"block_scales must be float8_e4m3fn, not {block_scales.dtype}"
        raise ValueError(message)
    check_values("block_scales", block_scales)
    check_block_scales(codes, 2, block_scales, NVFP4_BLOCK)
    steps = dequantize_fp8(block_scales) * check_scale("global_scale", global_scale, block_scales)
    return scale_blocks(packed_values(codes), steps, NVFP4_BLOCK, dtype)
