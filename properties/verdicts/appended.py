"""Judging caches that were appended to: bits, numbers within bounds, or codes between ends."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

import torch

from ...reference import Arithmetic
from ...reference.attention.append import addresses, checked_append
from ...reference.formats.code_ends import Part
from ...reference.tensors.inputs import AppendInputs
from .comparison import Check, fail, listed, off, same_bits
from .operations import APPENDED
from .verdict import EXACTLY, Verdict

Caches = tuple[torch.Tensor, ...]
NAMES = {"codes": ("k_cache", "v_cache"), "scales": ("k_scales", "v_scales")}
"""Tensors of the answer that hold a part of new rows; zero points lie in the scales."""


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
    assert inputs.kv_cache_sf is not None  # noqa: S101  such a cache has scales
    layout, ends = inputs.kv_format.kv_layout, inputs.kv_format.entry.ends
    assert ends is not None  # noqa: S101  `judges_codes` has looked
    pages, slots = (each.to(inputs.k.device) for each in addresses(inputs.metadata))
    tokens = torch.arange(len(pages), device=pages.device)
    if written is not None:
        tokens = tokens[written.to(tokens.device)]
    places = pages[tokens], slots[tokens]
    rows = inputs.k[tokens], inputs.v[tokens]
    given, found = (
        checked_append(inputs.k, inputs.v, pair, scales, inputs.metadata, inputs.kv_format)
        for pair, scales in (
            ((inputs.k_cache, inputs.v_cache), inputs.kv_cache_sf),
            ((caches[0], caches[1]), (caches[2], caches[3])),
        )
    )
    for side, scale in enumerate((inputs.k_scale, inputs.v_scale)):
        pair = [((each.k, each.k_scales), (each.v, each.v_scales))[side] for each in (found, given)]
        codes, scales = (
            None if each is None else by_slot(each, layout)[places].flatten(0, 1)
            for each in pair[0]
        )
        assert codes is not None  # noqa: S101  every cache has codes
        parts = ends(rows[side].flatten(0, 1), codes, scales, float(scale), arithmetic)
        for part in parts:
            verdict = _between(part, side, places, by_slot(pair[0][0], layout).shape, layout)
            if verdict.bad:
                return verdict
        for number, (now, before) in enumerate(zip(*pair, strict=True)):
            if now is not None and before is not None:
                name = APPENDED[2 * number + side]
                verdict = _kept(name, now, before, places, layout)
                if verdict.bad:
                    return verdict
    return Verdict("PASS", ratio=0.0)


def _between(
    part: Part,
    side: int,
    places: tuple[torch.Tensor, torch.Tensor],
    sizes: torch.Size,
    layout: str,
) -> Verdict:
    """Check a part of new rows, named by its places in the cache."""
    low, high = part.ends
    wrong = (part.found < low) | (part.found > high)
    if not wrong.any():
        return Verdict("PASS", ratio=0.0)
    name = NAMES.get(part.name, NAMES["scales"])[side]
    if part.name not in NAMES:
        name += f" ({part.name})"
    whole = []
    rows = wrong, part.numbers(part.found), part.numbers(low), part.numbers(high)
    for each in rows:
        cache = each.new_zeros((*sizes[:3], each.shape[1]))
        cache[places] = each.view(len(places[0]), sizes[2], -1)
        whole.append(by_slot(cache, layout))
    wrong, actual, least, most = whole
    where = tuple(int(i) for i in wrong.nonzero()[0])
    ends = [f"{each[where].item():.9g}" for each in (least, most)]
    return off(
        "numeric",
        f"{name}{list(where)}",
        f"{actual[where].item():.9g}",
        ends[0] if ends[0] == ends[1] else " to ".join(ends),
        bound=EXACTLY if ends[0] == ends[1] else "",
        more=f" ({int(wrong.sum())} of {part.found.numel()} differ)",
        worst=listed(Check(name, actual, least, most - least), wrong, (actual - least).abs()),
    )


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
