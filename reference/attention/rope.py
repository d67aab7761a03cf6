"""Rotary embedding of queries and keys, quantised and appended to a paged cache, by definition.

    y_i = x_i cos - x_j sin,   y_j = x_j cos + x_i sin,   codes = y / scale

for the pairs (i, j) of rotary channels (FlashInfer, ``pos_enc.cuh``); other channels, and values,
are only quantised. Everything is in float64 but the quotient, which is of float32 (see
``formats.quantizers``); ``rope_bounds`` says how far float32 may be off before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..formats.arithmetic import UNIT_ROUNDOFF, Arithmetic, checked_arithmetic
from ..formats.quantizers import QuantizedFormat, code_bounds, codes_of, given_scale, order_of
from ..formats.small_floats import FP8_FORMATS, round_to_dtype
from ..validation import (
    KVLayout,
    check_integers,
    check_kv_layout,
    check_same,
    check_tensor,
)
from .append import in_slots

PRODUCTS = 2.0
"""Roundings of a turned number, of its two products and their sum, in units of roundoff of the sum
of the products' magnitudes."""
SUBNORMAL = 2.0**-126
"""Below it a GPU may flush a product to zero."""
MAGNITUDE = 0x7FFF
"""Bits of the magnitude of a number of 16 bits."""
Ends = tuple[torch.Tensor, torch.Tensor]
"""The least and the greatest of each element."""


class RopeAppended(NamedTuple):
    """What a call turns, quantises and appends.

    Attributes:
        q: [tokens, qo_heads, channels], the queries.
        k_cache: the cache after the call, of keys.
        v_cache: the same of values; None where keys hold them.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor | None


@torch.no_grad()
def rope_and_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor | None],
    *,
    interleaved: bool = False,
    kv_layout: KVLayout = "NHD",
    q_dtype: torch.dtype | None = None,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> RopeAppended:
    """Turn queries and keys by their positions, quantise them and the values, and append.

    Args:
        q: [tokens, qo_heads, channels], any floating dtype, as the others.
        k: [tokens, kv_heads, channels].
        v: the same; None where keys hold the values (MLA), whose rotary channels are the last ones
            of q and k. Else they are the first ones.
        cos_sin: float32 [rows, rotary channels], by position: cosines of pairs, then their sines.
        positions: [tokens] integers, rows of ``cos_sin``.
        slots: [tokens] integers, page * page_size + offset; negative ones are not written.
        paged_kv_cache: the cache of keys [pages, page_size, kv_heads, channels], or with HND
            [pages, kv_heads, page_size, channels], FP8 or k's dtype; and that of values, or None.
        interleaved: whether pairs are neighbours (GPT-J); else they are half of the rotary
            channels apart (NeoX).
        kv_layout: ``"NHD"`` or ``"HND"``.
        q_dtype: dtype of the queries that are returned; None: that of the cache.
        q_scale, k_scale, v_scale: what is divided by before rounding to FP8, which saturates: a
            positive number; 1 where 16 bits are stored.

    Returns:
        The queries, and copies of the caches with the new slots.

    Raises:
        ValueError: shapes or dtypes that disagree, positions or slots out of range, or a scale that
            nothing divides by; the argument is named.
    """
    k_cache, v_cache = paged_kv_cache
    _check((q, k, v), cos_sin, positions, slots, paged_kv_cache, kv_layout)
    q_dtype = q_dtype or k_cache.dtype
    _check_stored("q", q_dtype, q.dtype, q_scale)
    _check_stored("k", k_cache.dtype, k.dtype, k_scale)
    if v is not None and v_cache is not None:
        _check_stored("v", v_cache.dtype, v.dtype, v_scale)
    turned = [
        _turned(
            x, cos_sin, positions, lambda a, b: (a + b,), interleaved=interleaved, last=v is None
        )[0]
        for x in (q, k)
    ]
    by_slot = k_cache if kv_layout == "NHD" else k_cache.transpose(1, 2)
    kept = (slots >= 0).to(k.device)
    places = slots[kept] // by_slot.shape[1], slots[kept] % by_slot.shape[1]
    caches: list[torch.Tensor | None] = []
    for cache, numbers, scale in (
        (k_cache, turned[1], k_scale),
        (v_cache, None if v is None else v.double(), v_scale),
    ):
        if cache is None or numbers is None:
            caches.append(None)
            continue
        rows = _stored(numbers, cache.dtype, scale)[kept]
        caches.append(in_slots(cache.clone(), _as_bits(rows), places, kv_layout))
    assert caches[0] is not None  # noqa: S101  of the two only values may be missing
    return RopeAppended(_stored(turned[0], q_dtype, q_scale), caches[0], caches[1])


def _check(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor | None],
    kv_layout: KVLayout,
) -> None:
    """Check a call's tensors against each other."""
    check_kv_layout(kv_layout)
    q, k, v = rows
    heads = "pages page_size heads" if kv_layout == "NHD" else "pages heads page_size"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None:
            check_tensor(name, x, "tokens heads channels")
            check_same(name, "tokens", x.shape[0], "q", q.shape[0])
            check_same(name, "channels", x.shape[2], "q", q.shape[2])
    check_tensor("cos_sin", cos_sin, "rows channels")
    if cos_sin.shape[1] % 2 or cos_sin.shape[1] > q.shape[2]:
        message = f"cos_sin has {cos_sin.shape[1]} channels; an even part of q's {q.shape[2]}"
        raise ValueError(message)
    for name, each in (("positions", positions), ("slots", slots)):
        check_same(name, "tokens", len(each), "q", q.shape[0])
    for name, cache, new in (("k_cache", caches[0], k), ("v_cache", caches[1], v)):
        if (cache is None) != (new is None):
            message = f"{name} is {'missing' if cache is None else 'given'}, unlike its new rows"
            raise ValueError(message)
        if cache is not None and new is not None:
            check_tensor(name, cache, f"{heads} channels")
            axis = 2 if kv_layout == "NHD" else 1
            check_same(name, "heads", cache.shape[axis], name[0], new.shape[1])
            check_same(name, "channels", cache.shape[3], "q", q.shape[2])
    if caches[1] is not None and caches[1].shape != caches[0].shape:
        shapes = tuple(caches[1].shape), tuple(caches[0].shape)
        message = f"v_cache has shape {shapes[0]}, but k_cache has {shapes[1]}"
        raise ValueError(message)
    held = caches[0].shape[0] * caches[0].shape[1 if kv_layout == "NHD" else 2]
    _check_places(positions, slots, len(cos_sin), held)


