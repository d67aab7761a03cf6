"""What a router's arithmetic still promises of the weights where their bound exceeds them.

A sigmoid made of tanh has an absolute error: of logits below -14 or so it may be anything from 0 to
several times itself, and so may the weights. What remains: no weight that is made of scores is
negative; renormalised weights w_i = a_i / (a_i + sum of the others + floor) of scores a_i within
[s_i - e_i, s_i + e_i] lie between the values at the ends of these intervals, and add up to
T / (T + floor), T the sum of the a_i, whatever each of them is; or all of them are 0, where all
a_i may be.
"""

from __future__ import annotations

import torch

from ..attention.error_terms import SUM, growth
from ..formats.arithmetic import (
    SMALLEST_SUBNORMAL,
    UNIT_ROUNDOFF,
    Arithmetic,
    dtype_name,
    unit_roundoff,
)
from .routing import Router

TINY = 2.0**-126
"""The smallest normal float32: a kernel may flush what is below it to zero."""
UNDERFLOWS = {"sqrt_softplus": TINY**0.5}
"""Scores that a kernel may flush to zero, by method of scoring; ``TINY`` of the others."""
LEAST_BY_TANH = 0.25
"""Least (1 + tanh(x / 2)) / 2 that is not 0, in units of u: half of a last digit of numbers just
below 1, and half of that."""

FINER = 2.0**-7
"""Relative error of sums of low scores that are not made of tanh: far above that of exponentials of
float32."""


def keeps_promises(
    router: Router,
    ids: torch.Tensor,
    scores: torch.Tensor,
    errors: torch.Tensor,
    given: torch.Tensor,
    arithmetic: Arithmetic,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return which weights [tokens, top_k] are among those that the arithmetic may give.

    Args:
        router: the checked arguments.
        ids: int64 [tokens, slots], the experts that were taken.
        scores, errors: [tokens, slots], what the weights of the experts that were taken are made
            of: their scores, or sigmoids of their logits.
        given: their weights, in the dtype of the computation.
        arithmetic: what the kernel computes in.
        dtype: the dtype that the weights were stored in.
    """
    how, slots, floor = router.how, given.shape[1], router.rules.renormalise_floor
    factors = torch.full_like(given, router.scaling_factor)
    if router.rules.expert_scales is not None:
        factors *= router.rules.expert_scales[ids]
    if bool((factors == 0).any()) or (how.score == "logit" and how.weight == "score"):
        return torch.ones_like(given, dtype=torch.bool)
    weights = given / factors
    u = UNIT_ROUNDOFF[arithmetic.accumulate]
    slack = (growth(slots) + SUM + 1) * u + unit_roundoff(dtype)
    lost = (TINY + SMALLEST_SUBNORMAL[dtype_name(dtype)]) / factors.abs()
    kept = weights >= -lost
    if how.score != "sqrt_softplus" or how.weight == "renormalize":
        kept &= weights <= (1 + slack) ** 2 + lost
    if how.weight not in ("renormalize", "softmax"):
        return kept
    total = weights.sum(dim=1, keepdim=True)
    near = (1 + slack) ** 2 - 1 + lost.sum(dim=1, keepdim=True)
    if how.weight == "softmax":
        return kept & ((total - 1).abs() <= near)
    low, high = (scores - errors).clamp(min=0.0), scores + errors
    least, most = low.sum(dim=1, keepdim=True), high.sum(dim=1, keepdim=True)
    kept &= weights >= _share(low, low + (most - high), floor) - near
    kept &= weights <= _share(high, high + (least - low), floor) + near
    at_least = _share(least, least, floor) - near
    adds_up = (total >= at_least) & (total <= _share(most, most, floor) + near)
    if arithmetic.sigmoid == "tanh" and how.score == "sigmoid":
        # Scores of tanh are 0 or far above the floor; exponentials are allowed, too.
        coarse = LEAST_BY_TANH * u
        sums = scores.sum(dim=1, keepdim=True)
        usual = _share(sums, sums, floor)
        fine = (total - usual).abs() <= near + FINER * usual
        adds_up &= (least > 0) | (total >= coarse / (coarse + floor) - near) | fine
        adds_up |= (least == 0) & (weights.abs() <= lost).all(dim=1, keepdim=True)
    return kept & adds_up


def _share(part: torch.Tensor, total: torch.Tensor, floor: float) -> torch.Tensor:
    """Return part / (total + floor), 0 where both are 0."""
    share: torch.Tensor = (part / (total + floor)).nan_to_num(nan=0.0)
    return share


def zero_is_right(
    router: Router,
    scores: torch.Tensor,
    errors: torch.Tensor,
    expected: torch.Tensor,
    bound: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return for which tokens [tokens] weights of 0 are what numbers of float32 can say.

    Args:
        router, scores, errors, dtype: the same as in ``keeps_promises``.
        expected, bound: the weights [tokens, top_k], and how far a kernel's may be from them.
    """
    least = UNDERFLOWS.get(router.how.score, TINY)
    underflows = (scores.abs() <= least) & (errors <= 2 * least)
    if router.how.weight in ("softmax", "sparsemixer"):
        underflows[:] = False  # their sum is 1, however low the logits are
    step = SMALLEST_SUBNORMAL[dtype_name(dtype)]
    stored = (expected.abs() <= step / 2) & (bound <= 2 * step)
    right: torch.Tensor = (underflows | stored).all(dim=1)
    return right
