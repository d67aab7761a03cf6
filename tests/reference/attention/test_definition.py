"""Paged and ragged attention against loops, torch's own attention and exact arithmetic."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from kernelproof.reference import (
    AttentionOutput,
    BatchMetadata,
    attention_error_bound,
    build_metadata,
    paged_attention,
    ragged_attention,
    ragged_attention_error_bound,
)

FLOAT64 = torch.float64
NAN = math.nan


@dataclass(frozen=True)
class Case:
    """One call, with the block table and lengths that its metadata were built from."""

    query_lens: list[int]
    seq_lens: list[int]
    block_table: list[list[int]]
    q: torch.Tensor
    k_cache: torch.Tensor  # NHD or HND
    v_cache: torch.Tensor
    metadata: BatchMetadata
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> str:
        return str(self.options.get("kv_layout", "NHD"))

    def run(self, **changes: Any) -> AttentionOutput:  # noqa: ANN401  the oracle's options
        options = {**self.options, **changes}
        return paged_attention(self.q, self.k_cache, self.v_cache, self.metadata, **options)

    def ragged(self) -> dict[str, Any]:
        """Gather q, k, v and indptrs, slot by slot out of the block table."""
        k, v = ([], [])
        for row, length in zip(self.block_table, self.seq_lens, strict=True):
            for position in range(length):
                page, slot = divmod(position, self.metadata.page_size)
                at = (row[page], slot) if self.layout == "NHD" else (row[page], slice(None), slot)
                k.append(self.k_cache[at])
                v.append(self.v_cache[at])
        heads = self.k_cache.shape[2 if self.layout == "NHD" else 1]
        ends = [sum(self.seq_lens[:i]) for i in range(len(self.seq_lens) + 1)]
        return {
            "q": self.q,
            "k": torch.stack(k) if k else self.q.new_zeros((0, heads, self.k_cache.shape[-1])),
            "v": torch.stack(v) if v else self.q.new_zeros((0, heads, self.v_cache.shape[-1])),
            "qo_indptr": self.metadata.qo_indptr,
            "kv_indptr": torch.tensor(ends, dtype=torch.int32),
        }

    def ragged_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name != "kv_layout"}


def make_case(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    page_size: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    dim_qk: int = 8,
    dim_vo: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: Any,  # noqa: ANN401  the oracle's options
) -> Case:
    """Make a batch whose pages lie scattered among NaN pages, with NaN behind the last key."""
    chance = random.Random(seed)  # noqa: S311  a shuffle
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-length // page_size) for length in seq_lens]
    ids = chance.sample(range(sum(pages) + 3), sum(pages))
    width = max(pages, default=0) + 1
    table = []
    for count in pages:
        own, ids = ids[:count], ids[count:]
        table.append(own + [chance.choice([-5, 10**6, 0]) for _ in range(width - count)])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_pages = sum(pages) + 3
    k_cache = torch.full((num_pages, page_size, kv_heads, dim_qk), NAN, dtype=dtype)
    v_cache = torch.full((num_pages, page_size, kv_heads, dim_vo), NAN, dtype=dtype)
    for row, length in zip(table, seq_lens, strict=True):
        for position in range(length):
            page, slot = row[position // page_size], position % page_size
            k_cache[page, slot] = normal(kv_heads, dim_qk)
            v_cache[page, slot] = normal(kv_heads, dim_vo)
    if options.get("kv_layout") == "HND":
        k_cache = k_cache.transpose(1, 2).contiguous()
        v_cache = v_cache.transpose(1, 2).contiguous()
    return Case(
        query_lens,
        seq_lens,
        table,
        normal(sum(query_lens), heads, dim_qk),
        k_cache,
        v_cache,
        build_metadata(query_lens, seq_lens, table, page_size),
        options,
    )


class Defined(NamedTuple):
    """Attention by definition, nested lists [tokens][heads]([dim])."""

    out: list[list[list[float]]]
    lse: list[list[float]]


def define(case: Case) -> Defined:
    """Loop over requests, tokens, heads and keys, with correctly rounded sums."""
    options = case.options
    heads, dim = case.q.shape[1:]
    kv_heads = case.k_cache.shape[2 if case.layout == "NHD" else 1]
    scale = options.get("sm_scale")
    scale = dim**-0.5 if scale is None else scale
    q = case.q.double().tolist()
    k_cache, v_cache = case.k_cache.double().tolist(), case.v_cache.double().tolist()
    sinks = options["sinks"].double().tolist() if "sinks" in options else [None] * heads
    mask = options["custom_mask"].tolist() if "custom_mask" in options else None
    result = Defined([], [])
    token = mask_start = 0
    for request, (query_len, seq_len) in enumerate(
        zip(case.query_lens, case.seq_lens, strict=True)
    ):
        for row in range(query_len):
            seen = [
                key
                for key in range(seq_len)
                if is_visible(row + seq_len - query_len, key, options)
                and (mask is None or mask[mask_start + row * seq_len + key])
            ]
            pages = [divmod(key, case.metadata.page_size) for key in seen]
            slots = [(case.block_table[request][page], slot) for page, slot in pages]
            outs, lses = [], []
            for head in range(heads):
                group = head // (heads // kv_heads)
                keys, values = (
                    [read(cache[page], case.layout, slot, group) for page, slot in slots]
                    for cache in (k_cache, v_cache)
                )
                out, lse = define_row(
                    q[token][head],
                    [[x * factor(options, "k_scale", group) for x in key] for key in keys],
                    [[x * factor(options, "v_scale", group) for x in value] for value in values],
                    scale=scale,
                    cap=options.get("logits_soft_cap", 0.0),
                    sink=sinks[head],
                    width=case.v_cache.shape[-1],
                )
                outs.append(out)
                lses.append(lse)
            result.out.append(outs)
            result.lse.append(lses)
            token += 1
        mask_start += query_len * seq_len
    return result


def read(page: list[list[list[float]]], layout: str, slot: int, kv_head: int) -> list[float]:
    return page[slot][kv_head] if layout == "NHD" else page[kv_head][slot]


def factor(options: dict[str, Any], name: str, kv_head: int) -> float:
    scale = options.get(name, 1.0)
    return float(scale.flatten()[kv_head]) if isinstance(scale, torch.Tensor) else float(scale)


def is_visible(position: int, key: int, options: dict[str, Any]) -> bool:
    """Whether a query at this position of the sequence sees this key."""
    window = options.get("window_left", -1)
    if options.get("causal", True) and key > position:
        return False
    return bool(window == -1 or key >= position - window)


def define_row(
    q: list[float],
    keys: list[list[float]],
    values: list[list[float]],
    *,
    scale: float,
    cap: float,
    sink: float | None,
    width: int,
) -> tuple[list[float], float]:
    logits = [scale * math.fsum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    if cap:
        logits = [cap * math.tanh(logit / cap) for logit in logits]
    every = logits if sink is None or sink == -math.inf else [*logits, sink]
    if not every:
        return [0.0] * width, -math.inf
    largest = max(every)
    total = math.fsum(math.exp(logit - largest) for logit in every)
    weights = [math.exp(logit - largest) / total for logit in logits]
    out = [
        math.fsum(w * value[e] for w, value in zip(weights, values, strict=True))
        for e in range(width)
    ]
    return out, largest + math.log(total)


def assert_close(found: AttentionOutput, expected: Defined | AttentionOutput) -> None:
    """Allow the roundings of float64 and no more."""
    for name in ("out", "lse"):
        actual, wanted = getattr(found, name), getattr(expected, name)
        if isinstance(wanted, list):
            wanted = torch.tensor(wanted, dtype=FLOAT64).reshape(actual.shape)
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12, msg=name)


MIXED = ([1, 3, 0, 2, 1, 5], [6, 7, 5, 0, 1, 3])  # decode, chunk, no tokens, no keys, 1, surplus
MASK_SIZE = sum(query_len * seq_len for query_len, seq_len in zip(*MIXED, strict=True))
MASK = torch.rand(MASK_SIZE, generator=torch.Generator().manual_seed(7)) < 0.6

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "not causal": {"causal": False},
    "window 0": {"window_left": 0},
    "window 1": {"window_left": 1},
    "window 3": {"window_left": 3},
    "window beyond every key": {"window_left": 10**6},
    "window, not causal": {"window_left": 2, "causal": False},
    "scale": {"sm_scale": 0.7},
    "negative scale": {"sm_scale": -0.3},
    "zero scale": {"sm_scale": 0.0},
    "soft cap": {"logits_soft_cap": 0.8},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 40.0, -90.0])},
    "sinks of -inf": {"sinks": torch.full((4,), -math.inf)},
    "scales": {"k_scale": 0.5, "v_scale": 3.0},
    "scales a head": {
        "k_scale": torch.tensor([0.5, 2.0]),
        "v_scale": torch.tensor([-1.5, 0.25]),
    },
    "custom mask": {"custom_mask": MASK},
    "custom mask alone": {"custom_mask": MASK, "causal": False},
    "custom mask of nothing": {"custom_mask": torch.zeros(MASK_SIZE, dtype=torch.bool)},
    "everything": {
        "window_left": 3,
        "sm_scale": 0.6,
        "logits_soft_cap": 1.5,
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        "custom_mask": MASK,
        "k_scale": torch.tensor([0.5, 2.0]),
        "v_scale": 2.0,
    },
}
features = pytest.mark.parametrize("options", FEATURES.values(), ids=list(FEATURES))
layouts = pytest.mark.parametrize("kv_layout", ["NHD", "HND"])


@layouts
@features
def test_the_definition(options: dict[str, Any], kv_layout: str) -> None:
    case = make_case(*MIXED, dim_vo=5, kv_layout=kv_layout, **options)
    assert_close(case.run(), define(case))


@layouts
@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 16])
def test_group_sizes(group: int, kv_layout: str) -> None:
    case = make_case(
        [2, 1], [3, 6], heads=2 * group, kv_heads=2, dim_qk=4, dim_vo=3, kv_layout=kv_layout
    )
    assert_close(case.run(), define(case))


@pytest.mark.parametrize("page_size", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, FLOAT64])
def test_page_sizes_and_dtypes(page_size: int, dtype: torch.dtype) -> None:
    case = make_case(*MIXED, page_size=page_size, dtype=dtype, dim_qk=6, dim_vo=10)
    found = case.run()
    assert found.out.dtype == found.lse.dtype == FLOAT64
    assert_close(found, define(case))


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  test data
    requests = chance.randint(0, 5)
    query_lens = [chance.choice([0, 1, 1, 2, 5]) for _ in range(requests)]
    seq_lens = [chance.choice([0, 1, 3, 4, 5, 8, 11]) for _ in range(requests)]
    kv_heads = chance.choice([1, 2, 3])
    options: dict[str, Any] = {
        "kv_layout": chance.choice(["NHD", "HND"]),
        "causal": chance.random() < 0.7,
        "window_left": chance.choice([-1, 0, 2, 6]),
        "logits_soft_cap": chance.choice([0.0, 2.0]),
    }
    case = make_case(
        query_lens,
        seq_lens,
        page_size=chance.choice([1, 2, 4, 7]),
        heads=kv_heads * chance.choice([1, 2, 3]),
        kv_heads=kv_heads,
        dim_qk=chance.choice([1, 4, 7]),
        dim_vo=chance.choice([1, 4, 9]),
        seed=seed,
        **options,
    )
    assert_close(case.run(), define(case))


@features
def test_ragged_equals_paged(options: dict[str, Any]) -> None:
    case = make_case(*MIXED, dim_vo=5, kv_layout="HND", **options)
    ragged = ragged_attention(**case.ragged(), **case.ragged_options())
    assert all(torch.equal(*pair) for pair in zip(ragged, case.run(), strict=True))


def test_ragged_takes_what_it_is_told_from_lists_of_lengths() -> None:
    case = make_case(*MIXED)
    arguments = case.ragged()
    for dtype in (torch.int32, torch.int64):
        arguments["qo_indptr"] = arguments["qo_indptr"].to(dtype)
        arguments["kv_indptr"] = arguments["kv_indptr"].to(dtype)
        assert_close(ragged_attention(**arguments), define(case))


# Torch's own attention


def dense_mask(query_len: int, seq_len: int, options: dict[str, Any]) -> torch.Tensor:
    rows = range(seq_len - query_len, seq_len)
    return torch.tensor(
        [[is_visible(row, key, options) for key in range(seq_len)] for row in rows],
        dtype=torch.bool,
    ).reshape(query_len, seq_len)


def dense_requests(
    case: Case,
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return each request's token slice and q, k, v as [1, heads, length, dim] in float64."""
    tensors = case.ragged()
    ends = tensors["kv_indptr"].tolist()
    token = 0
    for request, query_len in enumerate(case.query_lens):
        tokens = slice(token, token + query_len)
        keys = slice(ends[request], ends[request + 1])
        q, k, v = (
            tensor.double().transpose(0, 1).unsqueeze(0)
            for tensor in (case.q[tokens], tensors["k"][keys], tensors["v"][keys])
        )
        yield tokens, q, k, v
        token += query_len


