"""Rows whose logits are so far off that keys may change places: no weights go beyond the bound."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kernelproof.reference import (
    Arithmetic,
    AttentionOutput,
    ragged_attention,
    ragged_attention_error_bound,
)
from kernelproof.reference.attention.error_terms import FIXED_POINT, LOGIT, LSE, growth
from kernelproof.reference.attention.reordering import (
    LARGEST_LOGIT_ERROR,
    LogitErrors,
    largest_sum,
    may_reorder,
)

ROWS, KEYS, CHANNELS = (8, 2, 5), 5, 3
"""[N, K, R] of the random rows; few keys, so that each sign of each error can be tried."""
ROUNDING = 1e-12
SINGLE = 2.0**-24


class Perturbed:
    """Random rows with a sink, and what their logits are off by.

    The sink is the last of the logits [N, K, R, S' + 1] and has no value. A key of every fourth row
    is masked.
    """

    def __init__(self, seed: int, spread: float, largest: float, *, same: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (*ROWS, KEYS + 1)
        self.logits = spread * torch.randn(shape, generator=generator, dtype=torch.float64)
        self.logits.view(-1, KEYS + 1)[::4, 1] = -math.inf
        self.off = torch.rand(shape, generator=generator, dtype=torch.float64).mul_(largest)
        if same:
            self.off[:] = largest
        self.off.masked_fill_(self.logits.isneginf(), 0.0)
        values = (*ROWS[:2], KEYS, CHANNELS)
        self.v = torch.randn(values, generator=generator, dtype=torch.float64)

    def found(self) -> torch.Tensor:
        """Return the bound [N, K, R, E]."""
        nothing = torch.zeros((*ROWS, 1), dtype=torch.float64)
        most = self.off.amax(dim=-1, keepdim=True)
        errors = LogitErrors(self.off[..., :KEYS], most, nothing, nothing)
        return largest_sum(self.logits.log_softmax(dim=-1)[..., :KEYS], self.v, errors)

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """Return sum P_j |V_j| of these logits, [N, K, R, E]."""
        return logits.softmax(dim=-1)[..., :KEYS] @ self.v.abs()

    def attained(self) -> torch.Tensor:
        """Return the most that it may be.

        Where one logit alone moves, the sum is a quotient of two linear functions of its
        exponential, and so largest at an end: the corners are all that counts.
        """
        corners = itertools.product((-1.0, 1.0), repeat=KEYS + 1)
        sums = [self.of(self.logits + torch.tensor(c).double() * self.off) for c in corners]
        return torch.stack(sums).amax(dim=0)


@pytest.mark.parametrize("largest", [0.1, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("spread", [0.5, 3.0, 20.0])
def test_no_weights_within_the_errors_give_more(spread: float, largest: float) -> None:
    for seed in range(3):
        rows = Perturbed(seed, spread, largest)
        found = rows.found()
        assert (rows.attained() <= found * (1 + ROUNDING)).all()
        assert (found <= rows.v.abs().amax(dim=2, keepdim=True)).all()


@pytest.mark.parametrize("largest", [0.1, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("spread", [0.5, 3.0, 20.0])
def test_errors_that_are_alike_are_not_overrated(spread: float, largest: float) -> None:
    """Within exp(2 d) of what is attained, and within twice the number of keys.

    No Q_j is above exp(2 d) P_j, and P itself is within the errors. With the logit of key j up and
    all others down its weight is a / (1 + a - P_j) for a = exp(2 d) P_j, at least min(1, a) / 2 or
    half of Q_j: the sum attains half of each of the bound's terms.
    """
    for seed in range(3):
        rows = Perturbed(seed, spread, largest, same=True)
        factor = min(math.exp(2 * largest), 2.0 * KEYS)
        assert (rows.found() <= factor * rows.attained() * (1 + ROUNDING)).all()


def test_without_errors_it_is_the_sum() -> None:
    rows = Perturbed(0, 3.0, 0.0)
    torch.testing.assert_close(rows.found(), rows.of(rows.logits), rtol=ROUNDING, atol=0)


def test_keys_change_places_by_a_large_deviation_or_one_large_error() -> None:
    cases = [  # deviation, largest, whether keys may change places
        (0.5, 2.0, False),
        (1.0, LARGEST_LOGIT_ERROR, False),
        (0.5, LARGEST_LOGIT_ERROR + 1, True),
        (1.5, 2.0, True),
    ]
    for deviation, largest, expected in cases:
        one = torch.ones((1, 1, 1, 1), dtype=torch.float64)
        errors = LogitErrors(largest * one, largest * one, one, deviation * one)
        assert errors.reorder.tolist() == [[[[expected]]]], (deviation, largest)
        assert may_reorder(errors) is expected
        assert not may_reorder(errors._replace(absolute=one[..., :0]))  # no keys, no places


# Attention


def fixed_point_bound(
    q: torch.Tensor, k: torch.Tensor, sm_scale: float
) -> tuple[AttentionOutput, torch.Tensor, torch.Tensor]:
    """Attend to two keys in FP8, whose values are -1 and 1: the first has nearly all the weight.

    Returns:
        The bound; the exact logits [2]; and [2], what cutting the products off moves them by.
    """
    fp8 = torch.float8_e4m3fn
    assert torch.equal(q.to(fp8).float(), q)
    assert torch.equal(k.to(fp8).float(), k)
    bound = ragged_attention_error_bound(
        q.to(fp8).view(1, 1, -1),
        k.to(fp8).unsqueeze(1),
        torch.tensor([-1.0, 1.0]).to(fp8).view(2, 1, 1),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([0, 2], dtype=torch.int32),
        causal=False,
        sm_scale=sm_scale,
        arithmetic=Arithmetic(fp8_products="fixed_point"),
        out_dtype=torch.float16,
    )
    logits = sm_scale * (k.double() @ q.double())
    addends = sm_scale * q.abs().max() * k.abs().amax(dim=1).double()
    return bound, logits, growth(len(q)) * FIXED_POINT * (addends + logits.abs())


def moved(logits: torch.Tensor, off: torch.Tensor) -> float:
    """Return how far the output is moved where the first logit goes down and the second up."""
    off = torch.stack([-off[0], off[1]])
    return 2 * ((logits + off).softmax(dim=0)[1] - logits.softmax(dim=0)[1]).item()


def expansion(logits: torch.Tensor, off: torch.Tensor) -> tuple[float, float]:
    """Return w = sqrt(sum P e^2) and 2 w D, which part 2 of the derivation allows a small w."""
    weights, relative = logits.softmax(dim=0), off.clamp(max=LARGEST_LOGIT_ERROR).expm1()
    deviation = (weights * relative.square()).sum().sqrt().item()
    return deviation, 4 * deviation * weights.prod().sqrt().item()


def test_one_large_error_of_a_key_of_no_weight() -> None:
    """Products that cancel leave a key 90 below the other, and off by 139: it may get all."""
    side = torch.full((63,), 448.0)
    q = torch.cat([torch.tensor([2.0, 0.0]), side, side])
    far = torch.cat([torch.tensor([-448.0, 0.0]), side, -side])
    bound, logits, off = fixed_point_bound(q, torch.stack([0 * far, far]), 0.1)
    deviation, expanded = expansion(logits, off)
    assert deviation < 1e-3
    assert expanded < 1e-3
    assert off.max() > LARGEST_LOGIT_ERROR
    assert 1.99 < moved(logits, off) <= bound.out.item() < 2.01
    # The row's lse goes from 0 to the far key's logit, then.
    assert bound.lse.item() >= logits[1].item() + off[1].item()


def test_errors_that_are_large_together() -> None:
    """A key of weight 1.5e-6 is off by 10, the other by 3: neither by much, and it may get 0.6."""
    side = torch.full((63,), 448.0)
    q = torch.cat([torch.tensor([4.0, 0.0]), side, side])
    near = torch.cat([torch.zeros(2), side, -side]) * (144 / 448)
    far = torch.cat([torch.tensor([-448.0, 0.0]), side, -side])
    bound, logits, off = fixed_point_bound(q, torch.stack([near, far]), 0.0075)
    deviation, expanded = expansion(logits, off)
    assert deviation > 1
    assert off.max() < LARGEST_LOGIT_ERROR / 2
    assert 3 * expanded < moved(logits, off) <= bound.out.item()
    assert bound.out.item() < 2.01  # |O| + max |V|


def test_a_large_sink_is_off_by_more_than_the_keys() -> None:
    """The lse is the sink's logit, which is off by as much as it is rounded at its own size."""
    sink = 2.0**27
    zero = torch.zeros((1, 1, 8))
    call = zero, zero, zero[..., :1] + 1, torch.tensor([0, 1]), torch.tensor([0, 1])
    sinks = torch.tensor([sink])
    exact = ragged_attention(*call, sinks=sinks)
    assert exact.out.item() == 0
    assert exact.lse.item() == sink
    bound = ragged_attention_error_bound(*call, sinks=sinks)
    of_key, of_sink = LOGIT * SINGLE * sink, 2 * LOGIT * SINGLE * sink
    assert of_key > LARGEST_LOGIT_ERROR
    stored = (2 * LSE + 1) * SINGLE * sink  # part 5, the lse and the largest logit being the sink
    assert of_sink + stored <= bound.lse.item() <= 1.01 * (of_sink + stored)
    assert bound.out.item() < 1e-30
