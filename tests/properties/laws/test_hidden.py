"""What the laws of hidden keys overwrite, against a definition key by key."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, implementation
from kernelproof.impl.torch.sdpa import paged as sdpa
from kernelproof.properties.laws import find_law
from kernelproof.properties.laws.hidden import FILLS, HARMLESS, behind_windows, overwrite
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import AttentionProblem, materialise
from kernelproof.reference.formats.cache_elements import RECORDS
from kernelproof.reference.oracle import attention, seen_keys
from kernelproof.reference.problems.cache_names import KV_CACHES, element_of
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

PROBLEMS = (
    AttentionProblem(query_lens=(1,), seq_lens=(11,), page_size=2, window_left=3),
    AttentionProblem(query_lens=(3, 1, 0), seq_lens=(9, 4, 8), page_size=2, window_left=1,
                     causal=True, page_order=1),
    AttentionProblem(query_lens=(1, 1), seq_lens=(12, 5), page_size=2, window_left=2,
                     shared_prefix_pages=2, causal=True),
    AttentionProblem(query_lens=(2, 3), seq_lens=(7, 3), page_size=4, custom_mask=True, seed=3),
    AttentionProblem(query_lens=(4,), seq_lens=(9,), page_size=3, causal=False, window_left=0,
                     window_right=1, kv_layout="HND"),
    AttentionProblem(query_lens=(4,), seq_lens=(9,), page_size=3, tree=2, causal=True),
    AttentionProblem(query_lens=(5, 2), seq_lens=(3, 8), page_size=1, window_left=1, causal=True),
)  # fmt: skip


class Stages:
    """No stage is watched."""

    def stage(self, _: str) -> Any:  # noqa: ANN401  a context manager
        """Do nothing."""
        return nullcontext()


def owners(inputs: PagedAttentionInputs, problem: AttentionProblem) -> dict[tuple[int, int], Any]:
    """Return (request, key) by slot, several where a page is shared."""
    found: dict[tuple[int, int], Any] = {}
    for request, keys in enumerate(problem.seq_lens):
        for key in range(keys):
            page = int(inputs.block_table[request, key // problem.page_size])
            found.setdefault((page, key % problem.page_size), []).append((request, key))
    return found


def sees(inputs: PagedAttentionInputs, problem: AttentionProblem, request: int, key: int) -> bool:
    """Whether any query of a request sees a key."""
    t, s = problem.query_lens[request], problem.seq_lens[request]
    start = sum(a * b for a, b in zip(problem.query_lens[:request], problem.seq_lens, strict=False))
    for row in range(t):
        position = s - t + row
        kept = not problem.causal or key <= position
        kept &= problem.window_left < 0 or key >= position - problem.window_left
        kept &= problem.window_right < 0 or key <= position + problem.window_right
        if inputs.custom_mask is not None:
            kept &= bool(inputs.custom_mask[start + row * s + key])
        if kept:
            return True
    return False


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_slot_is_seen_where_some_query_sees_a_key_in_it(problem: AttentionProblem) -> None:
    inputs: Any = materialise(problem)
    seen, of = seen_keys(inputs), owners(inputs, problem)
    for page in range(seen.shape[0]):
        for slot in range(seen.shape[1]):
            wanted = any(sees(inputs, problem, *each) for each in of.get((page, slot), ()))
            assert bool(seen[page, slot]) == wanted, (page, slot)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_only_pages_behind_the_windows_of_all_their_requests_are_freed(
    problem: AttentionProblem,
) -> None:
    inputs: Any = materialise(problem)
    freed, of = behind_windows(inputs, problem), owners(inputs, problem)
    for page in range(len(freed)):
        keys = [each for slot in range(problem.page_size) for each in of.get((page, slot), ())]
        behind = (
            bool(keys)
            and problem.window_left >= 0
            and all(
                key < problem.seq_lens[n] - problem.query_lens[n] - problem.window_left
                for n, key in keys
            )
        )
        full = len(keys) % problem.page_size == 0
        assert freed[page].all() == freed[page].any() == (behind and full), page


ONE: dict[str, Any] = {"query_lens": (1,), "seq_lens": (12,), "page_size": 2}
TWO: dict[str, Any] = {"query_lens": (1, 1), "page_size": 2, "chunk": 4}
FREED: tuple[tuple[AttentionProblem, set[int]], ...] = (
    (AttentionProblem(**{**ONE, "seq_lens": (11,)}, chunk=4), {0, 1, 2, 3}),
    (AttentionProblem(**{**ONE, "query_lens": (3,)}, chunk=5, causal=True), {0, 1}),
    (AttentionProblem(**ONE, chunk=16), set()),
    (AttentionProblem(**ONE, chunk=8, window_left=1), {0, 1, 2, 3, 4}),
    (AttentionProblem(**ONE, chunk=4, sink_tokens=1), {1, 2, 3}),
    (AttentionProblem(**ONE, window_left=3, sink_tokens=3), {2, 3}),
    (AttentionProblem(**ONE, window_left=6, window_dilation=3), {0, 1}),
    (AttentionProblem(**TWO, seq_lens=(12, 5), shared_prefix_pages=2), {0, 1, 2, 3}),
    (AttentionProblem(**TWO, seq_lens=(12, 4), shared_prefix_pages=1), {1, 2, 3}),
)
"""Problems, and the pages that an engine frees, in the order in which they are placed."""


@pytest.mark.parametrize(("problem", "pages"), FREED)
def test_pages_before_a_chunk_are_freed_and_those_of_first_tokens_and_gaps_kept(
    problem: AttentionProblem, pages: set[int]
) -> None:
    for each in (problem, replace(problem, custom_mask=True, mask_pattern="sparse")):
        inputs: Any = materialise(each)
        freed = behind_windows(inputs, each)
        assert set(freed.all(dim=1).nonzero().flatten().tolist()) == pages
        before = attention(inputs)
        overwrite(inputs, freed, FILLS[0])
        assert torch.equal(before.out, attention(inputs).out)


@pytest.mark.parametrize("fill", [*dict.fromkeys(FILLS), HARMLESS])
@pytest.mark.parametrize("kv_cache", KV_CACHES)
def test_hidden_slots_of_any_cache_may_hold_anything(kv_cache: str, fill: Any) -> None:  # noqa: ANN401
    heads: dict[str, Any] = {"num_kv_heads": 2, "head_dim_qk": 64, "head_dim_vo": 64}
    if element_of(kv_cache) in RECORDS:
        heads = {"values_in_keys": True, "head_dim_qk": 576, "head_dim_vo": 512}
    problem = AttentionProblem(
        query_lens=(2, 1),
        seq_lens=(13, 6),
        page_size=4,
        window_left=2,
        causal=True,
        kv_cache=kv_cache,
        dtype="float16",
        kv_layout="HND",
        **heads,
    )
    inputs: Any = materialise(problem)
    before = attention(inputs)
    for hidden in (behind_windows(inputs, problem), ~seen_keys(inputs)):
        assert hidden.any()
        overwrite(inputs, hidden, fill)
        after = attention(inputs)
        assert torch.equal(before.out, after.out)
        assert torch.equal(before.lse, after.lse)
    if fill.number != fill.number:
        # A query that sees all keys meets NaN in numbers, in FP8 and in scales.
        whole = attention(replace(inputs, window_left=-1))
        assert whole.out.isnan().any()


@pytest.mark.parametrize("kv_cache", ["", "int8_per_token_head", "fp8_per_token_head"])
def test_a_kernel_that_multiplies_freed_pages_by_zero_is_found_in_any_cache(kv_cache: str) -> None:
    def widened(inputs: PagedAttentionInputs) -> Any:  # noqa: ANN401  a pair
        values = inputs.v_cache.float()
        if inputs.kv_cache_sf is not None:
            values = values * inputs.kv_cache_sf[1]
        spoilt = bool((values * 0).isnan().any())
        out, lse = sdpa(inputs)
        return (out * torch.nan, lse) if spoilt else (out, lse)

    features = ("per_token_head_kv",)
    problem = AttentionProblem(
        query_lens=(1,), seq_lens=(8,), page_size=2, window_left=1, kv_cache=kv_cache
    )
    claims: tuple[Any, ...] = ("any", "finite")
    for claim in claims:
        made: Any = implementation(
            "paged_attention", name="x", features=features, hidden_keys=claim
        )(widened)
        subject = Subject(made, Target.here("cpu"), Stages())
        said = [
            find_law("pages_behind_window").check(subject, replace(problem, seed=seed))
            for seed in range(6)
        ]
        assert all(each.bad for each in said) == (claim == "any"), said
        assert any(each.bad for each in said) == (claim == "any"), said
