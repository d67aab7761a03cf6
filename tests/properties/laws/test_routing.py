"""Laws of routing where scores are next to nothing: what a kernel's arithmetic loses there."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from kernelproof.impl import Implementation, Target, implementation
from kernelproof.properties.laws import find_law
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.reference import Arithmetic, RouteProblem
from kernelproof.reference.tensors.moe_inputs import RouteInputs

SATURATED = RouteProblem(num_tokens=9, method="deepseek_v3", regime="saturated", seed=2)
"""Both logits of token 8 are so low that a sigmoid by tanh is 0 in float32."""


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


def by_tanh(inputs: RouteInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Route as ``noAuxTcKernels.cu`` does."""
    scores = 0.5 * torch.tanh(0.5 * inputs.logits.float()) + 0.5
    weights, ids = scores.max(dim=1, keepdim=True)
    return ids.to(torch.int32), weights / (weights + 1e-20)


def kernel(sigmoid: str) -> Implementation:
    decorate = implementation("route", name="by-tanh", arithmetic=Arithmetic(sigmoid=sigmoid))
    return decorate(by_tanh)


@pytest.mark.parametrize(("sigmoid", "status"), [("tanh", "PASS"), ("exponential", "FAIL")])
def test_weights_need_not_add_up_where_the_scores_are_lost(sigmoid: str, status: str) -> None:
    subject = Subject(kernel(sigmoid), Target.here("cpu"), Stages())
    said = find_law("routing_invariants").check(subject, SATURATED)
    assert said.status == status, said


def test_weights_of_scores_that_tanh_tells_apart_add_up() -> None:
    def halved(inputs: RouteInputs) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = by_tanh(inputs)
        return ids, weights / 2

    half = implementation("route", name="halved", arithmetic=Arithmetic(sigmoid="tanh"))(halved)
    subject = Subject(half, Target.here("cpu"), Stages())
    problem = RouteProblem(num_tokens=9, method="deepseek_v3")
    assert find_law("routing_invariants").check(subject, problem).status == "FAIL"


def test_a_weight_that_is_nan_in_both_calls_is_another_law_s() -> None:
    """Whether it is right is ``routing_parity``'s question."""

    def nan_weights(inputs: RouteInputs) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = by_tanh(inputs)
        return ids, torch.full_like(weights, torch.nan)

    spoilt = implementation("route", name="nan", arithmetic=Arithmetic(sigmoid="tanh"))(nan_weights)
    subject = Subject(spoilt, Target.here("cpu"), Stages())
    problem = RouteProblem(num_tokens=9, method="deepseek_v3")
    assert find_law("row_containment").check(subject, problem).status == "PASS"
    assert find_law("routing_parity").check(subject, problem).status == "FAIL"


def test_an_answer_of_the_wrong_shape_is_named_as_routing_does() -> None:
    def one_row_more(inputs: RouteInputs) -> tuple[torch.Tensor, torch.Tensor]:
        weights = torch.zeros(inputs.logits.shape[0] + 1, inputs.top_k)
        return weights.to(torch.int32), weights

    kernel = implementation("route", name="one-row-more")(one_row_more)
    subject = Subject(kernel, Target.here("cpu"), Stages())
    with pytest.raises(Stop, match="topk_weights has shape"):
        find_law("no_tokens").check(subject, RouteProblem(num_tokens=3))


def test_parity_judges_nothing_where_zeros_are_all_that_tanh_promises() -> None:
    def zeros(inputs: RouteInputs) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = by_tanh(inputs)
        return ids, torch.zeros_like(weights)

    low = RouteProblem(num_tokens=9, method="deepseek_v3", regime="all_negative")
    vacuous = {}
    for name, route in (("honest", by_tanh), ("zeros", zeros)):
        made = implementation("route", name=name, arithmetic=Arithmetic(sigmoid="tanh"))(route)
        subject = Subject(made, Target.here("cpu"), Stages())
        for law in ("routing_parity", "routing_token_order"):
            said = find_law(law).check(subject, low)
            assert said.status == "PASS"
            vacuous[name, law] = said.vacuous
    assert all(vacuous.values())
    exponential = Subject(kernel("exponential"), Target.here("cpu"), Stages())
    said = find_law("routing_parity").check(exponential, low)
    assert (said.status, said.vacuous) == ("PASS", False)
