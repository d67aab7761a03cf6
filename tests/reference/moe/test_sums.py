"""What stands around experts: a norm of each output, a factor on the sum, gates of shared ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernelproof.reference import (
    Arithmetic,
    MoEProblem,
    QuantizedMatrix,
    materialise,
    moe,
    moe_error_bound,
    oracle,
)
from kernelproof.reference.moe.norms import OutputNorm
from kernelproof.reference.tensors.moe_inputs import MoEInputs

FLOAT64 = torch.float64
TOKENS, HIDDEN, INTER, EXPERTS, SHARED = 5, 6, 3, 4, 2


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT64)


def call() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    return {
        "hidden": draw(TOKENS, HIDDEN, seed=1),
        "w13": draw(EXPERTS, 2 * INTER, HIDDEN, seed=2),
        "w2": draw(EXPERTS, HIDDEN, INTER, seed=3),
        "topk_ids": torch.rand(TOKENS, EXPERTS, generator=generator).topk(2).indices,
        "topk_weights": torch.rand(TOKENS, 2, generator=generator, dtype=FLOAT64),
    }


def expert(x: list[float], w13: torch.Tensor, w2: torch.Tensor) -> list[float]:
    """Return an expert's output in Python's numbers."""
    first = [sum(a * b for a, b in zip(row, x, strict=True)) for row in w13.tolist()]
    middle = [
        g / (1.0 + math.exp(-g)) * u for g, u in zip(first[:INTER], first[INTER:], strict=True)
    ]
    return [sum(a * b for a, b in zip(row, middle, strict=True)) for row in w2.tolist()]


def normalised(
    y: list[float], eps: float | None, gain: list[float] | None, *, first: bool
) -> list[float]:
    if eps is None:
        return y
    if gain is not None and first:
        y = [a * b for a, b in zip(y, gain, strict=True)]
    root = math.sqrt(sum(a * a for a in y) / len(y) + eps)
    y = [a / root for a in y]
    return [a * b for a, b in zip(y, gain, strict=True)] if gain is not None and not first else y


def by_loops(
    inputs: dict[str, Any],
    *,
    eps: float | None = None,
    gain: torch.Tensor | None = None,
    first: bool = False,
    factor: float = 1.0,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
    shared_weight: float = 1.0,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.zeros(TOKENS, HIDDEN, dtype=FLOAT64)
    numbers = None if gain is None else gain.tolist()
    for token, x in enumerate(inputs["hidden"].tolist()):
        for slot in range(2):
            which = int(inputs["topk_ids"][token, slot])
            y = expert(x, inputs["w13"][which], inputs["w2"][which])
            y = normalised(y, eps, numbers, first=first)
            weight = float(inputs["topk_weights"][token, slot])
            out[token] += torch.tensor([factor * weight * a for a in y], dtype=FLOAT64)
        for which in range(len(shared[0]) if shared else 0):
            assert shared is not None
            y = expert(x, shared[0][which], shared[1][which])
            weight = shared_weight
            if gate is not None:
                weight *= float(gate[token, which if gate.shape[1] > 1 else 0])
            out[token] += torch.tensor([weight * a for a in y], dtype=FLOAT64)
    return out


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("gain", [None, draw(HIDDEN, seed=4)])
@pytest.mark.parametrize("first", [False, True])
def test_a_norm_of_each_output(eps: float, gain: torch.Tensor | None, first: bool) -> None:
    inputs = call()
    found = moe(
        **inputs,
        output_norm_eps=eps,
        output_norm_gain=gain,
        output_norm_first=first,
        routed_scaling_factor=2.5,
    )
    close(found, by_loops(inputs, eps=eps, gain=gain, first=first, factor=2.5))


@pytest.mark.parametrize("factor", [1.0, 2.5, -0.5])
@pytest.mark.parametrize("shared_weight", [1.0, 0.4])
@pytest.mark.parametrize("columns", [0, 1, SHARED])
@pytest.mark.parametrize("logits", [False, True])
def test_factors_and_gates(factor: float, shared_weight: float, columns: int, logits: bool) -> None:
    inputs = call()
    shared = draw(SHARED, 2 * INTER, HIDDEN, seed=5), draw(SHARED, HIDDEN, INTER, seed=6)
    given = draw(TOKENS, columns, seed=8) if columns else None
    gate = given
    if given is not None and logits:
        numbers = [[1.0 / (1.0 + math.exp(-a)) for a in row] for row in given.tolist()]
        gate = torch.tensor(numbers, dtype=FLOAT64)
    found = moe(
        **inputs,
        routed_scaling_factor=factor,
        shared_w13=shared[0],
        shared_w2=shared[1],
        shared_weight=shared_weight,
        shared_gate=given,
        shared_gate_logits=logits,
    )
    wanted = by_loops(inputs, factor=factor, shared=shared, shared_weight=shared_weight, gate=gate)
    close(found, wanted)


def test_a_factor_with_weights_on_the_input() -> None:
    inputs = call()
    plain = moe(**inputs, weights_on_input=True)
    close(moe(**inputs, weights_on_input=True, routed_scaling_factor=2.5), 2.5 * plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_norm_eps": 0.0}, "output_norm_eps is 0.0; it must be positive"),
        ({"output_norm_gain": torch.ones(6)}, "output_norm_eps is not: there is no norm"),
        (
            {"output_norm_eps": 1e-6, "output_norm_gain": torch.ones(5)},
            "output_norm_gain has 5 channels, but w2 has 6",
        ),
        ({"routed_scaling_factor": math.inf}, "routed_scaling_factor is inf"),
        ({"routed_scaling_factor": "2"}, "routed_scaling_factor is '2', not a number"),
        ({"shared_gate": torch.ones(5, 1)}, "shared_gate is given, but no shared experts"),
        (
            {
                "shared_w13": torch.zeros(2, 6, 6),
                "shared_w2": torch.zeros(2, 6, 3),
                "shared_gate": torch.ones(5, 3),
            },
            r"shared_gate has shape \[5, 3\]; it must be \[5, 1\] or \[5, 2\]",
        ),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe(**{**call(), **options})


@pytest.mark.parametrize("gain", [None, draw(8, seed=9)])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("size", [1e-4, 0.3])
def test_an_error_is_carried_no_further_by_the_norm(
    gain: torch.Tensor | None, first: bool, size: float
) -> None:
    norm = OutputNorm(1e-3, gain, first)
    y = draw(50, 8, seed=1)
    error = size * draw(50, 8, seed=2).abs()
    bound = norm.change(y, error, 0.0)
    reached = torch.zeros_like(y)
    for seed in range(200):
        share = torch.rand(50, 8, generator=torch.Generator().manual_seed(seed), dtype=FLOAT64)
        moved = y + error * ((2 * share - 1) if seed % 2 else (2 * share - 1).sign())
        reached = torch.maximum(reached, (norm.value(moved) - norm.value(y)).abs())
    assert (reached <= bound + 1e-12).all()
    if size < 0.1:
        assert (reached > 0.3 * bound).double().mean() > 0.8  # and is no wild guess


SUMS: list[dict[str, Any]] = [
    {"output_norm": "plain"},
    {"output_norm": "gain"},
    {"output_norm": "gain_first", "biases": True},
    {"routed_scaling_factor": 2.5, "shared_experts": 1},
    {"shared_experts": 2, "shared_gate": "weights"},
    {"shared_experts": 2, "shared_gate": "logits_each", "shared_weight": 2.5},
    {"shared_experts": 1, "shared_gate": "logits", "regime": "saturated"},
]


@pytest.mark.parametrize("changes", SUMS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_problems_say_what_is_given(changes: dict[str, Any], dtype: str) -> None:
    """Of the problem's tensors, by loops."""
    problem = MoEProblem(
        num_tokens=TOKENS,
        hidden=HIDDEN,
        inter=INTER,
        num_experts=EXPERTS,
        top_k=2,
        dtype=dtype,
        seed=3,
        **{**changes, "biases": False},
    )
    inputs = materialise(problem)
    assert isinstance(inputs, MoEInputs)
    assert inputs.routed_scaling_factor == problem.routed_scaling_factor
    wide: dict[str, Any] = {
        name: getattr(inputs, name).double() for name in ("hidden", "w13", "w2", "topk_weights")
    }
    wide["topk_ids"] = inputs.topk_ids
    shared = None
    if isinstance(inputs.shared_w13, torch.Tensor) and isinstance(inputs.shared_w2, torch.Tensor):
        shared = inputs.shared_w13.double(), inputs.shared_w2.double()
    gate = None if inputs.shared_gate is None else inputs.shared_gate.double()
    if gate is not None and inputs.shared_gate_logits:
        gate = 1.0 / (1.0 + torch.exp(-gate))
    gain = inputs.output_norm_gain
    wanted = by_loops(
        wide,
        eps=inputs.output_norm_eps,
        gain=None if gain is None else gain.double(),
        first=inputs.output_norm_first,
        factor=inputs.routed_scaling_factor,
        shared=shared,
        shared_weight=inputs.shared_weight,
        gate=gate,
    )
    close(oracle.experts(inputs), wanted)
    if problem.shared_weight:
        assert inputs.shared_weight == problem.shared_weight


