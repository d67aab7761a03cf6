"""Rules of routing of single families, against definitions written out expert by expert."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl.features import drawn_features
from kernelproof.reference import (
    METHODS,
    RouteProblem,
    Routing,
    materialise,
    oracle,
    problem_from_json,
)
from kernelproof.reference.moe.routing import route
from kernelproof.reference.moe.routing_bounds import compare_routing
from kernelproof.reference.tensors.moe_inputs import RouteInputs

RENORMALISED = [name for name, how in METHODS.items() if how.weight == "renormalize"]
Row = Sequence[float]


def logits_of(
    tokens: int = 40, experts: int = 12, seed: int = 0, shift: float = 0.0
) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(tokens, experts, generator=made, dtype=torch.float64) + shift


def scored(method: str, row: Row) -> list[float]:
    """Return the scores of one token's logits."""
    how = METHODS[method].score
    if how == "softmax":
        powers = [math.exp(x - max(row)) for x in row]
        return [each / sum(powers) for each in powers]
    if how == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in row]
    if how == "sqrt_softplus":
        return [math.sqrt(math.log1p(math.exp(x))) for x in row]
    return list(row)


def best(scores: Row, count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:count]


def check(found: Routing, wanted: Sequence[tuple[list[int], list[float]]]) -> None:
    for ids, weights, (right_ids, right_weights) in zip(
        found.topk_ids.tolist(), found.topk_weights.tolist(), wanted, strict=True
    ):
        assert ids == right_ids
        assert weights == pytest.approx(right_weights, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("method", RENORMALISED)
@pytest.mark.parametrize("floor", [0.0, 1e-20, 1e-9, 1e-6, 0.125, 3.0])
def test_the_floor_is_added_to_the_sum(method: str, floor: float) -> None:
    logits, wanted = logits_of(shift=-14.0), []
    for row in logits.tolist():
        scores = scored(method, row)
        ids = best(scores, 3)
        total = sum(scores[e] for e in ids) + floor
        wanted.append((ids, [2.5 * scores[e] / total for e in ids]))
    options: dict[str, Any] = {"method": method, "renormalise_floor": floor, "scaling_factor": 2.5}
    check(route(logits, 3, **options), wanted)


def test_a_floor_that_is_left_out_is_the_one_of_deepseek() -> None:
    logits = logits_of(shift=-60.0)
    plain = route(logits, 3, method="sigmoid_renorm")
    same = route(logits, 3, method="sigmoid_renorm", renormalise_floor=1e-20)
    assert torch.equal(plain.topk_weights, same.topk_weights)


def test_scales_of_experts_come_after_the_normalisation() -> None:
    """Gemma 4's router."""
    logits, scales, wanted = logits_of(), torch.linspace(0.25, 2.0, 12), []
    for row in logits.tolist():
        scores = scored("renormalize_naive", row)
        ids = best(scores, 4)
        total = sum(scores[e] for e in ids)
        wanted.append((ids, [scores[e] / total * float(scales[e]) for e in ids]))
    options: dict[str, Any] = {"renormalise_floor": 0.0, "expert_scales": scales}
    check(route(logits, 4, method="renormalize_naive", **options), wanted)


@pytest.mark.parametrize(("groups", "top_k"), [(2, 2), (3, 6), (4, 8), (6, 12)])
def test_each_group_gives_its_best(groups: int, top_k: int) -> None:
    """InternS1-Pro's router."""
    logits, wanted, size = logits_of(), [], 12 // groups
    for row in logits.tolist():
        scores = scored("default", row)
        ids = [
            group * size + each
            for group in range(groups)
            for each in best(scores[group * size : (group + 1) * size], top_k // groups)
        ]
        wanted.append((ids, [scores[e] for e in ids]))
    options: dict[str, Any] = {"num_groups": groups, "topk_groups": groups}
    check(route(logits, top_k, method="default", best_of_each_group=True, **options), wanted)


@pytest.mark.parametrize("shared", [1, 2, 3])
def test_shared_experts_are_normalised_with_the_selected(shared: int) -> None:
    """Inkling's gate: the bias selects among the routed experts, which come first."""
    logits, wanted = logits_of(experts=12 + shared), []
    bias = torch.linspace(-0.5, 0.5, 12)
    for row in logits.tolist():
        scores = scored("sigmoid_renorm", row)
        ids = best([scores[e] + float(bias[e]) for e in range(12)], 3)
        ids += range(12, 12 + shared)
        total = sum(scores[e] for e in ids)
        wanted.append((ids, [1.5 * scores[e] / total for e in ids]))
    options: dict[str, Any] = {"bias": bias, "renormalise_floor": 0.0, "scaling_factor": 1.5}
    check(route(logits, 3, method="sigmoid_renorm", shared_experts=shared, **options), wanted)


def test_a_table_selects_and_scores_weigh() -> None:
    """DeepSeek-V4's first layers."""
    logits, wanted = logits_of(), []
    table = torch.stack(
        [torch.randperm(12, generator=torch.Generator().manual_seed(i))[:3] for i in range(20)]
    ).to(torch.int32)
    tokens = (torch.arange(40) * 7) % 20
    for row, token in zip(logits.tolist(), tokens.tolist(), strict=True):
        scores, ids = scored("deepseek_v4", row), table[token].tolist()
        total = sum(scores[e] for e in ids)
        wanted.append((ids, [1.5 * scores[e] / total for e in ids]))
    options: dict[str, Any] = {"expert_table": table, "input_ids": tokens, "scaling_factor": 1.5}
    check(route(logits, 3, method="deepseek_v4", **options), wanted)


def mixed(row: Row, top_k: int, jitter: float) -> tuple[list[int], list[float]]:
    """Return the experts and the weights of PhiMoE's two passes, or of more of them."""
    left, ids, weights = list(row), [], []
    for _ in range(top_k):
        taken = best(left, 1)[0]
        most, total = left[taken], 0.0
        for x, original in zip(left, row, strict=True):
            size = max(abs(original), most)
            far = size > 0 and (most - original) / size > 2 * jitter
            total += 0.0 if far else math.exp(x - most)
        ids.append(taken)
        weights.append(1 / total)
        left[taken] = -math.inf
    return ids, weights


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.1, 0.5, 1.5])
@pytest.mark.parametrize("shift", [0.0, -100.0, 40.0])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_sparsemixer_is_a_softmax_over_what_is_near(
    jitter: float, shift: float, top_k: int
) -> None:
    logits = logits_of(shift=shift)
    logits[:4] = logits[:4].round()  # ties, and zeros
    wanted = [mixed(row, top_k, jitter) for row in logits.tolist()]
    check(route(logits, top_k, method="sparsemixer", jitter=jitter), wanted)


