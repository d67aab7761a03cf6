"""Judging caches that were appended to: bits, numbers within bounds, or codes between ends."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

import torch

from ...reference import Arithmetic
from ...reference.attention.append import addresses
from ...reference.formats.code_ends import Part
from ...reference.formats.kv_format import checked_cache
from ...reference.tensors.inputs import AppendInputs
from .comparison import fail, same_bits
from .operations import APPENDED
from .quantised import between
from .verdict import Verdict

Caches = tuple[torch.Tensor, ...]


def by_slot(cache: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """View a cache as [pages, page_size, kv_heads, channels]."""
    return cache if kv_layout == "NHD" else cache.transpose(1, 2)


def judges_codes(inputs: object) -> TypeGuard[AppendInputs]:
    """Whether a call writes new rows as codes whose ends are known, see ``code_ends.py``."""
    kv_format = inputs.kv_format if isinstance(inputs, AppendInputs) else None
    return kv_format is not None and kv_format.entry.ends is not None


def copied(inputs: AppendInputs) -> AppendInputs:
    """Return a record with its own rows, caches and scales, for whoever looks after a call."""
    k_cache, v_cache, *scales = (each.clone() for each in inputs.written)
    return replace(
        inputs,
        k=inputs.k.clone(),
        v=inputs.v.clone(),
        k_cache=k_cache,
        v_cache=v_cache,
        kv_cache_sf=(scales[0], scales[1]) if scales else None,
    )


def judge_codes(
    inputs: AppendInputs,
    caches: Caches,
    arithmetic: Arithmetic,
    written: torch.Tensor | None = None,
) -> Verdict:
    """Check each code and scale of new rows, and that every other slot keeps its bits.

    Args:
        inputs: what the call was given, unchanged; ``judges_codes`` holds of it.
        caches: what it returned, of the right shapes and dtypes.
        arithmetic: the roundings of the implementation.
        written: bool [tokens], which tokens have a slot; None: all.
    """
    assert inputs.kv_format is not None  # noqa: S101  `judges_codes` has looked
    layout, entry = inputs.kv_format.kv_layout, inputs.kv_format.entry
    assert entry.ends is not None  # noqa: S101  `judges_codes` has looked
    pages, slots = (each.to(inputs.k.device) for each in addresses(inputs.metadata))
    tokens = torch.arange(len(pages), device=pages.device)
    if written is not None:
        tokens = tokens[written.to(tokens.device)]
    places = pages[tokens], slots[tokens]
    before, after = (_sides(each, inputs) for each in (inputs.written, caches))
    if entry.record is not None and not same_bits(caches[0], caches[1]):
        return fail("numeric", "v_cache is not k_cache, whose keys hold the values")
    for side, (rows, scale) in enumerate(
        ((inputs.k, inputs.k_scale), (inputs.v, inputs.v_scale))[: 1 if entry.record else 2]
    ):
        codes, scales = (
            None if each is None else by_slot(each, layout)[places].flatten(0, 1)
            for each in after[side]
        )
        assert codes is not None  # noqa: S101  every cache has codes
        parts = entry.ends(rows[tokens].flatten(0, 1), codes, scales, float(scale), arithmetic)
        for part in parts:
            of_scales = scales is not None and part.name != "codes"
            name = APPENDED[side + 2 * of_scales]
            if part.name not in ("codes", "scales") or (part.name == "scales" and scales is None):
                name += f" ({part.name})"
            heads = rows.shape[1]
            verdict = _between(name, part, places, (len(tokens), heads), after[side][0], layout)
            if verdict.bad:
                return verdict
        for number, (now, then) in enumerate(zip(after[side], before[side], strict=True)):
            if now is not None and then is not None:
                verdict = _kept(APPENDED[side + 2 * number], now, then, places, layout)
                if verdict.bad:
                    return verdict
    return Verdict("PASS", ratio=0.0)


def _sides(
    caches: Caches, inputs: AppendInputs
) -> tuple[tuple[torch.Tensor, torch.Tensor | None], ...]:
    """Return (codes, scales) of K and of V, scales in linear order; None where there are none."""
    k_cache, v_cache, *scales = caches
    pair = (scales[0], scales[1]) if scales else None
    found = checked_cache(k_cache, v_cache, inputs.kv_layout, inputs.kv_format, pair)
    return (found.k, found.k_scales), (found.v, found.v_scales)


def _between(
    name: str,
    part: Part,
    places: tuple[torch.Tensor, torch.Tensor],
    shape: tuple[int, int],
    cache: torch.Tensor,
    layout: str,
) -> Verdict:
    """Check a part of new rows, named by its places in the cache.

    Args:
        name: what a finding calls it.
        part: the part, of rows [tokens * kv_heads, ...].
        places: pages and slots of the tokens.
        shape: tokens and kv_heads.
        cache: the codes of the whole cache.
        layout: its layout.
    """
    low, high = part.ends
    wrong = (part.found < low) | (part.found > high)
    if not wrong.any():
        return Verdict("PASS", ratio=0.0)
    outer = by_slot(cache, layout).shape[:3]
    rows = wrong, part.numbers(part.found), part.numbers(low), part.numbers(high)
    whole = []
    for each in rows:
        room = each.new_zeros((*outer, each.shape[1]))
        room[places] = each.view(*shape, -1)
        whole.append(by_slot(room, layout))
    is_wrong, actual, least, most = whole
    return between(name, actual, least, most, is_wrong)


def _kept(
    name: str,
    now: torch.Tensor,
    before: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
    layout: str,
) -> Verdict:
    """Check that slots of no new row have the bits that they had."""
    pair = [by_slot(each, layout).clone(memory_format=torch.contiguous_format).view(torch.uint8)
            for each in (now, before)]  # fmt: skip
    for each in pair:
        each[places] = 0
    if same_bits(*pair):
        return Verdict("PASS", ratio=0.0)
    where = [int(i) for i in (pair[0] != pair[1]).nonzero()[0]]
    page, slot, head, _ = where
    place = [page, slot, head] if layout == "NHD" else [page, head, slot]
    return fail("numeric", f"{name}{place}, which no new row has, was written")
