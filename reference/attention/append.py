"""Writing new keys and values into a paged cache."""

from __future__ import annotations

import torch

from ..formats.cache_elements import SCALE_LAYOUTS, CacheElement, element_of, stored_dtypes
from ..formats.kv_format import CheckedCache, KVCacheFormat, Scales, check_kv_format, checked_cache
from ..validation import KVLayout, check_kv_layout, check_same, check_tensor
from .metadata import BatchMetadata, check_metadata
from .options import check_scale

Caches = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def append_paged_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: BatchMetadata,
    *,
    kv_layout: KVLayout = "NHD",
    in_place: bool = False,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    kv_format: KVCacheFormat | None = None,
) -> Caches:
    """Write each request's new keys and values into the last slots of its pages.

    Token i of a request with T new tokens and S keys in all goes to position ``S - T + i``, that
    is slot ``position % page_size`` of page ``position // page_size`` of the request (FlashInfer's
    ``append_paged_kv_cache`` with positions from ``get_batch_indices_positions``). All other slots
    keep their bits. Requests that share a page must not append to it. In caches of records (see
    ``formats/latent_records.py``) both caches are one, and keys hold the values.

    Args:
        k: [tokens, kv_heads, head_dim_qk], the new keys of all requests, by ``qo_indptr``.
        v: [tokens, kv_heads, head_dim_vo].
        k_cache, v_cache: the same as in ``paged_attention``; k / k_scale and v / v_scale are
            rounded to what they hold, once. FP8 saturates (vLLM's ``reshape_and_cache_flash``).
        metadata: the batch after the append: ``seq_lens`` count the new tokens.
        kv_layout: ``"NHD"`` or ``"HND"``.
        in_place: write into the given caches; otherwise into copies of them.
        k_scale, v_scale: float or [kv_heads], with which ``paged_attention`` will multiply.
        kv_format: the same as in ``paged_attention``; caches with scales of blocks, or of tokens
            and heads, have a function of their own, ``append_paged_scaled``.

    Returns:
        (k_cache, v_cache), the given ones if ``in_place``.

    Raises:
        ValueError: shapes that disagree, metadata that contradict themselves or the cache, a
            request with more new tokens than keys; the argument and position are named.
    """
    check_kv_layout(kv_layout)
    check_tensor("k", k, "tokens kv_heads head_dim_qk")
    check_tensor("v", v, "tokens kv_heads head_dim_vo")
    axes = "pages page_size kv_heads" if kv_layout == "NHD" else "pages kv_heads page_size"
    check_tensor("k_cache", k_cache, f"{axes} head_dim_qk", codes=stored_dtypes())
    check_tensor("v_cache", v_cache, f"{axes} head_dim_vo", codes=stored_dtypes())
    check_kv_format(kv_format)
    if kv_format is not None and kv_format.entry.scaled:
        what = f"kv_format is {kv_format.element}, whose scales are written too"
        message = f"{what}: append_paged_scaled"
        raise ValueError(message)
    cache = checked_cache(k_cache, v_cache, kv_layout, kv_format, None)
    _check_rows(k, v, cache, metadata, kv_layout)
    if cache.kv_format.entry.record is not None:  # both caches are one, and keys hold the values
        v, v_scale = k, k_scale
    rows = [
        _encoded(new, name, scale, kv_format.entry if kv_format else element_of(stored))
        for name, new, scale, stored in (
            ("k_scale", k, k_scale, cache.k),
            ("v_scale", v, v_scale, cache.v),
        )
    ]
    return _written((k_cache, v_cache), rows, metadata, kv_layout, in_place=in_place)


@torch.no_grad()
def append_paged_scaled(
    k: torch.Tensor,
    v: torch.Tensor,
    paged_kv_cache: Caches,
    kv_cache_sf: Scales,
    metadata: BatchMetadata,
    *,
    kv_format: KVCacheFormat,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    in_place: bool = False,
) -> tuple[Caches, Scales]:
    """Quantise new keys and values, and write their codes and scales into their slots.

    The slots are those of ``append_paged_kv``. Codes of nvfp4 are those of ``quantize_nvfp4`` with
    the global scales ``k_scale`` and ``v_scale`` (FlashInfer's
    ``nvfp4_quantize_append_paged_kv_cache``, 0.7). With a scale for each token and head it is
    max(amax / largest code, 1e-6), rounded to float32, where amax is of the head's channels (vLLM's
    ``triton_reshape_and_cache_flash_per_token_head_quant``). With a zero point beside it, it is
    (largest - least) / largest code, see ``formats/zero_points.py``; both are rounded to the dtype
    of ``kv_cache_sf`` (lmdeploy's ``fill_kv_cache``).

    Args:
        k, v, metadata, in_place: the same as in ``append_paged_kv``; of nvfp4, head dims are
            multiples of 16.
        paged_kv_cache: codes of K and V, as in ``paged_attention``.
        kv_cache_sf: their scales, as in ``paged_attention``: [..., head_dim / 16] float8_e4m3fn of
            blocks, V's in the layout that ``kv_format`` says, [..., 1] float32 of tokens, or
            [..., 2] in float16, bfloat16 or float32 of scales and zero points.
        kv_format: format of the cache.
        k_scale, v_scale: further scales, with which ``paged_attention`` will multiply.

    Returns:
        (codes of K and V, scales of K and V), the given ones if ``in_place``.

    Raises:
        ValueError: as ``append_paged_kv``, or a format without such scales.
    """
    check_kv_format(kv_format, needed=True)
    if not kv_format.entry.scaled:
        message = f"kv_format is {kv_format.element}; append_paged_kv appends to such a cache"
        raise ValueError(message)
    kv_layout = kv_format.kv_layout
    cache = checked_append(k, v, paged_kv_cache, kv_cache_sf, metadata, kv_format)
    made = kv_format.entry.encode(k, k_scale), kv_format.entry.encode(v, v_scale)
    codes = _written(
        paged_kv_cache, [each.codes for each in made], metadata, kv_layout, in_place=in_place
    )
    assert cache.k_scales is not None  # noqa: S101  the format has them
    assert cache.v_scales is not None  # noqa: S101
    k_scales, v_scales = _written(
        (cache.k_scales, cache.v_scales),
        [
            each.scales.to(given.dtype)
            for each, given in zip(made, kv_cache_sf, strict=True)
            if each.scales is not None
        ],
        metadata,
        kv_layout,
        in_place=in_place,
    )
    v_scales = SCALE_LAYOUTS[kv_format.v_scale_layout].store(v_scales, kv_layout)
    if in_place:
        v_scales = kv_cache_sf[1].copy_(v_scales)
    return codes, (k_scales, v_scales)


