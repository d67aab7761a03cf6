"""Adapters to vLLM: stand-ins of its files show what they are given, and real files are judged.

A stand-in has the parameters of vLLM's function and computes by the oracle: parity then shows that
each argument arrives where vLLM expects it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelproof.impl import BUILT_IN, Target, find_implementation
from kernelproof.impl.engines.vllm_attention import padded_table
from kernelproof.impl.engines.vllm_stubs import align
from kernelproof.impl.targets.optional import missing
from kernelproof.impl.targets.unpacked import FROM
from kernelproof.properties.isolation.workers import Deadlines, Worker, WorkerPool
from kernelproof.properties.laws import laws_of
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.pools import HANDLER
from kernelproof.properties.worker.requests import Address
from kernelproof.reference import (
    AttentionProblem,
    BatchProblem,
    MergeProblem,
    MoEProblem,
    Problem,
    SlotsProblem,
    materialise,
)

ABSENT = missing("triton", "triton")
pytestmark = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))

ATTENTION = """
import torch
from kernelproof.reference import KVCacheFormat, build_metadata, paged_attention
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVQuantMode

USE_CAUSAL = USE_PER_SEQ_CAUSAL = MAX_MM_RANGES = 8
is_batch_invariant = False
MAX_3D_QUERY_LEN = 8