BASE = RouteProblem(num_tokens=33, num_experts=16, top_k=4, method="sigmoid_renorm")
RULES: dict[str, tuple[RouteProblem, dict[str, Any]]] = {
    "renormalise_floor": (
        replace(BASE, renormalise_floor=1e-6, regime="faint_scores"), {"renormalise_floor": 1e-20}
    ),
    "expert_scales": (replace(BASE, expert_scales=True), {"expert_scales": None}),
    "best_of_each_group": (
        replace(BASE, num_groups=4, topk_groups=4, best_of_each_group=True),
        {"best_of_each_group": False},
    ),
    "joint_shared_experts": (
        replace(BASE, shared_experts=2, renormalise_floor=0.0), {"renormalise_floor": 0.5}
    ),
    "hash_routing": (
        replace(BASE, method="deepseek_v4", hash_vocabulary=97),
        {"expert_table": None, "input_ids": None},
    ),
    "sparsemixer": (
        replace(BASE, method="sparsemixer", top_k=2, regime="all_negative"), {"jitter": 0.1}
    ),
}  # fmt: skip
"""A problem of each feature, and what makes another call of it."""


def routes_of(problem: RouteProblem) -> RouteInputs:
    made = materialise(problem)
    assert isinstance(made, RouteInputs)
    return made


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_a_feature_and_comes_back_from_json(rule: str) -> None:
    problem, _ = RULES[rule]
    assert drawn_features(problem) == [rule]
    assert drawn_features(BASE) == []
    assert problem_from_json(problem.to_json()) == problem


def test_old_problems_keep_their_ids() -> None:
    assert set(BASE.to_json()).isdisjoint(RouteProblem.later_fields)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("order", [lambda x: x, lambda x: x.flip(1)], ids=["as is", "reversed"])
