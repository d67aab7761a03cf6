"""Masks with a structure, biases and functions of ALiBi, against a loop over rows and keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernelproof.reference import (
    build_metadata,
    paged_attention,
    ragged_attention,
    ragged_attention_error_bound,
)
from kernelproof.reference.attention import softmax

QUERIES, KEYS = (5, 1, 9, 7, 0), (11, 8, 9, 4, 3)
HEADS, KV_HEADS, DIM = 4, 2, 8
SPANS = torch.tensor(
    [[[2, 5], [6, 9]], [[0, 20], [0, 0]], [[3, 3], [1, 7]], [[0, 2], [9, 3]], [[0, 1], [0, 0]]],
    dtype=torch.int32,
)
TOTAL = sum(t * s for t, s in zip(QUERIES, KEYS, strict=True))
Sees = Callable[[int, int, int, int], bool]
"""Whether a query at a position sees a key: of request, position, key and key-value head."""
Adds = Callable[[int, int, int, int], float]
"""What is added to a logit: of query head, request, query row and key."""


def tensors(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(sum(QUERIES), HEADS, DIM, generator=draw, dtype=torch.float64),
        torch.randn(sum(KEYS), KV_HEADS, DIM, generator=draw, dtype=torch.float64),
        torch.randn(sum(KEYS), KV_HEADS, DIM, generator=draw, dtype=torch.float64),
    )


def indptr(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def by_loop(
    sees: Sees, adds: Adds | None = None, cap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend row by row and key by key."""
    q, k, v = tensors()
    out = torch.zeros(len(q), HEADS, DIM, dtype=torch.float64)
    lse = torch.full((len(q), HEADS), -math.inf, dtype=torch.float64)
    token = first = 0
    for request, (count, keys) in enumerate(zip(QUERIES, KEYS, strict=True)):
        for row in range(count):
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                weights, total = [], 0.0
                for key in range(keys):
                    if not sees(request, row + keys - count, key, kv):
                        continue
                    logit = float(q[token, head] @ k[first + key, kv]) / math.sqrt(DIM)
                    logit = cap * math.tanh(logit / cap) if cap else logit
                    logit += adds(head, request, row, key) if adds else 0.0
                    weights.append((key, math.exp(logit)))
                    total += math.exp(logit)
                for key, weight in weights:
                    out[token, head] += weight / total * v[first + key, kv]
                lse[token, head] = math.log(total) if total else -math.inf
            token += 1
        first += keys
    return out, lse


