"""RoPE that quantises and appends, by definition: by complex numbers, by hand, and its bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.reference import Arithmetic, RopeAppendProblem, materialise, rope_and_append
from kernelproof.reference.attention.rope import ordered, rope_bounds, stored_bounds, unordered
from kernelproof.reference.tensors.rope_append import roped

PROBLEM = RopeAppendProblem(
    (3, 2), (20, 2), rope_dim=8, plain_dim=5, num_qo_heads=2, k_scale=0.11, shift=3, seed=1
)
REGIMES = ("iid", "ties", "outliers", "faint", "large", "zeros")


def by_complex_numbers(inputs: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Return rows turned as complex numbers are, in float64."""
    wide = x.double()
    part = wide[..., inputs.rotary]
    half = inputs.rope_dim // 2
    if not inputs.interleaved:
        part = torch.stack([part[..., :half], part[..., half:]], dim=-1).flatten(2)
    both = inputs.cos_sin[inputs.positions].double()
    turns = torch.complex(both[:, :half], both[:, half:]).unsqueeze(1)
    made = torch.view_as_complex(part.unflatten(2, (half, 2)).contiguous()) * turns
    found = torch.view_as_real(made)
    if not inputs.interleaved:
        found = found.transpose(2, 3)
    wide[..., inputs.rotary] = found.flatten(2)
    return wide


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("regime", REGIMES)
def test_bounds_hold_complex_products(*, interleaved: bool, latent: bool, regime: str) -> None:
    problem = replace(PROBLEM, interleaved=interleaved, latent=latent, regime=regime)
    inputs: Any = materialise(problem)
    for x in (inputs.q, inputs.k):
        wanted = by_complex_numbers(inputs, x)
        low, high = rope_bounds(
            x, inputs.cos_sin, inputs.positions, interleaved=interleaved, last=latent
        )
        assert ((wanted >= low) & (wanted <= high)).all()
        assert ((wanted.float() >= low) & (wanted.float() <= high)).all()
        if regime != "faint":
            assert (high - low).max() <= 1e-6 * wanted.abs().max()
        assert low[..., inputs.plain].equal(high[..., inputs.plain])


@pytest.mark.parametrize("regime", ["iid", "ties"])
def test_what_rounds_nothing_has_one_code(regime: str) -> None:
    inputs: Any = materialise(replace(PROBLEM, regime=regime))
    none = torch.zeros_like(inputs.positions)
    for positions in (none, inputs.positions if regime == "ties" else none):
        low, high = rope_bounds(inputs.q, inputs.cos_sin, positions)
        assert low.equal(high)
    at_zero = rope_bounds(inputs.q, inputs.cos_sin, none)[0]
    assert at_zero.equal(inputs.q.double())


def test_the_sign_of_a_sum_of_zeros_is_open_and_no_other() -> None:
    x = torch.tensor([[[-0.0, 0.0, 3.0, 3.0, -0.0]]])
    cos_sin = torch.tensor([[1.0, 0.5, 0.0, 0.5]])  # channels 0 and 2, 1 and 3 are pairs
    low, high = rope_bounds(x, cos_sin, torch.tensor([0]))
    assert low.signbit().tolist() == [[[True, True, False, False, True]]]
    assert high.signbit().tolist() == [[[False, True, False, False, True]]]
    zeros = torch.tensor([[[-0.0, 0.0, 0.0, 0.0, 0.0]]])
    low, high = rope_bounds(zeros, cos_sin, torch.tensor([0]))
    assert low.signbit().tolist() == [[[True, True, True, True, False]]]
    assert not high.signbit().any()


def test_a_call_by_hand() -> None:
    q = torch.tensor([[[1.0, 2.0, 3.0]], [[4.0, 8.0, -3.0]]], dtype=torch.bfloat16)
    cos_sin = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # a quarter turn: (x, y) becomes (-y, x)
    cache = torch.full((2, 2, 1, 3), 7.0, dtype=torch.bfloat16)
    found = rope_and_append(
        q, q, 10 * q, cos_sin, torch.tensor([1, 0]), torch.tensor([3, -1]), (cache, cache),
    )  # fmt: skip
    assert found.q.tolist() == [[[-2.0, 1.0, 3.0]], [[4.0, 8.0, -3.0]]]
    assert found.k_cache[1, 1, 0].tolist() == [-2.0, 1.0, 3.0]
    assert found.v_cache is not None
    assert found.v_cache[1, 1, 0].tolist() == [10.0, 20.0, 30.0]
    assert int((found.k_cache != cache).sum()) == 3
    assert cache.unique().tolist() == [7.0]


def test_the_last_channels_turn_where_keys_hold_the_values() -> None:
    q = torch.tensor([[[1.0, 2.0, 3.0]]])
    codes = torch.zeros(1, 2, 1, 3).to(torch.float8_e4m3fn)
    found = rope_and_append(
        q, q, None, torch.tensor([[0.0, 1.0]]), torch.tensor([0]), torch.tensor([1]),
        (codes, None), q_scale=0.25, k_scale=1000.0, q_dtype=torch.float8_e5m2,
    )  # fmt: skip
    assert found.q.float().tolist() == [[[4.0, -12.0, 8.0]]]
    assert found.v_cache is None
    assert found.k_cache[0, 0].float().tolist() == [[0.0, 0.0, 0.0]]
    least = 2.0**-9
    assert found.k_cache[0, 1].float().tolist() == [[least, -2 * least, least]]