LONGER = ([1, 37, 12, 3], [130, 37, 65, 3])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim_qk", "dim_vo"),
    [(4, 4, 64, 64), (6, 2, 80, 80), (7, 1, 16, 48), (16, 1, 192, 128), (10, 2, 32, 32)],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False, "sm_scale": 0.05},
        {"window_left": 20},
        {"window_left": 0},
        {"custom_mask": "random"},
    ],
    ids=str,
)
def test_scaled_dot_product_attention(
    heads: int, kv_heads: int, dim_qk: int, dim_vo: int, options: dict[str, Any]
) -> None:
    masks = [dense_mask(t, s, options) for t, s in zip(*LONGER, strict=True)]
    if "custom_mask" in options:
        generator = torch.Generator().manual_seed(1)
        drawn = [torch.rand(mask.shape, generator=generator) < 0.5 for mask in masks]
        options = {**options, "custom_mask": torch.cat([each.flatten() for each in drawn])}
        masks = [mask & each for mask, each in zip(masks, drawn, strict=True)]
    case = make_case(
        *LONGER,
        page_size=16,
        heads=heads,
        kv_heads=kv_heads,
        dim_qk=dim_qk,
        dim_vo=dim_vo,
        dtype=torch.bfloat16,
        **options,
    )
    found = case.run().out
    for mask, (tokens, q, k, v) in zip(masks, dense_requests(case), strict=True):
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=options.get("sm_scale"), enable_gqa=True
        )
        expected = expected[0].transpose(0, 1)
        expected[~mask.any(dim=1)] = 0.0  # a row without a key is NaN or 0 there, by version
        torch.testing.assert_close(found[tokens], expected, rtol=1e-11, atol=1e-12)