@pytest.mark.parametrize("changes", SUMS, ids=str)
def test_kernels_that_round_are_inside_and_others_outside(changes: dict[str, Any]) -> None:
    """A kernel that stores each expert's output, the sigmoids and their product in bfloat16."""
    problem = MoEProblem(
        num_tokens=40,
        hidden=64,
        inter=48,
        num_experts=EXPERTS,
        top_k=2,
        dtype="bfloat16",
        seed=3,
        **changes,
    )
    inputs = materialise(problem)
    assert isinstance(inputs, MoEInputs)
    arithmetic = Arithmetic(intermediate="inputs", projections="inputs", partial_outputs=True)
    expected, bound = oracle.bounded_experts(inputs, arithmetic)
    assert ((rounding(inputs) - expected).abs() / bound).max() < 0.95
    off: dict[str, dict[str, Any]] = {
        "output_norm": {"output_norm_eps": None, "output_norm_gain": None},
        "routed_scaling_factor": {"routed_scaling_factor": 1.0},
        "shared_gate": {"shared_gate": None},
    }
    for name in off.keys() & changes.keys():
        other = moe(*inputs.tensors(), **{**inputs.keywords(), **off[name]})
        assert ((other - expected).abs() / bound).max() > 2


def numbers(matrix: torch.Tensor | QuantizedMatrix | None) -> torch.Tensor:
    assert isinstance(matrix, torch.Tensor)
    return matrix.float()


