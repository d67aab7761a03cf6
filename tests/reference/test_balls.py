"""The oracle in float64 beside balls of 200 bits, which hold the exact answer for certain.

What the oracle is off by takes next to nothing (``SHARE``) of the bound of a kernel that computes
in float32, of which the law ``algebra`` allows 2^-12.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import flint
import pytest
import torch
from flint import arb

from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    MergeProblem,
    MoEProblem,
    RouteProblem,
    materialise,
)
from kernelproof.reference.operations import bounded_answer
from kernelproof.reference.oracle import judge_routing, routing

BITS = 200
FLOAT32 = Arithmetic()
SHARE = 2.0**-29
"""Share of the float32 bound that the oracle's own error may take: float64's unit roundoff, 2^-53,
over float32's, 2^-24, since the bound is proportional to it."""
Balls = list[Any]


@pytest.fixture(autouse=True)
def precise() -> Iterator[None]:
    before, flint.ctx.prec = flint.ctx.prec, BITS
    yield
    flint.ctx.prec = before


def balls(numbers: torch.Tensor) -> Any:  # noqa: ANN401  nested lists as deep as the tensor
    """Return numbers as balls of no radius."""
    nested: Any = numbers.double().tolist()

    def converted(each: Any) -> Any:  # noqa: ANN401
        return [*map(converted, each)] if isinstance(each, list) else arb(each)

    return converted(nested)


def total(addends: Sequence[Any]) -> Any:  # noqa: ANN401  flint has no types
    return sum(addends, arb(0))


def product(first: Sequence[Any], second: Sequence[Any]) -> Any:  # noqa: ANN401
    return total([a * b for a, b in zip(first, second, strict=True)])


def flat(nested: Any) -> Iterator[Any]:  # noqa: ANN401
    for each in nested:
        yield from flat(each) if isinstance(each, list) else [each]


def share(found: torch.Tensor, exact: Any, bound: torch.Tensor) -> float:  # noqa: ANN401
    """Return the largest error, with the ball's radius, as a share of the bound."""
    shares = [0.0]
    rows = zip(found.flatten().tolist(), flat(exact), bound.flatten().tolist(), strict=True)
    for number, ball, allowed in rows:
        error = float(abs(arb(number) - ball).upper())
        shares.append(error / allowed if allowed else error * float("inf") if error else 0.0)
    return max(shares)


def softmax(logits: Balls, sink: Any = None) -> tuple[Balls, Any]:  # noqa: ANN401
    """Return probabilities and the natural logarithm of the sum; a sink is in that alone."""
    exponentials = [each.exp() for each in logits]
    divisor = total(exponentials) + (arb(0) if sink is None else sink.exp())
    return [each / divisor for each in exponentials], divisor.log()