def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal,
    window_size, block_table, softcap, q_descale, k_descale, v_descale, seq_threshold_3D=None,
    num_par_softmax_segments=None, softmax_segm_output=None, softmax_segm_max=None,
    softmax_segm_expsum=None, alibi_slopes=None, sinks=None, kv_quant_mode=KVQuantMode.NONE,
    output_scale=None, k_scale_cache=None, v_scale_cache=None, mm_prefix_range=None,
    rswa_prefix_lens=None, rswa_window=None, use_alibi_sqrt=False, chunk_lookback=-1,
):
    more = {}
    if mm_prefix_range is not None:
        start, last = mm_prefix_range.unbind(-1)
        assert (last < seqused_k[:, None]).all() and mm_prefix_range.is_contiguous()
        # A range of one token is none to vLLM.
        stop = torch.where(start < last, last + 1, start)
        more["spans"] = torch.stack((start, stop), -1).int()
    left = window_size[0]
    if chunk_lookback >= 0:
        more["attention_chunk_size"], left = (left + 1) // (chunk_lookback + 1), -1
    if rswa_window is not None:
        assert left == -1
        left, more["sink_tokens"] = rswa_window - 1, int(rswa_prefix_lens.unique())
    if use_alibi_sqrt:
        more["alibi_function"] = "sqrt"
    if isinstance(causal, torch.Tensor):
        assert causal.dtype == torch.int32 and window_size == (-1, -1)
        causal = causal.bool()
    lengths = cu_seqlens_q.diff()
    assert max_seqlen_q == lengths.max() and max_seqlen_k == seqused_k.max() and q_descale is None
    room = block_table.shape[1] * v.shape[1]
    assert block_table.stride(0) % 32 == 0 and room >= -(-int(max_seqlen_k) // 32) * 32
    by_token = {
        KVQuantMode.INT8_PER_TOKEN_HEAD: "int8_per_token_head",
        KVQuantMode.FP8_PER_TOKEN_HEAD: "fp8_per_token_head",
    }.get(kv_quant_mode)
    assert (kv_quant_mode == KVQuantMode.NONE) == (k.dtype == q.dtype)
    assert (k_descale is None) == (kv_quant_mode != KVQuantMode.FP8_PER_TENSOR)
    assert out.dtype == (q.dtype if output_scale is None else torch.float8_e4m3fn)
    if softmax_segm_max is not None:
        assert softmax_segm_output.shape == (*q.shape[:2], 4, 1 << (q.shape[2] - 1).bit_length())
        assert softmax_segm_max.shape == softmax_segm_expsum.shape == (*q.shape[:2], 4)
    num_seqs, head_size, num_queries_per_kv = len(seqused_k), q.shape[2], q.shape[1] // k.shape[2]
    use_per_seq_causal = isinstance(causal, torch.Tensor)
    use_causal = use_per_seq_causal or causal
    use_mm_prefix = mm_prefix_range is not None
    use_3d = CONDITION
    if use_3d:
        softmax_segm_max.fill_(0)
    metadata = build_metadata(lengths, seqused_k, block_table, v.shape[1])
    form = None if k_descale is None else KVCacheFormat(str(k.dtype).removeprefix("torch."))
    scales = None
    if by_token:
        assert k_scale_cache.shape == v_scale_cache.shape == k.shape[:3]
        form = KVCacheFormat(by_token)
        scales = (k_scale_cache.unsqueeze(-1), v_scale_cache.unsqueeze(-1))
    found = paged_attention(
        q, k, v, metadata, causal=causal, sm_scale=softmax_scale, window_left=left,
        logits_soft_cap=softcap, sinks=sinks, kv_format=form, **more,
        alibi_slopes=alibi_slopes,
        k_scale=1.0 if k_descale is None else float(k_descale),
        v_scale=1.0 if k_descale is None else float(v_descale),
        kv_cache_sf=scales, output_scale=None if output_scale is None else float(output_scale),
    )
    out.copy_(found.out)
"""
SINGLE = """not (
        seq_threshold_3D is None
        or softmax_segm_output is None
        or max_seqlen_q > 1
        or num_seqs > seq_threshold_3D
        or is_batch_invariant
    )"""
"""The condition by which 0.32.0 takes its 3D kernel."""
SEVERAL = SINGLE.replace(
    "max_seqlen_q > 1",
    """(
            max_seqlen_q > 1
            and (
                max_seqlen_q > MAX_3D_QUERY_LEN
                or not use_causal
                or use_per_seq_causal
                or use_mm_prefix
                or tuned_large_head
            )
        )""",
)
"""That of 0.33.0."""
LARGE = """(
        head_size == 256
        and max_seqlen_q > 1
        and num_queries_per_kv <= 16
        and current_platform.is_device_capability_family(100)
    )
    use_3d = """
CHOSEN = ATTENTION.replace("use_3d = CONDITION", f"tuned_large_head = {LARGE}{SEVERAL}")
BY_IF = (
    CHOSEN.split("    use_3d = ")[0]
    + """    if seq_threshold_3D is None or max_seqlen_q > 1:
        launch_2d()
"""
)
"""A release that assigns no flag."""
MERGE = """
import torch
from kernelproof.reference import merge_states
from vllm.triton_utils import tl, triton

{strides}


def merge_attn_states(
    output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None{context}
):
    assert {strided} or prefix_lse.is_contiguous() and output_lse.is_contiguous()
    found = merge_states(
        torch.stack([prefix_output, suffix_output]), torch.stack([prefix_lse.T, suffix_lse.T]),
        {passed}
    )
    output.copy_(found.out)
    output_lse.copy_(found.lse.T)
"""
APPEND = """
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVQuantMode

num_stages, USE_HEAD_MAJOR_LAYOUT = current_platform.is_xpu(), False
INTERLEAVED_V_PACK_FACTOR = 0


def triton_reshape_and_cache_flash(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale,
    interleaved_v_pack_factor=0,
):
    assert kv_cache_dtype == "auto" and k_scale == v_scale == 1
    if key_cache.dim() == 5:
        x, slots = key_cache.shape[4], key_cache.shape[3]
        assert key_cache.stride()[:2] == value_cache.stride()[:2]
        value_cache = value_cache.permute(0, 3, 1, 2)
        if (packed := interleaved_v_pack_factor):
            pages, _, heads, dim = value_cache.shape
            shape = pages, -(-slots // packed), packed, heads, dim
            strides = value_cache.stride(0), dim * packed, 1, value_cache.stride(2), packed
            value_cache = value_cache.as_strided(shape, strides)
        for token, slot in enumerate(slot_mapping.tolist()):
            page, row = slot // slots, slot % slots
            if slot >= 0:
                key_cache[page, :, :, row] = key[token].unflatten(1, (-1, x))
                row = (row // packed, row % packed) if packed else (row,)
                value_cache[(page, *row)] = value[token]
        return
    page_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        key_cache[slot // page_size, slot % page_size] = key[token]
        value_cache[slot // page_size, slot % page_size] = value[token]


def triton_reshape_and_cache_flash_diffkv(key, value, kv_cache, slot_mapping, **more):
    caches = kv_cache.split([key.shape[2], value.shape[2]], dim=3)
    triton_reshape_and_cache_flash(key, value, *caches, slot_mapping, **more)


def triton_reshape_and_cache_flash_per_token_head_quant(
    key, value, key_cache, value_cache, k_scale_cache, v_scale_cache, slot_mapping, kv_quant_mode
):
    assert kv_quant_mode == KVQuantMode.INT8_PER_TOKEN_HEAD and len(slot_mapping) == len(key)
    page_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        place = slot // page_size, slot % page_size
        if slot >= 0:
            k_scale_cache[place] = key[token].abs().amax(-1) / 127
            v_scale_cache[place] = value[token].abs().amax(-1) / 127
            k, v = (key[token] / k_scale_cache[place].unsqueeze(-1),
                    value[token] / v_scale_cache[place].unsqueeze(-1))
            key_cache[place], value_cache[place] = k.round().to(torch.int8), v.round()
"""
MOE = """
import torch
from vllm import _custom_ops as ops
from vllm.triton_utils import tl


def get_default_config(M, E, N, K, topk, dtype{marlin}):
    return {{"BLOCK_SIZE_M": 4}}


def moe_align_block_size(topk_ids, block_size, num_experts, expert_map=None):
    most = topk_ids.numel() + num_experts * (block_size - 1)
    ids, padded = topk_ids.new_empty(most), topk_ids.new_empty(1)
    experts = topk_ids.new_empty(-(-most // block_size))
    ops.moe_align_block_size(topk_ids, num_experts, block_size, ids, experts, padded, None)
    return ids, experts if expert_map is None else expert_map[experts], padded


def {name}(
    A, B, C, A_scale, B_scale, {zeros}topk_weights, sorted_token_ids, expert_ids,
    num_tokens_post_padded, mul_routed_weight, top_k, config, compute_type, use_fp8_w8a8,
    use_int8_w8a8, use_int8_w8a16, use_int4_w4a16, per_channel_quant, block_shape=None,
    B_bias=None,
):
    assert compute_type == tl.float32
    rows = C.view(-1, C.shape[-1])
    for place, pair in enumerate(sorted_token_ids[: int(num_tokens_post_padded)].tolist()):
        expert = int(expert_ids[place // config["BLOCK_SIZE_M"]])
        if pair >= len(rows):
            continue
        rows[pair] = 0
        if expert >= 0:
            rows[pair] = A[pair // top_k] @ B[expert].T
            if B_bias is not None:
                rows[pair] += B_bias[expert]
            if mul_routed_weight:
                rows[pair] *= topk_weights.flatten()[pair]
"""
NEW_MOE = MOE.format(name="invoke_fused_moe_triton_kernel", zeros="", marlin="")
OLD_MOE = MOE.format(name="invoke_fused_moe_kernel", zeros="B_zp, ", marlin=", is_marlin")
NEW_MERGE = MERGE.format(
    strides="prefix_lse_head_stride = 1",
    strided=True,
    context=", prefill_tokens_with_context=None",
    passed="context_tokens=prefill_tokens_with_context",
)
OLD_MERGE = MERGE.format(strides="", strided=False, context="", passed="")
OPS = "vllm/v1/attention/ops/triton_"
FILES = {
    f"{OPS}unified_attention.py": CHOSEN,
    f"{OPS}merge_attn_states.py": NEW_MERGE,
    f"{OPS}reshape_and_cache_flash.py": APPEND,
    "vllm/model_executor/layers/fused_moe/fused_moe.py": NEW_MOE,
}
MIXED = AttentionProblem(
    query_lens=(3, 1, 5),
    seq_lens=(4, 17, 5),
    num_kv_heads=2,
    group_size=2,
    causal=True,
    page_size=4,
    page_order=3,
)
SHORT = replace(MIXED, query_lens=(1, 1, 2))
EXPERTS = MoEProblem(num_tokens=7, hidden=16, inter=32, num_experts=4, top_k=2)
APPENDED = replace(MIXED, operation="append_paged_kv")
SLOTS = SlotsProblem(
    ((((1, 30, 0), (7, 35, 0)), ((2,), (9,)))),
    page_size=16,
    world=2,
    rank=1,
    interleave=4,
    spare_rows=1,
    spare_slots=1030,
)
BATCHES = BatchProblem("page_indices", (((1, 30), (70, 35)), ((2,), (9,))), 16, spare_rows=1)
BY_TOKEN = replace(APPENDED, kv_cache="int8_per_token_head")


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write stand-ins of a release's files."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit", encoding="utf-8")
    monkeypatch.setenv(FROM, str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return tmp_path


def judged(name: str, problem: Problem, law: str = "parity") -> Verdict:
    (chosen,) = (each for each in laws_of(problem.operation) if each.name.endswith(law))
    return chosen.check(Subject(find_implementation(name), Target.here("cpu"), Stages()), problem)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("vllm-unified-attention", MIXED),
        ("vllm-unified-attention", replace(MIXED, causal=False, kv_layout="HND", sinks=True)),
        ("vllm-unified-attention", replace(MIXED, window_left=2, logits_soft_cap=3.0)),
        ("vllm-unified-attention", replace(MIXED, sm_scale=0.5, strided_q=True, strided_kv=True)),
        ("vllm-unified-attention", replace(MIXED, kv_cache="float8_e4m3fn", k_scale=0.5)),
        ("vllm-unified-attention", replace(MIXED, kv_cache="float8_e5m2", v_scale=2.0)),
        ("vllm-unified-attention", replace(MIXED, alibi=True, logits_soft_cap=3.0)),
        ("vllm-unified-attention", replace(MIXED, causal_by_request=True)),
        ("vllm-unified-attention", replace(MIXED, kv_cache="int8_per_token_head")),
        ("vllm-unified-attention", replace(MIXED, kv_cache="fp8_per_token_head", kv_layout="HND")),
        ("vllm-unified-attention", replace(MIXED, output_scale=0.25)),
        ("vllm-unified-attention", replace(MIXED, spans="images", window_left=2)),
        ("vllm-unified-attention", replace(MIXED, spans="prefix", causal=False)),
        ("vllm-unified-attention", replace(MIXED, chunk=2)),
        ("vllm-unified-attention", replace(MIXED, sink_tokens=1, window_left=1)),
        ("vllm-unified-attention", replace(MIXED, sink_tokens=1)),
        ("vllm-unified-attention", replace(MIXED, alibi=True, alibi_function="sqrt", sinks=True)),
        ("vllm-unified-attention-3d", SHORT),
        ("vllm-unified-attention-3d", replace(SHORT, head_dim_qk=24, head_dim_vo=24)),
        ("vllm-merge-attn-states", MergeProblem(num_tokens=3, num_heads=2, empty="some")),
        ("vllm-merge-attn-states", MergeProblem(num_tokens=3, context="some", seed=1)),
        ("vllm-reshape-and-cache-flash", APPENDED),
        ("vllm-reshape-and-cache-flash", replace(APPENDED, kv_layout="HND", strided_kv=True)),
        ("vllm-reshape-and-cache-flash", replace(APPENDED, strided_q=True)),
        ("vllm-reshape-and-cache-diffkv", APPENDED),
        ("vllm-reshape-and-cache-diffkv", replace(APPENDED, kv_layout="HND", head_dim_vo=24)),
        ("vllm-reshape-and-cache-head-major", APPENDED),
        ("vllm-reshape-and-cache-head-major", replace(APPENDED, kv_layout="HND", seed=1)),
        ("vllm-reshape-and-cache-interleaved", APPENDED),
        ("vllm-reshape-and-cache-interleaved", replace(APPENDED, page_size=8, strided_kv=True)),
        ("vllm-reshape-and-cache-per-token-head", BY_TOKEN),
        (
            "vllm-reshape-and-cache-per-token-head",
            replace(BY_TOKEN, kv_layout="HND", strided_kv=True, head_dim_vo=40, seed=1),
        ),
        ("vllm-fused-moe", EXPERTS),
        ("vllm-fused-moe", replace(EXPERTS, biases=True, activation="relu2")),
        ("vllm-fused-moe", replace(EXPERTS, weights_on_input=True)),
        ("vllm-fused-moe", replace(EXPERTS, local_experts=2, expert_offset=1)),
    ],
)
def test_each_argument_arrives(name: str, problem: Problem) -> None:
    verdict = judged(name, problem)
    assert verdict.status == "PASS", verdict.message


@pytest.mark.parametrize(
    ("name", "file", "text", "problem"),
    [
        ("vllm-merge-attn-states", "v1/attention/ops/triton_merge_attn_states.py", OLD_MERGE,
         MergeProblem(num_tokens=3, num_heads=2)),
        ("vllm-fused-moe", "model_executor/layers/fused_moe/fused_moe.py", OLD_MOE, EXPERTS),
    ],
)  # fmt: skip
def test_an_older_release_is_called_by_its_own_names(
    vllm: Path, name: str, file: str, text: str, problem: Problem
) -> None:
    (vllm / "vllm" / file).write_text(text, encoding="utf-8")
    verdict = judged(name, problem)
    assert verdict.status == "PASS", verdict.message


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("name", "problem", "said"),
    [
        ("vllm-unified-attention", replace(MIXED, query_lens=(5, 1, 1)), "no more queries than"),
        ("vllm-unified-attention", replace(MIXED, causal=False, window_left=1), "has two sides"),
        (
            "vllm-unified-attention",
            replace(MIXED, causal_by_request=True, window_left=1),
            "has two sides",
        ),
        ("vllm-unified-attention", replace(MIXED, alibi=True, sinks=True), "first new token"),
        ("vllm-unified-attention", replace(MIXED, chunk=2, causal=False), "earlier keys only"),
        ("vllm-unified-attention", replace(MIXED, chunk=2, window_left=3), "is the window"),
        ("vllm-unified-attention", replace(MIXED, chunk=2, spans="images"), "no model has"),
        ("vllm-unified-attention", replace(MIXED, chunk=2, sink_tokens=1), "not a chunk"),
        ("vllm-unified-attention", replace(MIXED, logits_bias="dense"), "feature logits_bias"),
        ("vllm-unified-attention-3d", replace(SHORT, spans="images"), "use_mm_prefix"),
        ("vllm-unified-attention", replace(MIXED, head_dim_vo=32), "one head dim"),
        ("vllm-unified-attention", replace(MIXED, v_scale=2.0), "belong to FP8 caches"),
        (
            "vllm-unified-attention",
            replace(MIXED, kv_cache="int8_per_token_head", v_scale=2.0),
            "belong to FP8 caches",
        ),
        ("vllm-unified-attention", replace(MIXED, custom_mask=True), "the feature custom_mask"),
        (
            "vllm-unified-attention-3d",
            replace(MIXED, query_lens=(1, 9, 1)),
            "max_seqlen_q > MAX_3D_QUERY_LEN",
        ),
        ("vllm-unified-attention-3d", replace(SHORT, causal=False), "not use_causal"),
        (
            "vllm-unified-attention-3d",
            replace(SHORT, causal_by_request=True),
            "max_seqlen_q > 1 and use_per_seq_causal",
        ),
        ("vllm-merge-attn-states", MergeProblem(num_states=3), "merges two states"),
        ("vllm-reshape-and-cache-flash", replace(APPENDED, kv_cache="float8_e5m2"), "hold e4m3"),
        ("vllm-reshape-and-cache-diffkv", replace(APPENDED, kv_cache="float8_e5m2"), "hold e4m3"),
        (
            "vllm-reshape-and-cache-head-major",
            replace(APPENDED, head_dim_qk=6, head_dim_vo=6),
            "packed by 4",
        ),
        ("vllm-reshape-and-cache-interleaved", replace(APPENDED, head_dim_vo=24), "one head dim"),
        ("vllm-reshape-and-cache-per-token-head", APPENDED, "for each token and head only"),
        ("vllm-reshape-and-cache-int4", APPENDED, "caches of four bits"),
        ("vllm-fused-moe", replace(EXPERTS, num_tokens=0), "launches nothing"),
        ("vllm-fused-moe", replace(EXPERTS, weights_on_input=True, biases=True), "the bias too"),
    ],
)
def test_what_is_not_claimed(name: str, problem: Problem, said: str) -> None:
    refusal = find_implementation(name).refusal(problem, Target.here("cpu"))
    assert refusal is not None
    assert said in refusal


ONE = replace(MIXED, query_lens=(1, 1, 1))
EIGHT = replace(MIXED, query_lens=(1, 8, 1), seq_lens=(4, 17, 5))


@pytest.mark.parametrize(
    ("text", "problem", "sm", "said"),
    [
        (SINGLE, ONE, None, ""),
        (SINGLE, replace(ONE, causal=False), None, ""),
        (SINGLE, SHORT, None, "max_seqlen_q > 1"),
        (SEVERAL, replace(ONE, causal=False), None, ""),
        (SEVERAL, replace(ONE, causal_by_request=True), None, ""),
        (SEVERAL, replace(ONE, spans="images"), None, ""),
        (SEVERAL, EIGHT, None, ""),
        (SEVERAL, replace(EIGHT, head_dim_qk=256, head_dim_vo=256), 90, ""),
        (
            SEVERAL, replace(EIGHT, head_dim_qk=256, head_dim_vo=256), 100,
            "max_seqlen_q > 1 and tuned_large_head",
        ),
        (SEVERAL.replace("_q > MAX_3D_QUERY_LEN", "_q >= 4"), EIGHT, None,
         "max_seqlen_q > 1 and max_seqlen_q >= 4"),
        (SEVERAL.replace("not use_causal", "window_size[0] < 8"), EIGHT, None,
         "what unified_attention chooses by depends on more than Kernelproof reads"),
        (BY_IF, replace(ONE, causal=False), None, ""),
        (BY_IF, SHORT, None, "max_seqlen_q > 1"),
    ],
)  # fmt: skip
def test_each_release_chooses_its_3d_kernel_by_its_own_condition(
    vllm: Path, text: str, problem: AttentionProblem, sm: int | None, said: str
) -> None:
    file = CHOSEN.replace(SEVERAL, text) if text != BY_IF else BY_IF
    (vllm / f"{OPS}unified_attention.py").write_text(file, encoding="utf-8")
    here = replace(Target.here("cpu"), sm=sm)
    refusal = find_implementation("vllm-unified-attention-3d").refusal(problem, here)
    assert (refusal or "").removeprefix("this release takes its 2D kernel: ") == said


DIFFERENT_KV = """
MOST = 16


def unified_attention_diffkv():
    spec_3d = (
        1 < max_seqlen_q <= MOST
        and sliding_window_val == 0
        and softmax_segm_output is not None
        and q.shape[0] <= softmax_segm_output.shape[0]
    )
    use_3d = not (seq_threshold_3D is None or (max_seqlen_q > 1 and not spec_3d))
"""


@pytest.mark.parametrize(
    ("text", "fields", "said"),
    [
        (DIFFERENT_KV, {}, ""),
        (DIFFERENT_KV, {"window_left": 3}, "max_seqlen_q > 1 and not spec_3d"),
        (DIFFERENT_KV.replace("16", "7"), {}, "max_seqlen_q > 1 and not spec_3d"),
        (DIFFERENT_KV, {"window_left": 3, "query_lens": (1, 1, 1)}, ""),
    ],
)
def test_the_kernel_of_different_head_dims_too(
    vllm: Path, text: str, fields: dict[str, Any], said: str
) -> None:
    (vllm / f"{OPS}unified_attention_diffkv.py").write_text(text, encoding="utf-8")
    problem = replace(EIGHT, head_dim_qk=32, head_dim_vo=16, **fields)
    found = find_implementation("vllm-unified-attention-diffkv-3d")
    refusal = found.refusal(problem, Target.here("cpu"))
    assert (refusal or "").removeprefix("this release takes its 2D kernel: ") == said


def test_what_older_releases_do_not_have(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = "def unified_attention(): pass"
    (vllm / f"{OPS}unified_attention.py").write_text(old, encoding="utf-8")
    here = Target.here("cpu")
    plain = find_implementation("vllm-unified-attention")
    said = plain.refusal(replace(MIXED, causal=False), here)
    assert said == "this release has causal attention only"
    said = plain.refusal(replace(MIXED, causal_by_request=True), here)
    assert said == "this release has one causal flag for all requests"
    said = plain.refusal(replace(MIXED, kv_cache="int8_per_token_head"), here)
    assert said == "this release has no scales of tokens and heads"
    said = plain.refusal(replace(MIXED, output_scale=1.0), here)
    assert said == "this release has no outputs in FP8"
    for fields, missing_part in (
        ({"spans": "images"}, "no ranges that see both ways"),
        ({"chunk": 2}, "no chunks"),
        ({"sink_tokens": 1}, "no keys that a window never hides"),
        ({"alibi": True, "alibi_function": "sqrt"}, "no root of a distance"),
        ({"window_left": 2, "two_sided_window": True}, "no window with two sides"),
        ({"kv_cache": "float8_e4m3fn", "q_dtype": "float8_e4m3fn"}, "no queries in FP8"),
    ):
        said = plain.refusal(replace(MIXED, **fields), here)
        assert said == f"this release has {missing_part}"
    said = find_implementation("vllm-unified-attention-3d").refusal(SHORT, here)
    assert said == "this release chooses between its 2D and 3D kernels by itself"
    append = find_implementation("vllm-reshape-and-cache-flash")
    for number, word in enumerate(("tgt_base = USE_HEAD_MAJOR_LAYOUT", "num_stages")):
        file = vllm / f"{number}" / f"{OPS}reshape_and_cache_flash.py"
        file.parent.mkdir(parents=True)
        file.write_text(f"{word} = head_stride = 1", encoding="utf-8")
        (vllm / f"{number}" / "vllm" / "__init__.py").touch()
        monkeypatch.setenv(FROM, str(vllm / f"{number}"))
        said = append.refusal(replace(APPENDED, kv_layout="HND"), here)
        assert said == "this release writes heads that lie one after another only"
    said = find_implementation("vllm-reshape-and-cache-per-token-head").refusal(BY_TOKEN, here)
    assert said == "this release has no scales of tokens and heads"
    for name, missing_part in (
        ("diffkv", "has no rows of keys and values"),
        ("head-major", "has no head-major layout"),
        ("interleaved", "never interleaves values"),
    ):
        said = find_implementation(f"vllm-reshape-and-cache-{name}").refusal(APPENDED, here)
        assert said == f"this release {missing_part}"
    said = append.refusal(APPENDED, here)
    assert said == "this release asks CUDA for the GPU before it launches the kernel"


@pytest.mark.usefixtures("vllm")
def test_head_major_caches_are_written_on_amd_only() -> None:
    said = find_implementation("vllm-reshape-and-cache-head-major").refusal(
        APPENDED, Target(device="cuda", sm=90)
    )
    assert said == "vLLM writes head-major caches on AMD only"


@pytest.mark.usefixtures("vllm")
def test_rows_without_a_slot_are_given_the_slot_minus_one() -> None:
    """The kernel with scales of tokens reads a slot for each row of keys."""
    for seed in range(4):
        problem = replace(BY_TOKEN, seed=seed)
        verdict = judged("vllm-reshape-and-cache-per-token-head", problem, "never_written")
        assert verdict.status == "PASS", verdict.message


def test_a_3d_call_that_took_the_2d_kernel_is_no_pass(vllm: Path) -> None:
    text = CHOSEN.replace("softmax_segm_max.fill_(0)", "pass")
    (vllm / f"{OPS}unified_attention.py").write_text(text, encoding="utf-8")
    with pytest.raises(Stop, match="vLLM took its 2D kernel for this call"):
        judged("vllm-unified-attention-3d", SHORT)


def test_the_kernels_of_a_module_are_of_one_module_whatever_its_lengths() -> None:
    found = find_implementation("vllm-unified-attention")
    assert found.module_of(MIXED) == found.module_of(SHORT) != ""
    assert found.module_of(MIXED) != found.module_of(replace(MIXED, window_left=3))
    odd = replace(MIXED, head_dim_qk=24, head_dim_vo=24)
    assert found.module_of(odd) != found.module_of(replace(odd, strided_q=True))
    assert len(list(found.problems_of_module(MIXED))) == 3
    wide = replace(MIXED, head_dim_qk=256, head_dim_vo=256)
    assert len(list(found.problems_of_module(wide))) == 6


def test_pairs_are_aligned_as_vllms_operator_aligns_them() -> None:
    """The example of ``moe_align_block_size``'s documentation, with experts counted from 0."""
    ids = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]], dtype=torch.int32) - 1
    pairs, experts, padded = (torch.empty(n, dtype=torch.int32) for n in (16, 4, 1))
    align(ids, 4, 4, pairs, experts, padded)
    assert pairs.tolist() == [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]
    assert (experts.tolist(), padded.tolist()) == ([0, 1, 2, 3], [16])
    shard = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)
    align(ids, 4, 4, pairs, experts, padded, shard)
    assert pairs[:8].tolist() == [0, 4, 10, 12, 2, 5, 8, 12]
    assert (experts.tolist(), padded.tolist()) == ([0, 1, -1, -1], [8])


ENGINES = Path(__file__).parents[3] / ".engines"
RELEASES: list[str] = sorted(each.name for each in ENGINES.glob("vllm-*"))


@pytest.fixture(scope="module", params=RELEASES or [""])
def release(request: pytest.FixtureRequest) -> Iterator[Worker]:
    """Lend a worker that loads the files of a release."""
    if not request.param:
        pytest.skip("the files of vLLM are not there: `make engines` fetches them")
    environment = {"TRITON_INTERPRET": "1", FROM: str(ENGINES / request.param)}
    preload = ("torch", "kernelproof.properties.worker.tasks")
    with (
        WorkerPool(HANDLER, preload=preload, environment=environment, standby=False) as pool,
        pool.lease() as lent,
    ):
        yield lent


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("vllm-unified-attention", MIXED),
        ("vllm-unified-attention", replace(MIXED, kv_cache="float8_e4m3fn", sinks=True)),
        (
            "vllm-unified-attention",
            replace(MIXED, kv_cache="int8_per_token_head", output_scale=0.5),
        ),
        ("vllm-unified-attention-3d", replace(SHORT, query_lens=(1, 1, 1), seq_lens=(4, 70, 5))),
        ("vllm-merge-attn-states", MergeProblem(num_tokens=3, num_heads=2)),
        ("vllm-reshape-and-cache-flash", replace(APPENDED, strided_q=True)),
        ("vllm-reshape-and-cache-diffkv", replace(APPENDED, kv_cache="float8_e4m3fn")),
        ("vllm-reshape-and-cache-head-major", APPENDED),
        ("vllm-reshape-and-cache-interleaved", APPENDED),
        ("vllm-slot-mapping", replace(SLOTS, first_page=2**29)),
        ("vllm-slot-mappings", SLOTS),
        ("vllm-page-indices", BATCHES),
        ("vllm-block-table", replace(BATCHES, output="page_table", rest="zero_rows")),
        ("vllm-fused-moe", EXPERTS),
        ("vllm-fused-moe", replace(EXPERTS, num_tokens=1, num_experts=8)),
    ],
)
def test_real_files(release: Worker, name: str, problem: Problem) -> None:
    (law,) = (law.name for law in laws_of(problem.operation) if law.name.endswith("parity"))
    address = Address(BUILT_IN[name], None, "cpu")
    outcome = release.run(address.case(law, problem), Deadlines(run=60.0))
    assert outcome.result is not None, outcome
    verdict = Verdict.from_json(outcome.result)
    assert verdict.status in {"PASS", "UNSUPPORTED"}, verdict.message


@pytest.mark.parametrize(
    ("keys", "size", "columns"), [((64,), 16, 4), ((10, 65), 16, 6), ((65, 10), 1, 96)]
)
def test_a_block_table_ends_with_the_last_whole_tile(
    keys: tuple[int, ...], size: int, columns: int
) -> None:
    queries = (1,) * len(keys)
    inputs: Any = materialise(AttentionProblem(query_lens=queries, seq_lens=keys, page_size=size))
    bound = replace(inputs, kv_len_bound=2**13)  # above the truth, and the table's room
    assert padded_table(bound).shape[1] >= inputs.block_table.shape[1]
    table = padded_table(inputs)
    rows, stride = len(keys), table.stride(0)
    assert (table.shape, stride % 32) == ((rows, columns), 0)
    assert table.untyped_storage().nbytes() == 4 * ((rows - 1) * stride + columns)
    used = -(-max(keys) // size)
    assert torch.equal(table[:, :used], inputs.block_table[:, :used])
    assert bool((table[:, used:] == -1).all())