append_paged_nvfp4 = append_paged_scaled
"""The function by the name that it had when nvfp4 was its only format."""


def checked_append(
    k: torch.Tensor,
    v: torch.Tensor,
    paged_kv_cache: Caches,
    kv_cache_sf: Scales,
    metadata: BatchMetadata,
    kv_format: KVCacheFormat,
) -> CheckedCache:
    """Check the tensors of a call that writes scales too."""
    cache = checked_cache(*paged_kv_cache, kv_format.kv_layout, kv_format, kv_cache_sf)
    check_tensor("k", k, "tokens kv_heads head_dim_qk")
    check_tensor("v", v, "tokens kv_heads head_dim_vo")
    _check_rows(k, v, cache, metadata, kv_format.kv_layout)
    return cache


def _check_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: CheckedCache,
    metadata: BatchMetadata,
    kv_layout: KVLayout,
) -> None:
    """Check new keys and values against the caches."""
    check_metadata(metadata)
    page_axis, head_axis = (1, 2) if kv_layout == "NHD" else (2, 1)
    check_same("v", "tokens", v.shape[0], "k", k.shape[0])
    for name, codes, new, channels in (
        ("k", cache.k, k, cache.head_dim_qk),
        ("v", cache.v, v, cache.head_dim_vo),
    ):
        check_same(name, "kv_heads", new.shape[1], f"{name}_cache", codes.shape[head_axis])
        check_same(name, "channels", new.shape[2], f"{name}_cache", channels)
        check_same(
            f"{name}_cache", "keys a page", codes.shape[page_axis], "metadata", metadata.page_size
        )
    check_same("v_cache", "pages", cache.v.shape[0], "k_cache", cache.k.shape[0])
    metadata.validate(num_tokens=k.shape[0], num_pages=cache.k.shape[0])


def _encoded(
    new: torch.Tensor, name: str, scale: float | torch.Tensor, entry: CacheElement
) -> torch.Tensor:
    """Return [tokens, kv_heads, channels] / scale as the cache holds them."""
    check_scale(name, scale, "kv_heads", new.shape[1])
    divisor = scale.reshape(-1, 1) if isinstance(scale, torch.Tensor) else scale
    return entry.encode(new, divisor).codes


def _written(
    caches: Caches,
    rows: list[torch.Tensor],
    metadata: BatchMetadata,
    kv_layout: KVLayout,
    *,
    in_place: bool,
) -> Caches:
    """Write rows [tokens, kv_heads, ...] into the last slots of each request, bit by bit."""
    slots = addresses(metadata)
    found = [
        in_slots(cache if in_place else cache.clone(), new, slots, kv_layout)
        for cache, new in zip(caches, rows, strict=True)
    ]
    return found[0], found[1]


def in_slots(
    cache: torch.Tensor,
    rows: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor],
    kv_layout: KVLayout,
) -> torch.Tensor:
    """Write rows [tokens, kv_heads, ...] into a cache, at pages and slots; return the cache."""
    pages, slots = (place.to(cache.device) for place in places)
    by_slot = cache if kv_layout == "NHD" else cache.transpose(1, 2)
    by_slot.view(rows.dtype)[pages, slots] = rows
    return cache


def addresses(metadata: BatchMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the physical page and the slot in it of every new token."""
    qo_indptr, seq_lens = metadata.qo_indptr.tolist(), metadata.seq_lens.tolist()
    page_indptr, indices = metadata.paged_kv_indptr.tolist(), metadata.paged_kv_indices.tolist()
    pages: list[int] = []
    slots: list[int] = []
    for request, seq_len in enumerate(seq_lens):
        new = qo_indptr[request + 1] - qo_indptr[request]
        if new > seq_len:
            message = (
                f"qo_indptr gives request {request} {new} new tokens, but "
                f"seq_lens[{request}] is {seq_len}"
            )
            raise ValueError(message)
        for position in range(seq_len - new, seq_len):
            pages.append(indices[page_indptr[request] + position // metadata.page_size])
            slots.append(position % metadata.page_size)
    return torch.tensor(pages, dtype=torch.long), torch.tensor(slots, dtype=torch.long)
