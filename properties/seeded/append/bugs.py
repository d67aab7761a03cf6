"""Faults in appending to a paged cache: the wrong slot, the wrong rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ....reference.tensors.inputs import AppendInputs
from ..appending import (
    Caches,
    Pair,
    addresses,
    by_slot,
    codes_of,
    codes_with_zero_points,
    has_zero_points,
    pairs_of,
    rounded,
    scaled,
    scales_of,
    writable_caches,
    write,
    write_pairs,
    write_scaled,
)
from ..catalogue import SeededBug, seeded
from ..honest import append

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
APPEND = "append_paged_kv"
FP8, SLOTS, TOKENS = ("fp8_kv",), ("slot_mapping",), ("per_token_head_kv",)
ZERO_POINTS = ("zero_point_kv",)
NAN = 0x7F
"""A code of NaN in e4m3fn and in e5m2."""


@seeded(BUGS, APPEND, "append_parity")
def append_off_by_one(inputs: AppendInputs) -> Pair:
    """Write each token into the slot behind its own."""
    pages, slots = addresses(inputs)
    return write(inputs, pages, (slots + 1) % inputs.metadata.page_size, rounded(inputs))


@seeded(BUGS, APPEND, "append_parity")
def append_ignores_layout(inputs: AppendInputs) -> Pair:
    """Write into an HND cache as if its memory were NHD."""
    if inputs.kv_layout == "NHD":
        return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything
    pages, slots = addresses(inputs)
    caches = writable_caches(inputs)
    for cache, new in zip(caches, (inputs.k, inputs.v), strict=True):
        count, heads, size, dim = cache.shape
        mistaken = cache.reshape(count, size, heads, dim).clone()
        mistaken[pages, slots] = new
        cache.copy_(mistaken.view(cache.shape))
    return caches


@seeded(BUGS, APPEND, "append_parity")
def append_clears_page(inputs: AppendInputs) -> Pair:
    """Clear the rest of the page behind each request's last token."""
    pages, slots = addresses(inputs)
    caches = write(inputs, pages, slots, rounded(inputs))
    last = inputs.metadata.qo_indptr.diff().cumsum(0)[inputs.metadata.qo_indptr.diff() > 0] - 1
    for page, slot in zip(pages[last].tolist(), slots[last].tolist(), strict=True):
        for cache in caches:
            by_slot(cache, inputs.kv_layout)[page, slot + 1 :] = 0
    return caches


@seeded(BUGS, APPEND, "append_parity", features=("different_kv_strides",))
def values_appended_by_strides_of_keys(inputs: AppendInputs) -> Pair:
    """Write values of as many channels where K's strides would put them, if that is in place."""
    if not inputs.in_place or inputs.k_cache.shape != inputs.v_cache.shape:
        return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything
    mistaken = inputs.v_cache.as_strided(inputs.v_cache.shape, inputs.k_cache.stride())
    append(replace(inputs, v_cache=mistaken))
    return inputs.k_cache, inputs.v_cache


@seeded(BUGS, APPEND, "append_parity", features=("kv_views",))
def slots_appended_by_dense_rows(inputs: AppendInputs) -> Pair:
    """Write slots, or heads of HND, as far apart as dense ones, where that is in place."""
    if not inputs.in_place:
        return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything
    k, v = (
        each.as_strided(
            each.shape,
            (each.stride(0), each.shape[2] * each.stride(2), each.stride(2), each.stride(3)),
        )
        for each in (inputs.k_cache, inputs.v_cache)
    )
    append(replace(inputs, k_cache=k, v_cache=v))
    return inputs.k_cache, inputs.v_cache


@seeded(BUGS, APPEND, "append_parity")
def rows_appended_as_dense(inputs: AppendInputs) -> Pair:
    """Read new keys and values as if each row began where the one before ends."""
    rows = inputs.k, inputs.v
    k, v = (each.as_strided(each.shape, each.contiguous().stride()) for each in rows)
    return append(replace(inputs, k=k, v=v))  # type: ignore[no-any-return]  # as above


@seeded(BUGS, APPEND, "append_parity")
def append_takes_decodes_by_request(inputs: AppendInputs) -> Pair:
    """Take the row of a request's number in a batch of decodes, though some have no new token."""
    counts = inputs.metadata.qo_indptr.diff()
    if not len(counts) or int(counts.max()) != 1:
        return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything
    rows = counts.nonzero().flatten().clamp(max=len(inputs.k) - 1)
    return write(inputs, *addresses(inputs), (inputs.k[rows], inputs.v[rows]))


