"""Faults in turning, quantising and appending: of pairs, turns, scales, slots and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ...reference import Arithmetic
from ...reference.attention.rope import ordered, unordered
from ...reference.tensors.rope_append import RopeAppendInputs
from . import far_bugs
from .catalogue import SeededBug, seeded

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
ROPE, PARITY = "rope_and_append", "rope_parity"
TILE = 4
"""Tokens of a tile of programs."""
Turn = Callable[[RopeAppendInputs, torch.Tensor], torch.Tensor]
Store = Callable[[torch.Tensor, torch.dtype, float], torch.Tensor]


def turned(
    inputs: RopeAppendInputs,
    x: torch.Tensor,
    *,
    both: torch.Tensor | None = None,
    sign: float = 1.0,
    rotary: slice | None = None,
    interleaved: bool | None = None,
) -> torch.Tensor:
    """Turn rows in float32, with parts that a fault replaces."""
    found = x.float()
    half = inputs.rope_dim // 2
    both = inputs.cos_sin[inputs.positions] if both is None else both
    cos, sin = both[:, None, :half], sign * both[:, None, half:]
    neighbours = inputs.interleaved if interleaved is None else interleaved
    part = found[..., inputs.rotary if rotary is None else rotary]
    pairs = part.unflatten(2, (-1, 2)) if neighbours else part.unflatten(2, (2, -1)).mT
    first, second = pairs[..., 0], pairs[..., 1]
    new = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=3)
    part.copy_((new if neighbours else new.mT).flatten(2))
    return found


def quotients(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return rows over a scale, as they are before they are rounded."""
    if dtype.itemsize > 1:
        return x.float()
    return x.float() / torch.full((), scale, device=x.device)