def stored(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


def outputs(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    bias: torch.Tensor | float = 0.0,
    bias2: torch.Tensor | float = 0.0,
) -> torch.Tensor:
    gate, up = stored(x @ w13.T + bias).chunk(2, dim=1)
    return stored(stored(torch.nn.functional.silu(gate) * up) @ w2.T + bias2)


def rounding(inputs: MoEInputs) -> torch.Tensor:
    """Compute experts in float32, with everything that is stored in bfloat16."""
    x, w13, w2 = (numbers(each) for each in (inputs.hidden, inputs.w13, inputs.w2))
    total = torch.zeros(len(x), x.shape[1])
    for which in range(EXPERTS):
        of = [] if inputs.w13_bias is None else [inputs.w13_bias[which].float()]
        of += [] if inputs.w2_bias is None else [inputs.w2_bias[which].float()]
        y = outputs(x, w13[which], w2[which], *of)
        if inputs.output_norm_eps is not None:
            gain = inputs.output_norm_gain
            wide = torch.ones(x.shape[1]) if gain is None else gain.float()
            y = y * wide if inputs.output_norm_first else y
            y = y * torch.rsqrt(y.square().mean(dim=1, keepdim=True) + inputs.output_norm_eps)
            y = stored(y if inputs.output_norm_first else y * wide)
        for slot in range(2):
            weight = inputs.topk_weights[:, slot] * (inputs.topk_ids[:, slot] == which)
            total += y * weight.unsqueeze(1) * inputs.routed_scaling_factor
    if inputs.shared_w13 is None:
        return total.to(torch.bfloat16).double()
    first, second = numbers(inputs.shared_w13), numbers(inputs.shared_w2)
    for which in range(len(first)):
        y = outputs(x, first[which], second[which])
        if inputs.shared_gate is not None:
            gate = inputs.shared_gate.float()[:, which if inputs.shared_gate.shape[1] > 1 else 0]
            logits = inputs.shared_gate_logits
            gate = stored(torch.sigmoid(gate)) if logits else gate
            y = y * gate.unsqueeze(1)
            y = stored(y) if logits else y
        total += y * inputs.shared_weight
    return total.to(torch.bfloat16).double()


def test_the_bound_has_the_same_options() -> None:
    inputs = call()
    shared = draw(SHARED, 2 * INTER, HIDDEN, seed=5), draw(SHARED, HIDDEN, INTER, seed=6)
    bound = moe_error_bound(
        **inputs,
        output_norm_eps=1e-5,
        output_norm_gain=draw(HIDDEN, seed=4),
        output_norm_first=True,
        routed_scaling_factor=2.5,
        shared_w13=shared[0],
        shared_w2=shared[1],
        shared_gate=draw(TOKENS, 1, seed=8),
        shared_gate_logits=True,
    )
    assert bound.shape == (TOKENS, HIDDEN)
    assert bool((bound > 0).all())


@pytest.mark.parametrize("activation", ["identity", "silu", "swiglu"])
@pytest.mark.parametrize("biases", [False, True])
def test_one_product_an_expert(activation: str, biases: bool) -> None:
    """Routed value projections: outputs have the channels of the only product."""
    problem = MoEProblem(
        num_tokens=TOKENS,
        hidden=HIDDEN,
        inter=INTER,
        num_experts=EXPERTS,
        top_k=2,
        seed=3,
        activation=activation,
        biases=biases,
        one_product=True,
        dtype="bfloat16",
        routed_scaling_factor=2.5,
    )
    inputs = materialise(problem)
    assert isinstance(inputs, MoEInputs)
    hidden, w13 = numbers(inputs.hidden).double(), numbers(inputs.w13).double()
    wanted = torch.zeros(TOKENS, INTER, dtype=FLOAT64)
    for token, experts in enumerate(inputs.topk_ids.tolist()):
        for slot, which in enumerate(experts):
            first = [
                sum(a * b for a, b in zip(row, hidden[token].tolist(), strict=True))
                for row in w13[which].tolist()
            ]
            if inputs.w13_bias is not None:
                of = inputs.w13_bias[which].tolist()
                first = [a + b for a, b in zip(first, of, strict=True)]
            y = first[:INTER]
            if activation != "identity":
                y = [a / (1.0 + math.exp(-a)) for a in y]
            if activation == "swiglu":
                y = [a * b for a, b in zip(y, first[INTER:], strict=True)]
            weight = 2.5 * float(inputs.topk_weights[token, slot])
            wanted[token] += torch.tensor([weight * a for a in y], dtype=FLOAT64)
    arithmetic = Arithmetic(intermediate="inputs", projections="inputs", partial_outputs=True)
    expected, bound = oracle.bounded_experts(inputs, arithmetic)
    close(expected, wanted)
    assert ((expected.to(torch.bfloat16).double() - expected).abs() <= bound).all()
    assert (bound < 0.03 * expected.abs().amax()).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"w2 is \[4, 6, 3\]; with one product it must be a tensor \[4, 3, 0\]"),
        ({"w2": torch.empty(4, 3, 0), "w2_bias": torch.zeros(4, 3)}, "w2_bias is given, but one_p"),
    ],
)
def test_one_product_takes_nothing_of_a_second(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe(**{**call(), **options}, one_product=True)
