"""Adapters of FlashInfer's kernels against the signatures of several releases, without a GPU.

``flashinfer_signatures.json`` holds the parameters of what they call, as
``python -m kernelproof.impl.flashinfer_declarations`` collects them from a release's wheel. A
stand-in binds each call to them, and answers as the oracle does, with an LSE of base 2.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.flashinfer import (
    calls as flashinfer_calls,
)
from kernelproof.impl.flashinfer import (
    cascade as flashinfer_cascade,
)
from kernelproof.impl.flashinfer import (
    mla as flashinfer_mla,
)
from kernelproof.impl.flashinfer import (
    paged as flashinfer_paged,
)
from kernelproof.impl.flashinfer import (
    plans as flashinfer_plans,
)
from kernelproof.impl.flashinfer import (
    ragged as flashinfer_ragged,
)
from kernelproof.impl.flashinfer import (
    trtllm as flashinfer_trtllm,
)
from kernelproof.impl.targets.optional import missing
from kernelproof.reference import AttentionOutput, AttentionProblem, materialise, oracle

SIGNATURES: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("signatures.json").read_text(encoding="utf-8")
)
RELEASES = sorted(SIGNATURES)
ADAPTERS = (
    flashinfer_calls,
    flashinfer_cascade,
    flashinfer_mla,
    flashinfer_paged,
    flashinfer_plans,
    flashinfer_ragged,
    flashinfer_trtllm,
)
KINDS = {1: inspect.Parameter.VAR_POSITIONAL, 2: inspect.Parameter.VAR_KEYWORD}
FP8: dict[str, Any] = {"kv_cache": "float8_e4m3fn", "q_dtype": "float8_e4m3fn"}
PLAIN = AttentionProblem(
    query_lens=(1, 1),
    seq_lens=(40, 21),
    num_kv_heads=2,
    group_size=2,
    head_dim_qk=128,
    head_dim_vo=128,
    dtype="bfloat16",
    page_size=16,
    page_order=1,
    causal=True,
    kv_layout="HND",
)
LATENT: dict[str, Any] = {"num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512,
                          "page_size": 32, "values_in_keys": True}  # fmt: skip
DEEPSEEK: dict[str, Any] = {**LATENT, "group_size": 128, "sm_scale": 192**-0.5}


def signature_of(parameters: list[str]) -> inspect.Signature:
    """Make a signature of names, with ``=`` behind those that have a default."""
    made: list[inspect.Parameter] = []
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    for each in parameters:
        default = None if each.endswith("=") else inspect.Parameter.empty
        own = KINDS.get(each.count("*"), kind)
        made.append(inspect.Parameter(each.strip("*="), own, default=default))
        if own == inspect.Parameter.VAR_POSITIONAL:
            kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(made)


class Release:
    """Stands for flashinfer and its modules."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.answer: AttentionOutput | None = None

    def bind(self, name: str, *args: Any, **keywords: Any) -> dict[str, Any]:  # noqa: ANN401
        """Bind a call to the release's signature."""
        found = next(k for k in SIGNATURES[self.version] if k.partition(".")[2] == name)
        bound = signature_of(SIGNATURES[self.version][found]).bind(*args, **keywords)
        self.calls.append((name, bound.arguments))
        return bound.arguments

    def result(self, given: dict[str, Any], *, always: bool = False) -> Any:  # noqa: ANN401
        """Answer as the oracle does."""
        assert self.answer is not None
        out, lse = self.answer.out, self.answer.lse / math.log(2.0)
        if given.get("out") is not None:
            given["out"].copy_(out.reshape(given["out"].shape))
            out = given["out"]
        return (out, lse.float()) if given.get("return_lse") or always else out

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  a class or a function of flashinfer
        if name == "MLAPlanMetadata":
            return SimpleNamespace(csr=dict, dense=dict)
        if any(key.endswith((f".{name}.plan", f".{name}.run")) for key in SIGNATURES[self.version]):
            return lambda **options: Wrapper(self, name, options)
        return lambda *args, **keywords: self.result(self.bind(name, *args, **keywords))