def check(sees: Sees, adds: Adds | None = None, **options: Any) -> None:  # noqa: ANN401
    """Compare the oracle of ragged keys and of pages with the loop."""
    q, k, v = tensors()
    expected = by_loop(sees, adds, options.get("logits_soft_cap", 0.0))
    found = ragged_attention(q, k, v, indptr(QUERIES), indptr(KEYS), **options)
    size = 4
    pages = [-(-length // size) for length in KEYS]
    table = torch.zeros(len(KEYS), max(pages), dtype=torch.int32)
    caches = torch.full((2, sum(pages), size, KV_HEADS, DIM), math.nan, dtype=torch.float64)
    page = first = 0
    for request, length in enumerate(KEYS):
        for number in range(pages[request]):
            table[request, number] = page
            held = range(number * size, min((number + 1) * size, length))
            for cache, rows in zip(caches, (k, v), strict=True):
                cache[page, : len(held)] = rows[first + held.start : first + held.stop]
            page += 1
        first += length
    metadata = build_metadata(list(QUERIES), list(KEYS), table, size)
    paged = paged_attention(q, caches[0], caches[1], metadata, **options)
    for answer in (found, paged):
        torch.testing.assert_close(answer.out, expected[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(answer.lse, expected[1], rtol=1e-10, atol=1e-10)


def in_same_span(request: int, position: int, key: int) -> bool:
    return any(a <= position < b and a <= key < b for a, b in SPANS[request].tolist())


@pytest.fixture(params=[False, True], ids=["whole", "row by row"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all rows at once, or each by itself."""
    if request.param:
        monkeypatch.setattr(softmax, "MAX_LOGIT_BYTES", 1)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 0, 2])
def test_spans_see_both_ways_behind_windows_and_ahead(causal: bool, window: int) -> None:
    def sees(request: int, position: int, key: int, _: int) -> bool:
        near = (not causal or key <= position) and (window < 0 or position - key <= window)
        return near or in_same_span(request, position, key)

    check(sees, causal=causal, window_left=window, spans=SPANS)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 0, 2])
def test_a_window_hides_keys_of_spans_too_where_that_is_asked_for(
    causal: bool, window: int
) -> None:
    def sees(request: int, position: int, key: int, _: int) -> bool:
        near = window < 0 or position - key <= window
        return near and (not causal or key <= position or in_same_span(request, position, key))

    check(sees, causal=causal, window_left=window, spans=SPANS, spans_in_window=True)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_a_query_sees_its_chunk_only(causal: bool, chunk: int) -> None:
    def sees(_: int, position: int, key: int, __: int) -> bool:
        together = math.floor(position / chunk) == math.floor(key / chunk)
        return together and (not causal or key <= position)

    check(sees, causal=causal, attention_chunk_size=chunk)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 4])
def test_dilation_leaves_multiples(causal: bool, window: int) -> None:
    def sees(_: int, position: int, key: int, __: int) -> bool:
        near = (not causal or key <= position) and (window < 0 or position - key <= window)
        return near and (position - key) % 3 == 0

    check(sees, causal=causal, window_left=window, window_dilation=3)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("more", [{}, {"attention_chunk_size": 4}, {"window_dilation": 2}])
def test_the_first_keys_are_seen_behind_a_window(causal: bool, more: dict[str, Any]) -> None:
    def sees(_: int, position: int, key: int, __: int) -> bool:
        near = position - key <= 1
        if "attention_chunk_size" in more:
            near = near and position // 4 == key // 4
        if "window_dilation" in more:
            near = near and (position - key) % 2 == 0
        return (near or key < 2) and (not causal or key <= position)

    check(sees, causal=causal, window_left=1, sink_tokens=2, **more)


def test_the_first_keys_stay_behind_a_right_window() -> None:
    check(
        lambda _, position, key, __: (position - key <= 1 or key < 2) and key <= position,
        causal=False,
        window_left=1,
        window_right=0,
        sink_tokens=2,
    )


@pytest.mark.usefixtures("blocks")
def test_all_at_once_with_a_mask_that_removes() -> None:
    mask = torch.rand(TOTAL, generator=torch.Generator().manual_seed(1)) < 0.7
    starts = [sum(t * s for t, s in zip(QUERIES[:i], KEYS[:i], strict=True)) for i in range(5)]

    def sees(request: int, position: int, key: int, _: int) -> bool:
        row = position - KEYS[request] + QUERIES[request]
        near = position - key <= 3 and position // 5 == key // 5 and (position - key) % 2 == 0
        seen = (near or key < 1) and key <= position
        kept = mask[starts[request] + row * KEYS[request] + key]
        return bool(kept) and (seen or in_same_span(request, position, key))

    check(
        sees,
        window_left=3,
        attention_chunk_size=5,
        window_dilation=2,
        sink_tokens=1,
        spans=SPANS,
        custom_mask=mask,
    )


@pytest.mark.usefixtures("blocks")
def test_each_key_value_head_has_a_mask_of_its_own() -> None:
    mask = torch.rand(KV_HEADS, TOTAL, generator=torch.Generator().manual_seed(2)) < 0.6
    starts = [sum(t * s for t, s in zip(QUERIES[:i], KEYS[:i], strict=True)) for i in range(5)]

    def sees(request: int, position: int, key: int, head: int) -> bool:
        row = position - KEYS[request] + QUERIES[request]
        return key <= position and bool(mask[head, starts[request] + row * KEYS[request] + key])

    check(sees, custom_mask=mask)


@pytest.mark.usefixtures("blocks")
def test_a_bias_is_added_after_the_soft_cap() -> None:
    bias = torch.randn(HEADS, TOTAL, generator=torch.Generator().manual_seed(3))
    starts = [sum(t * s for t, s in zip(QUERIES[:i], KEYS[:i], strict=True)) for i in range(5)]

    def adds(head: int, request: int, row: int, key: int) -> float:
        return float(bias[head, starts[request] + row * KEYS[request] + key])

    check(lambda _, position, key, __: key <= position, adds, logits_bias=bias, logits_soft_cap=0.7)


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_of_the_root_of_the_distance(causal: bool) -> None:
    slopes = torch.tensor([0.5, 1.0, 0.25, 2.0])

    def adds(head: int, request: int, row: int, key: int) -> float:
        position = row + KEYS[request] - QUERIES[request]
        return -float(slopes[head]) * math.sqrt(max(position - key, 0))

    check(
        lambda _, position, key, __: not causal or key <= position,
        adds,
        causal=causal,
        alibi_slopes=slopes,
        alibi_function="sqrt",
    )


def test_the_bound_holds_for_a_large_bias() -> None:
    q, k, v = (each.float() for each in tensors())
    bias = 1e4 * torch.randn(HEADS, TOTAL, generator=torch.Generator().manual_seed(4))
    ends = indptr(QUERIES), indptr(KEYS)
    exact = ragged_attention(q, k, v, *ends, causal=False, logits_bias=bias)
    bound = ragged_attention_error_bound(q, k, v, *ends, causal=False, logits_bias=bias)
    single = ragged_attention(
        q, k, v, *ends, causal=False, logits_bias=bias, compute_dtype=torch.float32
    )
    sees = exact.lse.isfinite()
    assert ((single.out - exact.out).abs() <= bound.out).all()
    assert ((single.lse - exact.lse).abs() <= bound.lse)[sees].all()
    plain = ragged_attention_error_bound(q, k, v, *ends, causal=False)
    assert bound.lse[sees].min() > plain.lse[sees].max()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"spans": SPANS[:2]}, "spans"),
        ({"spans": SPANS.float()}, "spans"),
        ({"spans": [(0, 1)]}, "spans"),
        ({"spans": SPANS, "spans_in_window": 2}, "spans_in_window"),
        ({"attention_chunk_size": -1}, "attention_chunk_size"),
        ({"window_dilation": 0}, "window_dilation"),
        ({"sink_tokens": True}, "sink_tokens"),
        ({"logits_bias": torch.zeros(HEADS, TOTAL - 1)}, "logits_bias"),
        ({"logits_bias": torch.zeros(HEADS, TOTAL, dtype=torch.int32)}, "logits_bias"),
        ({"custom_mask": torch.ones(HEADS, TOTAL, dtype=torch.bool)}, "custom_mask"),
        ({"alibi_function": "cube"}, "alibi_function"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], named: str) -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=named):
        ragged_attention(q, k, v, indptr(QUERIES), indptr(KEYS), **options)
