"""Identity experts: ids behind all others, whose output is the hidden state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelproof.impl.torch.moe import experts as torch_moe
from kernelproof.reference import Arithmetic, MoEProblem, materialise, moe, oracle
from kernelproof.reference.tensors.moe_inputs import MoEInputs

PROBLEM = MoEProblem(
    num_tokens=11, hidden=32, inter=16, num_experts=5, top_k=3, identity_experts=4, seed=3
)


def made(problem: MoEProblem) -> MoEInputs:
    inputs = materialise(problem)
    assert isinstance(inputs, MoEInputs)
    return inputs


def by_loops(inputs: MoEInputs, experts: int) -> torch.Tensor:
    """Add up slot by slot; each real expert is asked alone, with a weight of 1."""
    assert isinstance(inputs.hidden, torch.Tensor)
    out = torch.zeros(inputs.hidden.shape, dtype=torch.float64)
    for token, (ids, weights) in enumerate(
        zip(inputs.topk_ids.tolist(), inputs.topk_weights.double().tolist(), strict=True)
    ):
        row = inputs.hidden[token : token + 1]
        for expert, weight in zip(ids, weights, strict=True):
            if expert >= experts:
                out[token] += weight * row[0].double()
            elif expert >= 0:
                options = inputs.keywords() | {"identity_experts": 0}
                one = torch.tensor([[expert]], dtype=torch.int32)
                given = torch.ones(1, 1, dtype=torch.float64)
                y = moe(row, inputs.w13, inputs.w2, one, given, **options)
                out[token] += weight * y[0]
    return out


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        replace(PROBLEM, assignment="duplicates", biases=True, seed=5),
        replace(PROBLEM, assignment="masked", identity_experts=1),
        replace(PROBLEM, regime="zero_weights", dtype="bfloat16", identity_experts=256),
        replace(PROBLEM, quantized="fp8_channel", activation="relu2"),
    ],
)
def test_an_identity_adds_the_weighted_hidden_state(problem: MoEProblem) -> None:
    inputs = made(problem)
    assert int(inputs.topk_ids.max()) >= problem.num_experts
    wanted = by_loops(inputs, problem.num_experts)
    assert torch.allclose(oracle.experts(inputs), wanted, rtol=1e-12, atol=1e-12)
    bounded = oracle.bounded_experts(inputs, Arithmetic())
    assert torch.allclose(bounded.expected, wanted, rtol=1e-12, atol=1e-12)
    found = torch_moe(inputs)
    assert bool(((found.double() - wanted).abs() <= bounded.bound).all())
    left_out = moe(
        *inputs.tensors()[:3],
        inputs.topk_ids.masked_fill(inputs.topk_ids >= problem.num_experts, -1),
        inputs.topk_weights,
        **(inputs.keywords() | {"identity_experts": 0}),
    )
    assert bool(((left_out - wanted).abs() > 8 * bounded.bound).any())


def test_a_weight_on_the_input_is_the_same_to_an_identity() -> None:
    inputs = made(PROBLEM)
    only = replace(
        inputs, topk_ids=torch.full_like(inputs.topk_ids, PROBLEM.num_experts), w13_bias=None
    )
    first = oracle.experts(only)
    assert torch.equal(first, oracle.experts(replace(only, weights_on_input=True)))
    total = inputs.topk_weights.double().sum(dim=1, keepdim=True)
    assert isinstance(inputs.hidden, torch.Tensor)
    assert torch.allclose(first, total * inputs.hidden.double())


def test_ids_beyond_identities_and_impossible_problems_are_refused() -> None:
    inputs = made(PROBLEM)
    beyond = inputs.topk_ids.clone()
    beyond[0, 0] = 9
    with pytest.raises(ValueError, match="is 9; there are 5 experts and 4 identities"):
        oracle.experts(replace(inputs, topk_ids=beyond))
    with pytest.raises(ValueError, match="identity_experts is -1"):
        oracle.experts(replace(inputs, identity_experts=-1))
    for more in (
        {"local_experts": 2},
        {"quantized": "fp8_tensor", "quantized_hidden": True},
        {"one_product": True},
    ):
        with pytest.raises(ValueError, match="identity_experts"):
            replace(PROBLEM, **more)
