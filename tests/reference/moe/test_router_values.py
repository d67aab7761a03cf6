"""Values that routers of models have: trained biases, their dtype, groups' scores, many ids."""

from __future__ import annotations

import pytest
import torch

from kernelproof.impl.torch.moe import route as torch_route
from kernelproof.reference import (
    METHODS,
    RouteProblem,
    Routing,
    compare_routing,
    materialise,
    oracle,
    problem_from_json,
    route,
)
from kernelproof.reference.tensors.moe_inputs import RouteInputs

BIASED = tuple(name for name in METHODS if name != "sparsemixer")
GROUPED = tuple(name for name, how in METHODS.items() if how.score != "logit")


def made(problem: RouteProblem) -> RouteInputs:
    inputs = materialise(problem)
    assert isinstance(inputs, RouteInputs)
    return inputs


def sums_of_best(ranking: list[float], groups: int, count: int) -> list[float]:
    """Return the score of each group: the sum of its best experts, by a sort of each."""
    size = len(ranking) // groups
    parts = [sorted(ranking[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
    return [sum(part[:count]) for part in parts]


@pytest.mark.parametrize("method", GROUPED)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("group_score", "count"), [("best", 1), ("two_best", 2)])
def test_the_groups_score_is_what_was_asked_for(
    method: str, with_bias: bool, group_score: str, count: int
) -> None:
    problem = RouteProblem(
        num_tokens=40,
        num_experts=24,
        top_k=3,
        method=method,
        num_groups=4,
        topk_groups=1,
        bias=with_bias,
        group_score=group_score,
        seed=5,
    )
    inputs = made(problem)
    found = oracle.routing(inputs)
    scores = {
        "softmax": torch.softmax(inputs.logits.double(), dim=1),
        "sigmoid": 1 / (1 + torch.exp(-inputs.logits.double())),
        "sqrt_softplus": torch.log1p(torch.exp(inputs.logits.double())).sqrt(),
    }[METHODS[method].score]
    ranking = scores if inputs.bias is None else scores + inputs.bias.double()
    for token, row in enumerate(ranking.tolist()):
        of_group = sums_of_best(row, 4, count)
        group = of_group.index(max(of_group))
        members = range(6 * group, 6 * group + 6)
        assert found.topk_ids[token].tolist() == sorted(members, key=lambda e: -row[e])[:3]
    ids, weights = torch_route(inputs)
    assert oracle.judge_routing(inputs, Routing(ids, weights), torch_route.arithmetic).right
    other = "best" if count == 2 else "two_best"
    options = {**inputs.keywords(), "group_score": other}
    differs = route(inputs.logits, 3, **options)
    assert not oracle.judge_routing(inputs, differs, torch_route.arithmetic).right


@pytest.mark.parametrize("method", BIASED)
def test_a_bias_of_zeros_selects_as_none_does(method: str) -> None:
    logits = made(RouteProblem(num_tokens=30, num_experts=16, seed=3)).logits
    zeros = torch.zeros(16)
    plain = route(logits, 4, method=method)
    assert all(
        torch.equal(*each)
        for each in zip(plain, route(logits, 4, method=method, bias=zeros), strict=True)
    )
    if method not in GROUPED:
        return
    for group_score in ("best", "two_best"):
        options = {"num_groups": 4, "topk_groups": 2, "group_score": group_score}
        first, second = (
            route(logits, 4, method=method, bias=bias, **options)  # type: ignore[arg-type]
            for bias in (None, zeros)
        )
        assert all(torch.equal(*each) for each in zip(first, second, strict=True))


def test_a_group_score_is_one_of_two_and_needs_groups() -> None:
    with pytest.raises(ValueError, match="group_score is 'mean'; it must be None or one of"):
        route(torch.zeros(1, 4), 1, method="default", group_score="mean")
    for field, value in (("group_score", "best"), ("bias_values", "zeros"),
                         ("bias_dtype", "bfloat16")):  # fmt: skip
        with pytest.raises(ValueError, match=field):
            RouteProblem(num_experts=4, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_biases_have_several_units_and_decide(dtype: str) -> None:
    problem = RouteProblem(
        num_tokens=64,
        num_experts=288,
        top_k=8,
        method="deepseek_v3",
        bias=True,
        bias_values="trained",
        bias_dtype=dtype,
    )
    assert problem_from_json(problem.to_json()) == problem
    inputs = made(problem)
    assert inputs.bias is not None
    assert inputs.bias.dtype == getattr(torch, dtype)
    assert 6 <= float(inputs.bias.min()) < 6.7
    assert 7.3 < float(inputs.bias.max()) <= 8
    exact = torch.sigmoid(inputs.logits.double()) + inputs.bias.double()
    ids = exact.topk(8, dim=1).indices
    found = oracle.routing(inputs)
    assert torch.equal(found.topk_ids.long(), ids)
    assert int(found.topk_ids.max()) > 255
    # The bias does not weigh.
    chosen = torch.sigmoid(inputs.logits.double()).gather(1, ids)
    assert torch.allclose(found.topk_weights, chosen / chosen.sum(dim=1, keepdim=True))
    without = route(inputs.logits, 8, method="deepseek_v3")
    assert not torch.equal(found.topk_ids, without.topk_ids)
    # A sum in bfloat16 has steps of 1/32 there.
    narrow = (exact.bfloat16()).topk(8, dim=1).indices
    wrong = Routing(narrow.int(), torch.sigmoid(inputs.logits.double()).gather(1, narrow))
    assert not compare_routing(wrong, inputs.logits, 8, **inputs.keywords()).ids_right.all()


@pytest.mark.parametrize(("regime", "sign"), [("negative", -1), ("positive", 1)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_logits_of_one_sign(regime: str, sign: int, dtype: str) -> None:
    problem = RouteProblem(num_tokens=64, num_experts=16, regime=regime, dtype=dtype)
    logits = made(problem).logits.double() * sign
    assert bool((logits >= 0).all())
    assert float(logits.amin(dim=1).min()) < 1
    assert float(logits.amin(dim=1).max()) > 12
    assert float(logits.max()) < 26
