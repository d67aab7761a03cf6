"""The question that a batch of attention asks of the support rules."""

from __future__ import annotations

from typing import Any

import pytest

from kernelproof.impl.gating import Feature
from kernelproof.impl.gating.feature import TOKEN_SCALED_DTYPES, ZERO_POINT_DTYPES
from kernelproof.impl.gating.of_problem import feature_of
from kernelproof.reference import AttentionProblem
from kernelproof.reference.formats.cache_elements import TOKEN_SCALED, ZERO_POINTS


def asked(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], **fields: Any) -> Feature:  # noqa: ANN401
    problem = AttentionProblem("paged_attention", query_lens, seq_lens, **fields)
    return feature_of(problem, "fa2", decodes=True)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "padding"),
    [
        ((1, 4), (5, 5), "none"),
        ((1, 0), (5, 5), "no_query"),
        ((1, 0), (5, 0), "no_query"),
        ((0, 4), (5, 1), "few_keys"),
        ((0, 4, 4), (5, 1, 0), "no_keys"),
        ((1,), (0,), "no_keys"),
        ((), (), "none"),
    ],
)
def test_the_emptiest_request_is_the_padding(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...], padding: str
) -> None:
    assert asked(query_lens, seq_lens).padding == padding


def test_several_tokens_are_a_decodes_where_the_call_decodes() -> None:
    for query_lens, ragged in (((4, 4), False), ((4, 1), True), ((1, 1), False), ((1, 0), True)):
        found = asked(query_lens, (9, 9))
        assert (found.phase, found.query_len) == ("decode", max(query_lens))
        assert found.ragged_queries == ragged
    problem = AttentionProblem("paged_attention", (4, 1), (9, 9))
    prefill, xqa = feature_of(problem, "fa2"), feature_of(problem, "xqa")
    assert (prefill.phase, prefill.query_len, prefill.ragged_queries) == ("mixed", 1, False)
    assert (xqa.phase, xqa.query_len, xqa.ragged_queries) == ("decode", 4, True)


def test_a_draft_tree_is_a_mask_of_its_own() -> None:
    assert asked((4, 2), (9, 9), tree=1).mask == "tree"
    assert asked((4, 2), (9, 9), custom_mask=True).mask == "custom"


def test_rules_and_the_oracle_name_the_same_caches_with_scales_of_tokens() -> None:
    """Rules are read without torch, which the oracle's table needs."""
    assert TOKEN_SCALED_DTYPES == TOKEN_SCALED
    assert ZERO_POINT_DTYPES == ZERO_POINTS
    assert asked((1,), (5,), kv_cache=TOKEN_SCALED[0]).kv_dtype == TOKEN_SCALED[0]
