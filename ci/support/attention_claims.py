"""What releases declare about attention, in rows of the table of ``claims``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...impl.flashinfer_declarations.limits import HEAD_DIMS, PAGE_SIZES
from ...impl.gating import Feature
from . import facts
from .facts import Declarations, Fact, Row, row

COMMON = {"head_dim_qk": (64, 128, 256), "page_size": (16, 32, 64)}
"""What serving engines use with XQA."""
GROUP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
RUNNER_NAMES = {
    "float16": "FP16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "E4M3",
    "float8_e5m2": "E5M2",
    "nvfp4": "E2M1",
}
"""What trtllm-gen's attention runner calls each element format."""
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


def attention(declared: Declarations) -> Iterator[Row]:
    """Return the rows about attention and its caches."""
    for part in (
        _trtllm_gen,
        _xqa,
        _fa3,
        _fa2,
        _cuda_cores,
        _cutlass,
        _nvfp4_cache,
    ):
        yield from part(declared)


def _trtllm_gen(declared: Declarations) -> Iterator[Row]:
    runner = facts.attention_runner(declared)
    queries, place = facts.runner_dtypes(declared, "mDtypeQ")
    keys, keys_place = facts.runner_dtypes(declared, "mDtypeKv", "mDtypeK")
    for phase in ("decode", "prefill"):
        for q_dtype in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
            for kv_dtype in dict.fromkeys((q_dtype, "float8_e4m3fn", "float8_e5m2", "nvfp4")):
                accepted: tuple[Fact | None, ...] = (
                    _dtype(declared, "query", q_dtype, queries, place),
                    _dtype(declared, "KV", kv_dtype, keys, keys_place),
                )
                if kv_dtype == "nvfp4":
                    name = "context" if phase == "prefill" else "decode"
                    function = f"{_module(phase)}.trtllm_batch_{name}_with_kv_cache"
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
        run = f"{_module(phase)}.Batch{owner}WithPagedKVCacheWrapper.run"
        scales = facts.parameter(declared, run, *NVFP4_SCALES)
        fp4 = Feature(backend="fa2", phase=phase, kv_dtype="nvfp4")
        yield row("FA2 with NVFP4", fp4, scales, firm=False)
    fp4 = Feature(backend="fa2", head_dim_qk=512, kv_dtype="nvfp4")
    yield row("FA2 with NVFP4 and head_dim 512", fp4, wide_fp4, firm=False)


def _cuda_cores(declared: Declarations) -> Iterator[Row]:
    entry = declared["dispatch"].get("DISPATCH_GQA_GROUP_SIZE")
    for group_size in GROUP_SIZES if entry else ():
        holds = group_size in entry["values"]
        says = f"DISPATCH_GQA_GROUP_SIZE has {'a' if holds else 'no'} branch for {group_size}"
        fact = facts.everywhere(declared, says, entry["source"], holds=holds)
        feature = Feature(backend="cuda-core", q_dtype="float16", group_size=group_size)
        yield row("group sizes without tensor cores", feature, fact, firm=True)


def _cutlass(declared: Declarations) -> Iterator[Row]:
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


def _dtype(
    declared: Declarations, name: str, dtype: str, accepted: frozenset[str], source: str
) -> Fact | None:
    if not accepted:
        return None
    holds = RUNNER_NAMES[dtype] in accepted
    says = f"TllmGenFmhaRunner {'accepts' if holds else 'refuses'} {name} dtype {dtype}"
    return facts.everywhere(declared, says, source, holds=holds)


def _module(phase: str) -> str:
    return "prefill" if phase == "prefill" else "decode"