def test_the_oracle_s_own_answer_is_right_and_another_call_s_is_not(
    rule: str, order: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    problem, changes = RULES[rule]
    inputs = routes_of(problem)

    def judged(answer: Routing) -> bool:
        found = Routing(order(answer.topk_ids), order(answer.topk_weights.float()))
        return compare_routing(found, inputs.logits, inputs.top_k, **inputs.keywords()).right

    assert judged(oracle.routing(inputs))
    assert not judged(oracle.routing(replace(inputs, **changes)))


@pytest.mark.parametrize("floor", [0.0, 1e-20])
def test_zero_by_zero_is_right_where_nothing_is_added(floor: float) -> None:
    """Float32 holds no score of the second token: 0 / 0 is what such a kernel has."""
    logits = torch.tensor([[-20.0, -21.0, -22.0], [-200.0, -201.0, -202.0]])
    options: dict[str, Any] = {"method": "sigmoid_renorm", "renormalise_floor": floor}
    expected = route(logits, 2, **options)
    for token in range(2):
        weights = expected.topk_weights.float()
        weights[token] = torch.nan
        found = Routing(expected.topk_ids, weights)
        right = compare_routing(found, logits, 2, **options).weights_right
        assert right.tolist() == [token != 0, token != 1 or not floor]


def test_sparsemixer_may_take_what_it_cannot_tell_from_near_for_either() -> None:
    """A distance of 2 jitter to the last bits: a float32 kernel may go either way, and no third."""
    logits = torch.tensor([[-1.0 / 1.02, -1.0, -3.0]], dtype=torch.float64).repeat(3, 1)
    expected = route(logits, 1, method="sparsemixer", jitter=0.0098039215)
    both = 1 / (1 + math.exp(-1.0 + 1.0 / 1.02))
    weights = torch.tensor([[1.0], [both], [(1.0 + both) / 2 - 0.5]])
    found = Routing(expected.topk_ids, weights)
    options: dict[str, Any] = {"method": "sparsemixer", "jitter": 0.0098039215}
    assert compare_routing(found, logits, 1, **options).weights_right.tolist() == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"renormalise_floor": -1e-6}, "renormalise_floor is -1e-06"),
        ({"renormalise_floor": math.inf}, "renormalise_floor is inf"),
        ({"jitter": -1.0}, "jitter is -1.0"),
        ({"expert_scales": torch.ones(3)}, "expert_scales must be 12 finite numbers"),
        ({"shared_experts": 12}, "shared_experts is 12"),
        ({"shared_experts": 1, "method": "sigmoid"}, "shared_experts is 1, but the method"),
        ({"shared_experts": 2, "num_groups": 2, "topk_groups": 1}, "num_groups is 2, but shared"),
        ({"input_ids": torch.zeros(40).long()}, "expert_table and input_ids"),
        ({"best_of_each_group": True, "num_groups": 2, "topk_groups": 1}, "best_of_each_group"),
        ({"best_of_each_group": True, "num_groups": 3, "topk_groups": 3}, "a multiple of it"),
        ({"method": "sparsemixer", "bias": torch.zeros(12)}, "bias is given"),
    ],
)
def test_refusals(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        route(logits_of(), 2, **{"method": "sigmoid_renorm", **changes})


@pytest.mark.parametrize(
    ("table", "tokens", "said"),
    [
        ([[0, 12]], [0] * 40, "experts from 0 to 11"),
        ([[3, 3]], [0] * 40, "distinct experts"),
        ([[0, 1]], [1] * 40, "input_ids must be from 0 to 0"),
        ([[0, 1, 2]], [0] * 40, r"integers \[vocabulary, top_k\]"),
        ([[0, 1]], [0] * 39, r"integers \[tokens\]"),
    ],
)
def test_refusals_of_tables(table: list[list[int]], tokens: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        route(logits_of(), 2, expert_table=torch.tensor(table), input_ids=torch.tensor(tokens))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"renormalise_floor": -1.0}, "renormalise_floor"),
        ({"renormalise_floor": 1e-6, "method": "topk"}, "renormalise_floor"),
        ({"jitter": 0.5}, "jitter"),
        ({"best_of_each_group": True, "num_groups": 4, "topk_groups": 2}, "best_of_each_group"),
        ({"best_of_each_group": True, "num_groups": 8, "topk_groups": 8}, "best_of_each_group"),
        ({"hash_vocabulary": 9, "bias": True}, "bias"),
        ({"method": "sparsemixer", "bias": True}, "bias"),
        ({"hash_vocabulary": 9, "num_groups": 2, "topk_groups": 2}, "hash_vocabulary"),
        ({"shared_experts": 1, "method": "default"}, "shared_experts"),
        ({"shared_experts": 1, "expert_scales": True}, "shared_experts"),
        ({"shared_experts": 1, "hash_vocabulary": 9}, "shared_experts"),
    ],
)
def test_problems_that_no_call_can_look_like(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"problem field {field} is "):
        replace(BASE, **changes)