def stored(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Round rows over a scale to what is stored; FP8 saturates."""
    found = quotients(x, dtype, scale)
    most = torch.finfo(dtype).max if dtype.itemsize == 1 else torch.inf
    return found.clamp(-most, most).to(dtype)


def by_slot(inputs: RopeAppendInputs, cache: torch.Tensor) -> torch.Tensor:
    """View a cache as bytes [pages, slots, heads, bytes]."""
    cache = cache if inputs.kv_layout == "NHD" else cache.transpose(1, 2)
    return cache.view(torch.uint8)


def write(inputs: RopeAppendInputs, cache: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows into the slots of a cache."""
    kept = inputs.slots >= 0
    slots = inputs.slots[kept]
    place = slots // inputs.page_size, slots % inputs.page_size
    by_slot(inputs, cache)[place] = rows[kept].contiguous().view(torch.uint8)


def call(
    inputs: RopeAppendInputs,
    *,
    turn: Turn = turned,
    turn_q: Turn | None = None,
    store: Store = stored,
    store_q: Store | None = None,
) -> torch.Tensor:
    """Turn, quantise and append, with steps that a fault replaces."""
    write(
        inputs, inputs.k_cache, store(turn(inputs, inputs.k), inputs.k_cache.dtype, inputs.k_scale)
    )
    if inputs.v is not None and inputs.v_cache is not None:
        write(inputs, inputs.v_cache, store(inputs.v, inputs.v_cache.dtype, inputs.v_scale))
    return (store_q or store)((turn_q or turn)(inputs, inputs.q), inputs.q_dtype, inputs.q_scale)


@seeded(BUGS, ROPE, PARITY)
def queries_turn_backwards(inputs: RopeAppendInputs) -> torch.Tensor:
    """Turn queries by the negative angle."""
    return call(inputs, turn_q=lambda record, x: turned(record, x, sign=-1.0))


@seeded(BUGS, ROPE, PARITY)
def keys_turn_backwards(inputs: RopeAppendInputs) -> torch.Tensor:
    """Turn keys by the negative angle."""
    return call(inputs, turn=lambda record, x: turned(record, x, sign=-1.0), turn_q=turned)


@seeded(BUGS, ROPE, PARITY)
def always_halves(inputs: RopeAppendInputs) -> torch.Tensor:
    """Pair channels half of the rotary ones apart where neighbours are pairs."""
    return call(inputs, turn=lambda record, x: turned(record, x, interleaved=False))


@seeded(BUGS, ROPE, PARITY)
def halves_of_the_head(inputs: RopeAppendInputs) -> torch.Tensor:
    """Pair rotary channels with the second half of the head, where some do not turn."""

    def turn(record: RopeAppendInputs, x: torch.Tensor) -> torch.Tensor:
        found, half, dim = turned(record, x), record.rope_dim // 2, x.shape[2]
        if record.interleaved or record.latent or dim % 2:
            return found
        both = record.cos_sin[record.positions].unsqueeze(1)
        second = x.float()[..., dim // 2 : dim // 2 + half]
        found[..., :half] = x.float()[..., :half] * both[..., :half] - second * both[..., half:]
        return found

    return call(inputs, turn=turn)


@seeded(BUGS, ROPE, PARITY)
def rotary_channels_first_of_latent_keys(inputs: RopeAppendInputs) -> torch.Tensor:
    """Turn the first channels where the last ones are to turn."""
    first = slice(inputs.rope_dim)
    return call(inputs, turn=lambda record, x: turned(record, x, rotary=first))


@seeded(BUGS, ROPE, PARITY)
def turns_by_places(inputs: RopeAppendInputs) -> torch.Tensor:
    """Turn by the position in the request, where the given one differs."""
    both = inputs.cos_sin[inputs.places.long()]
    return call(inputs, turn=lambda record, x: turned(record, x, both=both))


@seeded(BUGS, ROPE, "rope_rows")
def turns_by_the_first_of_a_tile(inputs: RopeAppendInputs) -> torch.Tensor:
    """Turn a tile of tokens by the position of its first."""
    tokens = torch.arange(len(inputs.positions), device=inputs.q.device)
    both = inputs.cos_sin[inputs.positions[tokens // TILE * TILE]]
    return call(inputs, turn=lambda record, x: turned(record, x, both=both))


@seeded(BUGS, ROPE, PARITY)
def sines_in_16_bits(inputs: RopeAppendInputs) -> torch.Tensor:
    """Round cosines and sines to the dtype of the rows."""
    both = inputs.cos_sin[inputs.positions].to(inputs.q.dtype).float()
    return call(inputs, turn=lambda record, x: turned(record, x, both=both))


@seeded(BUGS, ROPE, PARITY)
def last_pair_does_not_turn(inputs: RopeAppendInputs) -> torch.Tensor:
    """Leave the last pair of channels as it is."""
    both = inputs.cos_sin[inputs.positions]
    both[:, inputs.rope_dim // 2 - 1], both[:, -1] = 1.0, 0.0
    return call(inputs, turn=lambda record, x: turned(record, x, both=both))


@seeded(BUGS, ROPE, PARITY)
def products_in_16_bits(inputs: RopeAppendInputs) -> torch.Tensor:
    """Cut what is turned off to 16 bits before it is quantised."""

    def turn(record: RopeAppendInputs, x: torch.Tensor) -> torch.Tensor:
        return (turned(record, x).view(torch.int32) & -0x10000).view(torch.float32)

    return call(inputs, turn=turn)


@seeded(BUGS, ROPE, PARITY)
def scale_of_keys_for_values(inputs: RopeAppendInputs) -> torch.Tensor:
    """Divide values by the scale of keys."""
    return call(replace(inputs, v_scale=inputs.k_scale))


@seeded(BUGS, ROPE, PARITY)
def scale_of_keys_for_queries(inputs: RopeAppendInputs) -> torch.Tensor:
    """Divide queries by the scale of keys."""
    return call(replace(inputs, q_scale=inputs.k_scale))


@seeded(BUGS, ROPE, PARITY)
def scales_multiply(inputs: RopeAppendInputs) -> torch.Tensor:
    """Multiply by the scales that are to divide."""
    inverse = {f"{n}_scale": 1.0 / getattr(inputs, f"{n}_scale") for n in ("q", "k", "v")}
    return call(replace(inputs, **inverse))


def _one_code(stored_rows: torch.Tensor, by: int, where: int) -> torch.Tensor:
    """Return stored rows one of whose codes is another, where that is a number."""
    order = ordered(stored_rows).flatten()
    if order.numel():
        order[where] += by if order[where].abs() < 7 << (8 * stored_rows.element_size() - 4) else 0
    return unordered(order.view(stored_rows.shape), stored_rows.dtype)


@seeded(BUGS, ROPE, PARITY)
def first_query_one_code_higher(inputs: RopeAppendInputs) -> torch.Tensor:
    """Raise the code of the first element of the last token's queries by one."""

    def store(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
        found = stored(x, dtype, scale)
        found[-1:] = _one_code(found[-1:], 1, 0)
        return found

    return call(inputs, store_q=store)


@seeded(BUGS, ROPE, PARITY)
def last_of_the_cache_one_code_lower(inputs: RopeAppendInputs) -> torch.Tensor:
    """Lower the code of the last channel of the last token's keys and values by one."""

    def store(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
        found = stored(x, dtype, scale)
        found[-1:] = _one_code(found[-1:], -1, -1)
        return found

    return call(inputs, store=store, store_q=stored)


@seeded(BUGS, ROPE, PARITY)
def ties_away_from_zero(inputs: RopeAppendInputs) -> torch.Tensor:
    """Round halves to the code that is further from zero."""

    def store(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
        beyond = quotients(x, dtype, scale) * (1 + 2.0**-23)
        found = stored(beyond, dtype, 1.0)
        return torch.where(beyond.isfinite(), found.float(), stored(x, dtype, scale).float()).to(
            dtype
        )

    return call(inputs, store=store)


@seeded(BUGS, ROPE, PARITY)
def values_cut_off(inputs: RopeAppendInputs) -> torch.Tensor:
    """Round towards zero what is stored in the cache."""

    def store(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
        found, exact = stored(x, dtype, scale), quotients(x, dtype, scale)
        order = ordered(found)
        larger = found.float().abs() > exact.abs()
        return unordered(torch.where(larger, order - order.sign(), order), dtype)

    return call(inputs, store=store, store_q=stored)


@seeded(BUGS, ROPE, PARITY)
def rope_zeros_without_a_sign(inputs: RopeAppendInputs) -> torch.Tensor:
    """Store 0 for what is rounded to -0."""

    def store(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
        found = stored(x, dtype, scale)
        return unordered(ordered(found).where(ordered(found) != -1, 0), dtype)

    return call(inputs, store=store)


@seeded(BUGS, ROPE, PARITY)
def does_not_saturate(inputs: RopeAppendInputs) -> torch.Tensor:
    """Make NaN of what is too large for FP8."""

    def store(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
        found = stored(x, dtype, scale)
        if dtype.itemsize > 1:
            return found
        beyond = quotients(x, dtype, scale).abs() > torch.finfo(dtype).max
        return found.view(torch.uint8).masked_fill(beyond, 0x7F).view(dtype)

    return call(inputs, store=store)


@seeded(BUGS, ROPE, PARITY)
def appends_one_slot_behind(inputs: RopeAppendInputs) -> torch.Tensor:
    """Write each token into the slot behind its own, in its page."""
    page, slot = inputs.slots // inputs.page_size, inputs.slots % inputs.page_size
    behind = page * inputs.page_size + (slot + 1) % inputs.page_size
    return call(replace(inputs, slots=torch.where(inputs.slots < 0, inputs.slots, behind)))


@seeded(BUGS, ROPE, "rope_pages")
def pages_as_they_come(inputs: RopeAppendInputs) -> torch.Tensor:
    """Number pages as they stand in the table of the batch, and not as it says."""
    page = inputs.page_indptr.long()[inputs.requests.long()] + inputs.places // inputs.page_size
    slots = page * inputs.page_size + inputs.places % inputs.page_size
    return call(replace(inputs, slots=torch.where(inputs.slots < 0, inputs.slots, slots)))


@seeded(BUGS, ROPE, "rope_never_written")
def skipped_tokens_in_slot_0(inputs: RopeAppendInputs) -> torch.Tensor:
    """Write tokens without a slot into the first slot of the first page."""
    first = inputs.slots < 0
    if not first.any():
        return call(inputs)
    kept = replace(inputs, slots=inputs.slots.clamp(min=0))
    token = int(first.nonzero()[0])
    for cache, rows, scale in zip(
        inputs.caches,
        (turned(inputs, inputs.k), inputs.v),
        (inputs.k_scale, inputs.v_scale),
        strict=False,
    ):
        assert rows is not None  # noqa: S101  as many rows as caches
        row = stored(rows[token], cache.dtype, scale)
        by_slot(kept, cache)[0, 0] = row.contiguous().view(torch.uint8)
    return call(inputs)


@seeded(BUGS, ROPE, "rope_never_written")
def skipped_rows_times_zero(inputs: RopeAppendInputs) -> torch.Tensor:
    """Add the rows of tokens without a slot, times zero, to the first slot of the first page."""
    q = call(inputs)
    for cache, rows in zip(inputs.caches, (inputs.k, inputs.v), strict=False):
        assert rows is not None  # noqa: S101  as many rows as caches
        lost = (rows[inputs.slots < 0].float() * 0).isnan().any(0)
        slot = by_slot(inputs, cache)[0, 0]
        slot[lost.repeat_interleave(cache.element_size(), 1)] = 0xFF
    return q


@seeded(BUGS, ROPE, "rope_never_written")
def last_slot_of_skipped_tokens(inputs: RopeAppendInputs) -> torch.Tensor:
    """Write what has slot -1 into the last slot of the last page."""
    whole = len(inputs.k_cache) * inputs.page_size
    return call(replace(inputs, slots=inputs.slots % whole))


@seeded(BUGS, ROPE, PARITY)
def clears_the_rest_of_pages(inputs: RopeAppendInputs) -> torch.Tensor:
    """Clear the slots of a page behind the last new token."""
    q = call(inputs)
    if len(inputs.slots) and inputs.slots[-1] >= 0:
        page, slot = divmod(int(inputs.slots[-1]), inputs.page_size)
        for cache in inputs.caches:
            by_slot(inputs, cache)[page, slot + 1 :] = 0
    return q


@seeded(BUGS, ROPE, PARITY)
def layout_of_slots_first(inputs: RopeAppendInputs) -> torch.Tensor:
    """Write into a cache of HND as if heads lay behind slots."""
    if inputs.kv_layout == "NHD":
        return call(inputs)
    mistaken = [each.reshape(each.transpose(1, 2).shape).clone() for each in inputs.caches]
    named = dict(zip(("k_cache", "v_cache"), mistaken, strict=False))
    q = call(replace(inputs, **named, kv_layout="NHD"))  # type: ignore[arg-type]  # both caches
    for cache, written in zip(inputs.caches, mistaken, strict=True):
        cache.view(torch.uint8).copy_(written.view(torch.uint8).view(cache.view(torch.uint8).shape))
    return q


@seeded(BUGS, ROPE, PARITY)
def first_head_for_all_keys(inputs: RopeAppendInputs) -> torch.Tensor:
    """Write the first head's keys for all heads."""
    return call(replace(inputs, k=inputs.k[:, :1].expand_as(inputs.k)))


@seeded(BUGS, ROPE, PARITY)
def rope_rows_without_a_stride(inputs: RopeAppendInputs) -> torch.Tensor:
    """Read rows as if each token began where the one before ends."""
    dense = {
        name: each.as_strided(each.shape, each.contiguous().stride())
        for name in ("q", "k", "v")
        if (each := getattr(inputs, name)) is not None
    }
    return call(replace(inputs, **dense))


@seeded(BUGS, ROPE, "rope_plain")
def plain_channels_by_cosines(inputs: RopeAppendInputs) -> torch.Tensor:
    """Multiply the first channel that does not turn by a cosine."""

    def turn(record: RopeAppendInputs, x: torch.Tensor) -> torch.Tensor:
        found = turned(record, x)
        plain = found[..., record.plain]
        if plain.shape[2]:
            plain[..., 0] *= record.cos_sin[record.positions][:, :1]
        return found

    return call(inputs, turn=turn)


@seeded(BUGS, ROPE, "rope_at_zero")
def positions_from_one(inputs: RopeAppendInputs) -> torch.Tensor:
    """Count positions from one."""
    both = inputs.cos_sin[(inputs.positions + 1).clamp(max=len(inputs.cos_sin) - 1)]
    return call(inputs, turn=lambda record, x: turned(record, x, both=both))


_LAST_TURNS: dict[tuple[int, ...], torch.Tensor] = {}


@seeded(BUGS, ROPE, "rope_again")
def turns_of_an_earlier_call(inputs: RopeAppendInputs) -> torch.Tensor:
    """Turn as the call before did, if that had as many tokens and channels."""
    shape, own = tuple(inputs.q.shape), inputs.cos_sin[inputs.positions]
    both = _LAST_TURNS.get(shape, own)
    _LAST_TURNS.clear()
    _LAST_TURNS[shape] = own
    both = both.to(own.device) if both.shape == own.shape else own
    return call(inputs, turn=lambda record, x: turned(record, x, both=both))


@seeded(BUGS, ROPE, "integer_inputs_unchanged")
def keys_turned_in_place(inputs: RopeAppendInputs) -> torch.Tensor:
    """Write turned keys over the given ones."""
    q = call(inputs)
    inputs.k.copy_(turned(inputs, inputs.k))
    return q


@seeded(BUGS, ROPE, "far_rows", features=("large_rows",))
def rope_row_in_int32(inputs: RopeAppendInputs) -> torch.Tensor:
    """Multiply a token's number by the stride of keys in int32."""
    return call(replace(inputs, k=far_bugs.found(inputs.k)))


@seeded(BUGS, ROPE, PARITY)
def queries_beyond_16_heads(inputs: RopeAppendInputs) -> torch.Tensor:
    """Write the queries of 16 heads, and zeros for the others."""
    q = call(inputs)
    q.view(torch.uint8)[:, 16:] = 0
    return q


@seeded(BUGS, ROPE, PARITY)
def keys_beyond_4_heads(inputs: RopeAppendInputs) -> torch.Tensor:
    """Write the first head's keys for those beyond the fourth."""
    k = inputs.k.clone()
    k[:, 4:] = k[:, :1]
    return call(replace(inputs, k=k))


@seeded(BUGS, ROPE, PARITY)
def positions_in_8_bits(inputs: RopeAppendInputs) -> torch.Tensor:
    """Keep the lowest 8 bits of positions."""
    return call(replace(inputs, positions=inputs.positions & 0xFF))


@seeded(BUGS, ROPE, PARITY)
def positions_in_12_bits(inputs: RopeAppendInputs) -> torch.Tensor:
    """Keep the lowest 12 bits of positions."""
    return call(replace(inputs, positions=inputs.positions & 0xFFF))


@seeded(BUGS, ROPE, PARITY)
def positions_as_64_bits(inputs: RopeAppendInputs) -> torch.Tensor:
    """Read positions of 32 bits two words apart, as the low halves of 64 bits."""
    positions = inputs.positions
    if positions.dtype == torch.int32 and len(positions):
        words = 2 * torch.arange(len(positions), device=positions.device)
        positions = positions[words % len(positions)]
    return call(replace(inputs, positions=positions))


@seeded(BUGS, ROPE, PARITY)
def pages_of_a_dense_cache(inputs: RopeAppendInputs) -> torch.Tensor:
    """Write into caches as if each page began where the one before ends."""
    dense = {
        name: cache.as_strided(cache.shape, torch.empty(cache.shape, device="meta").stride())
        for name, cache in zip(("k_cache", "v_cache"), inputs.caches, strict=False)
    }
    return call(replace(inputs, **dense))  # type: ignore[arg-type]  # both caches


@seeded(BUGS, ROPE, PARITY)
def quotients_by_reciprocals(inputs: RopeAppendInputs) -> torch.Tensor:
    """Multiply by the reciprocals of scales, undeclared."""
    return call(inputs, store=_by_reciprocal)


def _by_reciprocal(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    if dtype.itemsize > 1:
        return stored(x, dtype, scale)
    by = torch.ones((), device=x.device) / torch.full((), scale, device=x.device)
    return stored(x.float() * by, dtype, 1.0)


@seeded(CONTROLS, ROPE, control="honest")
def honest_rope(inputs: RopeAppendInputs) -> torch.Tensor:
    """Turn, quantise and append as the definition says, in float32."""
    return call(inputs)


@seeded(CONTROLS, ROPE, control="honest")
def rope_with_zeros_of_its_own_sign(inputs: RopeAppendInputs) -> torch.Tensor:
    """Negate what is turned as 0 - x, by which the sum of two zeros may have another sign."""

    def turn(record: RopeAppendInputs, x: torch.Tensor) -> torch.Tensor:
        positive = torch.where(x == 0, torch.zeros_like(x), x)
        found = turned(record, positive)
        found[..., record.plain] = x.float()[..., record.plain]
        return found

    return call(inputs, turn=turn)


@seeded(CONTROLS, ROPE, control="honest", arithmetic=Arithmetic(quotients="reciprocal"))
def rope_by_reciprocals(inputs: RopeAppendInputs) -> torch.Tensor:
    """Multiply by the reciprocals of scales."""
    return call(inputs, store=_by_reciprocal)


@seeded(CONTROLS, ROPE, control="honest", arithmetic=Arithmetic(intermediate="inputs"))
def rope_of_16_bits(inputs: RopeAppendInputs) -> torch.Tensor:
    """Round what is turned to the dtype of the rows before it is quantised, as two calls do."""

    def turn(record: RopeAppendInputs, x: torch.Tensor) -> torch.Tensor:
        return turned(record, x).to(x.dtype)

    return call(inputs, turn=turn)


@seeded(CONTROLS, ROPE, control="honest")
def rope_with_queries_of_skipped_tokens_unwritten(inputs: RopeAppendInputs) -> torch.Tensor:
    """Leave the queries of tokens without a slot as memory is: nothing is promised of them."""
    q = call(inputs)
    q.view(torch.uint8)[inputs.slots < 0] = 0x5A
    return q