class Wrapper:
    """Stands for a wrapper of a release."""

    is_cuda_graph_enabled = False

    def __init__(self, release: Release, name: str, options: dict[str, Any]) -> None:
        self._release, self._name = release, name
        release.bind(f"{name}.__init__", None, **options)

    def plan(self, **keywords: Any) -> None:  # noqa: ANN401
        self._release.bind(f"{self._name}.plan", None, **keywords)

    def run(self, *args: Any, **keywords: Any) -> Any:  # noqa: ANN401
        given = self._release.bind(f"{self._name}.run", None, *args, **keywords)
        return self._release.result(given, always=self._name == "BatchAttention")


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Release]:
    made = Release(request.param)
    caches = (
        flashinfer_calls.wrapper,
        flashinfer_paged._batch_attention,
        flashinfer_mla.mla_wrapper,
        flashinfer_trtllm.zeroed_workspace,
    )
    for module in ADAPTERS:
        for name, value in (("flashinfer", lambda *_: made), ("version", lambda: made.version),
                            ("WORKSPACE_BYTES", 64)):  # fmt: skip
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    for cache in caches:
        cache.cache_clear()
    yield made
    for cache in caches:
        cache.cache_clear()


def attended(release: Release, name: str, problem: AttentionProblem) -> None:
    inputs: Any = materialise(problem)
    expected = oracle.attention(inputs)
    release.answer = AttentionOutput(expected.out.to(inputs.out_dtype), expected.lse)
    out, lse = find_implementation(name)(inputs)
    assert torch.equal(out, release.answer.out)
    assert lse is None or torch.allclose(lse.double(), expected.lse, rtol=1e-6)


def came_later(name: str, problem: AttentionProblem, release: Release, chip: int) -> str | None:
    target = Target(sm=chip, flashinfer=release.version, cuda="13.0", device="cuda")
    return find_implementation(name).refusal(problem, target)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("name", "chip", "fields"),
    [
        ("decode", 90, {}),
        ("decode-fa2", 90, {"kv_cache": "float8_e5m2"}),
        ("decode-fa2-fast-plan", 90, {"kv_cache": "float8_e5m2", "window_left": 20}),
        ("decode-fa2-fast-plan", 90, {"query_lens": (3, 3)}),
        ("prefill-fa2", 90, {"query_lens": (3, 1), "window_left": 2, "logits_soft_cap": 5.0}),
        ("prefill-fa2", 90, {"custom_mask": True, "causal": False}),
        ("prefill-fa2", 90, {"kv_cache": "nvfp4"}),
        ("prefill-fa3", 90, {**FP8, "per_head_scales": True}),
        ("batch-attention", 90, {"query_lens": (1, 3)}),
        ("cascade", 90, {}),
        ("trtllm-decode", 100, {"window_left": 3, "sinks": True}),
        ("trtllm-decode", 100, {**FP8, "q_scale": 0.5, "k_scale": 2.0}),
        ("trtllm-decode", 100, {"kv_cache": "nvfp4 interleaved", "q_dtype": "float8_e4m3fn"}),
        ("trtllm-context", 100, {"query_lens": (5, 1)}),
        ("trtllm-decode", 100, {"query_lens": (5, 1)}),
        ("trtllm-decode", 100, {"query_lens": (3, 3)}),
        ("xqa-decode", 90, {"query_lens": (4, 4), "window_left": 5}),
        ("xqa-decode", 90, {"query_lens": (4, 4), "tree": 1}),
        ("xqa-ragged", 90, {"query_lens": (4, 1)}),
        ("xqa-ragged", 90, {"query_lens": (0, 3), "tree": 2}),
        ("prefill-fa2-uniform", 90, {"query_lens": (4, 4), "tree": 1}),
        ("trtllm-decode-auto", 90, {"query_lens": (4, 4)}),
        ("prefill-fa2", 90, {"query_lens": (4, 9), "tree": 2}),
        ("mla-trtllm", 100, {**DEEPSEEK, "query_lens": (2, 2)}),
        ("mla-trtllm", 100, {**DEEPSEEK, "query_lens": (4, 1)}),
        ("trtllm-decode-auto", 90, {"sinks": True}),
        ("xqa-decode", 90, {"v_scale": 0.5, "window_left": 0}),
        ("xqa-decode", 120, {"kv_cache": "nvfp4"}),
        ("xqa-decode-fp8", 90, FP8),
        ("xqa-decode-fp8", 90, {**FP8, "query_lens": (4, 4), "group_size": 16, "tree": 1}),
        ("xqa-decode-fp8", 90, {**FP8, "query_lens": (4, 4), "tree": 1}),
        ("xqa-decode-fp8", 90, {**FP8, "query_lens": (4, 4), "window_left": 5}),
        ("mla-fa2", 90, {**LATENT, "query_lens": (5, 1)}),
        ("mla-fa2", 90, {**LATENT, "kv_cache": "float8_e4m3fn"}),
        ("mla-fa3", 90, {**LATENT, "k_scale": 2.0, "causal": False}),
        ("mla-fa3", 90, {**LATENT, "kv_cache": "float8_e4m3fn", "k_scale": 2.0, "v_scale": 2.0}),
        ("mla-cutlass", 100, DEEPSEEK),
        ("mla-trtllm", 100, DEEPSEEK),
        ("mla-trtllm", 100, {**DEEPSEEK, **FP8, "q_scale": 0.5}),
        ("mla-xqa", 120, DEEPSEEK),
    ],
)
def test_calls_bind_in_every_release_or_came_later(
    name: str, chip: int, fields: dict[str, Any], layout: str, release: Release
) -> None:
    name = f"flashinfer-{name}"
    problem = replace(PLAIN, **{"kv_layout": layout, **fields})
    said = came_later(name, problem, release, chip)
    if said is None:
        attended(release, name, problem)
    else:
        newest = Target(sm=chip, flashinfer=RELEASES[-1], cuda="13.0", device="cuda")
        assert find_implementation(name).refusal(problem, newest) is None, said


