"""Metamorphic laws of attention: changes to a problem that must, or must not, change the answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...reference import AttentionOutput, AttentionProblem
from ...reference.attention.bounds import Bounded
from ...reference.formats.arithmetic import UNIT_ROUNDOFF
from ...reference.problems import KV_VIEWS
from ...reference.problems.cache_names import multiples_of
from ...reference.problems.mask_fields import NO_MASK
from ...reference.tensors.values import choose
from ..verdicts.asked import compared
from ..verdicts.comparison import (
    Result,
    agree,
    bitwise,
    fail,
    same_result_bits,
    worse,
)
from ..verdicts.contained import Stop
from ..verdicts.subject import Subject
from ..verdicts.verdict import VACUOUS, Verdict
from .general import as_expected, parity, run, run_on, same_result
from .hidden import unused_memory
from .law import ATTENTION, PAGED, Law, several

SWITCHES: dict[str, tuple[Any, Any]] = {
    "causal": (False, True),
    "window_left": (-1, None),
    "window_right": (-1, None),
    "logits_soft_cap": (0.0, 1.0),
    "sm_scale": (None, 0.05),
    "q_scale": (1.0, 2.0),
    "k_scale": (1.0, 2.0),
    "v_scale": (1.0, 2.0),
    "sinks": (False, True),
    "alibi": (False, True),
    "causal_by_request": (False, True),
    "output_scale": (None, 0.25),
    "output_divisor": (1.0, 4.0),
    "custom_mask": (False, True),
    "tree": (0, None),
    "per_head_scales": (False, True),
    "mask_by_head": (False, True),
    "spans": ("", "images"),
    "chunk": (0, 16),
    "window_dilation": (1, 2),
    "sink_tokens": (0, 1),
    "logits_bias": ("", "dense"),
    "alibi_function": ("linear", "sqrt"),
    "two_sided_window": (False, True),
    "spans_in_window": (False, True),
}
"""Options that must matter: the value of each that switches it off, and one that switches it on."""
TOGETHER: dict[str, dict[str, Any]] = {
    "custom_mask": NO_MASK,
    "alibi": {"alibi": False, "alibi_function": "linear"},
}
"""Options that others need: all of them that are switched off with one."""
VIEWS = KV_VIEWS[1:]
OTHER_PAGE_SIZES = (1, 2, 3, 5, 8, 16, 32, 64)
WITHOUT_CODES: dict[str, Any] = {"kv_cache": "", "q_dtype": "", "q_scale": 1.0}
SHIFTS = (512.0, -512.0, 8192.0, -8192.0)
"""Raw logits: with the usual scales 45 and more, where exp alone overflows or vanishes."""


def page_relabelling(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Move every page to another place in the cache."""
    return same_result(subject, problem, replace(problem, page_order=problem.page_order + 1))


def layout_invariance(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Store the cache in the other layout."""
    other = replace(problem, kv_layout="HND" if problem.kv_layout == "NHD" else "NHD")
    if not subject.supports(other):
        return VACUOUS
    return same_result(subject, problem, other)


def contiguity(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Make q a slice of packed QKV and the caches views of one allocation, then neither.

    At other times K and V are ``kv_views``, or have strides of their own, where that is supported.
    """
    dense = replace(
        problem, strided_q=False, strided_kv=False, different_kv_strides=False, kv_views=""
    )
    if choose(problem.seed, "kv_views", 0, 2) and not problem.values_in_keys:
        begin = choose(problem.seed, "kv_views", 1, len(VIEWS))
        for view in VIEWS[begin:] + VIEWS[:begin]:
            viewed = replace(problem, strided_q=True, kv_views=view)
            if subject.supports(viewed) and subject.supports(dense):
                return same_result(subject, viewed, dense)
    problem = replace(problem, kv_views="")
    different = bool(problem.seed % 2)
    for apart, (q, kv) in itertools.product(
        (different, not different), ((True, True), (False, True), (True, False))
    ):
        strided = replace(problem, strided_q=q, strided_kv=kv, different_kv_strides=apart)
        if subject.supports(strided) and subject.supports(dense):
            return same_result(subject, strided, dense)
    return VACUOUS


def logit_shift(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Add a constant to every logit: out is the same, lse grows by it. Sinks are shifted too.

    One channel of q is set to 1, and the same channel of k to 0 and then to the constant: the last
    one where V is part of K. It is none of V's then, unless V is all of K: the output's last
    channel holds the constant there, and is left out.
    """
    regime = "iid" if problem.exact else problem.regime
    problem = replace(problem, logits_soft_cap=0.0, regime=regime, **WITHOUT_CODES)
    if not subject.supports(problem):
        return VACUOUS
    inputs = subject.materialise(problem)
    keys = inputs.keys
    channel = problem.head_dim_qk - 1 if problem.values_in_keys else 0
    inputs.q[..., channel], keys[..., channel] = 1.0, 0.0
    (out, lse), bounded = run_on(subject, problem, inputs)
    constant = SHIFTS[problem.seed % len(SHIFTS)]
    keys[..., channel] = constant
    shift = constant * problem.scale * _per_query_head(inputs.k_scale, problem, keys.device)
    if inputs.sinks is not None:
        inputs = replace(inputs, sinks=(inputs.sinks + shift).to(inputs.sinks.dtype))
    shifted, shifted_bounded = run_on(subject, problem, inputs)
    expected: Result = (out, None if lse is None else lse.double() + shift)
    bound = bounded.bound
    if inputs.sinks is not None:
        # The shifted sinks were rounded: the oracle says how much that moves.
        before, after = bounded.expected, shifted_bounded.expected
        bound = AttentionOutput(
            bound.out + _finite_difference(before.out, after.out),
            bound.lse + _finite_difference(before.lse + shift, after.lse),
        )
    left, right = (bound, shifted_bounded.bound)
    if problem.values_in_keys and problem.head_dim_vo == problem.head_dim_qk:
        expected, shifted = _without_channel(expected, channel), _without_channel(shifted, channel)
        left, right = (AttentionOutput(each.out[..., :channel], each.lse) for each in (left, right))
    return agree(expected, shifted, (left, right), exact=False)


def _without_channel(result: Result, last: int) -> Result:
    """Return a result without the last channel of its output."""
    out, lse = result
    return out[..., :last], lse


def _per_query_head(
    scale: float | torch.Tensor, problem: AttentionProblem, device: torch.device
) -> torch.Tensor:
    """Return a scale of all or of each key-value head as one float64 of each query head."""
    if isinstance(scale, torch.Tensor):
        return scale.double().repeat_interleave(problem.group_size)
    return torch.full((problem.num_qo_heads,), scale, dtype=torch.float64, device=device)


def page_size_invariance(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Cut the same keys into pages of another size."""
    problem = replace(problem, shared_prefix_pages=0)
    least = multiples_of(problem.kv_cache).get("page_size", 1)
    sizes = [size for size in OTHER_PAGE_SIZES if size != problem.page_size and not size % least]
    for step in range(len(sizes)):
        size = sizes[(problem.seed + step) % len(sizes)]
        other = replace(problem, page_size=size)
        if subject.supports(other) and subject.supports(problem):
            return same_result(subject, problem, other)
    return VACUOUS


def batch_independence(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Run each of at most three requests by itself: the others must not change its answer."""

    def compare(result: Result, part: Result, bounds: Bounds) -> Verdict:
        return agree(result, part, bounds, exact=subject.exact(problem))

    return _each_alone(subject, problem, compare)


def same_bits_in_any_batch(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Run requests by themselves where that is promised to give the bits that a batch gives."""
    if "batch_invariant" not in subject.implementation.features:
        return VACUOUS

    def compare(result: Result, part: Result, _: Bounds) -> Verdict:
        verdict = Verdict("PASS", ratio=0.0)
        for name, alone, batched in zip(("out", "lse"), result, part, strict=True):
            if alone is not None and batched is not None:
                verdict = worse(verdict, bitwise(name, batched, alone))
        return verdict

    return _each_alone(subject, problem, compare)


Bounds = tuple[AttentionOutput, AttentionOutput]


def _each_alone(
    subject: Subject,
    problem: AttentionProblem,
    compare: Callable[[Result, Result, Bounds], Verdict],
) -> Verdict:
    """Compare at most three requests by themselves with what they are in the batch."""
    whole, whole_bounded = run(subject, problem)
    starts = [sum(problem.query_lens[:i]) for i in range(len(problem.query_lens))]
    checked = [i for i, t in enumerate(problem.query_lens) if t][:3]
    if len(problem.query_lens) < 2 or not checked:  # noqa: PLR2004  alone already
        return VACUOUS
    verdict = Verdict("PASS", ratio=0.0)
    for request in checked:
        alone = replace(
            problem,
            query_lens=(problem.query_lens[request],),
            seq_lens=(problem.seq_lens[request],),
            request_ids=(problem.ids[request],),
        )
        if not subject.supports(alone):
            continue
        result, bounded = run(subject, alone)
        rows = slice(starts[request], starts[request] + problem.query_lens[request])
        part: Result = (whole[0][rows], None if whole[1] is None else whole[1][rows])
        bound = type(bounded.bound)(whole_bounded.bound.out[rows], whole_bounded.bound.lse[rows])
        found = compare(result, part, (bounded.bound, bound))
        if found.bad:
            message = f"request {request} of the batch against itself alone: {found.message}"
            return replace(found, message=message)
        verdict = found if (found.ratio or 0.0) > (verdict.ratio or 0.0) else verdict
    return verdict


def switched(problem: AttentionProblem) -> dict[str, AttentionProblem]:
    """Return, for each feature that the problem uses, the problem without it.

    A window is switched on, too, where there is none: few problems have one, and it is most often
    lost (flashinfer#3864, sglang#31501).
    """
    without: dict[str, AttentionProblem] = {}
    longest = max(problem.seq_lens, default=0)
    if problem.window_left < 0 and longest > 1:
        without["window_left"] = replace(problem, window_left=longest // 2)
    for name, (off, _) in SWITCHES.items():
        if getattr(problem, name) != off:
            switched_off = TOGETHER.get(name, {name: off})
            without[name] = replace(problem, **switched_off)
    return without


def _unused(problem: AttentionProblem) -> Iterator[tuple[str, AttentionProblem]]:
    """Yield each feature that the problem does not use, and the problem with it."""
    for name, (off, on) in SWITCHES.items():
        if on is not None and getattr(problem, name) == off:
            switched_on: dict[str, Any] = {name: on}
            with suppress(ValueError):  # there is no such call
                yield name, replace(problem, **switched_on)


def sensitivity(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Switch each feature in use off: where the oracle's answer moves, the subject's must move.

    An option is ignored where nothing of the answer moves. Where it moves too little, one of the
    two answers is wrong, for whatever reason, and that is the finding.
    """
    others = {name: other for name, other in switched(problem).items() if subject.supports(other)}
    if not others:
        return VACUOUS
    first = run(subject, problem)
    moves = {name: _moves(subject, name, problem, first, other) for name, other in others.items()}
    stuck = {name: move for name, move in moves.items() if move.stuck}
    if not stuck:
        lost = (move.verdict for move in moves.values() if move.verdict.bad)
        looked = any(not move.verdict.vacuous for move in moves.values())
        return next(lost, Verdict("PASS", ratio=0.0) if looked else VACUOUS)
    still = {name: move for name, move in stuck.items() if move.still}
    # Shrinking leaves one option: only a kernel that ignores it is asked about all others.
    for name, other in _unused(problem) if still else ():
        if name not in others and subject.supports(other):
            with suppress(Stop):
                move = _moves(subject, name, problem, first, other)
                still |= {name: move} if move.still else {}
    ignored = [name for name in still if _ignored_with_other_values(subject, problem, name)]
    if ignored and _right_without(subject, problem, ignored):
        message = "; ".join(still[name].stuck for name in ignored)
        if len(ignored) > 1:
            message = f"{', '.join(ignored)} are ignored: {message}"
        calls = compared(problem, others.get(ignored[0], problem))
        failure = replace(fail("insensitive", message), ignored=tuple(ignored), compared=calls)
        # Where each of them is stuck for an answer that is wrong without the option, that is why.
        about = [still[name].about for name in ignored]
        return replace(failure, about=about[0] if all(about) else None)
    wrong = (move.wrong for move in stuck.values() if move.wrong.bad)
    return next(wrong, Verdict("PASS", ratio=0.0))


def _ignored_with_other_values(subject: Subject, problem: AttentionProblem, name: str) -> bool:
    """Whether an option moves nothing with other numbers and more keys either.

    A kernel that rounds what the option changes may give the same few bits with and without it.
    """
    more = tuple(LONGER * keys for keys in problem.seq_lens)
    # A window that is too wide by some keys moves nothing where there are no more than those.
    for changes in ({"seed": problem.seed + 1}, {"seed": problem.seed + 2}, {"seq_lens": more}):
        with suppress(Stop, ValueError):  # there is no such call
            fresh = replace(problem, **changes)
            other = {**dict(_unused(fresh)), **switched(fresh)}[name]
            if not (subject.supports(fresh) and subject.supports(other)):
                continue
            if not _moves(subject, name, fresh, run(subject, fresh), other).same:
                return False
    return True


def _right_without(subject: Subject, problem: AttentionProblem, names: Collection[str]) -> bool:
    """Whether an answer is right with these options or without: ignoring them is what is wrong.

    What is wrong for another reason may stand still, too, such as an answer of zeros.
    """
    off: dict[str, Any] = {}
    for name in names:
        if getattr(problem, name) != SWITCHES[name][0]:
            off |= TOGETHER.get(name, {name: SWITCHES[name][0]})
    with suppress(Stop, ValueError):  # there is no such call
        bare = replace(problem, **off)
        asked = [bare, problem] if names and subject.supports(bare) else []
        return any(not parity(subject, each).bad for each in asked)
    return False


LONGER = 16
"""Factor on the keys with which an option must move nothing either to be called ignored."""
VISIBLE = 16 * UNIT_ROUNDOFF["bfloat16"]
"""Share of the oracle's largest element by which an option must move it to be called ignored:
less may be lost in the roundings of a kernel that honours it."""


class Move(NamedTuple):
    """What another value of one option does.

    Attributes:
        verdict: whether the law holds of it, and NaN.
        stuck: sentence on an element that moves too little; empty where there is none.
        same: every bit of the answer stays.
        still: whether the answer does not move though the oracle's moves visibly.
        wrong: the verdict on the first answer of what is stuck, or else on the other one.
        about: the other problem as JSON, where its answer is wrong.
    """

    verdict: Verdict
    stuck: str = ""
    same: bool = False
    still: bool = False
    wrong: Verdict = VACUOUS
    about: Mapping[str, Any] | None = None


def _moves(
    subject: Subject,
    name: str,
    problem: AttentionProblem,
    first: tuple[Result, Bounded],
    other: AttentionProblem,
) -> Move:
    """Check that another value of one option moves the answer wherever it moves the oracle's."""
    (out, lse), bounded = first
    (other_out, other_lse), other_bounded = run(subject, other)
    same, visible = same_result_bits((out, lse), (other_out, other_lse)), False
    made = Move(VACUOUS, same=same)
    for field, with_it, without_it in (("out", out, other_out), ("lse", lse, other_lse)):
        if with_it is None or without_it is None or with_it.shape != without_it.shape:
            continue
        bound = getattr(bounded.bound, field) + getattr(other_bounded.bound, field)
        expected = getattr(other_bounded.expected, field)
        moved = _finite_difference(getattr(bounded.expected, field), expected)
        must_move = moved > 4 * bound
        if not must_move.any():
            continue
        if not made.verdict.bad:
            made = made._replace(verdict=Verdict("PASS", ratio=0.0))
        before, after = with_it.double(), without_it.double()
        # To infinity is a move, and which of both is wrong is another law's question.
        actual = (before - after).abs().nan_to_num(nan=0.0, posinf=torch.inf)
        stuck = must_move & (actual < moved - 2 * bound)
        lost = stuck & (before.isnan() | after.isnan())
        if lost.any() and not made.verdict.bad:
            where = tuple(int(i) for i in lost.nonzero()[0])
            broken = problem if before[where].isnan() else other
            message = (
                f"with {name} = {getattr(broken, name)}, {field}{list(where)} is NaN, which "
                f"the oracle's is not ({int(lost.sum())} of {lost.numel()} are)"
            )
            about = None if broken is problem else broken.to_json()
            made = made._replace(verdict=replace(fail("nan", message), about=about))
        stuck &= ~lost
        largest = _finite_difference(expected, torch.zeros_like(expected)).max()
        visible |= bool((must_move & (moved > VISIBLE * largest)).any())
        if stuck.any() and not made.stuck:
            where = tuple(int(i) for i in stuck.nonzero()[0])
            off = (after - expected).abs() > getattr(other_bounded.bound, field)
            too = f"; with {getattr(other, name)} it is wrong, too" if off.any() else ""
            said = (
                f"{name} = {getattr(problem, name)} in place of {getattr(other, name)} moves "
                f"the oracle's {field}{list(where)} by {moved[where].item():.3g}, the "
                f"implementation's by "
                f"{actual[where].item():.3g} ({int(stuck.sum())} of "
                f"{int(must_move.sum())} elements that must move do not){too}"
            )
            made = made._replace(stuck=said, about=other.to_json() if off.any() else None)
    if not made.stuck:
        return made
    wrong = as_expected(subject, problem, *first, exact=False)
    if not wrong.bad:
        second = (other_out, other_lse)
        wrong = as_expected(subject, other, second, other_bounded, exact=False)
        message = f"with {name} = {getattr(other, name)}: {wrong.message}"
        wrong = replace(wrong, message=message, about=other.to_json())
    return made._replace(still=visible and same, wrong=wrong)


def _finite_difference(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return |first - second|, and 0 where both are -inf or either is NaN."""
    difference = (first - second).abs()
    return torch.where(difference.isfinite(), difference, 0.0)


LAWS = (
    Law(
        "unused_memory",
        ATTENTION,
        unused_memory,
        "NaN in unused pages, in the tail of a last page, in pages behind every window and around "
        "tensors changes nothing",
    ),
    Law(
        "page_relabelling",
        PAGED,
        page_relabelling,
        "moving pages to other places in the cache changes nothing",
        weight=0.5,
        overlap="parity kills its bug when two draws happen to differ in nothing but their pages",
    ),
    Law(
        "layout_invariance",
        PAGED,
        layout_invariance,
        "NHD and HND caches with the same keys give the same answer",
        weight=0.5,
        looks_at=({"kv_layout": several},),
    ),
    Law(
        "contiguity",
        ATTENTION,
        contiguity,
        "strided and contiguous tensors with the same values give the same answer",
        weight=0.5,
    ),
    Law(
        "logit_shift",
        ATTENTION,
        logit_shift,
        "a constant added to every logit, and to the sinks, changes nothing but the lse",
        weight=0.5,
    ),
    Law(
        "page_size_invariance",
        PAGED,
        page_size_invariance,
        "the same keys in pages of another size give the same answer",
        weight=0.5,
        looks_at=({"page_size": several},),
    ),
    Law(
        "batch_independence",
        ATTENTION,
        batch_independence,
        "a request alone equals itself in any batch",
        overlap="call_order kills its bug when the draw before happened to hold the same queries",
    ),
    Law(
        "same_bits_in_any_batch",
        ATTENTION,
        same_bits_in_any_batch,
        "a request has the same bits alone and in any batch, where that is promised",
        weight=0.5,
        needs=("batch_invariant",),
    ),
    Law(
        "sensitivity",
        ATTENTION,
        sensitivity,
        "a feature in use changes the answer wherever the oracle says that it does",
    ),
)
