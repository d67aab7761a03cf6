"""What adapters declare: that of their backend, what differs, and refusals in order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kernelproof.impl import BUILT_IN, Arithmetic, Target, find_implementation
from kernelproof.impl.flashinfer.backends import FA2, XQA, Backend, one_module
from kernelproof.impl.flashinfer.claims import (
    either,
    one_head_dim,
    one_query_token,
    two_states,
    unavailable,
)
from kernelproof.impl.registry import built_in_provider
from kernelproof.impl.targets.backends import BACKENDS, FLASHINFER, KERNELPROOF, PROVIDERS, TORCH
from kernelproof.impl.targets.refusal import Refusal, first_reason
from kernelproof.reference import AttentionProblem, MergeProblem

HERE = Target()
MINE = Backend(
    "cuda",
    Arithmetic(probabilities="inputs"),
    features=("fp8_kv",),
    compile_key=one_module("mine"),
    build_ahead=True,
    build_minutes=2.5,
)


def nothing(inputs: Any) -> None:  # noqa: ANN401  any record
    del inputs


def test_an_adapter_declares_what_its_backend_does() -> None:
    adapter = MINE.adapter("paged_attention", "mine")(nothing)
    assert adapter.refusal(AttentionProblem(), replace(HERE, sm=90)) is not None, "no rule allows"
    assert (adapter.name, adapter.operation, adapter.backend) == ("mine", "paged_attention", "cuda")
    assert adapter.features == {"fp8_kv"}
    assert adapter.arithmetic == MINE.arithmetic
    assert (adapter.build_ahead, adapter.build_minutes) == (True, 2.5)
    assert adapter.module_of(AttentionProblem()) == "'mine'"
    assert adapter.provider == FLASHINFER


def test_an_adapter_names_what_differs() -> None:
    adapter = MINE.adapter("merge_state", "mine", features=(), backend="", build_ahead=False)
    made = adapter(nothing)
    assert (made.features, made.backend, made.build_ahead) == (frozenset(), "", False)
    assert made.build_minutes == MINE.build_minutes
    assert made.refusal(MergeProblem(), HERE) is None


def test_the_first_reason_counts_and_keeps_its_code() -> None:
    adapter = MINE.adapter("merge_state", "mine", two_states, unavailable)(nothing)
    said = adapter.refusal(MergeProblem(num_states=3), HERE)
    assert said == "merge_state merges 2 states, not 3"
    told = MINE.adapter(
        "merge_state", "mine", lambda *_: None, lambda *_: Refusal("no GPU", "device"), two_states
    )(nothing).refusal(MergeProblem(num_states=3), HERE)
    assert told == "no GPU"
    assert told is not None
    assert told.code == "device"
    assert either()(MergeProblem(), HERE) is None
    assert first_reason((0, "zero"), ("", "empty"), (1, "one"), (True, "two")) == "one"
    assert first_reason((0, "zero")) is None


@pytest.mark.parametrize(
    ("refuses", "fields", "said"),
    [
        (one_query_token("it takes"), {"query_lens": (1, 2)}, "it takes one query token a request"),
        (one_query_token("it takes"), {"query_lens": (1, 0)}, "it takes one query token a request"),
        (one_query_token("it takes"), {"query_lens": (1, 1)}, None),
        (one_head_dim("one"), {"head_dim_vo": 128, "head_dim_qk": 64}, "one"),
        (one_head_dim("one"), {}, None),
    ],
)
def test_reasons_that_adapters_share(refuses: Any, fields: Any, said: str | None) -> None:  # noqa: ANN401
    fields = {"seq_lens": (4, 4), "query_lens": (1, 1), **fields}
    assert refuses(AttentionProblem(**fields), HERE) == said


def test_keys_of_modules() -> None:
    problem = AttentionProblem(page_size=16)
    assert FA2.compile_key is not None
    assert XQA.compile_key is not None
    other = replace(problem, page_size=32)
    assert FA2.compile_key(problem) == FA2.compile_key(other)
    assert XQA.compile_key(problem) != XQA.compile_key(other), "pages are compiled in"


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_built_in_implementation_comes_from_its_backends_distribution(name: str) -> None:
    found = find_implementation(name)
    expected = FLASHINFER if name.startswith("flashinfer-") else KERNELPROOF
    if name.startswith(("torch-sdpa", "torch-flex", "torch-varlen")):
        expected = TORCH
    if name.startswith(("lmdeploy-", "sglang-", "vllm-")):
        expected = name.partition("-")[0]
    if name.startswith("liger-"):
        expected = "liger_kernel"
    assert found.provider == built_in_provider(name) == expected
    assert not found.backend or PROVIDERS[found.backend] == found.provider


def test_a_name_that_is_not_built_in_has_no_provider_here() -> None:
    assert built_in_provider("my_kernels:mine") is None
    assert set(BACKENDS) == set(PROVIDERS)


def test_only_kernels_of_a_cache_need_finite_numbers_behind_windows() -> None:
    needed = {name: find_implementation(name).hidden_keys for name in BUILT_IN}
    finite = {name for name, need in needed.items() if need == "finite"}
    assert {"flashinfer-decode", "flashinfer-prefill-fa3", "flashinfer-xqa-decode"} <= finite
    assert not finite & {"flashinfer-ragged-fa3", "flashinfer-prefill-fa2", "triton-attention"}


def test_which_adapters_claim_pages_of_64_bits_and_which_rows_too() -> None:
    """Pages of ``paged_kv_t`` have offsets of size_t; the queries' rows and MLA's pages do not."""
    claims = {
        name: {"large_tensors", "large_caches"} & find_implementation(name).features
        for name in ("flashinfer-decode", "flashinfer-decode-fa2", "flashinfer-prefill-fa2",
                     "flashinfer-prefill-fa2-graph", "flashinfer-prefill-fa3", "flashinfer-mla-fa2",
                     "flashinfer-ragged-fa2", "triton-attention", "triton-ragged-attention")
    }  # fmt: skip
    pages = {name for name, claimed in claims.items() if claimed == {"large_caches"}}
    assert pages == {"flashinfer-decode", "flashinfer-decode-fa2", "flashinfer-prefill-fa2"}
    both = {name for name, claimed in claims.items() if claimed == {"large_tensors"}}
    assert both == {"triton-attention", "triton-ragged-attention"}
