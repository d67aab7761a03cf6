"""Further adapters to engines: stand-ins show what they are given, and real files are judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelproof.impl import BUILT_IN, Target, find_implementation
from kernelproof.impl.targets.optional import missing
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.impl.targets.unpacked import FROM
from kernelproof.properties.isolation.workers import Deadlines, Worker, WorkerPool
from kernelproof.properties.laws import laws_of
from kernelproof.properties.space.axes import narrow
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.pools import HANDLER
from kernelproof.properties.worker.requests import Address
from kernelproof.reference import AttentionProblem, BatchedMoEProblem, Problem

ABSENT = missing("triton", "triton")
pytestmark = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))

MIXED = AttentionProblem(
    query_lens=(3, 1, 5),
    seq_lens=(4, 17, 5),
    num_kv_heads=2,
    group_size=2,
    causal=True,
    page_size=16,
    page_order=3,
)
DECODED = replace(MIXED, query_lens=(1, 1, 1), causal=False)
LATENT = replace(DECODED, num_kv_heads=1, head_dim_qk=48, head_dim_vo=32, values_in_keys=True)
CODES = replace(DECODED, kv_cache="float8_e4m3fn", k_scale=0.5, v_scale=2.0)
RAGGED = replace(MIXED, operation="ragged_attention", page_size=1, page_order=0)
ENCODED = replace(RAGGED, seq_lens=RAGGED.query_lens)
APPENDED = replace(MIXED, operation="append_paged_kv")
DIFFERENT = replace(MIXED, head_dim_vo=32)
BATCHED = BatchedMoEProblem(counts=(3, 0, 18, 1), most_rows=18, hidden=136, inter=144)
VERIFIED = replace(MIXED, query_lens=(3, 3), seq_lens=(118, 110))
"""Requests whose prefixes have keys in each of four parts."""

PREFILL = """
from kernelproof.reference import ragged_attention
from vllm.utils.math_utils import RCP_LN2

USE_SINKS = True


def context_attention_fwd(
    q, k, v, o, b_start_loc, b_seq_len, max_input_len, is_causal=True, softmax_scale=None,
    sliding_window_q=None, sliding_window_k=None, sinks=None,
):
    assert b_start_loc.equal(b_seq_len.cumsum(0) - b_seq_len) and max_input_len == b_seq_len.max()
    indptr = b_seq_len.new_zeros(len(b_seq_len) + 1)
    indptr[1:] = b_seq_len.cumsum(0)
    left = -1 if sliding_window_q is None else sliding_window_q
    right = -1 if sliding_window_k is None else sliding_window_k
    o.copy_(ragged_attention(
        q, k, v, indptr, indptr, causal=is_causal, sm_scale=softmax_scale, window_left=left,
        window_right=right, sinks=sinks,
    ).out)
"""
DECODE = """
from kernelproof.reference import KVCacheFormat, build_metadata, paged_attention


def decode_attention_fwd(
    q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale,
    page_size, logit_cap=0.0, k_scale=None, v_scale=None, is_mla=False,
):
    assert attn_logits.shape == (*q.shape[:2], num_kv_splits, v_buffer.shape[-1] + 1)
    assert attn_logits.isnan().all()
    assert is_mla == (k_buffer.data_ptr() == v_buffer.data_ptr())
    metadata = build_metadata(b_seq_len.clamp(max=1), b_seq_len, req_to_token, page_size)
    element = str(k_buffer.dtype).removeprefix("torch.")
    form = None if k_scale is None else KVCacheFormat(element)
    found = paged_attention(
        q, k_buffer, v_buffer, metadata, sm_scale=sm_scale, logits_soft_cap=logit_cap,
        kv_format=form, k_scale=1.0 if form is None else float(k_scale),
        v_scale=1.0 if form is None else float(v_scale),
    )
    o.copy_(found.out)
    lse.copy_(found.lse)
"""
LMDEPLOY = {
    "pagedattention": """
