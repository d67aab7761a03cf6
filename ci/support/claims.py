"""What can be compared: what a release declares of calls, chip by chip, as knowledge of them.

A claim is firm where the facts together are all that decides and one of them names the chip, so
that the rules should allow what they admit. Of one that is not, only a refusal can be compared: a
call whose dtypes are accepted one by one may still lack a kernel for the pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...impl.flashinfer.names import ACTIVATION_NAMES, ROUTING_MEMBERS
from ...impl.flashinfer_declarations.capabilities import HEAD_DIMS, PAGE_SIZES
from ...impl.gating import Feature
from ...impl.gating.knowledge import Knowledge
from ...impl.gating.rules import DECLARED
from . import facts
from .facts import Declarations, Fact, named_chips

COMMON = {"head_dim_qk": (64, 128, 256), "page_size": (16, 32, 64)}
"""What serving engines use with XQA."""
GROUP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
EQUAL_DTYPES = ("float16", "bfloat16", "float8_e4m3fn")
NVFP4_SCALES = ("kv_block_scales", "kv_cache_sf")
"""The parameter for the scales of an NVFP4 cache, until 0.6.7 and from 0.6.8."""
MLA_ON = {
    backend: Feature(
        "mla",
        backend,
        head_dim_qk=576,
        head_dim_vo=512,
        page_size=64,
        group_size=128,
        q_dtype=dtype,
    )
    for backend, dtype in (
        ("trtllm-gen", "bfloat16"),
        ("cutlass", "bfloat16"),
        ("xqa", "float8_e4m3fn"),
    )
}
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


@dataclass(frozen=True)
class Row:
    """Facts about one call.

    Attributes:
        topic: the topic of the comparison.
        feature: the call.
        facts: the facts that are known; each must admit a chip.
        firm: whether they are all that decides, so that the rules should allow what they admit.
    """

    topic: str
    feature: Feature
    facts: tuple[Fact, ...]
    firm: bool


def row(topic: str, feature: Feature, *facts: Fact | None, firm: bool) -> Row:
    """Make a row; None is a fact that is not known."""
    return Row(topic, feature, tuple(fact for fact in facts if fact is not None), firm)


def claims(declared: Declarations) -> Iterator[Knowledge]:
    """Return everything that a release declares and the rules can be asked about.

    Each is known by the facts that refuse the call, or else by all facts about it.
    """
    named_somewhere = named_chips(declared)
    for feature, about in _by_feature(declared).items():
        named = frozenset().union(*(fact.named for fact in about.facts)) or named_somewhere
        for chip in declared["chips"]:
            refusing = tuple(fact for fact in about.facts if chip not in fact.chips)
            told = refusing or about.facts
            yield Knowledge(
                DECLARED,
                "; ".join(dict.fromkeys(fact.source for fact in told if fact.source)),
                about.topic,
                feature,
                chip,
                declared["flashinfer"],
                not refusing,
                "; ".join(fact.says for fact in told),
                firm=about.firm and chip in named,
            )


def _by_feature(declared: Declarations) -> dict[Feature, Row]:
    """Join the rows about one call; those without facts say nothing."""
    joined: dict[Feature, Row] = {}
    for each in (row for part in PARTS for row in part(declared)):
        before = joined.get(each.feature, each)
        facts = tuple(dict.fromkeys((*before.facts, *each.facts)))
        if facts:
            joined[each.feature] = replace(before, facts=facts, firm=before.firm or each.firm)
    return joined


def _trtllm_attention(declared: Declarations) -> Iterator[Row]:
    runner = facts.attention_runner(declared)
    for phase in ("decode", "prefill"):
        for q_dtype in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
            for kv_dtype in dict.fromkeys((q_dtype, "float8_e4m3fn", "float8_e5m2", "nvfp4")):
                accepted: tuple[Fact | None, ...] = (
                    facts.runner_dtype(declared, "query", q_dtype, "mDtypeQ"),
                    facts.runner_dtype(declared, "KV", kv_dtype, "mDtypeKv", "mDtypeK"),
                )
                if kv_dtype == "nvfp4":
                    name = "context" if phase == "prefill" else "decode"
                    function = f"{phase}.trtllm_batch_{name}_with_kv_cache"
                    accepted += (facts.parameter(declared, function, *NVFP4_SCALES),)
                feature = Feature(
                    backend="trtllm-gen",
                    phase=phase,
                    q_dtype=q_dtype,
                    kv_dtype=kv_dtype,
                    kv_layout="HND",
                    group_size=8,
                )
                firm = q_dtype == kv_dtype and q_dtype in EQUAL_DTYPES
                yield row("trtllm-gen attention", feature, runner, *accepted, firm=firm)
    yield row("trtllm-gen MLA", MLA_ON["trtllm-gen"], runner, firm=True)


def _xqa(declared: Declarations) -> Iterator[Row]:
    checked = facts.major_check(declared, "xqa", "xqa")
    compiled = facts.jit_filter(declared, "gen_xqa_module")
    plain = Feature(backend="xqa", group_size=8)
    yield row("XQA", plain, checked, compiled, firm=True)
    entry = "decode.xqa_batch_decode_with_kv_cache"
    if entry in declared["signatures"]:
        lengths = facts.parameter(declared, entry, "q_cu_seq_lens")
        ragged = replace(plain, query_len=4, ragged_queries=True)
        yield row("XQA with ragged queries", ragged, checked, compiled, lengths, firm=True)
    asserted = facts.major_check(declared, "xqa", "xqa", test="in", last=True)
    fp4 = Feature(backend="xqa", group_size=8, kv_dtype="nvfp4")
    yield row("XQA with NVFP4", fp4, checked, compiled, asserted, firm=False)
    limits = declared["xqa"]
    asked = {"head_dims": ("head_dim_qk", HEAD_DIMS), "page_sizes": ("page_size", PAGE_SIZES)}
    for name, (field, values) in asked.items() if limits else ():
        for value in values:
            holds = value in limits[name]
            says = f"gen_xqa_module {'accepts' if holds else 'refuses'} {field} {value}"
            fact = facts.everywhere(declared, says, limits["source"], holds=holds)
            feature = replace(plain, page_size=value)
            if field == "head_dim_qk":
                feature = replace(plain, head_dim_qk=value, head_dim_vo=value)
            # Whether a kernel was built and run for each of them is not declared.
            yield row(
                f"XQA by {field}", feature, checked, compiled, fact, firm=value in COMMON[field]
            )
    mla = facts.major_check(declared, "xqa", "xqa_mla")
    generated = facts.jit_filter(declared, "gen_xqa_module_mla")
    yield row("XQA MLA", MLA_ON["xqa"], mla, generated, firm=True)


def _fa3(declared: Declarations) -> Iterator[Row]:
    built = facts.fixed_flags(
        declared, "gen_customize_batch_prefill_module", "sm90a_nvcc_flags", 90
    )
    limits = declared["fa3"]
    if built is None or not limits:
        return
    source = limits["source"]
    for q_dtype in EQUAL_DTYPES:
        for kv_dtype in dict.fromkeys((q_dtype, "float8_e4m3fn", "nvfp4")):
            holds = [q_dtype, kv_dtype] in limits["dtypes"]
            says = f"FA3 is {'' if holds else 'not '}selected for {q_dtype} with {kv_dtype}"
            fact = facts.everywhere(declared, says, source, holds=holds)
            feature = Feature(backend="fa3", phase="prefill", q_dtype=q_dtype, kv_dtype=kv_dtype)
            yield row(
                "FA3 by dtype", feature, built, fact, firm=q_dtype == kv_dtype != "float8_e4m3fn"
            )
    says = f"FA3 is {'' if limits['custom_mask'] else 'not '}selected for a custom mask"
    fact = facts.everywhere(declared, says, source, holds=limits["custom_mask"])
    masked = Feature(backend="fa3", phase="prefill", mask="custom")
    yield row("FA3 with a custom mask", masked, built, fact, firm=False)
    for head_dim in (64, 80, 96, 128, 192, 256, 512) if limits["head_dims"] else ():
        holds = [head_dim, head_dim] in limits["head_dims"]
        says = f"FA3's prefill is {'' if holds else 'not '}selected for head_dim {head_dim}"
        fact = facts.everywhere(declared, says, source, holds=holds)
        feature = Feature(backend="fa3", phase="prefill", head_dim_qk=head_dim)
        yield row("FA3 by head_dim", feature, built, fact, firm=holds)


def _fa2(declared: Declarations) -> Iterator[Row]:
    wide = facts.jit_filter(declared, "_fa2_head_dim_nvcc_flags")
    wide_fp4 = facts.jit_filter(declared, "_fa2_head_dim_nvcc_flags", narrow=True)
    for phase, owner in (("decode", "Decode"), ("prefill", "Prefill")):
        feature = Feature(backend="fa2", phase=phase, head_dim_qk=512)
        yield row("FA2 with head_dim 512", feature, wide, firm=True)
        run = f"{phase}.Batch{owner}WithPagedKVCacheWrapper.run"
        scales = facts.parameter(declared, run, *NVFP4_SCALES)
        fp4 = Feature(backend="fa2", phase=phase, kv_dtype="nvfp4")
        yield row("FA2 with NVFP4", fp4, scales, firm=False)
    fp4 = Feature(backend="fa2", head_dim_qk=512, kv_dtype="nvfp4")
    yield row("FA2 with NVFP4 and head_dim 512", fp4, wide_fp4, firm=False)


def _cuda_cores(declared: Declarations) -> Iterator[Row]:
    for group_size in GROUP_SIZES:
        fact = facts.macro_branch(declared, "DISPATCH_GQA_GROUP_SIZE", group_size)
        feature = Feature(backend="cuda-core", q_dtype="float16", group_size=group_size)
        yield row("group sizes without tensor cores", feature, fact, firm=True)


def _cutlass_attention(declared: Declarations) -> Iterator[Row]:
    ragged = Feature("ragged_attention", "cutlass", phase="prefill")
    built = facts.jit_filter(declared, "gen_fmha_cutlass_sm100a_module")
    yield row("CUTLASS ragged attention", ragged, built, firm=True)
    yield row(
        "CUTLASS MLA", MLA_ON["cutlass"], facts.jit_filter(declared, "gen_mla_module"), firm=True
    )


def _nvfp4_cache(declared: Declarations) -> Iterator[Row]:
    written = facts.capability(declared, "nvfp4_kv_quantize")
    feature = Feature("append_paged_kv", "cuda", kv_dtype="nvfp4")
    yield row("writing an NVFP4 cache", feature, written, firm=False)


def _cutlass_moe(declared: Declarations) -> Iterator[Row]:
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


def _trtllm_moe(declared: Declarations) -> Iterator[Row]:
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


def _other_moe(declared: Declarations) -> Iterator[Row]:
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


PARTS = (
    _trtllm_attention,
    _xqa,
    _fa3,
    _fa2,
    _cuda_cores,
    _cutlass_attention,
    _nvfp4_cache,
    _cutlass_moe,
    _trtllm_moe,
    _other_moe,
    _routing,
)
"""Functions that return the rows about the calls of one backend."""
