"""Laws of experts about what must not matter: unread weights, slots of weight 0, far addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from ...impl import Implementation
from ...reference import MoEProblem, QuantizedMatrix
from ...reference.problems.moe import as_one
from ...reference.tensors.allocation import unreserved
from ...reference.tensors.batched_moe import BatchedMoEInputs
from ...reference.tensors.moe_inputs import MoEInputs
from ...reference.tensors.moe_regimes import assignment
from ...reference.tensors.values import bits, stream
from ..isolation.machine import undisturbed
from ..verdicts.subject import Subject
from ..verdicts.verdict import VACUOUS, Verdict
from .expert_calls import answer, result, same
from .far import has_room, narrow
from .law import MOE, Law

E8M0_NAN, E4M3_NAN = 255, 0x7F
FAR_HIDDEN, FAR_INTER = 1024, 512
FAR_EXPERTS = 2**12 + 3
FAR_PLACES = (0, 2**11 + 1, 2**12 + 2)
"""Experts in use. Those of gated w13 begin 2^20 numbers apart, those of w2 2^19, so that the last
ones begin beyond 2^32 and beyond 2^31: products of an id and a stride that int32 cannot hold."""
SOME_EXPERTS, MOST_SECONDS, CPU_SECONDS = 259, 6.0, 60.0
"""On a CPU: experts with which a call is timed first; seconds that it may be expected to take with
all of them; and the deadline of each call. The interpreter runs programs for each tile of weights
that are far larger than those of other problems, and of some kernels for each expert."""
SHARES = (8, 2)
"""Divisors of hidden and inter of calls that are timed before the first of full size."""
_too_slow: WeakKeyDictionary[Implementation, str] = WeakKeyDictionary()
"""Why an implementation is not asked, once that has been measured in this process; empty: it is."""


def unselected_experts(subject: Subject, problem: MoEProblem) -> Verdict:
    """Put NaN into the experts that no token goes to, and around all tensors: nothing changes."""
    inputs = subject.materialise(problem)
    first, bound = answer(subject, problem, inputs)
    poisoned = subject.materialise(problem, unused=torch.nan)
    _poison(poisoned, problem)
    second = result(subject, problem, poisoned)
    return same(second, first, 2 * bound, exact=subject.exact(problem))


def _poison(inputs: MoEInputs, problem: MoEProblem) -> None:
    """Overwrite the weights and biases of experts that no slot names with NaN."""
    here = torch.arange(problem.expert_offset, problem.expert_offset + problem.here)
    named = torch.isin(here, inputs.topk_ids.cpu().long())
    spoil_experts(inputs, (~named).nonzero().flatten())


def spoil_experts(inputs: MoEInputs | BatchedMoEInputs, unread: torch.Tensor) -> None:
    """Overwrite the weights and biases of experts, by their place on this rank, with NaN."""
    for value in (inputs.w13, inputs.w2, inputs.w13_bias, inputs.w2_bias):
        if isinstance(value, QuantizedMatrix):
            _fill(value.scales, unread)
            if value.codes.dtype == torch.float8_e4m3fn:
                _fill(value.codes, unread)
        elif value is not None:
            _fill(value, unread)


def _fill(tensor: torch.Tensor, index: torch.Tensor) -> None:
    index = index.to(tensor.device)
    if tensor.element_size() > 1:
        tensor[index] = torch.nan
    else:
        nan = E4M3_NAN if tensor.dtype == torch.float8_e4m3fn else E8M0_NAN
        tensor.view(torch.uint8)[index] = nan


def zero_weight_slots(subject: Subject, problem: MoEProblem) -> Verdict:
    """Send slots of weight 0 to other experts: nothing changes."""
    if problem.weights_on_input or problem.num_experts <= problem.top_k or not problem.num_tokens:
        return VACUOUS
    inputs = subject.materialise(problem)
    device = inputs.topk_ids.device
    tokens = torch.arange(problem.num_tokens, device=device)
    zero = bits(stream(problem.seed, "zero slots"), tokens, problem.top_k) % 2 == 0
    elsewhere = assignment(replace(problem, seed=problem.seed + 1, assignment="iid"), device)
    if problem.assignment != "duplicates":
        # An expert that the token has already stays where it is.
        taken = (elsewhere.unsqueeze(2) == inputs.topk_ids.unsqueeze(1)).any(dim=2)
        zero &= ~taken
    given = replace(inputs, topk_weights=inputs.topk_weights.masked_fill(zero, 0.0))
    moved = replace(given, topk_ids=torch.where(zero, elsewhere, given.topk_ids))
    if not bool((zero & (moved.topk_ids != given.topk_ids)).any()):
        return VACUOUS
    first, bound = answer(subject, problem, given)
    second = result(subject, problem, moved)
    return same(second, first, 2 * bound, exact=subject.exact(problem))


def padding_of_widths(subject: Subject, problem: MoEProblem) -> Verdict:
    """Put NaN behind hidden and inter where tensors are wider: nothing changes."""
    promised = "unread_padding" in subject.implementation.features
    if not (promised and problem.pad_to and problem.num_tokens):
        return VACUOUS
    inputs = subject.materialise(problem)
    first, bound = answer(subject, problem, inputs)
    second = result(subject, problem, subject.materialise(problem, padding=torch.nan))
    return same(second, first, 2 * bound, exact=subject.exact(problem))


def far_experts(subject: Subject, problem: MoEProblem) -> Verdict:
    """Keep few experts far apart in weights of more than 2^32 numbers: nothing changes.

    On a CPU these are memory that is mapped and, but for the experts in use, never touched; on a
    GPU they are allocated, and not written.
    """
    if reason := _too_slow.get(subject.implementation):
        return Verdict("UNSUPPORTED", "time", reason)
    asked = "large_weights" in subject.implementation.features and problem.num_tokens
    if not asked or problem.quantized or problem.shared_experts:
        return VACUOUS
    near = replace(
        problem,
        num_tokens=len(FAR_PLACES),
        hidden=FAR_HIDDEN,
        inter=FAR_INTER,
        num_experts=len(FAR_PLACES),
        top_k=1,
        local_experts=0,
        expert_offset=0,
        biases=False,
        swiglu_parameters=as_one(problem.swiglu_parameters),
        assignment="balanced",
        strided_hidden=False,
        one_product=False,
        pad_to=0,
        pad_states=False,
        token_ids=(),
        identity_experts=0,
    )
    near = narrow(subject, near)
    far = replace(near, num_experts=FAR_EXPERTS)
    if not (subject.claims(near) and subject.claims(far)) or _too_large(subject, near):
        return VACUOUS
    inputs = subject.materialise(near)
    if subject.target.device == "cpu" and subject.implementation not in _too_slow:
        reason = _too_slow[subject.implementation] = _would_take_long(subject, near, inputs)
        if reason:
            return Verdict("UNSUPPORTED", "time", reason)
    first, bound = answer(subject, near, inputs)
    given = _moved(inputs, FAR_PLACES, FAR_EXPERTS)
    second = result(subject, far, given)
    return same(second, first, 2 * bound, exact=subject.exact(near))


def _would_take_long(subject: Subject, near: MoEProblem, inputs: MoEInputs) -> str:
    """Return why calls of this size are not made; empty if they are."""
    experts = f"{len(FAR_PLACES)} experts of {FAR_HIDDEN} by {FAR_INTER}"
    seconds = _seconds_of_full_size(subject, near)
    if seconds <= MOST_SECONDS:
        experts, seconds = f"{FAR_EXPERTS:,} experts", _seconds_with_all(subject, near, inputs)
    if seconds <= MOST_SECONDS:
        return ""
    return f"{experts} would take it about {seconds:.0f} s a call on a CPU"


def _seconds_of_full_size(subject: Subject, near: MoEProblem) -> float:
    """Return what a call of full size would take by two smaller ones; 0 if they are not claimed."""
    timed = []
    for share in SHARES:
        smaller = replace(near, hidden=FAR_HIDDEN // share, inter=FAR_INTER // share)
        if not subject.claims(smaller):
            return 0.0
        inputs = subject.materialise(smaller)
        before = undisturbed()
        result(subject, smaller, inputs)
        seconds = undisturbed() - before
        if seconds > MOST_SECONDS:
            return seconds
        timed.append((smaller.work, seconds))
    (little, first), (some, second) = timed
    slope = max(second - first, 0.0) / (some - little)
    return second + slope * (near.work - some)


def _seconds_with_all(subject: Subject, near: MoEProblem, inputs: MoEInputs) -> float:
    """Return what a call with all experts would take, by calls with few and with some."""
    counts, seconds = (len(FAR_PLACES), SOME_EXPERTS), []
    for count in counts:
        places = (*range(len(FAR_PLACES) - 1), count - 1)
        given = _moved(inputs, places, count)
        before = undisturbed()
        result(subject, replace(near, num_experts=count), given)
        seconds.append(undisturbed() - before)
    few, some = seconds
    more = (FAR_EXPERTS - SOME_EXPERTS) / (SOME_EXPERTS - len(FAR_PLACES))
    return some + more * max(some - few, 0.0)


def _moved(inputs: MoEInputs, places: Sequence[int], count: int) -> MoEInputs:
    """Return the same call with its experts in these places among a number of them."""
    assert isinstance(inputs.w13, torch.Tensor)  # noqa: S101  they are not quantised
    assert isinstance(inputs.w2, torch.Tensor)  # noqa: S101
    ids = torch.tensor(places, dtype=torch.int32, device=inputs.topk_ids.device)
    return replace(
        inputs,
        w13=_far(inputs.w13, places, count),
        w2=_far(inputs.w2, places, count),
        topk_ids=ids[inputs.topk_ids.long()],
        num_experts=count,
    )


def _too_large(subject: Subject, problem: MoEProblem) -> bool:
    """Whether a GPU has no room for the weights beside what an implementation may need."""
    itemsize: int = getattr(torch, problem.dtype).itemsize
    rows = 2 * FAR_INTER if problem.gated else FAR_INTER
    needed = itemsize * FAR_EXPERTS * FAR_HIDDEN * (rows + FAR_INTER)
    return not has_room(subject, 2 * needed)


def _far(matrix: torch.Tensor, places: Sequence[int], experts: int) -> torch.Tensor:
    """Put experts into these places among others that hold nothing."""
    apart = unreserved((experts, *matrix.shape[1:]), matrix.dtype, matrix.device)
    for place, weights in zip(places, matrix, strict=True):
        apart[place] = weights
    return apart


LAWS = (
    Law(
        "unselected_experts",
        MOE,
        unselected_experts,
        "NaN in experts that no token goes to, and around tensors, changes nothing",
        weight=0.5,
    ),
    Law(
        "zero_weight_slots",
        MOE,
        zero_weight_slots,
        "it does not matter which expert a slot of weight 0 names",
        weight=0.5,
    ),
    Law(
        "padding_of_widths",
        MOE,
        padding_of_widths,
        "NaN behind the channels that count, in tensors that are wider, changes nothing",
        weight=0.5,
        needs=("unread_padding",),
        looks_at=({"widths": lambda values: tuple(each for each in values if each[0])},),
    ),
    Law(
        "far_experts",
        MOE,
        far_experts,
        "weights of more than 2^32 numbers give what those of the experts in use give",
        weight=0.1,
        needs=("large_weights",),
        cpu_seconds=CPU_SECONDS,
    ),
)
