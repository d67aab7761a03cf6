"""Judging a routing: any choice among scores that a kernel cannot tell apart is right."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...impl import Implementation
from ...reference import Routing, oracle
from ...reference.moe.routing_bounds import RoutingComparison
from ...reference.tensors.moe_inputs import RouteInputs
from .comparison import Check, Result, fail, listed, off
from .verdict import PASS, VACUOUS, Verdict

COPIED = ("logits", "bias", "expert_scales", "expert_table", "input_ids")
"""Tensors of a routing's record."""


def guarded(inputs: RouteInputs) -> RouteInputs:
    """Return a copy of what a call may change."""
    copies = {name: getattr(inputs, name) for name in COPIED}
    return replace(
        inputs, **{name: each.clone() for name, each in copies.items() if each is not None}
    )


def compare(
    implementation: Implementation, inputs: RouteInputs, result: Result
) -> RoutingComparison | Verdict:
    """Compare (topk_weights, topk_ids) with what may be right; a FAIL if the shapes are not."""
    wrong = misshapen(inputs, result)
    if wrong is not None:
        return wrong
    weights, ids = result
    assert ids is not None  # noqa: S101  of route there are always both
    return oracle.judge_routing(inputs, Routing(ids, weights), implementation.arithmetic)


def misshapen(inputs: RouteInputs, result: Result) -> Verdict | None:
    """Return what is wrong with shapes or dtypes of (topk_weights, topk_ids), if anything is."""
    weights, ids = result
    assert ids is not None  # noqa: S101  of route there are always both
    wanted = [len(inputs.logits), inputs.slots]
    for name, tensor in (("topk_ids", ids), ("topk_weights", weights)):
        if list(tensor.shape) != wanted:
            return fail("shape", f"{name} has shape {list(tensor.shape)}, not {wanted}")
    if ids.dtype.is_floating_point or ids.dtype == torch.bool:
        return fail("dtype", f"topk_ids is {ids.dtype}, not an integer")
    if not weights.dtype.is_floating_point:
        return fail("dtype", f"topk_weights is {weights.dtype}, not floating")
    return None


def judge_route(implementation: Implementation, inputs: RouteInputs, result: Result) -> Verdict:
    """Judge (topk_weights, topk_ids) of a call."""
    compared = compare(implementation, inputs, result)
    if isinstance(compared, Verdict):
        return compared
    weights, ids = result
    assert ids is not None  # noqa: S101  of route there are always both
    wrong = ~compared.ids_right
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        best = oracle.routing(inputs).topk_ids[token].tolist()
        said = f"token {token} goes to {ids[token].tolist()}, better ones are among {best}"
        return fail("numeric", f"{said} ({int(wrong.sum())} of {len(wrong)} tokens)")
    given = weights.to(compared.bound.dtype)
    difference = (given - compared.expected).abs().masked_fill(given == compared.expected, 0.0)
    ratio = (difference / compared.bound).masked_fill(difference == 0, 0.0)
    if not bool(compared.weights_right.all()):
        misplaced = ~(difference <= compared.bound)
        if not bool(misplaced.any()):
            return _unlike(given, compared)
        token, slot = misplaced.nonzero()[0].tolist()
        nan = bool(weights[token, slot].isnan())
        bound = f"{float(compared.bound[token, slot]):.3g}"
        return off(
            "nan" if nan else "numeric",
            f"topk_weights[{token}, {slot}] of expert {int(ids[token, slot])}",
            f"{float(weights[token, slot]):.9g}",
            f"{float(compared.expected[token, slot]):.9g}",
            bound=bound,
            more=f", bound {bound}",
            ratio=None if nan else float(ratio.nan_to_num(posinf=torch.inf).max()),
            worst=listed(
                Check("topk_weights", weights, compared.expected, compared.bound),
                misplaced,
                ratio.nan_to_num(nan=torch.inf),
            ),
        )
    if _tells_nothing(compared):
        return VACUOUS
    return Verdict("PASS", ratio=float(ratio.max()) if ratio.numel() else 0.0)


def _unlike(given: torch.Tensor, compared: RoutingComparison) -> Verdict:
    """Return the FAIL of weights within bounds that exceed them, as no arithmetic makes them."""
    token = int((~compared.weights_right).nonzero()[0])
    weights, expected = (
        [float(f"{each:.6g}") for each in row[token].tolist()] for row in (given, compared.expected)
    )
    said = f"the weights of token {token} are {weights}, expected {expected}"
    sums = (float(row[token].sum()) for row in (given, compared.expected))
    return fail("numeric", "{}: they add up to {:.6g}, expected {:.6g}".format(said, *sums))


def _tells_nothing(compared: RoutingComparison) -> bool:
    """Whether there are tokens, and weights of 0 would be within the bounds of all of them."""
    judged = compared.weights_judged
    return bool(judged.numel()) and not bool(judged.any())


def agree_routes(
    implementation: Implementation,
    inputs: RouteInputs,
    first: Result,
    second: Result,
    *,
    other: RouteInputs | None = None,
) -> Verdict:
    """Check that two routings of the same tokens agree.

    The experts must be the same, or both choices right among scores that cannot be distinguished;
    the weights of the same experts must lie within the sum of both bounds, or both be NaN: whether
    they are right is another law's question.

    Args:
        implementation: the implementation that gave both.
        inputs, other: the inputs of the first route, and of the second if they are not the same.
        first, second: (topk_weights, topk_ids).
    """
    compared = compare(implementation, inputs, first)
    second_compared = compare(implementation, other or inputs, second)
    for each in (compared, second_compared):
        if isinstance(each, Verdict):
            return each
    assert isinstance(compared, RoutingComparison)  # noqa: S101  verdicts have gone
    assert isinstance(second_compared, RoutingComparison)  # noqa: S101
    rows = [_by_id(result, each.bound) for result, each in
            ((first, compared), (second, second_compared))]  # fmt: skip
    (ids, weights, bound), (other_ids, other_weights, other_bound) = rows
    alike = (ids == other_ids).all(dim=1)
    wrong = ~(alike | (compared.ids_right & second_compared.ids_right))
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        said = f"token {token} goes to {ids[token].tolist()}, then to {other_ids[token].tolist()}"
        return fail("numeric", f"{said} ({int(wrong.sum())} of {len(wrong)} tokens)")
    same = (weights == other_weights) | (weights.isnan() & other_weights.isnan())
    difference = (weights - other_weights).abs().masked_fill(same, 0.0)
    # Experts with equal logits may be taken in either order, in which sparsemixer weighs them.
    right = compared.weights_right & second_compared.weights_right
    apart = ~(difference <= bound + other_bound) & (alike & ~right).unsqueeze(1)
    if bool(apart.any()):
        token, slot = apart.nonzero()[0].tolist()
        said = f"the weight of expert {int(ids[token, slot])} for token {token} is "
        said += f"{float(weights[token, slot]):.9g}, then {float(other_weights[token, slot]):.9g}"
        return fail("numeric", said)
    if _tells_nothing(compared) or _tells_nothing(second_compared):
        return VACUOUS
    return PASS


def _by_id(result: Result, bound: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bring ids, weights and their bounds into the order of the ids."""
    weights, ids = result
    assert ids is not None  # noqa: S101  of route there are always both
    order = ids.long().argsort(dim=1, stable=True)
    return ids.long().gather(1, order), weights.double().gather(1, order), bound.gather(1, order)