def _check_places(positions: torch.Tensor, slots: torch.Tensor, rows: int, held: int) -> None:
    """Check that positions are rows of turns, and that no slot lies behind the caches."""
    check_integers("positions", positions)
    check_integers("slots", slots)
    for name, wrong, count, what in (
        ("positions", (positions < 0) | (positions >= rows), rows, "rows of turns"),
        ("slots", slots >= held, held, "slots of the caches"),
    ):
        if wrong.any():
            place = int(wrong.nonzero()[0])
            message = f"{name}[{place}] is out of range: there are {count} {what}"
            raise ValueError(message)


def _check_stored(name: str, stored: torch.dtype, given: torch.dtype, scale: float) -> None:
    """Check what rows are stored as, and the scale that they are divided by."""
    if stored not in FP8_FORMATS and stored != given:
        message = f"{name} is {given}, and stored as {stored}; it must be that, or FP8"
        raise ValueError(message)
    if not 0 < scale < math.inf:
        message = f"{name}_scale is {scale}; it must be a positive number"
        raise ValueError(message)
    if stored not in FP8_FORMATS and scale != 1:
        message = f"{name}_scale is {scale}; it must be 1 where {stored} is stored"
        raise ValueError(message)


def rope_bounds(
    x: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
    last: bool = False,
    arithmetic: Arithmetic | None = None,
) -> Ends:
    """Return the least and the greatest number that an arithmetic may quantise, in float64.

    A turned number is a sum of two products: three roundings of float32, or two where a product is
    fused. Where float32 holds both products and their sum, as at position 0, there is no error.
    Where both products are zeros, the sign of their sum is open.

    Args:
        x: [tokens, heads, channels].
        cos_sin, positions, interleaved: see ``rope_and_append``.
        last: whether the rotary channels are the last ones, and not the first.
        arithmetic: its ``intermediate``: the format of what is quantised.
    """
    arithmetic = checked_arithmetic(arithmetic)
    low, high = _turned(x, cos_sin, positions, _sum_of, interleaved=interleaved, last=last)
    if arithmetic.rounded("intermediate", x.dtype):
        low, high = (round_to_dtype(each, x.dtype).double() for each in (low, high))
    return low, high