def test_a_fast_plan_comes_after_a_plan_of_other_lengths(release: Release) -> None:
    if release.version != RELEASES[-1]:
        return
    attended(release, "flashinfer-decode-fa2-fast-plan", PLAIN)
    first = keywords_of(release, "BatchDecodeWithPagedKVCacheWrapper.plan")
    assert first["indptr"].tolist() == [0, 1, 2]
    assert first["last_page_len"].tolist() == [1, 1]
    given = keywords_of(release, "fast_decode_plan")
    assert given["global_override_indptr_cpu"].tolist() == given["indptr"].tolist() == [0, 3, 5]
    assert given["last_page_len"].tolist() == [8, 5]
    assert [name for name, _ in release.calls][-4:-1] == [
        "BatchDecodeWithPagedKVCacheWrapper.__init__",
        "BatchDecodeWithPagedKVCacheWrapper.plan",
        "fast_decode_plan",
    ]


@pytest.mark.parametrize("name", ["ragged-fa2", "ragged-fa3"])
def test_ragged_calls_bind_too(name: str, release: Release) -> None:
    attended(release, f"flashinfer-{name}", replace(PLAIN, operation="ragged_attention"))


def keywords_of(release: Release, name: str) -> dict[str, Any]:
    return next(given for called, given in reversed(release.calls) if called == name)


def test_what_trtllm_gen_is_given(release: Release) -> None:
    problem = replace(PLAIN, **FP8, q_scale=0.5, k_scale=2.0, v_scale=0.25, sinks=True)
    attended(release, "flashinfer-trtllm-decode", problem)
    given = keywords_of(release, "trtllm_batch_decode_with_kv_cache")
    assert given["bmm1_scale"] == problem.scale
    assert given["bmm2_scale"] == 0.25
    assert given["out"].dtype == torch.bfloat16
    assert given["max_seq_len"] == 40
    assert int(given["block_tables"].max()) < given["kv_cache"][0].shape[0]
    assert not given["workspace_buffer"].any()
    assert ("return_lse" in given) == (release.version != "0.6.7")
    attended(release, "flashinfer-trtllm-context", replace(problem, query_lens=(5, 2)))
    given = keywords_of(release, "trtllm_batch_context_with_kv_cache")
    assert (given["max_q_len"], given["max_kv_len"], given["batch_size"]) == (5, 40, 2)
    assert given["cum_seq_lens_q"].tolist() == [0, 5, 7]
    assert given["cum_seq_lens_kv"].tolist() == [0, 3, 5]


def test_what_xqa_is_given(release: Release) -> None:
    attended(release, "flashinfer-xqa-decode-fp8", replace(PLAIN, **FP8, q_scale=2.0))
    given = keywords_of(release, "trtllm_batch_decode_with_kv_cache")
    assert given["query"].dtype == torch.bfloat16
    assert given["kv_cache"][0].dtype == torch.float8_e4m3fn
    assert given["bmm1_scale"] == 2.0 * PLAIN.scale
    assert given["backend"] == "xqa"
    attended(release, "flashinfer-xqa-decode", replace(PLAIN, seq_lens=(0, 0)))
    # A table of no columns is an empty grid there: "cudaErrorInvalidValue".
    assert keywords_of(release, "trtllm_batch_decode_with_kv_cache")["block_tables"].shape == (2, 1)
    attended(release, "flashinfer-xqa-decode", replace(PLAIN, kv_cache="nvfp4"))
    given = keywords_of(release, "trtllm_batch_decode_with_kv_cache")
    assert len(given["kv_cache_sf"]) == 2
    assert "kv_block_scales" not in given


