"""What releases declare about mixtures of experts, in rows of the table of ``claims``."""

from __future__ import annotations

from collections.abc import Iterator

from ...impl.flashinfer.names import ACTIVATION_NAMES, ROUTING_MEMBERS
from ...impl.gating import Feature
from . import facts
from .facts import Declarations, Row, row

GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_oai")
CUTLASS_RUNNERS = {
    "none": "CutlassBf16Runner",
    "fp8_per_tensor": "CutlassFp8PerTensorRunner",
    "fp8_block": "CutlassFp8BlockRunner",
    "mxfp8": "CutlassMxfp8Runner",
    "nvfp4": "CutlassNvfp4Runner",
    "mxfp8_mxfp4": "CutlassMxfp8Mxfp4Runner",
    "w4a16": "CutlassW4A16Runner",
    "w4a8": "CutlassW4A8Runner",
}
TRTLLM_MOES = {
    "none": ("fused_moe.trtllm_bf16_moe", "TrtllmBf16Config"),
    "fp8_per_tensor": ("fused_moe.trtllm_fp8_per_tensor_scale_moe", "TrtllmFp8PerTensorConfig"),
    "fp8_block": ("fused_moe.trtllm_fp8_block_scale_moe", "TrtllmFp8BlockConfig"),
    "nvfp4": ("fused_moe.trtllm_fp4_block_scale_moe", "TrtllmFp4Config"),
}
TRTLLM_LAUNCHER = "trtllm_fused_moe_kernel_launcher"
TRTLLM_MOE_MODULE = "gen_trtllm_gen_fused_moe_sm100_module"


def experts(declared: Declarations) -> Iterator[Row]:
    """Return the rows about fused experts and their routing."""
    for part in (_cutlass, _trtllm_gen, _others, _routing):
        yield from part(declared)


def _cutlass(declared: Declarations) -> Iterator[Row]:
    module = facts.moe_module(declared)
    for activation, member in ACTIVATION_NAMES.items():
        known = facts.enum_member(declared, "ActivationType", member)
        # A gated activation is a kernel of its own after the first GEMM, not an epilogue of it.
        gated = activation in GATED
        kernel = None if gated else facts.activation_kernel(declared, "cutlass", member)
        feature = Feature("moe", "cutlass", activation=activation)
        firm = activation in ("swiglu", "geglu", "relu2")
        yield row("CUTLASS MoE by activation", feature, module, known, kernel, firm=firm)
    for quantisation, name in CUTLASS_RUNNERS.items():
        runner = facts.moe_runner(declared, name)
        feature = Feature("moe", "cutlass", quantisation=quantisation)
        yield row("CUTLASS MoE by quantisation", feature, module, runner, firm=runner is not None)


def _trtllm_gen(declared: Declarations) -> Iterator[Row]:
    checked = facts.launcher(declared, TRTLLM_LAUNCHER)
    built = facts.jit_filter(declared, TRTLLM_MOE_MODULE)
    for quantisation, (function, config) in TRTLLM_MOES.items():
        there = facts.callable_there(declared, function)
        answered = facts.moe_config(declared, config)
        feature = Feature("moe", "trtllm-gen", quantisation=quantisation)
        yield row(
            "trtllm-gen MoE by quantisation", feature, checked, built, there, answered, firm=True
        )
    for activation, member in ACTIVATION_NAMES.items():
        known = facts.enum_member(declared, "ActivationType", member)
        kernel = facts.activation_kernel(declared, "trtllm-gen", member)
        feature = Feature("moe", "trtllm-gen", activation=activation, quantisation="nvfp4")
        # Its SwiGLU has optional parameters that make it the other one.
        about = () if activation == "swiglu_oai" else (known, kernel)
        answered = facts.moe_config(declared, TRTLLM_MOES["nvfp4"][1])
        chips = (checked, built, answered)
        yield row("trtllm-gen MoE by activation", feature, *chips, *about, firm=False)


def _others(declared: Declarations) -> Iterator[Row]:
    for backend, function, config in (
        ("cute-dsl", "cute_dsl_fused_moe_nvfp4", "CuteDslConfig"),
        ("b12x", "b12x_fused_moe", "B12xNvfp4Config"),
    ):
        feature = Feature("moe", backend, quantisation="nvfp4")
        about = facts.capability(declared, function), facts.moe_config(declared, config)
        yield row(f"{backend} MoE", feature, *about, firm=True)


def _routing(declared: Declarations) -> Iterator[Row]:
    there = facts.capability(declared, "trtllm_gen_routing")
    for routing, member in ROUTING_MEMBERS.items():
        known = facts.enum_member(declared, "RoutingMethodType", member)
        feature = Feature("route", "trtllm-gen", routing=routing)
        yield row("trtllm-gen routing", feature, there, known, firm=False)
    deepseek = Feature("route", "cuda", routing="deepseek_v3")
    fused = facts.capability(declared, "fused_topk_deepseek")
    yield row("DeepSeek routing", deepseek, fused, firm=True)