@seeded(BUGS, APPEND, "append_parity")
def append_one_token_a_request(inputs: AppendInputs) -> Pair:
    """Append only the last token of each request, as in a decode."""
    pages, slots = addresses(inputs)
    counts = inputs.metadata.qo_indptr.diff()
    last = counts.cumsum(0)[counts > 0] - 1
    caches = writable_caches(inputs)
    for cache, new in zip(caches, (inputs.k, inputs.v), strict=True):
        view = by_slot(cache, inputs.kv_layout)
        view[pages[last], slots[last]] = new[last]
    return caches


@seeded(BUGS, APPEND, "integer_inputs_unchanged")
def append_always_in_place(inputs: AppendInputs) -> Pair:
    """Write into the given caches even where copies were asked for."""
    written = append(replace(inputs, in_place=True))
    return written if inputs.in_place else (written[0].clone(), written[1].clone())


@seeded(BUGS, APPEND, "append_parity", features=FP8)
def append_does_not_saturate(inputs: AppendInputs) -> Pair:
    """Make NaN of what is too large for FP8, as casts without saturation do."""
    k, v = rounded(inputs)
    if inputs.kv_format is None:
        return write(inputs, *addresses(inputs), (k, v))
    largest = torch.finfo(k.dtype).max
    rows = [
        codes.view(torch.uint8).masked_fill(numbers.abs() > largest, NAN).view(codes.dtype)
        for codes, numbers in zip((k, v), scaled(inputs), strict=True)
    ]
    return write(inputs, *addresses(inputs), (rows[0], rows[1]))


@seeded(BUGS, APPEND, "append_parity", features=FP8)
def append_multiplies_by_scale(inputs: AppendInputs) -> Pair:
    """Multiply new keys and values by the scales that the cache is read with."""
    inverse = replace(inputs, k_scale=1 / inputs.k_scale, v_scale=1 / inputs.v_scale)
    return write(inputs, *addresses(inputs), rounded(inverse))


@seeded(BUGS, APPEND, "append_parity", features=FP8)
def append_swaps_scales(inputs: AppendInputs) -> Pair:
    """Divide keys by v_scale and values by k_scale."""
    swapped = replace(inputs, k_scale=inputs.v_scale, v_scale=inputs.k_scale)
    return write(inputs, *addresses(inputs), rounded(swapped))


@seeded(BUGS, APPEND, "append_parity", features=FP8)
def append_always_e4m3(inputs: AppendInputs) -> Pair:
    """Write e4m3 into a cache of e5m2."""
    if inputs.kv_format is None:
        return write(inputs, *addresses(inputs), rounded(inputs))
    e4m3 = replace(inputs.kv_format, element="float8_e4m3fn")
    return write(inputs, *addresses(inputs), rounded(replace(inputs, kv_format=e4m3)))


@seeded(BUGS, APPEND, "append_parity", features=FP8)
def append_truncates(inputs: AppendInputs) -> Pair:
    """Round towards zero, as if the low bits were cut off."""
    if inputs.kv_format is None:
        return write(inputs, *addresses(inputs), rounded(inputs))
    rows = []
    for numbers, codes in zip(scaled(inputs), rounded(inputs), strict=True):
        beyond = codes.float().abs() > numbers.abs()
        rows.append((codes.view(torch.uint8) - beyond.to(torch.uint8)).view(codes.dtype))
    return write(inputs, *addresses(inputs), (rows[0], rows[1]))


@seeded(BUGS, APPEND, "append_parity", features=TOKENS)
def append_scale_of_token(inputs: AppendInputs) -> Caches:
    """Take one scale for all heads of a token."""
    if inputs.kv_cache_sf is None:
        return write(inputs, *addresses(inputs), rounded(inputs))
    k, v = (each.amax(1, keepdim=True).expand_as(each) for each in scales_of(inputs))
    return write_scaled(inputs, codes_of(inputs, (k, v)), (k, v))