def test_what_a_verify_is_given(release: Release) -> None:
    chain, ragged = replace(PLAIN, query_lens=(3, 3)), replace(PLAIN, query_lens=(5, 1))
    tree = replace(chain, tree=1)
    for name, problem in (("xqa-decode", chain), ("xqa-decode", tree), ("trtllm-decode", chain),
                          ("xqa-decode-fp8", replace(tree, **FP8))):  # fmt: skip
        attended(release, f"flashinfer-{name}", problem)
        given = keywords_of(release, "trtllm_batch_decode_with_kv_cache")
        assert given["q_len_per_req"] == 3
        assert ("mask" in given) == name.startswith("xqa")
        if "mask" in given:
            assert (given["mask"].dtype, given["mask"].shape) == (torch.uint16, (2, 3, 2))
            inputs: Any = materialise(problem)
            seen = (given["mask"][..., 0].int().unsqueeze(-1) >> torch.arange(3)) & 1
            tril = torch.ones(2, 3, 3).tril()
            wanted = tril if inputs.tree_mask is None else inputs.tree_mask.view(2, 3, 3)
            assert torch.equal(seen.bool(), wanted.bool())
    attended(release, "flashinfer-trtllm-decode", ragged)
    given = keywords_of(release, "trtllm_batch_decode_with_kv_cache")
    assert given["q_len_per_req"] is None
    assert (given["max_q_len"], given["cum_seq_lens_q"].tolist()) == (5, [0, 5, 6])
    if release.version.startswith("0.7"):
        attended(release, "flashinfer-xqa-ragged", replace(PLAIN, query_lens=(0, 1)))
        given = keywords_of(release, "xqa_batch_decode_with_kv_cache")
        assert (given["q_len_per_req"], given["q_cu_seq_lens"].tolist()) == (2, [0, 0, 1])
        assert (given["mask"].shape, int(given["mask"][0, 0])) == ((1, 2), 1)
    if release.version == RELEASES[-1]:
        attended(release, "flashinfer-prefill-fa2-uniform", tree)
        given = keywords_of(release, "BatchPrefillWithPagedKVCacheWrapper.plan")
        assert given["uniform_q_len"] == 3
        assert "return_lse" not in keywords_of(release, "BatchPrefillWithPagedKVCacheWrapper.run")
    attended(release, "flashinfer-prefill-fa2", tree)
    given = keywords_of(release, "BatchPrefillWithPagedKVCacheWrapper.plan")
    assert given["custom_mask"].shape == (3 * 40 + 3 * 21,)
    find_implementation("flashinfer-prefill-fa2-unsplit")(materialise(tree))
    given = keywords_of(release, "BatchPrefillWithPagedKVCacheWrapper.plan")
    assert given.get("custom_mask") is None
    # A request's bits begin with a byte: 3 times 40 and 3 times 21 of them.
    assert given["packed_custom_mask"].shape == (15 + 8,)
    attended(release, "flashinfer-mla-trtllm", replace(PLAIN, **DEEPSEEK, query_lens=(2, 2)))
    given = keywords_of(release, "trtllm_batch_decode_with_kv_cache_mla")
    assert given["query"].shape == (2, 2, 128, 576)
    if release.version.startswith("0.7"):
        attended(release, "flashinfer-mla-trtllm", replace(PLAIN, **DEEPSEEK, query_lens=(2, 1)))
        given = keywords_of(release, "trtllm_batch_decode_with_kv_cache_mla")
        assert (given["query"].shape, given["out"].shape) == ((3, 128, 576), (3, 128, 512))
        assert (given["max_q_len"], given["cum_seq_lens_q"].tolist()) == (2, [0, 2, 3])
    said = came_later("flashinfer-decode-fa2", chain, release, 90)
    assert (said is None) == release.version.startswith("0.7"), said
    if said is None:
        attended(release, "flashinfer-decode-fa2", chain)
        given = keywords_of(release, "BatchDecodeWithPagedKVCacheWrapper.plan")
        assert given.get("q_len_per_req", given.get("kwargs", {}).get("q_len_per_req")) == 3


