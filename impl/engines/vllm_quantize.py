"""vLLM's Triton quantisers: what it runs where its compiled operators are not there."""

from __future__ import annotations

import torch

from ...reference import Arithmetic, QuantizeProblem
from ...reference.formats.quantizers import LEAST_NORMAL
from ...reference.tensors.quantize import QuantizeInputs
from ..gpu.triton_interpreter import rounding_away
from ..targets.refusal import Refusal
from ..targets.target import Target
from .quantisers import (
    MX_FEATURES,
    Answer,
    int8_groups,
    int8_tokens,
    quantiser,
    refused,
    refused_given,
    refused_groups,
    refused_mx,
)
from .sources import load
from .vllm_stubs import QUANTISATION, stubs_without_operators

FP8_FILE, INT8_FILE = f"{QUANTISATION}.fp8_utils", f"{QUANTISATION}.int8_utils"
MX_FILE = f"{QUANTISATION}.mxfp8_utils"
PADDING_FILE = "vllm.kernels.triton.qkv_padded_fp8_quant"
FP8 = ("float8_e4m3fn",)


def _supports_groups(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    why = refused(problem, target, FP8_FILE, "per_token_group_quant_fp8", FP8)
    return why or refused_groups(problem) or True


@quantiser(
    name="vllm-group-quant-fp8",
    provider="vllm",
    supports=_supports_groups,
    # `_absmax * (1.0 / fp8_max)`, `exp2(ceil(log2(scale_raw)))`, `y / y_s`: fp8_utils.py.
    arithmetic=Arithmetic(scales="reciprocal", powers="logarithm", quotients="approximate"),
)
def group_fp8(inputs: QuantizeInputs) -> Answer:
    """Quantise groups of rows by ``per_token_group_quant_fp8``."""
    x, to = inputs.x, inputs.to
    with load(FP8_FILE, stubs_without_operators) as kernels:
        codes, scales = kernels.per_token_group_quant_fp8(
            x,
            to.block[1] or x.shape[1],
            eps=to.floor,
            dtype=to.dtype,
            column_major_scales=inputs.scale_layout != "rows",
            tma_aligned_scales=inputs.scale_layout == "padded_columns",
            use_ue8m0=to.scale_format == "ue8m0",
        )
    return codes, scales


@quantiser(
    name="vllm-token-quant-int8",
    provider="vllm",
    supports=int8_tokens(INT8_FILE),
    # `absmax / 127`, `x * (127 / absmax)`, libdevice's round: int8_utils.py.
    arithmetic=Arithmetic(scales="approximate", quotients="inverse", ties="away"),
)
def token_int8(inputs: QuantizeInputs) -> Answer:
    """Quantise rows by ``per_token_quant_int8``."""
    with load(INT8_FILE, stubs_without_operators) as kernels, rounding_away(inputs.x):
        codes, scales = kernels.per_token_quant_int8(inputs.x)
    return codes, scales


@quantiser(
    name="vllm-group-quant-int8",
    provider="vllm",
    supports=int8_groups(INT8_FILE),
    # `_absmax / int8_max`, and `y / y_s` cast to int8, which cuts: int8_utils.py.
    arithmetic=Arithmetic(scales="approximate", quotients="approximate", ties="cut"),
)
def group_int8(inputs: QuantizeInputs) -> Answer:
    """Quantise groups of rows by ``per_token_group_quant_int8``."""
    x, to = inputs.x, inputs.to
    with load(INT8_FILE, stubs_without_operators) as kernels:
        codes, scales = kernels.per_token_group_quant_int8(
            x, to.block[1] or x.shape[1], eps=to.floor
        )
    return codes, scales


def _supports_mx(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    why = refused(problem, target, MX_FILE, "_mxfp8_e4m3_quantize_triton", FP8)
    return why or refused_mx(problem, LEAST_NORMAL) or refused_groups(problem) or True


@quantiser(
    name="vllm-quant-mxfp8",
    provider="vllm",
    supports=_supports_mx,
    features=MX_FEATURES,
    # `ceil(log2(amax / FP8_MAX))`, and a product with a power of two: mxfp8_utils.py.
    arithmetic=Arithmetic(scales="approximate", powers="logarithm"),
)
def mxfp8(inputs: QuantizeInputs) -> Answer:
    """Quantise groups of 32 by ``_mxfp8_e4m3_quantize_triton``, which ROCm runs."""
    with load(MX_FILE, stubs_without_operators) as kernels:
        codes, scales = kernels._mxfp8_e4m3_quantize_triton(inputs.x)  # noqa: SLF001
    return codes, scales


def _supports_padding(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    why = refused(problem, target, PADDING_FILE, "quantize_fp8_pad_head_dim_triton", FP8)
    return why or refused_given(problem) or True


@quantiser(
    name="vllm-static-quant-fp8",
    provider="vllm",
    supports=_supports_padding,
    arithmetic=Arithmetic(quotients="approximate"),  # `x / scale`: qkv_padded_fp8_quant.py
)
def static_fp8(inputs: QuantizeInputs) -> Answer:
    """Quantise a tensor of one head by ``quantize_fp8_pad_head_dim_triton``, which pads it."""
    with load(PADDING_FILE, stubs_without_operators) as kernels:
        padded = kernels.quantize_fp8_pad_head_dim_triton(inputs.x.unsqueeze(1), inputs.scale)
    if padded[:, 0, inputs.x.shape[1] :].view(torch.uint8).any():
        message = "the channels that the head is padded with are not zero"
        raise RuntimeError(message)
    return padded[:, 0, : inputs.x.shape[1]], None