from kernelproof.reference import build_metadata, paged_attention
from lmdeploy.messages import QuantPolicy
from .utils import get_device_props

LESS = {less}


def flash_attn_with_kvcache(
    q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale=None, window_size=None,
    softcap=None, alibi_slopes=None, k_scales_zeros=None, v_scales_zeros=None,
    quant_policy=QuantPolicy.NONE, sinks=None,
):
    assert get_device_props()["compute_capability"] and quant_policy == QuantPolicy.NONE
    left = window_size[0] - LESS if window_size[0] >= 0 else -1
    queries = cache_seqlens * 0 + len(q) // len(cache_seqlens)
    metadata = build_metadata(queries, cache_seqlens, page_table, k_cache.shape[1])
    return paged_attention(
        q, k_cache, v_cache, metadata, causal=False, sm_scale=softmax_scale, window_left=left,
        sinks=sinks, logits_soft_cap=softcap, alibi_slopes=alibi_slopes,
    ).out.to(q.dtype)
""",
    "flashattention": """
from kernelproof.reference import ragged_attention


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale, causal, window_size, softcap,
    alibi_slopes, sinks, kv_layout,
):
    assert kv_layout == "hsd" and max_seqlen_q == cu_seqlens_q.diff().max()
    left = window_size[0] - {less} if window_size[0] >= 0 else -1
    return ragged_attention(
        q, k.transpose(0, 1), v.transpose(0, 1), cu_seqlens_q, cu_seqlens_k, causal=causal,
        sm_scale=softmax_scale, window_left=left, logits_soft_cap=softcap, sinks=sinks,
        alibi_slopes=alibi_slopes,
    ).out.to(q.dtype)
""",
    "fill_kv_cache": """