def test_what_latent_attention_is_given(release: Release) -> None:
    problem = replace(PLAIN, **LATENT, k_scale=2.0, strided_q=True, strided_kv=True)
    attended(release, "flashinfer-mla-fa2", problem)
    planned = keywords_of(release, "BatchMLAPagedAttentionWrapper.plan")
    assert (planned["head_dim_ckv"], planned["head_dim_kpe"]) == (512, 64)
    assert planned["sm_scale"] == 2.0 * problem.scale
    assert ("metadata" in planned) == release.version.startswith("0.7")
    given = keywords_of(release, "BatchMLAPagedAttentionWrapper.run")
    compressed, rotary = given.get("kv_cache") or (given["ckv_cache"], given["kpe_cache"])
    assert (compressed.shape[1:], rotary.shape[1:]) == ((32, 512), (32, 64))
    assert rotary.data_ptr() - compressed.data_ptr() == 512 * 2
    attended(release, "flashinfer-mla-trtllm", replace(PLAIN, **DEEPSEEK))
    given = keywords_of(release, "trtllm_batch_decode_with_kv_cache_mla")
    assert given["query"].shape == (2, 1, 128, 576)
    assert given["kv_cache"].shape[1:] == (32, 576)
    assert given["block_tables"].shape[1] % 4 == 0


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("trtllm-decode", {"query_lens": (0, 1)}, "one query token a request or more"),
        ("trtllm-decode", {"query_lens": (17, 1)}, "at most 16 query tokens"),
        ("xqa-decode", {"query_lens": (2, 1)}, "equally many tokens of each request"),
        ("xqa-decode", {"query_lens": (22, 22)}, "at most 16 query tokens"),
        ("xqa-decode", {"query_lens": (2, 2), "seq_lens": (1, 9)}, "no more queries than keys"),
        ("xqa-decode", {"query_lens": (2, 2), "causal": False}, "under a causal mask"),
        ("xqa-decode", {"query_lens": (2, 2), "tree": 1, "window_left": 3}, "without one"),
        ("decode", {"query_lens": (2, 2)}, "with tensor cores on FA2 alone"),
        ("decode-fa2", {"query_lens": (2, 1)}, "equally many tokens of each request"),
        ("decode-fa2-graph", {"query_lens": (2, 1)}, "equally many tokens of each request"),
        ("decode-graph", {"query_lens": (2, 2)}, "with tensor cores on FA2 alone"),
        ("mla-xqa", {**LATENT, "query_lens": (2, 2)}, "query_len must be 1"),
        ("trtllm-decode", {**FP8, "kv_cache": "nvfp4"}, "block scales interleaved"),
        ("trtllm-decode", {"logits_soft_cap": 5.0}, "soft_cap must be false"),
        ("trtllm-decode", {"page_size": 8}, "page_size must be"),
        ("trtllm-context", {"query_lens": (41, 1)}, "no more queries than keys"),
        ("trtllm-context", {"causal": False}, "mask must be causal"),
        ("mla-trtllm", {**LATENT, "page_size": 16}, "page_size must be 32 or 64"),
        ("mla-trtllm", {}, "values from the keys"),
        ("mla-cutlass", LATENT, "the scale of 192 channels"),
        ("mla-cutlass", {**DEEPSEEK, "strided_kv": True}, "contiguous"),
        ("mla-cutlass", {**DEEPSEEK, "v_scale": 2.0}, "no v_scale"),
        ("mla-fa2", {**LATENT, "v_scale": 2.0}, "no v_scale"),
        ("mla-fa2", {**LATENT, "sinks": True}, "sinks must be false"),
        ("mla-fa3", LATENT, "the chip"),
        ("decode", LATENT, "does not name the feature mla"),
    ],
)
def test_what_they_do_not_claim_on_blackwell(name: str, fields: dict[str, Any], said: str) -> None:
    target = Target(sm=100, flashinfer="0.7.2.post1", cuda="13.0", device="cuda")
    why = find_implementation(f"flashinfer-{name}").refusal(replace(PLAIN, **fields), target)
    assert why is not None
    assert said in why


def test_hopper_gives_xqa_queries_that_fp8_holds() -> None:
    def refusal(name: str, chip: int, **fields: Any) -> str | None:  # noqa: ANN401
        target = Target(sm=chip, flashinfer="0.7.2.post1", cuda="13.0", device="cuda")
        return find_implementation(f"flashinfer-{name}").refusal(replace(PLAIN, **fields), target)

    half = {"kv_cache": "float8_e4m3fn"}
    assert "rounds 16-bit queries" in str(refusal("xqa-decode", 90, **half))
    assert "rounds 16-bit queries" in str(refusal("trtllm-decode-auto", 90, **half))
    assert refusal("xqa-decode", 120, **half) is None
    assert refusal("xqa-decode-fp8", 90, **FP8) is None
    assert "on SM90 alone" in str(refusal("xqa-decode-fp8", 120, **FP8))
    assert "page_size must be" in str(refusal("xqa-decode-fp8", 90, **FP8, page_size=8))
    assert refusal("trtllm-decode-auto", 100, **half) is None
    assert refusal("trtllm-decode-auto", 107) is None


