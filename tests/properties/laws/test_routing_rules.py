"""Kernels that route by the rule of one family only are found, and not accused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch.nn import functional

from kernelproof.impl import Implementation, Target, implementation
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.laws import laws_of
from kernelproof.properties.space.axes import narrow
from kernelproof.properties.space.moe_strategies import route_problems
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import Problem, RouteProblem
from kernelproof.reference.tensors.moe_inputs import RouteInputs

TARGET = Target.here("cpu")
PROBLEMS = 40
ROUTING = ("routing_", "row_containment")
Routed = tuple[torch.Tensor, torch.Tensor]


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


def biased(inputs: RouteInputs, floor: float) -> Routed:
    """Route by sigmoids and a bias, with a floor of the kernel's own."""
    scores = torch.sigmoid(inputs.logits.float())
    ranking = scores if inputs.bias is None else scores + inputs.bias
    ids = ranking.topk(inputs.top_k, dim=1).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(dim=1, keepdim=True) + floor)
    return ids.to(torch.int32), weights * inputs.scaling_factor


def lfm2(inputs: RouteInputs) -> Routed:
    return biased(inputs, 1e-6)


def deepseek_in_lfm2_s_place(inputs: RouteInputs) -> Routed:
    return biased(inputs, 1e-20)


def of_lfm2(problem: RouteProblem, _: Target) -> bool | str:
    sigmoids = problem.method in ("minimax2", "sigmoid_renorm") and problem.num_groups == 1
    return (sigmoids and problem.renormalise_floor == 1e-6) or "LFM2's routing only"


def inkling(inputs: RouteInputs) -> Routed:
    """Normalise logarithms of sigmoids, which never vanish."""
    logits = inputs.logits.float()
    experts = logits.shape[1] - inputs.shared_experts
    routed = torch.sigmoid(logits[:, :experts])
    ranking = routed if inputs.bias is None else routed + inputs.bias
    ids = ranking.topk(inputs.top_k, dim=1).indices
    shared = torch.arange(experts, logits.shape[1]).expand(len(ids), -1)
    ids = torch.cat([ids, shared], dim=1)
    weights = torch.softmax(functional.logsigmoid(logits.gather(1, ids)), dim=1)
    return ids.to(torch.int32), weights * inputs.scaling_factor


def of_inkling(problem: RouteProblem, _: Target) -> bool | str:
    sigmoids = problem.method in ("minimax2", "sigmoid_renorm") and problem.shared_experts
    return (sigmoids and problem.renormalise_floor == 0) or "Inkling's routing only"


def gemma4(inputs: RouteInputs) -> Routed:
    """Take the softmax of the best logits, which needs no floor."""
    assert inputs.expert_scales is not None
    best = inputs.logits.float().topk(inputs.top_k, dim=1)
    weights = torch.softmax(best.values, dim=1) * inputs.expert_scales[best.indices]
    return best.indices.to(torch.int32), weights * inputs.scaling_factor


def of_gemma4(problem: RouteProblem, _: Target) -> bool | str:
    softmax = problem.method in ("renormalize", "renormalize_naive")
    plain = softmax and not problem.bias and problem.num_groups == 1
    return (plain and problem.expert_scales) or "Gemma 4's routing only"


def hashed(inputs: RouteInputs) -> Routed:
    assert inputs.expert_table is not None
    assert inputs.input_ids is not None
    ids = inputs.expert_table[inputs.input_ids]
    scores = functional.softplus(inputs.logits.float(), threshold=50.0).sqrt()
    weights = scores.gather(1, ids.long())
    return ids, weights / (weights.sum(dim=1, keepdim=True) + 1e-20) * inputs.scaling_factor


def of_hashes(problem: RouteProblem, _: Target) -> bool | str:
    table = problem.hash_vocabulary and problem.method == "deepseek_v4"
    return bool(table) or "DeepSeek-V4's first layers only"


