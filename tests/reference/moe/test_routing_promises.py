"""Weights whose bound exceeds them: what a router's arithmetic still promises, and where none."""

from __future__ import annotations

import pytest
import torch

from kernelproof.reference import Arithmetic, Routing, route
from kernelproof.reference.moe.routing_bounds import RoutingComparison, compare_routing

TANH = Arithmetic(sigmoid="tanh")
RENORMALISED = ("deepseek_v3", "minimax2", "sigmoid_renorm")
WEIGHED = ("sigmoid", "llama4", "topk_sigmoid")


def logits_at(level: float) -> torch.Tensor:
    """Return logits [3, 8] that are all next to a level, none of them equal."""
    return level - torch.arange(24).view(3, 8).flip(1) / 256


def by_tanh(logits: torch.Tensor, top_k: int, method: str) -> Routing:
    """Route in float32 with sigmoids that are made of tanh."""
    ids = logits.topk(top_k, dim=1).indices
    scores = 0.5 + 0.5 * torch.tanh(0.5 * logits.float().gather(1, ids))
    if method in RENORMALISED:
        scores /= scores.sum(dim=1, keepdim=True) + 1e-20
    return Routing(ids.to(torch.int32), scores)


def judged(
    logits: torch.Tensor, found: Routing, method: str, arithmetic: Arithmetic = TANH
) -> RoutingComparison:
    top_k = found.topk_ids.shape[1]
    return compare_routing(found, logits, top_k, method=method, arithmetic=arithmetic)


@pytest.mark.parametrize("method", [*RENORMALISED, *WEIGHED])
@pytest.mark.parametrize("level", [-2.0, -9.0, -12.0, -14.2, -15.0, -17.0, -20.0, -89.0, -300.0])
def test_an_honest_kernel_is_right_at_every_level(method: str, level: float) -> None:
    logits = logits_at(level)
    exact = route(logits, 2, method=method)
    for found in (
        by_tanh(logits, 2, method),
        exact,
        exact._replace(topk_weights=exact.topk_weights.to(torch.bfloat16)),
    ):
        assert judged(logits, found, method).right
    assert judged(logits, exact, method, Arithmetic()).right


@pytest.mark.parametrize("method", RENORMALISED)
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_zeros_are_wrong_where_no_sigmoid_of_tanh_is_0(method: str, top_k: int) -> None:
    """From -13.9 to -14.5 each weight may be off by more than itself; their sum is still 1."""
    for level in (-6.0, -12.0, -13.9, -14.2):
        logits = logits_at(level)
        ids = route(logits, top_k, method=method).topk_ids
        found = Routing(ids, torch.zeros(ids.shape))
        compared = judged(logits, found, method)
        assert not compared.weights_right.any()
        assert compared.weights_judged.all()


@pytest.mark.parametrize("method", [*RENORMALISED, *WEIGHED])
@pytest.mark.parametrize("level", [-16.0, -25.0, -80.0])
def test_nothing_is_judged_where_zeros_are_what_tanh_gives(method: str, level: float) -> None:
    logits = logits_at(level)
    ids = route(logits, 2, method=method).topk_ids
    zeros = Routing(ids, torch.zeros(ids.shape))
    compared = judged(logits, zeros, method)
    assert compared.weights_right.all()
    assert not compared.weights_judged.any()
    exact = judged(logits, zeros, method, Arithmetic())
    assert exact.weights_judged.all()
    assert not exact.weights_right.any()
    if method in RENORMALISED:  # what adds up to anything else is no arithmetic's
        for wrong in (torch.full(ids.shape, 0.25), torch.tensor([[1.5, -0.5]]).expand(3, 2)):
            assert not judged(logits, Routing(ids, wrong), method).weights_right.any()


def test_zeros_of_scores_that_underflow_are_right_and_judged() -> None:
    for method in ("sigmoid_renorm", "sigmoid", "llama4", "deepseek_v4"):
        logits = logits_at(-300.0)
        ids = route(logits, 2, method=method).topk_ids
        compared = judged(logits, Routing(ids, torch.zeros(ids.shape)), method, Arithmetic())
        assert compared.right
        assert compared.weights_judged.all()
        half = Routing(ids, torch.full(ids.shape, 0.5))
        assert not judged(logits, half, method, Arithmetic()).weights_right.any()


@pytest.mark.parametrize("level", [-40.0, -87.0, -90.0, -104.0, -200.0])
def test_square_roots_of_what_is_flushed_or_subnormal_are_right(level: float) -> None:
    logits = logits_at(level)
    exact = route(logits, 3, method="deepseek_v4")
    soft = torch.exp(logits.gather(1, exact.topk_ids.long()))
    flushed = torch.where(soft < 2.0**-126, 0.0, soft)
    for scores in (soft.sqrt(), flushed.sqrt()):
        weights = scores / (scores.sum(dim=1, keepdim=True) + 1e-20)
        found = Routing(exact.topk_ids, weights.float())
        assert judged(logits, found, "deepseek_v4", Arithmetic()).right


def test_one_score_that_is_far_above_the_others_is_judged() -> None:
    logits = torch.tensor([[1.0, -30.0, -31.0]])
    found = route(logits, 2, method="sigmoid")
    assert judged(logits, found, "sigmoid").weights_judged.all()
    assert not judged(
        logits, found._replace(topk_weights=torch.zeros(1, 2)), "sigmoid"
    ).weights_right.any()
