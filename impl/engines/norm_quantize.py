"""SGLang's and vLLM's Triton norms that quantise, to FP8 with scales in e8m0."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from types import SimpleNamespace

import torch

from ...reference import Arithmetic, NormQuantizeProblem
from ...reference.formats.quantizers import LEAST_NORMAL
from ...reference.tensors.norm_quantize import NormQuantizeInputs
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from .quantisers import MX_GROUP, Answer, group_of, key_of, refused
from .sglang_calls import SGLANG
from .sources import implementation, load
from .vllm_stubs import Unused, stubs_without_operators

HOME = "sglang.kernels.ops.layernorm"
BLOCK_FILE, MX_FILE = f"{HOME}.rmsnorm_fp8_e8m0", f"{HOME}.rmsnorm_mxfp8"
GRID_FILE = f"{HOME}.rmsnorm_fake_quant_amd_gfx95"
QUERY_FILE = "vllm.models.deepseek_v41.common.ops.query_quant"
FP8 = ("float8_e4m3fn",)
BLOCK, GRID_FLOOR = 128, 1e-10
"""Channels of a block, and what an amax counts at least in SGLang's kernels for AMD."""
KEYS = 32
"""Channels of the keys that vLLM's kernel normalises beside the queries."""


def _key(problem: NormQuantizeProblem) -> Hashable:
    return key_of(problem), problem.residual


norm = functools.partial(
    implementation,
    "norm_and_quantize",
    compile_key=_key,
    build_ahead="cuda",
    build_minutes=0.03,
    build_compilers=1,
    features=("e8m0_scales",),
    # `rsqrt(sum / N + eps)`, the norm rounded to x's dtype, `amax * (1.0 / 448.0)`, and powers of
    # two of its bits: in each of the four files.
    arithmetic=Arithmetic(roots="approximate", intermediate="inputs", scales="reciprocal"),
)
"""``implementation``, with what the adapters declare alike."""


def _refused(
    problem: NormQuantizeProblem, target: Target, file: str, kernel: str, group: int, floor: float
) -> Refusal | str | None:
    return refused(problem, target, file, kernel, FP8) or first_reason(
        (problem.scale is not None, "computes its scales"),
        (problem.scale_format != "e8m0", "scales are e8m0 codes"),
        (group_of(problem) != group, f"a group has {group} channels"),
        (problem.num_channels % group, "a row is whole groups"),
        (problem.gamma_offset != 0, "gains have no offset"),
        (problem.floor != floor, f"the largest magnitude counts at least {floor:g}"),
    )  # fmt: skip


def _supports_blocks(problem: NormQuantizeProblem, target: Target) -> Refusal | str | bool:
    why = _refused(
        problem, target, BLOCK_FILE, "rmsnorm_fp8_e8m0_quant", BLOCK, LEAST_NORMAL
    ) or first_reason(
        (problem.residual, "adds no residual"),
        (problem.scale_layout != "rows", "scales are not swizzled"),
    )
    return why or True


@norm(name="sglang-rmsnorm-fp8-e8m0", provider=SGLANG, supports=_supports_blocks)
def blocks(inputs: NormQuantizeInputs) -> Answer:
    """Normalise and quantise blocks of 128 by ``rmsnorm_fp8_e8m0_quant``."""
    with load(BLOCK_FILE, dict) as kernels:
        (codes, scales), _ = kernels.rmsnorm_fp8_e8m0_quant(inputs.x, inputs.gamma, inputs.eps)
    tokens, columns = scales.shape  # a view of [columns, tokens] under the other shape
    return codes, scales.view(torch.uint8).view(columns, tokens).t().contiguous()


def _supports_mx(problem: NormQuantizeProblem, target: Target) -> Refusal | str | bool:
    why = _refused(
        problem, target, MX_FILE, "rmsnorm_mxfp8", MX_GROUP, LEAST_NORMAL
    ) or first_reason(
        (problem.residual, "adds no residual"),
        (problem.scale_layout != "swizzled", "scales are swizzled"),
        (problem.dtype != "bfloat16", "takes bfloat16"),
        (problem.num_channels % BLOCK != 0, f"a row has a multiple of {BLOCK} channels"),
        (not problem.num_tokens, "takes a row or more"),
    )
    return why or True


@norm(
    name="sglang-rmsnorm-mxfp8",
    provider=SGLANG,
    supports=_supports_mx,
    features=("e8m0_scales", "swizzled_scales"),
)
def mxfp8(inputs: NormQuantizeInputs) -> Answer:
    """Normalise and quantise groups of 32 by ``rmsnorm_mxfp8``."""
    with load(MX_FILE, dict) as kernels:
        _, codes, scales = kernels.rmsnorm_mxfp8(inputs.x, inputs.gamma, inputs.eps)
    return codes, scales.view(inputs.scale_shape)


def _supports_grid(problem: NormQuantizeProblem, target: Target) -> Refusal | str | bool:
    why = _refused(problem, target, GRID_FILE, "rmsnorm_fake_quant_fp8", MX_GROUP, GRID_FLOOR)
    why = why or first_reason((problem.scale_layout != "rows", "scales are not swizzled"))
    return why or True


@norm(name="sglang-rmsnorm-fp8-grid", provider=SGLANG, supports=_supports_grid)
def grid(inputs: NormQuantizeInputs) -> Answer:
    """Add, normalise and quantise groups of 32 by ``rmsnorm_fake_quant_fp8``, made for AMD."""
    with load(GRID_FILE, dict) as kernels:
        found, _ = kernels.rmsnorm_fake_quant_fp8(
            inputs.x, inputs.gamma, inputs.eps, residual=inputs.residual, emit_fp8=True
        )
    return found.q, found.scale


def _query_stubs() -> Mapping[str, Mapping[str, object]]:
    """Stand in for vLLM's layers beside the kernel."""
    found = dict(stubs_without_operators())
    layers = "vllm.model_executor.layers"
    found[f"{layers}.fusion.quant_activation"] = {
        "QuantizedActivation": lambda data, scale, *_: SimpleNamespace(data=data, scale=scale),
        "get_input_quant_key": Unused(),
    }
    found[f"{layers}.quantization.utils.quant_utils"] = {"kMxfp8Dynamic": Unused()}
    return found


def _supports_query(problem: NormQuantizeProblem, target: Target) -> Refusal | str | bool:
    why = _refused(
        problem, target, QUERY_FILE, "fused_q_kv_rmsnorm_quant", MX_GROUP, LEAST_NORMAL
    ) or first_reason(
        (problem.residual, "adds no residual"),
        (problem.scale_layout != "swizzled", "scales are swizzled"),
        (target.device == "cpu", "a launch for each of 128 rows takes the interpreter too long"),
    )
    return why or True


@norm(
    name="vllm-q-kv-rmsnorm-quant",
    provider="vllm",
    supports=_supports_query,
    features=("e8m0_scales", "swizzled_scales"),
)
def query(inputs: NormQuantizeInputs) -> Answer:
    """Normalise and quantise queries by ``fused_q_kv_rmsnorm_quant``, beside keys of ones."""
    x = inputs.x
    keys, gains = x.new_ones(len(x), KEYS), x.new_ones(KEYS)
    with load(QUERY_FILE, _query_stubs) as kernels:
        found, _ = kernels.fused_q_kv_rmsnorm_quant(x, keys, inputs.gamma, gains, inputs.eps)
    return found.data, found.scale.view(inputs.scale_shape)