def interns1(inputs: RouteInputs) -> Routed:
    probabilities = torch.softmax(inputs.logits.float(), dim=1)
    groups = inputs.num_groups or 1
    parts = probabilities.unflatten(1, (groups, -1))
    best = parts.topk(inputs.top_k // groups, dim=2)
    first = torch.arange(groups).view(-1, 1) * parts.shape[2]
    ids, weights = (best.indices + first).flatten(1), best.values.flatten(1)
    if inputs.method == "renormalize_naive":
        weights = weights / weights.sum(dim=1, keepdim=True)
    return ids.to(torch.int32), weights * inputs.scaling_factor


def of_interns1(problem: RouteProblem, _: Target) -> bool | str:
    softmax = problem.method in ("default", "renormalize_naive") and not problem.bias
    eight = problem.num_groups == problem.top_k == 8
    return (softmax and eight and problem.best_of_each_group) or "InternS1-Pro's routing only"


def phimoe(inputs: RouteInputs) -> Routed:
    """Weigh the best twice, as the published code does; of logits of -inf it takes one twice."""
    scores = inputs.logits.float()
    ids, left, weights = scores.topk(inputs.top_k, dim=1).indices, scores, []
    for best in ids.split(1, dim=1):
        most = scores.gather(1, best)
        size = scores.abs().clamp(min=most)
        masked = left.masked_fill((most - scores) / size > 2 * inputs.jitter, -torch.inf)
        weights.append(torch.softmax(masked, dim=1).gather(1, best))
        left = left.scatter(1, best, -torch.inf)
    return ids.to(torch.int32), torch.cat(weights, dim=1) * inputs.scaling_factor


def of_phimoe(problem: RouteProblem, _: Target) -> bool | str:
    plain = problem.method == "sparsemixer" and not problem.expert_scales
    two = problem.top_k == 2 and problem.jitter == 0.01
    return (plain and two) or "PhiMoE's routing only"


KERNELS: dict[str, tuple[Callable[[RouteInputs], Routed], Any, tuple[str, ...]]] = {
    "LFM2": (lfm2, of_lfm2, ("renormalise_floor",)),
    "Inkling": (inkling, of_inkling, ("joint_shared_experts",)),
    "Gemma 4": (gemma4, of_gemma4, ("expert_scales",)),
    "DeepSeek-V4": (hashed, of_hashes, ("hash_routing",)),
    "InternS1-Pro": (interns1, of_interns1, ("best_of_each_group",)),
    "PhiMoE": (phimoe, of_phimoe, ("sparsemixer",)),
}
"""By family: the kernel, what it supports, and the features that it names."""


def made(family: str, function: Callable[[RouteInputs], Routed] | None = None) -> Implementation:
    kernel, supports, features = KERNELS[family]
    decorate = implementation("route", name="one-rule", supports=supports, features=features)
    return decorate(function or kernel)


def problems_of(kernel: Implementation) -> list[RouteProblem]:
    def probe(problems: Sequence[Problem]) -> list[Refusal | None]:
        return [kernel.refusal(each, TARGET) for each in problems]

    axes = narrow("route", probe, 200_000)
    assert axes is not None, "nothing is supported"
    found: list[RouteProblem] = []

    @seed(3)
    @settings(
        max_examples=4 * PROBLEMS, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(route_problems(axes))
    def draw(problem: RouteProblem) -> None:
        if kernel.refusal(problem, TARGET) is None:
            found.append(problem)

    draw()
    return found[:PROBLEMS]


@pytest.mark.parametrize("family", KERNELS)
def test_a_kernel_of_one_family_is_judged_and_not_accused(family: str) -> None:
    kernel = made(family)
    problems = problems_of(kernel)
    assert len(problems) == PROBLEMS
    subject = Subject(kernel, TARGET, Stages())
    for law in laws_of("route"):
        if law.name.startswith(ROUTING):
            for problem in problems:
                said = law.check(subject, problem)
                assert not said.bad, (law.name, problem, said)


def test_another_floor_than_lfm2_s_is_found() -> None:
    kernel = made("LFM2", deepseek_in_lfm2_s_place)
    subject = Subject(kernel, TARGET, Stages())
    parity = next(law for law in laws_of("route") if law.name == "routing_parity")
    assert any(parity.check(subject, each).bad for each in problems_of(kernel))