def fill_kv_cache(
    k_states, v_states, k_caches, v_caches, q_start_loc, q_seq_length, kv_seq_length,
    max_q_seq_length, block_offsets,
):
    assert max_q_seq_length == q_seq_length.max()
    size = k_caches.shape[1]
    for row, (begin, new, keys) in enumerate(zip(
        q_start_loc.tolist(), q_seq_length.tolist(), kv_seq_length.tolist()
    )):
        for token in range(new):
            at = keys - new + token
            page = int(block_offsets[row, at // size])
            k_caches[page, at % size] = k_states[begin + token]
            v_caches[page, at % size] = v_states[begin + token]
""",
}

GROUPED = replace(VERIFIED, num_kv_heads=1, group_size=6, head_dim_qk=48, head_dim_vo=32)
DRAFTED = AttentionProblem(
    query_lens=(3, 1),
    seq_lens=(37, 100),
    num_kv_heads=2,
    group_size=16,
    head_dim_qk=256,
    head_dim_vo=256,
    causal=True,
    page_size=16,
    page_order=3,
    kv_cache="float8_e4m3fn",
    k_scale=0.5,
    v_scale=2.0,
)
"""The one shape that ``unified_attention_3d_mtp`` takes."""


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


def write(folder: Path, *, less: int) -> None:
    """Write stand-ins of vLLM's and lmdeploy's files; windows have ``less`` keys than is said."""
    vllm = folder / "vllm" / "v1" / "attention" / "ops"
    lmdeploy = folder / "lmdeploy" / "pytorch" / "kernels" / "cuda"
    for place in (vllm, lmdeploy):
        place.mkdir(parents=True)
    for name in ("vllm", "lmdeploy"):
        (folder / name / "__init__.py").write_text("raise SystemExit", encoding="utf-8")
        (folder / name / "_version.py").write_text("version = '0.1'", encoding="utf-8")
    (vllm / "triton_prefill_attention.py").write_text(PREFILL, encoding="utf-8")
    (vllm / "triton_decode_attention.py").write_text(DECODE, encoding="utf-8")
    for name, text in LMDEPLOY.items():
        (lmdeploy / f"{name}.py").write_text(text.replace("{less}", str(less)), encoding="utf-8")


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write stand-ins whose windows are what a model means."""
    write(tmp_path, less=1)
    (tmp_path / "sglang").mkdir()  # a package without a file: what it refuses is asked about only
    (tmp_path / "sglang" / "__init__.py").touch()
    monkeypatch.setenv(FROM, str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def judged(name: str, problem: Problem) -> Verdict:
    (parity,) = (law for law in laws_of(problem.operation) if law.name.endswith("parity"))
    return parity.check(Subject(find_implementation(name), Target.here("cpu"), Stages()), problem)


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("vllm-prefill", replace(ENCODED, sinks=True, window_left=2, sm_scale=0.5)),
        ("vllm-prefill", replace(ENCODED, causal=False, window_left=1, window_right=2)),
        ("vllm-decode", replace(DECODED, group_size=1)),
        ("vllm-decode-grouped", replace(DECODED, logits_soft_cap=3.0, kv_layout="HND")),
        ("vllm-decode-grouped", LATENT),
        ("vllm-decode-grouped", CODES),
        ("lmdeploy-decode", replace(DECODED, window_left=2, sinks=True, logits_soft_cap=3.0)),
        ("lmdeploy-decode", replace(DECODED, query_lens=(2, 2, 2))),
        ("lmdeploy-prefill", replace(RAGGED, window_left=2, alibi=True)),
        ("lmdeploy-fill-kv-cache", APPENDED),
        ("lmdeploy-fill-kv-cache", replace(APPENDED, query_lens=(1, 1, 1), kv_layout="HND")),
    ],
)
def test_each_argument_arrives(name: str, problem: Problem) -> None:
    verdict = judged(name, problem)
    assert verdict.status == "PASS", verdict.message


@pytest.mark.parametrize("name", ["lmdeploy-decode", "lmdeploy-prefill"])
def test_a_window_of_one_key_more_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, less=0)
    monkeypatch.setenv(FROM, str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    problem = replace(DECODED if name == "lmdeploy-decode" else RAGGED, window_left=2)
    assert judged(name, problem).status == "FAIL"


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(
    ("name", "problem", "said"),
    [
        ("vllm-prefill", RAGGED, "as many queries as keys"),
        ("vllm-prefill", replace(ENCODED, window_left=0), "stands for none"),
        ("vllm-prefill", replace(ENCODED, logits_soft_cap=2.0), "no soft cap"),
        ("vllm-decode", DECODED, "are vllm-decode-grouped"),
        ("vllm-decode", replace(DECODED, group_size=1, dtype="float16"), "in 16 bits"),
        ("vllm-decode-grouped", replace(DECODED, group_size=1), "is vllm-decode"),
        ("vllm-decode-grouped", MIXED, "one query a request"),
        ("vllm-decode-grouped", replace(DECODED, sinks=True), "no windows and no sinks"),
        ("vllm-decode-grouped", replace(LATENT, head_dim_qk=40), "channels or more"),
        ("vllm-unified-attention-diffkv", replace(DIFFERENT, causal=False), "causal only"),
        ("vllm-unified-attention-td", replace(MIXED, page_size=4), "whole tiles"),
        ("vllm-chunked-prefill-paged-decode", replace(MIXED, page_size=5), "multiples of 16"),
        ("vllm-chunked-prefill-paged-decode", replace(MIXED, query_lens=(3, 0, 5)), "neighbour"),
        ("vllm-chunked-prefill-paged-decode", replace(MIXED, alibi=True, window_left=3), "beside"),
        ("lmdeploy-decode", MIXED, "same number of queries"),
        ("lmdeploy-decode", replace(DECODED, query_lens=(2, 2, 2), causal=True), "its last key"),
        ("lmdeploy-decode", replace(DECODED, page_size=24), "powers of two"),
        ("lmdeploy-decode", replace(LATENT, head_dim_qk=64), "first tile"),
        ("lmdeploy-prefill", replace(RAGGED, causal=False, window_left=3), "under a causal mask"),
        ("lmdeploy-prefill", replace(RAGGED, causal=False, alibi=True), "as far behind a query"),
        ("lmdeploy-fill-kv-cache", replace(APPENDED, page_size=4), "powers of two"),
        ("sglang-verify-splitkv", MIXED, "same number of drafts"),
        ("sglang-verify-splitkv", replace(VERIFIED, seq_lens=(3, 9)), "has a prefix"),
        ("sglang-verify-splitkv", GROUPED, "one head dim"),
        ("sglang-verify-mla", MIXED, "same number of drafts"),
        ("sglang-verify-mla", replace(GROUPED, seq_lens=(3, 9)), "has a prefix"),
        ("sglang-verify-mla", replace(GROUPED, num_kv_heads=2), "power of two"),
        ("sglang-verify-mla", replace(GROUPED, head_dim_vo=64), "no more channels"),
        ("sglang-verify-mla", replace(GROUPED, head_dim_vo=40), "channels or more"),
        ("sglang-verify-mla", replace(GROUPED, window_left=3), "extend kernel"),
        ("sglang-unified-attention-3d-mtp", replace(DRAFTED, query_lens=(5, 1)), "2 to 4 drafts"),
        ("sglang-unified-attention-3d-mtp", replace(DRAFTED, group_size=8), "16 share keys"),
        ("sglang-unified-attention-3d-mtp", replace(DRAFTED, page_size=32), "pages have 16"),
        ("sglang-unified-attention-3d-mtp", replace(DRAFTED, sinks=True), "AITER's kernel"),
    ],
)
def test_what_is_not_claimed(name: str, problem: Problem, said: str) -> None:
    refusal = find_implementation(name).refusal(problem, Target.here("cpu"))
    assert refusal is not None
    assert said in refusal


@pytest.mark.parametrize(
    "name",
    [name for name in BUILT_IN if name.startswith(("vllm-", "sglang-", "lmdeploy-", "liger-"))],
)
def test_a_kernel_of_an_engine_that_is_not_there_is_asked_little(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FROM, str(tmp_path))
    found, target = find_implementation(name), Target.here("cpu")
    asked: list[Refusal | None] = []

    def probe(problems: Sequence[Problem]) -> list[Refusal | None]:
        asked.extend(found.refusal(each, target) for each in problems)
        return asked[-len(problems) :]

    assert narrow(found.operation, probe, 200_000) is None
    assert len(asked) < 200
    assert any(each and each.code == "package" for each in asked)


TWO_SIDED: dict[str, Any] = {"causal": False, "window_left": 5, "two_sided_window": True}
IN_FP8: dict[str, Any] = {
    "kv_cache": "float8_e4m3fn", "q_dtype": "float8_e4m3fn", "q_scale": 0.5, "k_scale": 2.0,
    "v_scale": 1.25, "head_dim_qk": 32, "head_dim_vo": 32, "page_size": 32,
}  # fmt: skip

ENGINES = Path(__file__).parents[3] / ".engines"
FOLDERS = [ENGINES / name for name in ("vllm-0.33.0", "sglang-0.5.23", "lmdeploy-0.18.0")]


@pytest.fixture(scope="module")
def real() -> Iterator[Worker]:
    """Lend a worker that loads the files of three releases."""
    if not all(folder.is_dir() for folder in FOLDERS):
        pytest.skip("the files of engines are not there: `make engines` fetches them")
    environment = {"TRITON_INTERPRET": "1", FROM: ":".join(map(str, FOLDERS))}
    preload = ("torch", "kernelproof.properties.worker.tasks")
    with (
        WorkerPool(HANDLER, preload=preload, environment=environment, standby=False) as pool,
        pool.lease() as lent,
    ):
        yield lent


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("vllm-prefill", replace(ENCODED, sinks=True, window_left=2)),
        ("vllm-decode", replace(DECODED, group_size=1)),
        ("vllm-decode-grouped", LATENT),
        ("vllm-decode-grouped", replace(CODES, logits_soft_cap=3.0)),
        ("vllm-unified-attention-diffkv", replace(DIFFERENT, window_left=3)),
        ("vllm-unified-attention-diffkv-3d", replace(DIFFERENT, sinks=True)),
        ("vllm-unified-attention-td", MIXED),
        ("vllm-unified-attention-3d-td", replace(MIXED, head_dim_qk=24, head_dim_vo=24)),
        ("vllm-unified-attention", replace(MIXED, spans="images")),
        ("vllm-unified-attention", replace(MIXED, spans="prefix", causal=False)),
        ("vllm-unified-attention", replace(MIXED, chunk=2, seq_lens=(4, 37, 5))),
        ("vllm-unified-attention-3d", replace(MIXED, chunk=16, seq_lens=(4, 87, 5))),
        ("vllm-unified-attention-3d", replace(DECODED, causal=True, spans="images")),
        (
            "vllm-unified-attention",
            replace(MIXED, sink_tokens=1, window_left=1, seq_lens=(4, 87, 5)),
        ),
        ("vllm-unified-attention-td", replace(MIXED, alibi=True, alibi_function="sqrt")),
        (
            "vllm-unified-attention",
            replace(MIXED, spans="images", spans_in_window=True, window_left=2),
        ),
        *(
            ("vllm-unified-attention", replace(MIXED, causal_by_request=each, **TWO_SIDED))
            for each in (False, True)
        ),
        *(
            (f"vllm-unified-attention{form}", replace(MIXED, **IN_FP8))
            for form in ("", "-3d", "-td")
        ),
        ("vllm-unified-attention", replace(MIXED, kv_views="row", strided_q=True)),
        ("sglang-extend", replace(MIXED, **TWO_SIDED)),
        ("sglang-extend", replace(MIXED, custom_mask=True, **TWO_SIDED)),
        ("sglang-extend", replace(MIXED, logits_bias="dense")),
        ("sglang-decode", replace(DECODED, group_size=1, logits_bias="dense")),
        ("sglang-decode-grouped", replace(DECODED, logits_bias="relative")),
        ("vllm-chunked-prefill-paged-decode", replace(MIXED, sinks=True, window_left=2)),
        ("vllm-chunked-prefill-paged-decode", replace(MIXED, alibi=True)),
        ("vllm-batched-moe", BATCHED),
        ("vllm-batched-moe", replace(BATCHED, activation="relu2", dtype="float16")),
        *(
            ("vllm-batched-moe-fp8", replace(BATCHED, quantized=name, quantized_hidden=True))
            for name in ("fp8_tensor", "fp8_channel", "fp8_block")
        ),
        ("lmdeploy-decode", replace(DECODED, logits_soft_cap=3.0, seq_lens=(70, 1, 33))),
        ("lmdeploy-prefill", replace(RAGGED, logits_soft_cap=3.0, sinks=True)),
        ("lmdeploy-fill-kv-cache", APPENDED),
        ("sglang-verify-splitkv", VERIFIED),
        ("sglang-verify-mla", GROUPED),
        ("sglang-verify-mla", replace(GROUPED, values_in_keys=True, dtype="float16")),
        ("sglang-verify-mla", replace(VERIFIED, query_lens=(1, 1), k_scale=0.5)),
        ("sglang-unified-attention-3d-mtp", DRAFTED),
    ],
)
def test_real_files(real: Worker, name: str, problem: Problem) -> None:
    (law,) = (law.name for law in laws_of(problem.operation) if law.name.endswith("parity"))
    outcome = real.run(Address(BUILT_IN[name], None, "cpu").case(law, problem), Deadlines(run=60.0))
    assert outcome.result is not None, outcome
    verdict = Verdict.from_json(outcome.result)
    assert verdict.status == "PASS", verdict.message
