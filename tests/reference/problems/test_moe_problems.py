"""Problems of routing and experts: what they refuse, and the tensors that are made of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.reference import (
    ACTIVATIONS,
    METHODS,
    Arithmetic,
    MoEProblem,
    QuantizedMatrix,
    RouteProblem,
    materialise,
    oracle,
    problem_from_json,
)
from kernelproof.reference.moe.weights import checked_matrix
from kernelproof.reference.problems.moe import (
    ASSIGNMENTS,
    INEXACT,
    MOE_REGIMES,
    QUANTISED,
    ROUTE_REGIMES,
)
from kernelproof.reference.tensors.allocation import CANARY
from kernelproof.reference.tensors.moe_inputs import MoEInputs, RouteInputs

BASE = MoEProblem(
    num_tokens=9, hidden=160, inter=96, num_experts=6, top_k=3, dtype="bfloat16", biases=True
)
ROUTED = RouteProblem(num_tokens=17, num_experts=16, top_k=3, bias=True)


def experts_of(problem: MoEProblem, unused: float = CANARY) -> MoEInputs:
    made = materialise(problem, unused=unused)
    assert isinstance(made, MoEInputs)
    return made


def routes_of(problem: RouteProblem) -> RouteInputs:
    made = materialise(problem)
    assert isinstance(made, RouteInputs)
    return made


def numbers(matrix: torch.Tensor | QuantizedMatrix) -> torch.Tensor:
    """Return the numbers of weights, in float64."""
    checked = checked_matrix("w13", matrix, "experts rows columns")
    return torch.stack([checked.weights(expert) for expert in range(len(checked.values))])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"activation": "swish"}, "activation"),
        ({"quantized": "int4"}, "quantized"),
        ({"assignment": "random"}, "assignment"),
        ({"regime": "ties"}, "regime"),
        ({"top_k": 7}, "top_k"),
        ({"hidden": 0}, "hidden"),
        ({"local_experts": 4, "expert_offset": 3}, "expert_offset"),
        ({"activation": "relu2", "interleaved": True}, "interleaved"),
        ({"activation": "geglu", "swiglu_parameters": "one"}, "swiglu_parameters"),
        ({"swiglu_parameters": "each", "shared_experts": 1}, "swiglu_parameters"),
        ({"swiglu_parameters": "each_limit", "shared_experts": 1}, "swiglu_parameters"),
        ({"activation": "swiglu_step", "swiglu_parameters": "alpha"}, "swiglu_parameters"),
        ({"activation": "geglu1", "swiglu_parameters": "beta_limit"}, "swiglu_parameters"),
        ({"output_norm": "layer"}, "output_norm"),
        ({"output_norm": "plain", "weights_on_input": True}, "output_norm"),
        ({"shared_gate": "logits"}, "shared_gate"),
        ({"shared_gate": "sigmoid", "shared_experts": 1}, "shared_gate"),
        ({"shared_weight": 2.5}, "shared_weight"),
        ({"one_product": True, "shared_experts": 1}, "one_product"),
        ({"one_product": True, "output_norm": "plain"}, "one_product"),
        ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor"),
        ({"quantized_hidden": True}, "quantized_hidden"),
        ({"quantized": "nvfp4", "inter": 24}, "inter"),
        ({"quantized": "mxfp4", "hidden": 48}, "hidden"),
        ({"token_ids": (1, 2)}, "token_ids"),
        ({"num_tokens": 2, "token_ids": (1, -2)}, r"token_ids\[1\]"),
    ],
)
def test_experts_refuse_what_no_call_can_look_like(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"problem field {field} is "):
        replace(BASE, **changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"method": "best"}, "method"),
        ({"regime": "zero_weights"}, "regime"),
        ({"masked_groups": "nan"}, "masked_groups"),
        ({"num_groups": 3, "method": "sigmoid"}, "num_groups"),
        ({"num_groups": 4, "topk_groups": 2, "method": "topk"}, "num_groups"),
        ({"num_groups": 4, "topk_groups": 5, "method": "sigmoid"}, "topk_groups"),
        ({"top_k": 17}, "top_k"),
        ({"num_groups": 8, "method": "sigmoid"}, "top_k"),
        ({"scaling_factor": float("nan")}, "scaling_factor"),
    ],
)
def test_routing_refuses_what_no_call_can_look_like(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"problem field {field} is "):
        replace(ROUTED, **changes)


def test_problems_come_back_from_json_with_their_ids() -> None:
    for problem in (
        MoEProblem(),
        RouteProblem(),
        replace(BASE, quantized="fp8_block", quantized_hidden=True, token_ids=tuple(range(9))),
        replace(ROUTED, num_groups=4, topk_groups=2, method="deepseek_v3"),
    ):
        read = problem_from_json(problem.to_json())
        assert read == problem
        assert read.id == problem.id
    with pytest.raises(ValueError, match="problem field page_size is 3; it must be absent: moe"):
        problem_from_json({**BASE.to_json(), "page_size": 3})


@pytest.mark.parametrize("regime", MOE_REGIMES)
@pytest.mark.parametrize("quantized", QUANTISED)
def test_values_belong_to_tokens_and_experts(regime: str, quantized: str) -> None:
    """Another batch, another shard and another rank see the same values."""
    problem = replace(BASE, regime=regime, quantized=quantized, quantized_hidden=bool(quantized))
    whole = experts_of(problem)
    shard = experts_of(replace(problem, local_experts=2, expert_offset=3))
    assert torch.equal(numbers(shard.w13), numbers(whole.w13)[3:5])
    assert torch.equal(numbers(shard.w2), numbers(whole.w2)[3:5])
    assert shard.w13_bias is not None
    assert whole.w13_bias is not None
    assert torch.equal(shard.w13_bias, whole.w13_bias[3:5])
    chosen = (7, 2, 4)
    part = experts_of(replace(problem, num_tokens=3, token_ids=chosen))
    assert torch.equal(part.topk_ids, whole.topk_ids[list(chosen)])
    assert torch.equal(part.topk_weights, whole.topk_weights[list(chosen)])
    hidden = [checked_matrix("hidden", each.hidden, "tokens hidden") for each in (part, whole)]
    rows = torch.arange(3), torch.tensor(chosen)
    first, second = (
        each.tokens(row, torch.float64) for each, row in zip(hidden, rows, strict=True)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("quantized", ["fp8_tensor", "fp8_channel", "fp8_block", "nvfp4", "mxfp4"])
def test_codes_stand_for_numbers_near_the_values(quantized: str) -> None:
    plain = numbers(experts_of(replace(BASE, dtype="float32")).w13)
    coded = numbers(experts_of(replace(BASE, quantized=quantized)).w13)
    assert torch.equal(coded.to(torch.bfloat16).double(), coded), "bfloat16 holds them"
    relative = (coded - plain).norm() / plain.norm()
    assert 0 < relative < (0.05 if quantized.startswith("fp8") else 0.2)


def test_assignments_are_what_they_are_called() -> None:
    problem = replace(BASE, num_tokens=40, num_experts=16)
    ids = {name: experts_of(replace(problem, assignment=name)).topk_ids for name in ASSIGNMENTS}
    for name in ("iid", "balanced", "one_expert", "sparse"):
        assert all(len(set(row)) == 3 for row in ids[name].tolist()), name
    assert len(ids["one_expert"].unique(dim=0)) == 1
    assert len(ids["sparse"].unique()) == 4
    counts = ids["balanced"].flatten().bincount(minlength=16)
    assert counts.max() - counts.min() <= 1
    assert any(len(set(row)) < 3 for row in ids["duplicates"].tolist())
    nobody = (ids["masked"] == -1).double().mean()
    assert 0.15 < nobody < 0.5
    assert torch.equal(ids["masked"].where(ids["masked"] >= 0, ids["iid"]), ids["iid"])


@pytest.mark.parametrize("regime", MOE_REGIMES)
def test_outputs_are_of_a_size_that_half_precision_holds(regime: str) -> None:
    for activation in ACTIVATIONS:
        problem = replace(BASE, regime=regime, activation=activation, dtype="float16")
        out = oracle.experts(experts_of(problem))
        assert 1e-2 < float(out.std()) < 5e3, activation
        assert float(out.abs().max()) < 3e4, activation


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_exact_grid_is_exact(activation: str, dtype: str) -> None:
    for on_input, many in itertools.product((False, True), (3, 8)):
        problem = replace(
            BASE,
            num_tokens=30,
            num_experts=9,
            top_k=many,
            activation=activation,
            dtype=dtype,
            regime="exact_grid",
            weights_on_input=on_input,
        )
        assert problem.exact == (activation not in INEXACT)
        if problem.exact:
            out = oracle.experts(experts_of(problem))
            # silu(-128) is not 0 in float64, but smaller than any number that a kernel has.
            out = torch.where(out.abs() < 1e-30, 0.0, out)
            assert torch.equal(out.to(getattr(torch, dtype)).double(), out)
            assert float((out != 0).double().mean()) > 0.5


def test_what_surrounds_tensors_is_poisoned_where_asked() -> None:
    problem = replace(BASE, quantized="fp8_channel", strided_hidden=True)
    clean, poisoned = experts_of(problem), experts_of(problem, unused=torch.nan)
    assert torch.equal(oracle.experts(clean), oracle.experts(poisoned))
    assert clean.hidden.stride() == (320, 1)  # type: ignore[union-attr]  # it is a tensor
    assert poisoned.storages["hidden"].isnan().any()
    assert poisoned.storages["w2.scales"].isnan().any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("regime", ROUTE_REGIMES)
def test_routing_problems_have_an_order(method: str, regime: str) -> None:
    problem = replace(ROUTED, bias=method != "sparsemixer", method=method, regime=regime)
    for dtype in ("float32", "float16", "bfloat16"):
        inputs = routes_of(replace(problem, dtype=dtype))
        found = oracle.routing(inputs)
        rounded = found._replace(topk_weights=found.topk_weights.float())
        assert oracle.judge_routing(inputs, rounded, Arithmetic()).right


def test_regimes_of_routing_are_what_they_are_called() -> None:
    made = {name: routes_of(replace(ROUTED, regime=name)) for name in ROUTE_REGIMES}
    assert len(made["ties"].logits.unique()) == 7
    assert bool((made["all_negative"].logits < -100).all())
    assert bool((made["saturated"].logits.abs() > 60).any())
    bias = made["negative_scores"].bias
    assert bias is not None
    assert bool((torch.sigmoid(made["negative_scores"].logits) + bias < 0).all())
    assert bool((made["dominant_expert"].logits.amax(dim=1) == 24).all())
    assert bool((made["exact_grid"].logits % 128 == 0).all())
    best = made["faint_scores"].logits.amax(dim=1)
    assert bool((best < 2).all())
    assert float(best.max() - best.min()) > 40