def test_slots_and_pages_of_a_problem() -> None:
    inputs: Any = materialise(replace(PROBLEM, skipped=True, kv_layout="HND", page_size=5))
    kept = inputs.slots >= 0
    assert 0 < int(kept.sum()) < len(kept)
    assert inputs.requests[~kept].unique().tolist() == [-1]
    first = inputs.page_indptr[inputs.requests[kept].long()].long()
    pages = inputs.page_indices[first + inputs.places[kept] // 5]
    assert inputs.slots[kept].equal(pages.long() * 5 + inputs.places[kept] % 5)
    found = roped(inputs)
    changed = (found.k_cache.view(torch.uint8) != inputs.before[0].view(torch.uint8)).any(3)
    touched = changed.any(1).flatten().nonzero().flatten()
    assert set(touched.tolist()) <= set(inputs.slots[kept].tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_orders_are_those_of_numbers(dtype: torch.dtype) -> None:
    width = torch.int16 if dtype.itemsize > 1 else torch.int8
    limits = torch.iinfo(width)
    every = torch.arange(limits.min, limits.max + 1).to(width).view(dtype)
    assert unordered(ordered(every), dtype).view(width).equal(every.view(width))
    numbers = every.double()
    finite = numbers.isfinite()
    order, numbers = ordered(every)[finite].argsort(), numbers[finite]
    assert (numbers[order].diff() >= 0).all()


def test_what_is_rounded_to_16_bits_is_one_of_two() -> None:
    inputs: Any = materialise(PROBLEM)
    low, high = rope_bounds(
        inputs.q, inputs.cos_sin, inputs.positions, arithmetic=Arithmetic(intermediate="inputs")
    )
    assert low.to(torch.bfloat16).double().equal(low)
    least, most = stored_bounds((low, high), torch.bfloat16, 1.0)
    assert (most - least).max() <= 1


def test_caches_of_one_buffer_have_pages_apart() -> None:
    problem = replace(PROBLEM, strided_kv=True, kv_layout="HND", index_dtype="int32")
    inputs: Any = materialise(problem)
    for cache in inputs.caches:
        assert cache.stride(0) == 2 * cache[0].numel()
    assert inputs.v_cache.storage_offset() - inputs.k_cache.storage_offset() == (
        inputs.k_cache[0].numel()
    )
    assert (inputs.positions.dtype, inputs.slots.dtype) == (torch.int32, torch.int32)
    other: Any = materialise(replace(problem, strided_kv=False, index_dtype="int64"))
    for one, two in zip(roped(inputs), roped(other), strict=True):
        assert one is not None
        assert two is not None
        assert one.view(torch.uint8).equal(two.view(torch.uint8))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope_dim": 7}, "rope_dim"),
        ({"codes": ""}, "quantised_q"),
        ({"quantised_q": False, "q_scale": 2.0}, "q_scale"),
        ({"latent": True, "num_kv_heads": 2}, "latent"),
        ({"latent": True, "v_scale": 2.0}, "v_scale"),
        ({"k_scale": 0.0}, "k_scale"),
        ({"latent": True, "strided_kv": True}, "strided_kv"),
        ({"index_dtype": "int16"}, "index_dtype"),
        ({"query_lens": (2,)}, "query_lens"),
        ({"query_lens": (1, 1)}, "seq_lens"),
    ],
)
def test_a_problem_is_refused_by_its_field(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"problem field {said}"):
        RopeAppendProblem(**fields)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"k": torch.ones(3, 1, 4)}, "k"),
        ({"v": None}, "v_cache is given"),
        ({"cos_sin": torch.ones(2, 6)}, "cos_sin has 6 channels"),
        ({"slots": torch.zeros(3, dtype=torch.long)}, "slots"),
        ({"paged_kv_cache": (torch.ones(1, 4, 2, 4), torch.ones(1, 4, 1, 4))}, "k_cache"),
        ({"paged_kv_cache": (torch.ones(1, 4, 1, 4), torch.ones(1, 2, 1, 4))}, "v_cache has shape"),
        ({"paged_kv_cache": (torch.ones(1, 4, 1, 4), torch.ones(2, 4, 1, 4))}, "v_cache has shape"),
        (
            {"paged_kv_cache": (torch.ones(1, 4, 1, 4).half(),) * 2, "q_dtype": torch.float32},
            "k is torch.float32, and stored as torch.float16",
        ),
        ({"q_dtype": torch.float16}, "q is torch.float32"),
        ({"positions": torch.tensor([0, -1])}, r"positions\[1\] is out of range"),
        ({"positions": torch.tensor([2, 0])}, r"positions\[0\] is out of range"),
        ({"positions": torch.zeros(2)}, "positions must hold integers"),
        ({"slots": torch.tensor([0, 4])}, r"slots\[1\] is out of range"),
        ({"k_scale": -1.0}, "k_scale is -1.0"),
        ({"v_scale": 2.0}, "v_scale is 2.0; it must be 1"),
        ({"q_dtype": torch.float8_e4m3fn, "q_scale": 0.0}, "q_scale is 0.0"),
    ],
)
def test_a_call_is_refused_by_its_argument(given: dict[str, Any], said: str) -> None:
    rows, cache = torch.ones(2, 1, 4), torch.ones(1, 4, 1, 4)
    arguments = {
        "q": rows, "k": rows, "v": rows, "cos_sin": torch.ones(2, 4),
        "positions": torch.zeros(2, dtype=torch.long), "slots": torch.arange(2),
        "paged_kv_cache": (cache, cache), **given,
    }  # fmt: skip
    with pytest.raises(ValueError, match=said):
        rope_and_append(**arguments)
