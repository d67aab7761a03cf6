"""Kernels that round operands or products: inside of the bound that says so, outside of others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.reference import Arithmetic, AttentionOutput, AttentionProblem, materialise, oracle
from kernelproof.reference.problems import ATTENTION_REGIMES
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

Rounding = Callable[[torch.Tensor], torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def unchanged(values: torch.Tensor) -> torch.Tensor:
    return values


def to_tf32(values: torch.Tensor) -> torch.Tensor:
    """Round to nearest, ties to even."""
    bits = values.float().view(torch.int32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return rounded.view(torch.float32)


def cut_to_tf32(values: torch.Tensor) -> torch.Tensor:
    return (values.float().view(torch.int32) & ~0x1FFF).view(torch.float32)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b.transpose(-1, -2)


def rounded_product(dtype: torch.dtype) -> Product:
    """Round each product of two elements before the sum."""

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.to(dtype).unsqueeze(-2) * b.to(dtype).unsqueeze(-3)).float().sum(-1)

    return multiply


def by_sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 2 * torch.sigmoid(2 * x) - 1


def attend(
    inputs: PagedAttentionInputs,
    *,
    operand: Rounding = unchanged,
    multiply: Product = product,
    dequantise: Rounding = unchanged,
    tanh: Rounding = torch.tanh,
    store: Rounding = unchanged,
    sink: Rounding = unchanged,
    lse: Rounding = unchanged,
) -> AttentionOutput:
    """Attend to one request, not causal, in float32; a kernel's roundings are arguments."""
    (length,) = inputs.metadata.seq_lens.tolist()
    keys, values = (
        cache[inputs.metadata.paged_kv_indices.long()].flatten(0, 1)[:length].float()
        for cache in (inputs.k_cache, inputs.v_cache)
    )
    group = inputs.q.shape[1] // keys.shape[1]
    k, v = (
        operand(dequantise(each * scale)).repeat_interleave(group, 1).transpose(0, 1)
        for each, scale in ((keys, inputs.k_scale), (values, inputs.v_scale))
    )
    logits = store(multiply(operand(inputs.q.float()).transpose(0, 1), k)) * inputs.sm_scale
    if cap := inputs.logits_soft_cap:
        logits = cap * tanh(logits / cap)
    if inputs.sinks is not None:  # a key of value 0
        sinks = sink(inputs.sinks)[:, None, None].expand(-1, logits.shape[1], 1)
        logits, v = torch.cat([logits, sinks], -1), torch.nn.functional.pad(v, (0, 0, 0, 1))
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    out = operand(weights) @ operand(v) / weights.sum(-1, keepdim=True)
    return AttentionOutput(
        out.transpose(0, 1).to(inputs.out_dtype), lse(logits.logsumexp(-1).transpose(0, 1))
    )


def made(call: AttentionProblem) -> PagedAttentionInputs:
    inputs = materialise(call)
    assert isinstance(inputs, PagedAttentionInputs)
    return inputs


def worst(found: AttentionOutput, inputs: PagedAttentionInputs, declared: Arithmetic) -> float:
    """Return the largest error over bound of out and lse."""
    expected, bound = oracle.bounded_attention(inputs, declared)
    ratios = [
        ((got.double() - wanted).abs() / allowed).max().item()
        for got, wanted, allowed in zip(found, expected, bound, strict=True)
    ]
    assert all(map(math.isfinite, ratios))
    return max(ratios)


def problem(regime: str, keys: int, seed: int, **fields: Any) -> AttentionProblem:  # noqa: ANN401
    usual = {"page_size": 16, "num_kv_heads": 2, "group_size": 2}
    wide = {"head_dim_qk": 64, "head_dim_vo": 64}
    return AttentionProblem(
        query_lens=(2,), seq_lens=(keys,), regime=regime, seed=seed, **{**usual, **wide, **fields}
    )