def _turned(
    x: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    combine: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
    *,
    interleaved: bool,
    last: bool,
) -> tuple[torch.Tensor, ...]:
    """Return rows in float64 whose rotary channels are what is made of their two products."""
    wide = x.double()
    size = cos_sin.shape[1]
    rotary = slice(x.shape[2] - size, None) if last else slice(size)
    both = cos_sin[positions.to(cos_sin.device)].double().unsqueeze(1)
    cos, sin = both.split(size // 2, dim=2)
    part = wide[..., rotary]
    pairs = part.unflatten(2, (-1, 2)) if interleaved else part.unflatten(2, (2, -1)).mT
    first, second = pairs.unbind(3)
    made = combine(first * cos, -(second * sin)), combine(second * cos, first * sin)
    found = []
    for new in (torch.stack(each, dim=3) for each in zip(*made, strict=True)):
        rows = wide.clone()
        rows[..., rotary] = (new if interleaved else new.mT).flatten(2)
        found.append(rows)
    return tuple(found)


def _sum_of(one: torch.Tensor, other: torch.Tensor) -> Ends:
    """Return the least and the greatest that the sum of two products may become in float32."""
    y = one + other
    is_exact = y.float().double() == y
    sizes = torch.zeros_like(y)
    for each in (one, other):
        is_exact &= each.float().double() == each
        sizes += each.abs()
    slack = (PRODUCTS * UNIT_ROUNDOFF["float32"] * sizes).masked_fill(is_exact, 0.0)
    tiny = torch.stack([(each != 0) & (each.abs() < SUBNORMAL) for each in (one, other, y)]).any(0)
    slack = slack + tiny * 2 * SUBNORMAL
    # Signs are those of y, of zeros too.
    ends = (-slack, slack)
    low, high = ((y + e).copysign(torch.where(slack > y.abs(), e, y)) for e in ends)
    # That of two zeros is open: it is another where a zero is negated as 0 - x, as Triton does.
    is_open = (one == 0) & (other == 0)
    return low.masked_fill(is_open, -0.0), high.masked_fill(is_open, 0.0)


def stored_bounds(
    numbers: Ends, dtype: torch.dtype, scale: float, arithmetic: Arithmetic | None = None
) -> Ends:
    """Return the least and the greatest code that numbers between these may be stored as.

    Args:
        numbers: float64 [tokens, heads, channels], see ``rope_bounds``.
        dtype: FP8, or one of 16 bits, which no scale divides.
        scale: what is divided by.
        arithmetic: its ``quotients``.

    Returns:
        Two int32 tensors, see ``ordered``.
    """
    low, high = numbers
    if dtype not in FP8_FORMATS:
        return ordered(round_to_dtype(low, dtype)), ordered(round_to_dtype(high, dtype))
    to = QuantizedFormat(dtype)
    rows = [each.flatten(1) for each in numbers]
    by = given_scale(rows[0], scale)
    least = code_bounds(rows[0], by, to, arithmetic)[0]
    most = code_bounds(rows[1], by, to, arithmetic)[1]
    return least.view(low.shape).int(), most.view(low.shape).int()


def ordered(stored: torch.Tensor) -> torch.Tensor:
    """Return FP8 codes, or numbers of 16 bits, as int32 in the order of their numbers; -0 is -1."""
    if stored.element_size() == 1:
        return order_of(stored).int()
    bits = stored.view(torch.int16).int()
    return torch.where(bits < 0, -1 - (bits & MAGNITUDE), bits)


def unordered(order: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what ``ordered`` makes this of."""
    if dtype in FP8_FORMATS:
        return codes_of(order.to(torch.int16), dtype)
    bits = torch.where(order < 0, -2 - MAGNITUDE - order, order)
    return bits.to(torch.int16).view(dtype)


def _stored(numbers: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    return unordered(stored_bounds((numbers, numbers), dtype, scale)[0], dtype)


def _as_bits(rows: torch.Tensor) -> torch.Tensor:
    """Return codes of a byte as bytes, of which torch takes some; other rows as they are."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows
