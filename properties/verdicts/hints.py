"""Hints: the one classic fault of attention kernels that explains all wrong elements of a finding.

A hint is computed, never guessed: each wrong element lies within the bound around what the oracle
gives after the fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...reference import Arithmetic, AttentionOutput
from ...reference.attention.bounds import Bounded
from ...reference.operations import bounded_answer
from ...reference.tensors.inputs import (
    AttentionInputs,
    AttentionOptions,
    PagedAttentionInputs,
)
from .comparison import Result
from .verdict import Verdict

TILES = (16, 32, 64, 128)
"""Numbers of keys in the tiles of which the last one may be left out."""
MOST_WORK = 1 << 20
"""Largest product of heads, query tokens, and query tokens with keys for which faults are tried."""
CLEARLY = 4.0
"""Bounds by which a fault moves most wrong elements at least."""
MOST = 0.5
"""Share of the wrong elements that it moves so far."""
SIXTEEN_BITS = (torch.bfloat16, torch.float16)
SCALES = ("k_scale", "v_scale", "q_scale", "sm_scale")


@dataclass(frozen=True)
class Call:
    """A call with a wrong answer.

    Attributes:
        inputs: the inputs of the call.
        result: what the implementation gave.
        bounded: what the oracle expects.
        wrong: which elements of out and lse are wrong.
        judged: the elements of the requests that have a wrong one, which a fault must give.
        arithmetic: the arithmetic that the implementation declares.
    """

    inputs: AttentionInputs
    result: Result
    bounded: Bounded
    wrong: tuple[torch.Tensor, torch.Tensor]
    judged: tuple[torch.Tensor, torch.Tensor]
    arithmetic: Arithmetic

    def asked(self, **changes: Any) -> Bounded:  # noqa: ANN401  fields of the inputs
        """Return the oracle's answer to other inputs."""
        return bounded_answer(replace(self.inputs, **changes), self.arithmetic)


def with_hint(
    verdict: Verdict,
    inputs: Any,  # noqa: ANN401  any record with out
    result: Result,
    bounded: Bounded,
    arithmetic: Arithmetic,
) -> Verdict:
    """Return a FAIL of numbers or NaN whose message names the fault that explains all of them.

    The arguments are those of ``with_rounding``; any other verdict is returned as it is.
    """
    attention = isinstance(inputs, AttentionOptions)
    if verdict.kind not in ("numeric", "nan") or not attention or _work(inputs) > MOST_WORK:
        return verdict
    out, lse = result
    nothing_wrong = torch.zeros_like(bounded.expected.lse, dtype=torch.bool)
    wrong = (
        ~_within(out, bounded.expected.out, bounded.bound.out),
        nothing_wrong if lse is None else ~_within(lse, bounded.expected.lse, bounded.bound.lse),
    )
    if not (wrong[0].any() or wrong[1].any()):
        return verdict
    rows = _rows_of_requests(inputs, wrong[0].any(-1).any(-1) | wrong[1].any(-1))
    judged = (rows.view(-1, 1, 1).expand_as(wrong[0]), rows.view(-1, 1).expand_as(wrong[1]))
    call = Call(inputs, result, bounded, wrong, judged, arithmetic)
    names = [name for name, made in _faults(call) if explains(call, made)]
    return verdict.explained_by(names) if names else verdict


def explains(call: Call, made: Callable[[], Bounded | None]) -> bool:
    """Whether a fault gives the answers of all requests that have a wrong element.

    It must move wrong elements by much more than the bound around the answer after it, or the bound
    allows too much to say anything. A row that sees no key after the fault may hold NaN: it is 0
    divided by 0.
    """
    try:
        after = made()
    except ValueError:  # the oracle refuses the changed call: no kernel was asked for it
        return False
    if after is None:
        return False
    fits, clearly = True, []
    no_key = after.expected.lse.isneginf()
    for number, got in enumerate(call.result):
        if got is None:
            continue
        expected, bound = after.expected[number], after.bound[number]
        divided = got.isnan() & (no_key.unsqueeze(-1) if got.dim() > no_key.dim() else no_key)
        fits &= bool((_within(got, expected, bound) | divided | ~call.judged[number]).all())
        moved = (expected - call.bounded.expected[number]).abs() > CLEARLY * bound
        clearly.append(moved[call.wrong[number]])
    return fits and bool(torch.cat(clearly).double().mean() >= MOST)