def attended(inputs: Any) -> tuple[list[Any], list[Any]]:  # noqa: ANN401
    """Attend by the definition: causal by the ends of both, with a window, a cap and sinks."""
    q, k, v = map(balls, (inputs.q, inputs.k, inputs.v))
    sinks = None if inputs.sinks is None else balls(inputs.sinks)
    group, outs, lses = len(q[0]) // len(k[0]), [], []
    starts, key_starts = inputs.qo_indptr.tolist(), inputs.kv_indptr.tolist()
    for request, start in enumerate(starts[:-1]):
        first, end = key_starts[request : request + 2]
        offset = end - first - (starts[request + 1] - start)
        for token in range(start, starts[request + 1]):
            position = offset + token - start
            seen = [
                key
                for key in range(first, end)
                if (not inputs.causal or key - first <= position)
                and (inputs.window_left < 0 or key - first >= position - inputs.window_left)
            ]
            for head, query in enumerate(q[token]):
                logits = [product(query, k[key][head // group]) * inputs.sm_scale for key in seen]
                if cap := inputs.logits_soft_cap:
                    logits = [(each / cap).tanh() * cap for each in logits]
                weights, lse = softmax(logits, sinks and sinks[head])
                values = zip(*(v[key][head // group] for key in seen), strict=True)
                outs.append([product(weights, channel) for channel in values])
                lses.append(lse)
    return outs, lses


RAGGED = AttentionProblem(
    "ragged_attention", query_lens=(3, 1), seq_lens=(9, 17), num_kv_heads=1, group_size=2,
    head_dim_qk=16, head_dim_vo=8, causal=True,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "changed",
    [
        {"regime": "iid"},
        {"regime": "outlier_channels"},
        {"regime": "one_sign", "dtype": "bfloat16"},
        {"regime": "dominant_key", "window_left": 4},
        {"logits_soft_cap": 10.0},
        {"sinks": True, "sm_scale": 0.5},
    ],
    ids=str,
)
def test_attention_takes_next_to_nothing_of_the_float32_bound(
    changed: dict[str, Any], seed: int
) -> None:
    inputs: Any = materialise(replace(RAGGED, seed=seed, **changed))
    answer = bounded_answer(replace(inputs, out_dtype=torch.float32), FLOAT32)
    outs, lses = attended(inputs)
    assert share(answer.expected.out, outs, answer.bound.out) < SHARE
    assert share(answer.expected.lse, lses, answer.bound.lse) < SHARE


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging_takes_next_to_nothing_of_the_float32_bound(dtype: str, seed: int) -> None:
    problem = MergeProblem(num_states=4, num_tokens=3, num_heads=2, dtype=dtype, seed=seed)
    inputs: Any = materialise(problem)
    answer = bounded_answer(replace(inputs, out_dtype=torch.float32), FLOAT32)
    states, tokens, heads, dim = inputs.outs.shape
    outs, lses = balls(inputs.outs), balls(inputs.lses)
    merged, logarithms = [], []
    for token in range(tokens):
        for head in range(heads):
            weights, lse = softmax([lses[state][token][head] for state in range(states)])
            rows = [outs[state][token][head] for state in range(states)]
            merged.append([product(weights, [row[at] for row in rows]) for at in range(dim)])
            logarithms.append(lse)
    assert share(answer.expected.out, merged, answer.bound.out) < SHARE
    assert share(answer.expected.lse, logarithms, answer.bound.lse) < SHARE


def silu(x: Any) -> Any:  # noqa: ANN401
    return x / (1 + (-x).exp())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("activation", ["swiglu", "silu", "relu2", "gelu"])
def test_experts_take_next_to_nothing_of_the_float32_bound(activation: str, seed: int) -> None:
    problem = MoEProblem(num_tokens=3, activation=activation, seed=seed)
    inputs: Any = materialise(problem)
    answer = bounded_answer(replace(inputs, out_dtype=torch.float32), FLOAT32)
    hidden, w13, w2 = map(balls, (inputs.hidden, inputs.w13, inputs.w2))
    weights, ids = balls(inputs.topk_weights), inputs.topk_ids.tolist()
    alone = {
        "silu": silu,
        "relu2": lambda x: x * x if x > 0 else arb(0),
        "gelu": lambda x: x * (1 + (x / arb(2).sqrt()).erf()) / 2,
    }
    outs = []
    for token, row in enumerate(hidden):
        out = [arb(0)] * len(row)
        for expert, weight in zip(ids[token], weights[token], strict=True):
            if expert < 0:
                continue
            first = [product(row, each) for each in w13[expert]]
            half = len(first) // 2
            inner = (
                [silu(gate) * up for gate, up in zip(first[:half], first[half:], strict=True)]
                if activation == "swiglu"
                else [*map(alone[activation], first)]
            )
            out = [
                so_far + weight * product(inner, each)
                for so_far, each in zip(out, w2[expert], strict=True)
            ]
        outs.append(out)
    assert share(answer.expected.out, outs, answer.bound.out) < SHARE


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["default", "renormalize", "deepseek_v3", "llama4"])
def test_weights_of_routes_take_next_to_nothing_of_the_float32_bound(
    method: str, seed: int
) -> None:
    inputs: Any = materialise(
        RouteProblem(num_tokens=4, num_experts=8, top_k=1 if method == "llama4" else 3,
                     method=method, scaling_factor=2.5 if method == "deepseek_v3" else 1.0,
                     seed=seed)
    )  # fmt: skip
    found = routing(inputs)
    compared = judge_routing(inputs, found, FLOAT32)
    exact = []
    for row, ids in zip(balls(inputs.logits), found.topk_ids.tolist(), strict=True):
        chosen = [row[expert] for expert in ids]
        if method == "default":
            every = softmax(row)[0]
            weights = [every[expert] for expert in ids]
        elif method == "renormalize":
            weights = softmax(chosen)[0]
        else:
            scores = [1 / (1 + (-each).exp()) for each in chosen]
            divisor = total(scores) + arb(1e-20) if method == "deepseek_v3" else arb(1)
            weights = [each * inputs.scaling_factor / divisor for each in scores]
        exact.append(weights)
    assert bool(compared.ids_right.all())
    assert share(compared.expected, exact, compared.bound) < SHARE
