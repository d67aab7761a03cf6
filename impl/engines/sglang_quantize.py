"""SGLang's Triton quantisers: what it runs where its compiled kernels are not there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from ...reference import Arithmetic, QuantizeProblem
from ...reference.formats.quantizers import LEAST_NORMAL
from ...reference.tensors.quantize import QuantizeInputs
from ..gpu.triton_interpreter import rounding_away
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from .quantisers import (
    INT8,
    MX_FEATURES,
    Answer,
    group_of,
    int8_groups,
    int8_tokens,
    quantiser,
    refused,
    refused_given,
    refused_groups,
    refused_mx,
    refused_rows,
)
from .sglang_calls import SGLANG, stubs
from .sources import load
from .vllm_stubs import Unused

HOME = "sglang.kernels.ops.quantization"
FP8_FILE, INT8_FILE = f"{HOME}.fp8_kernel", f"{HOME}.int8_kernel"
MX_FILE, SWIZZLED_FILE = f"{HOME}.mxfp8_quant", f"{HOME}.mxfp8_swizzled_triton"
CAST_FILE, ACT_FILE = f"{HOME}.fp8_quantize", f"{HOME}.act_quant_triton"
FP8, BOTH = ("float8_e4m3fn",), ("float8_e4m3fn", "float8_e5m2")
ACT_FLOOR, MX_FLOOR = 1e-4, 1e-30
ROWS_OF_MLA = 256
"""Rows that the output of ``per_token_group_quant_mla_deep_gemm_masked_fp8`` is padded to."""


def quantising_stubs() -> Mapping[str, Mapping[str, object]]:
    """Stand in for SGLang where nothing but its Triton kernels quantises."""
    nobody = lambda *_: False  # noqa: E731  as long as a name for it
    utils: dict[str, object] = dict(stubs()["sglang.srt.utils"])
    utils |= dict.fromkeys(("is_cuda", "is_hip", "is_musa", "is_xpu"), nobody)
    utils["ceil_align"] = lambda number, of: -(-number // of) * of
    runtime = ("is_arch_support_pdl", "is_hip_runtime", "is_musa_runtime")
    return {
        "sglang.srt.utils": utils,
        "sglang.srt.utils.patch_torch": {"register_fake_if_exists": Unused()},
        "sglang.srt.environ": {"envs": Unused()},
        "sglang.kernels.jit.utils": {
            **dict.fromkeys(runtime, nobody), "get_jit_cuda_arch": Unused(),
        },
        # It packs scales for one library's products; here they stay what the kernel wrote.
        "deep_gemm": {"transform_sf_into_required_layout": lambda scales, **_: scales},
    }  # fmt: skip


def _supports_8bit(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    why = refused(problem, target, FP8_FILE, "_per_token_group_quant_8bit_raw", (*BOTH, *INT8))
    why = why or refused_groups(problem)
    why = why or first_reason(
        (problem.spare_channels, "rows lie one behind the other"),
        (
            problem.scale_format == "ue8m0" and problem.scale_layout == "rows",
            "powers of two lie column after column",
        ),
    )  # fmt: skip
    return why or True


@quantiser(
    name="sglang-group-quant-8bit",
    provider=SGLANG,
    supports=_supports_8bit,
    # `_absmax / bit8_max`, `exp2(ceil(log2(y_s)))`; `y * (1.0 / y_s)`, by columns `y / y_s`; a cast
    # to int8 cuts: fp8_kernel.py.
    arithmetic=Arithmetic(
        scales="approximate", powers="logarithm", quotients="reciprocal", ties="cut"
    ),
)
def group_8bit(inputs: QuantizeInputs) -> Answer:
    """Quantise groups of rows by ``_per_token_group_quant_8bit_raw``."""
    x, to = inputs.x, inputs.to
    with load(FP8_FILE, quantising_stubs) as kernels:
        codes, scales = kernels._per_token_group_quant_8bit_raw(  # noqa: SLF001  exported so
            x,
            to.block[1] or x.shape[1],
            eps=to.floor,
            dtype=to.dtype,
            column_major_scales=inputs.scale_layout != "rows",
            scale_tma_aligned=inputs.scale_layout == "padded_columns",
            scale_ue8m0=to.scale_format == "ue8m0",
        )
    return codes, scales


def _supports_static(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    why = refused(problem, target, FP8_FILE, "static_quant_fp8", FP8) or refused_given(problem)
    return why or refused_rows(problem) or True


@quantiser(
    name="sglang-static-quant-fp8",
    provider=SGLANG,
    supports=_supports_static,
    arithmetic=Arithmetic(quotients="reciprocal"),  # `y * (1.0 / y_s)`: fp8_kernel.py
)
def static_fp8(inputs: QuantizeInputs) -> Answer:
    """Quantise a tensor by ``static_quant_fp8``."""
    with load(FP8_FILE, quantising_stubs) as kernels:
        codes, _ = kernels.static_quant_fp8(inputs.x, inputs.scale)
    return codes, None


def _supports_cast(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    why = refused(problem, target, CAST_FILE, "fp8_quantize", BOTH) or refused_given(problem)
    why = why or first_reason(
        (problem.dtype == "float32", "takes 16 bits"),
        (problem.num_channels & (problem.num_channels - 1), "channels are a power of two"),
    )  # fmt: skip
    return why or True


@quantiser(
    name="sglang-fp8-quantize",
    provider=SGLANG,
    supports=_supports_cast,
    arithmetic=Arithmetic(quotients="reciprocal"),  # `x * scale_inv`: fp8_quantize.py
)
def cast(inputs: QuantizeInputs) -> Answer:
    """Quantise a tensor by ``fp8_quantize``, with the reciprocal of its scale."""
    assert inputs.scale is not None  # noqa: S101  no other problem is supported
    with load(CAST_FILE, quantising_stubs) as kernels:
        codes = kernels.fp8_quantize(
            inputs.x, scale_inv=1.0 / inputs.scale.item(), fp8_dtype=inputs.to.dtype
        )
    return codes, None


def _supports_act(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    why = refused(problem, target, ACT_FILE, "act_quant", FP8) or refused_groups(problem)
    group = group_of(problem)
    if not why:
        why = refused_rows(_with_float32(problem))
    why = why or first_reason(
        (group & (group - 1), "groups are a power of two"),
        (problem.floor != ACT_FLOOR, f"the largest magnitude counts at least {ACT_FLOOR}"),
    )  # fmt: skip
    return why or True


def _with_float32(problem: QuantizeProblem) -> QuantizeProblem:
    """Return the problem without what ``refused_rows`` says of powers of two."""
    return replace(problem, scale_format="float32")


@quantiser(
    name="sglang-act-quant",
    provider=SGLANG,
    supports=_supports_act,
    # `amax * fp8_max_inv`, `exp2(ceil(log2(...)))`, `x / scale`: act_quant_triton.py.
    arithmetic=Arithmetic(scales="reciprocal", powers="logarithm", quotients="approximate"),
)
def act(inputs: QuantizeInputs) -> Answer:
    """Quantise groups of rows by ``act_quant``."""
    x, to = inputs.x, inputs.to
    with load(ACT_FILE, quantising_stubs) as kernels:
        codes, scales = kernels.act_quant(
            x,
            block_size=to.block[1] or x.shape[1],
            scale_fmt="ue8m0" if to.scale_format == "ue8m0" else None,
        )
    return codes, scales


@quantiser(
    name="sglang-token-quant-int8",
    provider=SGLANG,
    supports=int8_tokens(INT8_FILE),
    # `absmax / 127`, `x * (127 / absmax)`, libdevice's round: int8_kernel.py.
    arithmetic=Arithmetic(scales="approximate", quotients="inverse", ties="away"),
)
def token_int8(inputs: QuantizeInputs) -> Answer:
    """Quantise rows by ``per_token_quant_int8``."""
    with load(INT8_FILE, quantising_stubs) as kernels, rounding_away(inputs.x):
        codes, scales = kernels.per_token_quant_int8(inputs.x)
    return codes, scales


@quantiser(
    name="sglang-group-quant-int8",
    provider=SGLANG,
    supports=int8_groups(INT8_FILE),
    # `_absmax / int8_max`, and `y / y_s` cast to int8, which cuts: int8_kernel.py.
    arithmetic=Arithmetic(scales="approximate", quotients="approximate", ties="cut"),
)
def group_int8(inputs: QuantizeInputs) -> Answer:
    """Quantise groups of rows by ``per_token_group_quant_int8``."""
    x, to = inputs.x, inputs.to
    with load(INT8_FILE, quantising_stubs) as kernels:
        codes, scales = kernels.per_token_group_quant_int8(
            x, to.block[1] or x.shape[1], eps=to.floor
        )
    return codes, scales


def _supports_mx(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    why = refused(problem, target, MX_FILE, "to_mxfp8", FP8) or refused_mx(problem, MX_FLOOR)
    why = why or refused_groups(problem)
    return why or True


@quantiser(
    name="sglang-quant-mxfp8",
    provider=SGLANG,
    supports=_supports_mx,
    features=MX_FEATURES,
    # `ceil(log2(amax / 448.0))`, and a division by a power of two: mxfp8_quant.py.
    arithmetic=Arithmetic(scales="approximate", powers="logarithm"),
)
def mxfp8(inputs: QuantizeInputs) -> Answer:
    """Quantise groups of 32 by ``to_mxfp8``."""
    with load(MX_FILE, quantising_stubs) as kernels:
        found = kernels.to_mxfp8(inputs.x)
    return found.data, found.scale


def _supports_swizzled(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    why = refused(problem, target, SWIZZLED_FILE, "mxfp8_quantize_swizzled", FP8)
    why = why or refused_mx(problem, LEAST_NORMAL) or refused_groups(problem)
    why = why or first_reason(
        (problem.dtype != "bfloat16", "takes bfloat16"),
        (problem.scale_layout != "swizzled", "scales are swizzled"),
    )  # fmt: skip
    return why or True


@quantiser(
    name="sglang-quant-mxfp8-swizzled",
    provider=SGLANG,
    supports=_supports_swizzled,
    features=(*MX_FEATURES, "swizzled_scales"),
)
def swizzled_mxfp8(inputs: QuantizeInputs) -> Answer:
    """Quantise groups of 32 by ``mxfp8_quantize_swizzled``, whose powers are of exponents' bits."""
    with load(SWIZZLED_FILE, quantising_stubs) as kernels, on_any_device(kernels, inputs.x):
        codes, scales = kernels.mxfp8_quantize_swizzled(inputs.x)
    return codes, scales.view(inputs.scale_shape)