FLEX: list[dict[str, Any]] = [
    {},
    {"causal": False, "sm_scale": 0.05},
    {"window_left": 9},
    {"window_left": 3, "causal": False},
    {"logits_soft_cap": 1.5, "sm_scale": 1.0},
    {"logits_soft_cap": 30.0, "window_left": 20},
]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("options", FLEX, ids=str)
def test_flex_attention(options: dict[str, Any]) -> None:
    case = make_case(*LONGER, page_size=16, heads=6, kv_heads=2, dim_qk=32, dim_vo=48, **options)
    found = case.run()
    cap = options.get("logits_soft_cap", 0.0)
    causal, window = options.get("causal", True), options.get("window_left", -1)
    for tokens, q, k, v in dense_requests(case):
        offset = k.shape[2] - q.shape[2]

        def score_mod(
            score: torch.Tensor,
            batch: torch.Tensor,  # noqa: ARG001  flex_attention's signature
            head: torch.Tensor,  # noqa: ARG001
            row: torch.Tensor,
            key: torch.Tensor,
            offset: int = offset,
        ) -> torch.Tensor:
            if cap:
                score = cap * torch.tanh(score / cap)
            if causal:
                score = torch.where(row + offset >= key, score, -math.inf)
            if window >= 0:
                score = torch.where(row + offset - key <= window, score, -math.inf)
            return score

        out, aux = flex_attention(
            q,
            k,
            v,
            score_mod=score_mod,
            scale=options.get("sm_scale"),
            enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )
        torch.testing.assert_close(
            found.out[tokens], out[0].transpose(0, 1), rtol=1e-11, atol=1e-12
        )
        assert aux.lse is not None
        torch.testing.assert_close(
            found.lse[tokens], aux.lse[0].transpose(0, 1), rtol=1e-12, atol=1e-12
        )