@pytest.mark.parametrize(("version", "reads"), [("0.6.13", False), ("0.7.2.post1", True)])
def test_the_fp8_kernel_of_sm90_reads_no_tree_of_few_rows_before_a_release(
    version: str, *, reads: bool
) -> None:
    def refusal(**fields: Any) -> str | None:  # noqa: ANN401
        target = Target(sm=90, flashinfer=version, cuda="13.0", device="cuda")
        problem = replace(PLAIN, **{**FP8, "query_lens": (4, 4), **fields})
        return find_implementation("flashinfer-xqa-decode-fp8").refusal(problem, target)

    assert refusal(group_size=8) is None, "a chain"
    assert refusal(group_size=9, tree=1) is None
    assert refusal(group_size=8, tree=1, sinks=True) is None, "another kernel"
    said = refusal(group_size=8, tree=1)
    assert (said is None) == reads
    assert said is None or "never reads the bits" in said
    assert "without one" in str(refusal(group_size=9, tree=1, window_left=3))


def test_tiles_that_end_inside_a_query_are_refused_from_a_release_on() -> None:
    def refusal(version: str, **fields: Any) -> str | None:  # noqa: ANN401
        target = Target(sm=90, flashinfer=version, cuda="13.0", device="cuda")
        problem = replace(PLAIN, **{**LATENT, **fields})
        return find_implementation("flashinfer-mla-fa2").refusal(problem, target)

    ends = {"group_size": 3, "query_lens": (40, 1)}
    assert "inside a query token" in str(refusal("0.7.1", **ends))
    assert refusal("0.7.0", **ends) is None
    assert refusal("0.7.1", **{**ends, "group_size": 4}) is None
    assert refusal("0.7.1", **{**ends, "query_lens": (20, 1)}) is None
    assert refusal("0.7.1", **ends, causal=False) is None


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_a_latent_session_plans_once_and_runs_often(backend: str, release: Release) -> None:
    found = find_implementation(f"flashinfer-mla-{backend}")
    assert found.session is not None
    session, inputs = found.session(), materialise(replace(PLAIN, **LATENT))
    expected = oracle.attention(inputs)  # type: ignore[arg-type]
    release.answer = AttentionOutput(expected.out.bfloat16(), expected.lse)
    session.plan(inputs)
    for _ in range(2):
        assert torch.equal(session.run(inputs)[0], release.answer.out)
    names = [name.rpartition(".")[2] for name, _ in release.calls]
    assert names == ["__init__", "plan", "run", "run"]


def test_the_installed_release_is_as_the_file_says() -> None:
    installed = flashinfer_calls.version()
    if missing("flashinfer", "flashinfer") or installed not in SIGNATURES:
        pytest.skip(f"flashinfer-python {installed} is none of {', '.join(RELEASES)}")
    for key, parameters in SIGNATURES[installed].items():
        if "cute_dsl" in key and missing("cutlass", "flashinfer"):
            continue  # it is imported where NVIDIA's compiler for it is
        module, _, qualified = key.partition(".")
        found: Any = importlib.import_module(f"flashinfer.{module}")
        for part in qualified.split("."):
            found = getattr(found, part)
        names = [name.strip("*=") for name in parameters]
        assert list(inspect.signature(found).parameters) == names, key


def test_a_single_causal_prefill_of_more_queries_than_keys_is_refused_as_flashinfer_does() -> None:
    single = find_implementation("flashinfer-single-prefill-fa2")
    target = Target(sm=90, flashinfer="0.7.2.post1", cuda="13.0", device="cuda")
    more = AttentionProblem(
        "ragged_attention", (2,), (1,), head_dim_qk=64, head_dim_vo=64, dtype="float16", causal=True
    )
    refusal = single.refusal(more, target)
    assert refusal is not None
    assert "no more queries than keys under a causal mask" in str(refusal)
    for taken in (replace(more, causal=False), replace(more, query_lens=(1,))):
        assert "no more queries" not in str(single.refusal(taken, target))