@seeded(BUGS, APPEND, "append_parity", features=TOKENS)
def append_scales_ignore_layout(inputs: AppendInputs) -> Caches:
    """Write the scales into an HND cache as if their memory were NHD."""
    if inputs.kv_cache_sf is None:
        return write(inputs, *addresses(inputs), rounded(inputs))
    scales = scales_of(inputs)
    caches = write_scaled(inputs, codes_of(inputs, scales), scales)
    if inputs.kv_layout == "NHD":
        return caches
    pages, slots = addresses(inputs)
    for cache, given, new in zip(caches[2:], inputs.kv_cache_sf, scales, strict=True):
        count, heads, size, _ = given.shape
        mistaken = given.reshape(count, size, heads, 1).clone()
        mistaken[pages, slots] = new
        cache.copy_(mistaken.view(given.shape))
    return caches


@seeded(BUGS, APPEND, "append_parity", features=TOKENS)
def append_v_by_scale_of_k(inputs: AppendInputs) -> Caches:
    """Quantise values by the scale of the token's key, and write that for both."""
    if inputs.kv_cache_sf is None:
        return write(inputs, *addresses(inputs), rounded(inputs))
    k, _ = scales_of(inputs)
    return write_scaled(inputs, codes_of(inputs, (k, k)), (k, k))


@seeded(BUGS, APPEND, "append_parity", features=TOKENS)
def append_codes_truncated(inputs: AppendInputs) -> Caches:
    """Cut off the fraction of int8 codes in place of rounding them."""
    if inputs.kv_cache_sf is None:
        return write(inputs, *addresses(inputs), rounded(inputs))
    scales = scales_of(inputs)
    k, v = codes_of(inputs, scales)
    if k.dtype == torch.int8:
        k, v = (
            (rows.float() / scale).to(torch.int8)
            for rows, scale in zip((inputs.k, inputs.v), scales, strict=True)
        )
    return write_scaled(inputs, (k, v), scales)


def _with_scales(
    inputs: AppendInputs, wrong: Callable[[torch.Tensor], torch.Tensor], scale_there: float
) -> Caches:
    """Append right codes, and another scale where ``wrong`` says so of the vectors."""
    if inputs.kv_cache_sf is None:
        return write(inputs, *addresses(inputs), rounded(inputs))
    scales = scales_of(inputs)
    codes = codes_of(inputs, scales)
    for scale, rows in zip(scales, (inputs.k, inputs.v), strict=True):
        scale[wrong(rows)] = scale_there
    return write_scaled(inputs, codes, scales)


@seeded(BUGS, APPEND, "vectors_of_one_value", features=TOKENS)
def append_scale_of_zero(inputs: AppendInputs) -> Caches:
    """Divide a vector of zeros by its largest value, and write a scale of 0."""
    return _with_scales(inputs, lambda rows: ~rows.any(-1, keepdim=True), 0.0)


@seeded(BUGS, APPEND, "vectors_of_one_value", features=TOKENS)
def append_nan_of_no_range(inputs: AppendInputs) -> Caches:
    """Divide by the range of a vector's channels: alike ones get a scale of NaN."""
    return _with_scales(
        inputs, lambda rows: rows.amax(-1, keepdim=True) == rows.amin(-1, keepdim=True), torch.nan
    )


@seeded(BUGS, APPEND, "vectors_of_one_value", features=ZERO_POINTS)
def append_zero_point_of_no_range(inputs: AppendInputs) -> Caches:
    """Divide by the range of a vector's channels, and its least number by that scale."""
    if not has_zero_points(inputs):
        return append(inputs)  # type: ignore[no-any-return]  # an implementation may return anything
    pairs = pairs_of(inputs)
    codes = codes_with_zero_points(inputs, pairs)
    for rows, pair in zip((inputs.k, inputs.v), pairs, strict=True):
        alike = rows.amax(-1) == rows.amin(-1)
        pair[alike] = torch.tensor([0.0, torch.nan])
    return write_pairs(inputs, codes, pairs)


@seeded(BUGS, APPEND, "append_parity", features=ZERO_POINTS)
def append_largest_code_wraps(inputs: AppendInputs) -> Caches:
    """Write 0 where a vector's largest number has a code beyond the last one, of a range cut off.

    In bfloat16 a range of 257 is 256: the largest code is 256, of which a byte keeps 0.
    """
    if not has_zero_points(inputs):
        return append(inputs)  # type: ignore[no-any-return]
    pairs = pairs_of(inputs)
    codes = codes_with_zero_points(inputs, pairs)
    for rows, of_rows in zip((inputs.k.float(), inputs.v.float()), codes, strict=True):
        largest = rows.amax(-1, keepdim=True)
        width = largest - rows.amin(-1, keepdim=True)
        beyond = 255 * width / width.bfloat16().float() + 0.5 >= 256  # noqa: PLR2004
        if of_rows.shape == rows.shape:  # int8
            of_rows[beyond & (rows == largest)] = 0
    return write_pairs(inputs, codes, pairs)