def _rows_of_requests(inputs: AttentionInputs, rows: torch.Tensor) -> torch.Tensor:
    """Return all rows of the requests that these rows are of."""
    lengths = inputs.lengths()[0].long()
    request = torch.repeat_interleave(lengths)
    return torch.zeros_like(lengths).index_add_(0, request, rows.long())[request] > 0


def _within(got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    got = got.to(expected.dtype)
    return (got == expected) | ((got - expected).abs() <= bound)


def _work(inputs: AttentionInputs) -> int:
    queries, keys = (int(each.sum()) for each in inputs.lengths())
    return int(inputs.q.shape[1]) * queries * (queries + keys)


Made = tuple[str, Callable[[], Bounded | None]]
"""A fault in words, and the oracle's answer after it; None where the call has no such fault."""


def _faults(call: Call) -> Iterator[Made]:
    if not call.wrong[0].any():
        yield from _of_lse(call)
        return
    for by, direction in ((-1, "next"), (1, "previous")):
        for axis, name in ((1, "head"), (0, "row")):
            yield f"out has the values of the {direction} {name}", partial(_shifted, call, by, axis)
    yield "out is truncated, not rounded, to 16 bits", lambda: _truncated(call)
    yield "rows hold the answers to another request's rows", lambda: _of_other_requests(call)
    yield "each request reads the pages of the first one", lambda: _of_first_pages(call)
    yield from _of_scales(call)
    yield from _of_keys(call)


def _shifted(call: Call, by: int, axis: int) -> Bounded | None:
    """Return the answer with other heads or rows; None where some are their own.

    The lse may be that of other ones or its own.
    """
    after = _moved(call.bounded, partial(torch.roll, shifts=by, dims=axis))
    if not bool(_within(call.result[0], after.expected.out, after.bound.out).all()):
        return None
    if call.wrong[1].any():
        return after
    pairs = zip(after, call.bounded, strict=True)
    return Bounded(*(each._replace(lse=own.lse) for each, own in pairs))


def _of_lse(call: Call) -> Iterator[Made]:
    for factor, words in ((1 / math.log(2), "divided"), (math.log(2), "multiplied")):
        yield (
            f"the lse is {words} by ln 2 (the base of the logarithm)",
            partial(_with_lse, call, partial(torch.mul, other=factor)),
        )
    yield (
        "the lse is transposed: [heads, tokens] in memory",
        lambda: _with_lse(call, lambda each: each.transpose(0, 1).reshape(each.shape)),
    )


def _with_lse(call: Call, move: Callable[[torch.Tensor], torch.Tensor]) -> Bounded:
    """Return the answer with another lse."""
    return Bounded(*(each._replace(lse=move(each.lse)) for each in call.bounded))


def _moved(bounded: Bounded, move: Callable[[torch.Tensor], torch.Tensor]) -> Bounded:
    """Return an answer, and its bounds, of which each tensor is changed alike."""
    return Bounded(*(AttentionOutput(*map(move, each)) for each in bounded))


def _truncated(call: Call) -> Bounded | None:
    """Return what an out is whose last digits are cut off; None where some element differs."""
    out = call.result[0]
    if out.dtype not in SIXTEEN_BITS:
        return None
    exact = call.asked(out_dtype=torch.float32)
    ends = [
        _cut(exact.expected.out + sign * exact.bound.out, out.dtype).double() for sign in (-1, 1)
    ]
    if not bool(((ends[0] <= out) & (out <= ends[1])).all()):
        return None
    # Each element is the number that was cut, exactly.
    return Bounded(
        AttentionOutput(out.double(), exact.expected.lse),
        AttentionOutput(torch.zeros_like(ends[0]), exact.bound.lse),
    )


def _cut(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round numbers towards zero."""
    rounded = numbers.to(dtype)
    # The bits of a number less one are those of its neighbour towards zero, whatever its sign.
    outwards = rounded.double().abs() > numbers.abs()
    return (rounded.view(torch.int16) - outwards.to(torch.int16)).view(dtype)


def _of_other_requests(call: Call) -> Bounded | None:
    """Return the answer of which each wrong row is a row of another request, as it was found."""
    expected, bound = call.bounded
    lengths = call.inputs.lengths()[0].long()
    request = torch.repeat_interleave(lengths)
    heads = call.wrong[0].any(-1)
    index = torch.arange(len(heads), device=heads.device)
    for row in heads.any(-1).nonzero().flatten().tolist():
        alike = _within(call.result[0][row], expected.out, bound.out).all(-1)
        alike &= expected.out.any(-1)  # zeros are nobody's answer
        fits = (alike | ~heads[row]).all(-1) & (request != request[row])
        if not fits.any():
            return None
        index[row] = int(fits.nonzero()[0])
    return _moved(call.bounded, lambda each: each[index])


def _of_first_pages(call: Call) -> Bounded | None:
    """Return the answer where requests read the page table from the first one's row on."""
    inputs = call.inputs
    if not isinstance(inputs, PagedAttentionInputs):
        return None
    starts = inputs.metadata.paged_kv_indptr.long()
    counts = starts.diff()
    if not len(counts):
        return None
    entry = torch.arange(int(counts.sum()), device=starts.device)
    own = entry - torch.repeat_interleave(starts[:-1], counts)
    indices = inputs.metadata.paged_kv_indices[starts[0] + own]
    return call.asked(metadata=replace(inputs.metadata, paged_kv_indices=indices))


def _of_scales(call: Call) -> Iterator[Made]:
    inputs = call.inputs
    scaled = [name for name in SCALES if bool((torch.as_tensor(getattr(inputs, name)) != 1).any())]
    for name in scaled:
        yield f"{name} is not applied", partial(call.asked, **{name: 1.0})
    if {"k_scale", "v_scale"} <= {*scaled}:
        both = {"k_scale": 1.0, "v_scale": 1.0}
        yield "neither k_scale nor v_scale is applied", lambda: call.asked(**both)


def _of_keys(call: Call) -> Iterator[Made]:
    inputs = call.inputs
    for name in ("window_left", "window_right"):
        if (size := getattr(inputs, name)) >= 0:
            yield f"{name} keeps one key too many", partial(call.asked, **{name: size + 1})
        if size > 0:
            yield f"{name} keeps one key too few", partial(call.asked, **{name: size - 1})
    if inputs.window_left == 0:
        yield (
            "window_left keeps one key too few",
            lambda: _masked(call, lambda at, key, _: key > at),
        )
    if inputs.causal is True and inputs.window_right < 0:
        behind = {"causal": False, "window_right": 1}
        yield (
            "rows see the key behind their own (the mask is shifted)",
            lambda: call.asked(**behind),
        )
        yield (
            "rows do not see their own key (the mask is shifted)",
            lambda: _masked(call, lambda at, key, _: key != at),
        )
    yield (
        "the last key of each request is left out",
        lambda: _masked(call, lambda _, key, keys: key < keys - 1),
    )
    yield (
        "the first key of each request is left out",
        lambda: _masked(call, lambda _, key, __: key > 0),
    )
    for tile in TILES:
        yield f"the last tile of {tile} keys is left out", partial(_without_last_tile, call, tile)


def _without_last_tile(call: Call, tile: int) -> Bounded | None:
    """Return the answer without the last tile; None where that was all that rows see."""
    after = _masked(call, lambda _, key, keys: key < (keys - 1) // tile * tile)
    nothing_left = after.expected.lse.isneginf() | ~call.judged[1]
    return None if bool(nothing_left.all()) else after


def _masked(call: Call, sees: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]) -> Bounded:
    """Return the oracle's answer where rows see fewer keys.

    Args:
        call: the call.
        sees: a function of the rows' positions [T, 1], of keys [1, S] and of their number: which of
            a request's keys its rows see at most.
    """
    inputs = call.inputs
    device = inputs.q.device
    found = [torch.zeros(0, dtype=torch.bool, device=device)]
    for queries, keys in zip(*(each.tolist() for each in inputs.lengths()), strict=True):
        at = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
        key = torch.arange(keys, device=device).unsqueeze(0)
        found.append(sees(at, key, keys).expand(queries, keys).flatten())
    mask = torch.cat(found)
    both = mask if inputs.custom_mask is None else mask & inputs.custom_mask
    return call.asked(custom_mask=both)