HALF = ("bfloat16", "float16")
WORDS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]] = {
    "rounded to TF32": (
        {"operands": "tfloat32"}, [{}, {"logits_soft_cap": 5.0}], {"operand": to_tf32},
    ),
    "cut off to TF32": (
        {"operands": "tfloat32"}, [{}, {"logits_soft_cap": 5.0}], {"operand": cut_to_tf32},
    ),
    **{
        f"{dtype} products": (
            {"products": "inputs"}, [{"dtype": dtype}],
            {"multiply": rounded_product(getattr(torch, dtype))},
        )
        for dtype in HALF
    },
    **{
        f"{dtype} values of an FP8 cache": (
            {"dequantized": "inputs"},
            [{"dtype": dtype, "kv_cache": cache, "k_scale": 0.3, "v_scale": scale}
             for cache in ("float8_e4m3fn", "float8_e5m2") for scale in (1.0, 0.7)],
            {"dequantise": lambda x, dtype=dtype: x.to(getattr(torch, dtype)).float()},
        )
        for dtype in HALF
    },
    **{
        f"{dtype} {word}": (
            {field: "inputs"}, [{"dtype": dtype, **more} for more in others],
            {argument: lambda x, dtype=dtype: x.to(getattr(torch, dtype)).float()},
        )
        for dtype in HALF
        for word, field, argument, others in (
            ("logits", "logits", "store", [{}, {"logits_soft_cap": 5.0}]),
            ("sinks", "sinks", "sink", [{"sinks": True}]),
            ("LSE", "lse", "lse", [{}, {"sinks": True}]),
        )
    },
    "tanh by a sigmoid": (
        {"tanh": "sigmoid"},
        [{"logits_soft_cap": cap, "head_dim_qk": 16} for cap in (1.0, 30.0, 2000.0)],
        {"tanh": by_sigmoid},
    ),
}  # fmt: skip
"""What is declared, problems for it, and what a kernel that does so rounds."""
REGIMES = [each for each in ATTENTION_REGIMES if each != "exact_grid"]
words = pytest.mark.parametrize("word", WORDS)


@words
@pytest.mark.parametrize("regime", REGIMES)
def test_it_is_inside_its_bound(word: str, regime: str) -> None:
    declared, options, roundings = WORDS[word]
    for fields in options:
        for seed, keys in enumerate((1, 7, 40, 257, 2048)):
            inputs = made(problem(regime, keys, seed, **fields))
            found = attend(inputs, **roundings)
            if "float16" in word and not found.lse.isfinite().all():
                continue  # overflow, which no bound forgives
            assert worst(found, inputs, Arithmetic(**declared)) <= 1, (fields, keys)


@words
def test_it_is_outside_of_the_bound_without_the_word(word: str) -> None:
    _, options, roundings = WORDS[word]
    inputs = [made(problem("iid", 100, seed, **options[-1])) for seed in range(4)]
    assert max(worst(attend(each, **roundings), each, Arithmetic()) for each in inputs) > 1
    assert max(worst(attend(each), each, Arithmetic()) for each in inputs) <= 1


@words
def test_a_dropped_key_is_outside_of_it(word: str) -> None:
    """The widened bound still sees one key of 100 that is not read."""
    declared, options, roundings = WORDS[word]
    whole = problem("iid", 100, 3, **{**options[0], "causal": False})
    inputs, short = made(whole), made(replace(whole, seq_lens=(99,)))
    found = attend(replace(short, q=inputs.q), **roundings)
    assert worst(found, inputs, Arithmetic(**declared)) > 1


@pytest.mark.parametrize(
    ("word", "fields"),
    [
        (Arithmetic(operands="tfloat32"), {"dtype": "bfloat16"}),
        (Arithmetic(products="inputs"), {"dtype": "float32"}),
        (Arithmetic(dequantized="inputs"), {"dtype": "bfloat16"}),
        (Arithmetic(dequantized="inputs"),
         {"dtype": "bfloat16", "kv_cache": "float8_e4m3fn", "k_scale": 0.5, "v_scale": 2.0}),
        (Arithmetic(tanh="sigmoid"), {}),
    ],
)  # fmt: skip
def test_what_loses_nothing_widens_nothing(word: Arithmetic, fields: dict[str, Any]) -> None:
    inputs = made(problem("iid", 40, 0, **fields))
    found, expected = (
        oracle.bounded_attention(inputs, each).bound for each in (word, Arithmetic())
    )
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_overflow_of_a_product_is_not_forgiven() -> None:
    """Of float16, from 65504 on: the oracle's answer is finite, and so is its bound."""
    inputs = made(problem("iid", 4, 0, dtype="float16"))
    inputs.q[..., 0], inputs.k_cache[..., 0] = 1024.0, 1024.0
    expected, bound = oracle.bounded_attention(inputs, Arithmetic(products="inputs"))
    assert not attend(inputs, multiply=rounded_product(torch.float16)).out.isfinite().any()
    assert all(each.isfinite().all() for each in (*expected, *bound))
