"""Judging a routing: any choice among scores that a kernel cannot tell apart is right."""

from __future__ import annotations

import torch

from ...reference import Routing, oracle
from ...reference.moe_inputs import RouteInputs
from ...reference.routing_bounds import RoutingComparison
from ..comparison import Result, fail
from ..subject import Subject
from ..verdict import Verdict


def compare(subject: Subject, inputs: RouteInputs, result: Result) -> RoutingComparison | Verdict:
    """Compare (topk_weights, topk_ids) with what may be right; a FAIL if the shapes are not."""
    weights, ids = result
    assert ids is not None  # noqa: S101  of route there are always both
    wanted = [len(inputs.logits), inputs.top_k]
    for name, tensor in (("topk_ids", ids), ("topk_weights", weights)):
        if list(tensor.shape) != wanted:
            return fail("shape", f"{name} has shape {list(tensor.shape)}, not {wanted}")
    if ids.dtype.is_floating_point or ids.dtype == torch.bool:
        return fail("dtype", f"topk_ids is {ids.dtype}, not an integer")
    if not weights.dtype.is_floating_point:
        return fail("dtype", f"topk_weights is {weights.dtype}, not floating")
    return oracle.judge_routing(inputs, Routing(ids, weights), subject.implementation.arithmetic)


def judge_route(subject: Subject, inputs: RouteInputs, result: Result) -> Verdict:
    """Judge (topk_weights, topk_ids) of a call."""
    compared = compare(subject, inputs, result)
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
    difference = (weights.to(compared.bound.dtype) - compared.expected).abs()
    ratio = (difference / compared.bound).masked_fill(difference == 0, 0.0)
    if not bool(compared.weights_right.all()):
        misplaced = ~(difference <= compared.bound)
        token, slot = misplaced.nonzero()[0].tolist()
        nan = bool(weights[token, slot].isnan())
        said = (
            f"topk_weights[{token}, {slot}] of expert {int(ids[token, slot])} is "
            f"{float(weights[token, slot]):.9g}, expected "
            f"{float(compared.expected[token, slot]):.9g}, bound "
            f"{float(compared.bound[token, slot]):.3g}"
        )
        worst = None if nan else float(ratio.nan_to_num(posinf=torch.inf).max())
        return fail("nan" if nan else "numeric", said, worst)
    return Verdict("PASS", ratio=float(ratio.max()) if ratio.numel() else 0.0)