# Exact arithmetic, compared bitwise


@features
def test_equal_logits_show_exactly_which_keys_a_row_sees(options: dict[str, Any]) -> None:
    # With V the identity and logits that are all 0, a row's output is 1 / count where it sees.
    kept = {k: v for k, v in options.items() if k in {"causal", "window_left", "custom_mask"}}
    case = make_case(*MIXED, heads=2, kv_heads=1, dim_vo=7, **kept)
    case.q.zero_()
    for row, length in zip(case.block_table, case.seq_lens, strict=True):
        for position in range(length):
            one_hot = torch.eye(7)[position]
            case.v_cache[row[position // 4], position % 4] = one_hot
    found = case.run()
    masks = [dense_mask(t, s, kept) for t, s in zip(*MIXED, strict=True)]
    if "custom_mask" in kept:
        sizes = [mask.numel() for mask in masks]
        flat = torch.split(kept["custom_mask"], sizes)
        masks = [m & f.view(m.shape) for m, f in zip(masks, flat, strict=True)]
    padded = torch.cat([torch.nn.functional.pad(mask, (0, 7 - mask.shape[1])) for mask in masks])
    counts = padded.sum(dim=1, keepdim=True).double()
    expected = torch.where(padded, 1.0 / counts, 0.0)
    assert torch.equal(found.out, expected.unsqueeze(1).expand(-1, 2, -1))
    assert torch.equal(found.lse, torch.log(counts).expand(-1, 2))


def test_equal_logits_with_a_power_of_two_of_keys_are_a_plain_mean() -> None:
    case = make_case([1, 1, 1], [1, 8, 64], dtype=torch.bfloat16, dim_vo=3)
    case.q.zero_()
    values = case.v_cache
    values.copy_((values * 8).round())  # dyadic, so that every partial sum is exact
    tensors = case.ragged()
    found = case.run()
    for request, (start, count) in enumerate([(0, 1), (1, 8), (9, 64)]):
        mean = tensors["v"][start : start + count].double().sum(dim=0) / count
        assert torch.equal(found.out[request], mean.repeat_interleave(2, dim=0))


def test_one_dominant_key_is_copied() -> None:
    case = make_case([1, 4], [9, 13], heads=6, kv_heads=2, dim_qk=4, sm_scale=1.0)
    case.q.fill_(1.0)
    case.k_cache.copy_(torch.where(case.k_cache.isnan(), NAN, 0.0))
    tensors = case.ragged()
    for request, position, key in ((0, 5, 5), (1, 2, 11)):
        page = case.block_table[request][position // 4]
        case.k_cache[page, position % 4] = 250.0  # logit 1000: exp(-1000) is 0 in float64
        rows = [0] if request == 0 else [1, 2, 3, 4]
        found = case.run()
        for row in rows:
            expected = tensors["v"][key].double().repeat_interleave(3, dim=0)
            assert torch.equal(found.out[row], expected)
            assert torch.equal(found.lse[row], torch.full((6,), 1000.0, dtype=FLOAT64))


def test_a_softmax_by_hand() -> None:
    q = torch.tensor([[[1.0]]], dtype=FLOAT64)
    k = torch.tensor([[[0.0]], [[math.log(3.0)]]], dtype=FLOAT64)
    v = torch.tensor([[[8.0]], [[16.0]]], dtype=FLOAT64)
    ends = torch.tensor([0, 1]), torch.tensor([0, 2])
    found = ragged_attention(q, k, v, *ends, sm_scale=1.0)
    assert found.out.item() == pytest.approx(14.0, rel=1e-15)
    assert found.lse.item() == pytest.approx(math.log(4.0), rel=1e-15)
    # A sink of log 4 doubles the denominator; v_scale halves what is left.
    sinks = torch.tensor([math.log(4.0)], dtype=FLOAT64)
    found = ragged_attention(q, k, v, *ends, sm_scale=1.0, sinks=sinks, v_scale=0.5)
    assert found.out.item() == pytest.approx(3.5, rel=1e-15)
    assert found.lse.item() == pytest.approx(math.log(8.0), rel=1e-15)


def test_logits_beyond_the_range_of_exp() -> None:
    q = torch.tensor([[[1e3]]])
    k = torch.tensor([[[-1e3]], [[1e3]], [[1e3]]])
    v = torch.tensor([[[5.0]], [[2.0]], [[4.0]]])
    for sign in (1.0, -1.0):
        found = ragged_attention(q, k, v, torch.tensor([0, 1]), torch.tensor([0, 3]), sm_scale=sign)
        expected = (3.0, 1e6 + math.log(2.0)) if sign > 0 else (5.0, 1e6)
        assert (found.out.item(), found.lse.item()) == expected


# Rows that see nothing


@layouts
def test_rows_that_see_no_key(kv_layout: str) -> None:
    case = make_case([2, 5, 1], [0, 3, 4], kv_layout=kv_layout)
    found = case.run()
    blind = [0, 1, 2, 3]  # a request without keys, and the surplus rows of five for three keys
    assert torch.equal(found.out[blind], torch.zeros(4, 4, 8, dtype=FLOAT64))
    assert torch.equal(found.lse[blind], torch.full((4, 4), -math.inf, dtype=FLOAT64))
    assert found.out[4:].isfinite().all()
    assert found.lse[4:].isfinite().all()
    sinks = torch.tensor([0.5, -1.0, 3e4, -3e4])
    found = case.run(sinks=sinks)
    assert torch.equal(found.out[blind], torch.zeros(4, 4, 8, dtype=FLOAT64))
    assert torch.equal(found.lse[blind], sinks.double().expand(4, -1))


def test_no_request_and_no_token() -> None:
    for query_lens, seq_lens in (([], []), ([0, 0], [5, 0])):
        found = make_case(query_lens, seq_lens, dim_vo=3).run()
        assert found.out.shape == (0, 4, 3)
        assert found.lse.shape == (0, 4)


# What must not matter


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View as integers: NaN equals itself only there."""
    return tensor.contiguous().view(torch.uint8)


@features
def test_no_input_is_changed(options: dict[str, Any]) -> None:
    case = make_case(*MIXED, kv_layout="HND", **options)
    tensors = [case.q, case.k_cache, case.v_cache, *case.metadata.tensors().values()]
    tensors += [value for value in options.values() if isinstance(value, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    arguments = (case.q, case.k_cache, case.v_cache, case.metadata)
    ragged = case.ragged()
    ragged_before = {name: tensor.clone() for name, tensor in ragged.items()}
    for compute_dtype in (torch.float32, FLOAT64):
        paged_attention(*arguments, **case.options, compute_dtype=compute_dtype)
        attention_error_bound(*arguments, **case.options, compute_dtype=compute_dtype)
        ragged_attention(**ragged, **case.ragged_options(), compute_dtype=compute_dtype)
        ragged_attention_error_bound(**ragged, **case.ragged_options(), compute_dtype=compute_dtype)
    assert all(torch.equal(bits(old), bits(new)) for old, new in zip(before, tensors, strict=True))
    assert all(torch.equal(bits(ragged_before[name]), bits(ragged[name])) for name in ragged)


def test_the_output_never_aliases_an_input() -> None:
    case = make_case([1], [1], dtype=FLOAT64)
    q, k_cache, v_cache = case.q.clone(), case.k_cache.clone(), case.v_cache.clone()
    found = case.run()
    found.out.fill_(7.0)
    found.lse.fill_(7.0)
    for old, new in ((q, case.q), (k_cache, case.k_cache), (v_cache, case.v_cache)):
        assert torch.equal(bits(old), bits(new))


@features
def test_float32_on_request(options: dict[str, Any]) -> None:
    case = make_case(*MIXED, dtype=torch.bfloat16, **options)
    found, exact = case.run(compute_dtype=torch.float32), case.run()
    assert found.out.dtype == found.lse.dtype == torch.float32
    torch.testing.assert_close(found.out.double(), exact.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse.double(), exact.lse, rtol=1e-5, atol=1e-5)


@features
@pytest.mark.parametrize("limit", [1, 600])
def test_blocks_of_rows_change_nothing(
    options: dict[str, Any], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case([7, 1, 12], [9, 30, 5], **without_mask(options))
    if "custom_mask" in options:
        drawn = torch.rand(63 + 30 + 60, generator=torch.Generator().manual_seed(3)) < 0.5
        case = replace(case, options={**case.options, "custom_mask": drawn})
    whole = case.run()
    monkeypatch.setattr("kernelproof.reference.attention.softmax.MAX_LOGIT_BYTES", limit)
    assert_close(case.run(), whole)


def without_mask(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "custom_mask"}


@features
def test_strides_change_nothing(options: dict[str, Any]) -> None:
    case = make_case(*MIXED, dim_vo=8, **options)
    packed = torch.full((case.q.shape[0], 4 + 2 + 2, 8), NAN)
    packed[:, :4] = case.q
    both = torch.stack([case.k_cache, case.v_cache], dim=1)  # one cache holds K and V, a page each
    wide = torch.full((*case.k_cache.shape[:3], 19), NAN)
    wide[..., 3:11] = case.v_cache
    every_other = torch.full((*case.k_cache.shape[:-1], 16), NAN)
    every_other[..., ::2] = case.k_cache
    expected = case.run()
    for strided in (
        replace(case, q=packed[:, :4], k_cache=both[:, 0], v_cache=both[:, 1]),
        replace(case, k_cache=every_other[..., ::2], v_cache=wide[..., 3:11]),
        replace(case, q=case.q.transpose(0, 2).contiguous().transpose(0, 2)),
    ):
        assert_close(strided.run(), expected)


def test_an_hnd_view_of_an_nhd_cache() -> None:
    case = make_case(*MIXED)
    viewed = replace(
        case, k_cache=case.k_cache.transpose(1, 2), v_cache=case.v_cache.transpose(1, 2)
    )
    assert_close(viewed.run(kv_layout="HND"), case.run())


def test_shared_pages() -> None:
    case = make_case([1, 2, 3], [9, 10, 12])
    table = [row[:] for row in case.block_table]
    table[1][:2] = table[2][:2] = table[0][:2]  # a prefix of two pages in common
    shared = replace(
        case, block_table=table, metadata=build_metadata([1, 2, 3], [9, 10, 12], table, 4)
    )
    assert_close(shared.run(), define(shared))


@layouts
def test_garbage_where_no_row_looks(kv_layout: str) -> None:
    # The unused pages and the tail of the last page hold NaN in every case here: another garbage,
    # also in the keys behind the window of every row, must give the same bits.
    case = make_case([1, 2, 3], [11, 12, 3], kv_layout=kv_layout, window_left=2)
    filled = replace(
        case, k_cache=case.k_cache.nan_to_num(1e30), v_cache=case.v_cache.nan_to_num(1e30)
    )
    expected = filled.run()
    assert expected.out.isfinite().all()
    for garbage in (NAN, math.inf, -3e38):
        for request, first_seen in ((0, 8), (1, 8), (2, 0)):
            for position in range(first_seen):
                page, slot = case.block_table[request][position // 4], position % 4
                for cache in (case.k_cache, case.v_cache):
                    where = (page, slot) if kv_layout == "NHD" else (page, slice(None), slot)
                    cache[where] = garbage
        found = case.run()
        assert torch.equal(found.out, expected.out)
        assert torch.equal(found.lse, expected.lse)
        bound = attention_error_bound(
            case.q, case.k_cache, case.v_cache, case.metadata, **case.options
        )
        assert bound.out.isfinite().all()
        assert bound.lse.isfinite().all()


def test_a_block_of_rows_reads_only_what_its_rows_see(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([3], [6])
    expected = case.run()
    page, slot = case.block_table[0][1], 1
    case.v_cache[page, slot] = NAN  # the last key, which the last row alone sees
    monkeypatch.setattr("kernelproof.reference.attention.softmax.MAX_LOGIT_BYTES", 1)
    found = case.run()
    torch.testing.assert_close(found.out[:2], expected.out[:2], rtol=1e-12, atol=1e-12)
    assert found.out[2].isnan().all()


def test_garbage_keys_that_the_mask_hides_from_every_row() -> None:
    case = make_case([2], [8], custom_mask=torch.tensor([[True] * 5 + [False] * 3] * 2).flatten())
    expected = case.run()
    page = case.block_table[0][1]
    case.k_cache[page, 1:] = NAN
    found = case.run()
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised_caches_are_read_as_their_codes(dtype: torch.dtype) -> None:
    case = make_case(*MIXED, k_scale=torch.tensor([0.5, 2.0]), v_scale=0.25)
    coded = replace(case, k_cache=case.k_cache.to(dtype), v_cache=case.v_cache.to(dtype))
    plain = replace(case, k_cache=coded.k_cache.float(), v_cache=coded.v_cache.float())
    assert_close(coded.run(), define(plain))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@features
def test_cuda_agrees(options: dict[str, Any]) -> None:
    case = make_case(*MIXED, **options)
    on_device: dict[str, Any] = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    found = paged_attention(
        case.q.cuda(),
        case.k_cache.cuda(),
        case.v_cache.cuda(),
        case.metadata.to("cuda"),
        **on_device,
    )
    assert found.out.is_cuda
    assert_close(AttentionOutput(found.out.cpu(), found.lse.cpu()), case.run())
