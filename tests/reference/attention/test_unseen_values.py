"""A row of attention is clean of NaN and infinities in keys and values that it may not see."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernelproof.reference import (
    Arithmetic,
    attention_error_bound,
    build_metadata,
    paged_attention,
    ragged_attention,
    ragged_attention_error_bound,
)

T, S, HEADS, KV_HEADS, DIM = 5, 9, 4, 2, 8
SPOILS = (math.nan, math.inf, -math.inf)
HIDING: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"causal": True, "window_left": 2},
    {"causal": False, "window_left": 1, "window_right": 1},
    {"causal": False, "custom_mask": torch.arange(T * S) % 3 != 1},
    {"causal": True, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    {"causal": True, "logits_soft_cap": 2.0},
    {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
)


def sees(options: dict[str, Any], row: int) -> list[int]:
    """Name the keys that a query row sees."""
    position = S - T + row
    keys = []
    for key in range(S):
        kept = not options["causal"] or key <= position
        kept &= options.get("window_left", -1) < 0 or key >= position - options["window_left"]
        kept &= options.get("window_right", -1) < 0 or key <= position + options["window_right"]
        if "custom_mask" in options:
            kept &= bool(options["custom_mask"][row * S + key])
        keys += [key] if kept else []
    return keys


def by_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend row by row to copies of the keys that the row sees, and to nothing else."""
    out, lse = torch.zeros(T, HEADS, DIM, dtype=torch.float64), torch.zeros(T, HEADS).double()
    for row in range(T):
        keys = sees(options, row)
        for head in range(HEADS):
            ks, vs = (each.double()[keys, head // 2] for each in (k, v))
            logits = ks @ q.double()[row, head] / math.sqrt(DIM)
            if "logits_soft_cap" in options:
                logits = 2.0 * torch.tanh(logits / 2.0)
            if "alibi_slopes" in options:
                away = torch.tensor(keys) - (S - T + row)
                logits = logits + options["alibi_slopes"][head].double() * away
            extra = [options["sinks"][head].double()[None]] if "sinks" in options else []
            whole = torch.cat([logits, *extra])
            lse[row, head] = torch.logsumexp(whole, 0)
            weights = torch.softmax(whole, 0)[: len(keys)]
            out[row, head] = (weights[:, None] * vs).sum(0)
    return out, lse


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = ((T, HEADS, DIM), (S, KV_HEADS, DIM), (S, KV_HEADS, DIM))
    return [torch.randn(size, generator=generator) for size in sizes]


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("options", HIDING, ids="-".join)
@pytest.mark.parametrize("spoilt", [(0,), (6,), (8,), (0, 6, 8)])
def test_each_row_is_as_if_it_had_its_own_keys_only(
    options: dict[str, Any], spoilt: tuple[int, ...], spoil: float
) -> None:
    q, k, v = tensors()
    for number, key in enumerate(spoilt):
        v[key, :, number::2] = (spoil, math.nan, -spoil)[number]
    expected, lse = by_rows(q, k, v, options)
    found = ragged_attention(q, k, v, torch.tensor([0, T]), torch.tensor([0, S]), **options)
    torch.testing.assert_close(found.out, expected, equal_nan=True, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.lse, lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", HIDING[:4], ids="-".join)
def test_a_key_of_nan_spoils_the_rows_that_see_it_and_no_other(options: dict[str, Any]) -> None:
    q, k, v = tensors()
    k[6], v[6] = math.nan, math.nan
    clean: Any = [each.clone() for each in tensors()]
    indptr: Any = torch.tensor([0, T]), torch.tensor([0, S])
    found = ragged_attention(q, k, v, indptr[0], indptr[1], **options)
    expected = ragged_attention(clean[0], clean[1], clean[2], indptr[0], indptr[1], **options)
    for row in range(T):
        if 6 in sees(options, row):
            assert found.out[row].isnan().all()
        else:
            assert torch.equal(found.out[row], expected.out[row])
            assert torch.equal(found.lse[row], expected.lse[row])


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize(
    "arithmetic",
    [
        Arithmetic(),
        Arithmetic(probabilities="inputs"),
        Arithmetic(operands="tfloat32", tanh="approximate"),
    ],
)
@pytest.mark.parametrize("options", HIDING, ids="-".join)
def test_bounds_of_a_row_are_clean_of_what_it_does_not_see(
    options: dict[str, Any], arithmetic: Arithmetic, spoil: float
) -> None:
    q, k, v = tensors()
    k[6], v[6] = spoil, spoil
    clean: Any = tensors()
    clean[1][6], clean[2][6] = 0.0, 0.0
    indptr: Any = torch.tensor([0, T]), torch.tensor([0, S])
    found = ragged_attention_error_bound(
        q, k, v, indptr[0], indptr[1], arithmetic=arithmetic, **options
    )
    expected = ragged_attention_error_bound(
        clean[0], clean[1], clean[2], *indptr, arithmetic=arithmetic, **options
    )
    for row in range(T):
        if 6 not in sees(options, row):
            torch.testing.assert_close(found.out[row], expected.out[row])
            torch.testing.assert_close(found.lse[row], expected.lse[row])


def test_pages_behind_the_window_of_one_request_and_seen_by_another() -> None:
    q = torch.randn(2, 2, DIM, generator=torch.Generator().manual_seed(3))
    cache = torch.randn(6, 4, 1, DIM, generator=torch.Generator().manual_seed(4))
    metadata = build_metadata([1, 1], [12, 4], [[0, 1, 2], [0, 9, 9]], 4)
    options: dict[str, Any] = {"causal": True, "window_left": 3}
    before = paged_attention(q, cache, cache, metadata, **options)
    spoilt = cache.clone()
    spoilt[0] = math.nan
    after = paged_attention(q, spoilt, spoilt, metadata, **options)
    assert torch.equal(after.out[0], before.out[0])
    assert after.out[1].isnan().all()
    bound = attention_error_bound(q, spoilt, spoilt, metadata, **options)
    assert bound.out[0].isfinite().all()
    assert bound.lse[0].isfinite().all()