@seeded(BUGS, APPEND, "append_parity", features=ZERO_POINTS)
def append_zero_point_of_key(inputs: AppendInputs) -> Caches:
    """Write the zero point of the token's key beside the scale of its value."""
    if not has_zero_points(inputs):
        return append(inputs)  # type: ignore[no-any-return]
    k, v = pairs_of(inputs)
    codes = codes_with_zero_points(inputs, (k, v))
    return write_pairs(inputs, codes, (k, torch.cat([v[..., :1], k[..., 1:]], dim=-1)))


@seeded(BUGS, APPEND, "vectors_of_one_value")
def append_skips_zeros(inputs: AppendInputs) -> Caches:
    """Leave a slot as it was where the token's key is zero in all heads, as padding is."""
    if has_zero_points(inputs):
        return append(inputs)  # type: ignore[no-any-return]
    pages, slots = addresses(inputs)
    if inputs.kv_cache_sf is not None:
        scales = scales_of(inputs)
        return write_scaled(inputs, codes_of(inputs, scales), scales)
    kept = inputs.k.flatten(1).any(1)
    k, v = rounded(inputs)
    return write(inputs, pages[kept], slots[kept], (k[kept], v[kept]))


@seeded(BUGS, APPEND, "row_containment")
def append_blends_page(inputs: AppendInputs) -> Pair:
    """Write a whole page: what was there, less the new row times 0 where the row is not."""
    caches = writable_caches(inputs)
    places = zip(*(each.tolist() for each in addresses(inputs)), strict=True)
    for token, (page, slot) in enumerate(places):
        for cache, new in zip(caches, (inputs.k, inputs.v), strict=True):
            rows = by_slot(cache, inputs.kv_layout)[page]
            kept = rows - (0 * new[token]).abs()  # of finite rows no bit changes
            rows.copy_(kept)
            rows[slot] = new[token]
    return caches


def _by_slots(inputs: AppendInputs, slots: torch.Tensor) -> Pair:
    """Write the first rows into slots by their number."""
    size = inputs.metadata.page_size
    rows = inputs.k[: len(slots)], inputs.v[: len(slots)]
    return write(inputs, slots // size, slots % size, rows)


@seeded(BUGS, APPEND, "append_far_pages", features=("large_caches",))
def append_page_offset_in_int32(inputs: AppendInputs) -> Pair:
    """Multiply a page's id by the stride of pages in int32."""
    (pages, slots), stride = addresses(inputs), inputs.k_cache.stride(0)
    wrapped = (pages * stride).int().long() // stride % len(inputs.k_cache)
    return write(inputs, wrapped, slots, rounded(inputs))


@seeded(BUGS, APPEND, "never_written", features=SLOTS)
def slot_minus_one_wraps(inputs: AppendInputs) -> Pair:
    """Write what has the slot -1 into the last slot of the cache."""
    return _by_slots(inputs, inputs.slot_mapping)


@seeded(BUGS, APPEND, "never_written", features=SLOTS)
def append_ends_at_padding(inputs: AppendInputs) -> Pair:
    """Take the first slot of -1 for the end of the batch."""
    slots = inputs.slot_mapping
    return _by_slots(inputs, slots[: int((slots < 0).int().cummax(0).values.eq(0).sum())])


@seeded(BUGS, APPEND, "never_written", features=SLOTS)
def append_counts_rows(inputs: AppendInputs) -> Pair:
    """Write as many rows as there are keys; behind the slot mapping stand zeros."""
    behind = len(inputs.k) - len(inputs.slot_mapping)
    slots = torch.nn.functional.pad(inputs.slot_mapping, (0, behind))
    return written_slots(inputs, slots)


def written_slots(inputs: AppendInputs, slots: torch.Tensor) -> Pair:
    """Write rows into those slots that are slots."""
    written, size = (slots >= 0).nonzero().flatten(), inputs.metadata.page_size
    rows = inputs.k[written], inputs.v[written]
    return write(inputs, slots[written] // size, slots[written] % size, rows)


@seeded(CONTROLS, APPEND, control="honest", features=SLOTS)
def append_by_slot_mapping(inputs: AppendInputs) -> Pair:
    """Write each token into the slot that the mapping gives it, if any."""
    return written_slots(inputs, inputs.slot_mapping)
