"""Judging what turning, quantising and appending gave: codes, and every byte of the caches."""

from __future__ import annotations

import torch

from ...impl import Implementation
from ...reference import Arithmetic
from ...reference.attention.rope import (
    Ends,
    ordered,
    rope_bounds,
    stored_bounds,
    unordered,
)
from ...reference.tensors.rope_append import RopeAppendInputs
from .comparison import Check, Result, fail, listed, off
from .verdict import EXACTLY, Verdict

NAMES = ("k_cache", "v_cache")
"""The caches, as findings name them."""
OVER = Verdict("PASS", ratio=0.0)
"""Each code lies between its ends, which leave no slack to report."""


def judge_rope(implementation: Implementation, inputs: RopeAppendInputs, result: Result) -> Verdict:
    """Judge the queries of a call, and the caches in its record."""
    return judge_appended(inputs, result[0], implementation.arithmetic_of(0))


def judge_appended(inputs: RopeAppendInputs, q: torch.Tensor, arithmetic: Arithmetic) -> Verdict:
    """Check every code that a call gave, and that no other byte of the caches changed.

    Args:
        inputs: the record, as the call left it; its rows are those that it was given.
        q: the queries that it returned. Those of tokens without a slot are not judged.
        arithmetic: the roundings of the implementation.
    """
    if q.dtype != inputs.q_dtype or q.shape != inputs.q.shape:
        return fail("shape", f"q is {q.dtype} of shape {list(q.shape)}")
    form = {"interleaved": inputs.interleaved, "last": inputs.latent, "arithmetic": arithmetic}
    turned: list[Ends] = [
        rope_bounds(x, inputs.cos_sin, inputs.positions, **form)  # type: ignore[arg-type]  # as named
        for x in (inputs.q, inputs.k)
    ]
    kept = inputs.slots >= 0
    wanted = stored_bounds(turned[0], q.dtype, inputs.q_scale, arithmetic)
    verdict = _between("q", q, wanted, kept.view(-1, 1, 1).expand(q.shape))
    if verdict.bad:
        return verdict
    values = inputs.k if inputs.v is None else inputs.v
    numbers = (turned[1], (values.double(), values.double()))
    scales = inputs.k_scale, inputs.v_scale
    places = inputs.slots[kept] // inputs.page_size, inputs.slots[kept] % inputs.page_size
    for name, cache, before, ends, scale in zip(
        NAMES, inputs.caches, inputs.before, numbers, scales, strict=False
    ):
        least, most = (
            ordered(before).clone(memory_format=torch.contiguous_format) for _ in range(2)
        )
        found = stored_bounds(ends, cache.dtype, scale, arithmetic)
        for whole, rows in ((least, found[0]), (most, found[1])):
            by_slot = whole if inputs.kv_layout == "NHD" else whole.transpose(1, 2)
            by_slot[places] = rows[kept]
        everywhere = torch.ones_like(least, dtype=torch.bool)
        verdict = _between(name, cache, (least, most), everywhere)
        if verdict.bad:
            return verdict
    return OVER


def _between(name: str, actual: torch.Tensor, ends: Ends, judged: torch.Tensor) -> Verdict:
    """Check codes, in the order of their numbers, against the least and the greatest of each."""
    order, (least, most) = ordered(actual), ends
    wrong = ((order < least) | (order > most)) & judged
    if not wrong.any():
        return OVER
    where = tuple(int(i) for i in wrong.nonzero()[0])
    expected = unordered(least, actual.dtype)
    pair = actual.double(), expected.double()

    def shown(code: torch.Tensor, number: torch.Tensor) -> str:
        width = torch.uint8 if code.element_size() == 1 else torch.int16
        bits = int(code[where].view(width)) & (256 ** code.element_size() - 1)
        return f"{number[where].item():.9g} (0x{bits:0{2 * code.element_size()}x})"

    apart = (order - least).abs().double()
    return off(
        "numeric",
        f"{name}{list(where)}",
        shown(actual, pair[0]),
        shown(expected, pair[1]),
        bound=EXACTLY,
        more=f", {int(apart[where])} codes apart ({int(wrong.sum())} of {wrong.numel()} differ)",
        worst=listed(Check(name, *pair, torch.zeros_like(pair[0])), wrong, apart),
    )