@contextmanager
def on_any_device(kernels: Any, x: torch.Tensor) -> Iterator[None]:  # noqa: ANN401  a module of theirs
    """Let the interpreter run what asks for a tensor of a GPU."""
    if x.is_cuda:
        yield
        return
    with (
        patch.object(kernels, "can_use_mxfp8_swizzled", lambda _: True),
        patch.object(torch, "get_device_module", lambda: NoDevices),
    ):
        yield


class NoDevices:
    """Stands in for ``torch.cuda`` where the interpreter runs."""

    @staticmethod
    def device(_device: torch.device) -> AbstractContextManager[None]:
        """Select no device."""
        return nullcontext()


def _supports_tensor(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    why = refused(problem, target, FP8_FILE, "per_tensor_quant_mla_fp8", FP8)
    why = why or first_reason(
        (problem.scale is not None, "computes its scale"),
        (problem.block != (0, 0), "has one scale for the tensor"),
        (problem.scale_format != "float32", "scales are no powers of two"),
        (not problem.num_tokens, "of no rows no program computes a scale"),
    )  # fmt: skip
    return why or True


@quantiser(
    name="sglang-tensor-quant-mla-fp8",
    provider=SGLANG,
    supports=_supports_tensor,
    # `_absmax / fp8_max`, `x * (1.0 / x_s)`: fp8_kernel.py.
    arithmetic=Arithmetic(scales="approximate", quotients="reciprocal"),
)
def tensor_fp8(inputs: QuantizeInputs) -> Answer:
    """Quantise the rows of one head by ``per_tensor_quant_mla_fp8``, with a scale of all."""
    scale = inputs.x.new_zeros(1, dtype=torch.float32)
    with load(FP8_FILE, quantising_stubs) as kernels:
        codes, scales = kernels.per_tensor_quant_mla_fp8(
            inputs.x.unsqueeze(0), scale, eps=inputs.to.floor
        )
    return codes[0], scales.view(1, 1)


def _supports_masked(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
    name = "per_token_group_quant_mla_deep_gemm_masked_fp8"
    why = refused(problem, target, FP8_FILE, name, FP8) or refused_groups(problem)
    why = why or first_reason(
        (problem.scale_format != "float32", "scales are no powers of two"),
        (problem.scale_layout != "rows", f"columns of scales are padded to {ROWS_OF_MLA} rows"),
    )  # fmt: skip
    return why or True


@quantiser(
    name="sglang-group-quant-mla-fp8",
    provider=SGLANG,
    supports=_supports_masked,
    arithmetic=Arithmetic(scales="approximate", quotients="approximate"),  # fp8_kernel.py
)
def masked_fp8(inputs: QuantizeInputs) -> Answer:
    """Quantise the rows of one head by the kernel for masked grouped products, in groups."""
    x, to = inputs.x, inputs.to
    with load(FP8_FILE, quantising_stubs) as kernels:
        codes, scales, counts, *_ = kernels.per_token_group_quant_mla_deep_gemm_masked_fp8(
            x.unsqueeze(0), group_size=to.block[1] or x.shape[1], eps=to.floor
        )
    if len(x) and counts.tolist() != [len(x)]:
        message = f"counts are {counts.tolist()}, not [{len(x)}]"
        raise RuntimeError(message)
    return codes[0, : len(x)], scales[0, : len(x)].contiguous()
