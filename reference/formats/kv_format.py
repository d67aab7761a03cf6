"""What the bytes of a KV cache hold: a format that travels with every quantised cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..validation import KVLayout, check_kv_layout, check_values, listed
from .cache_elements import (
    CACHE_ELEMENTS,
    SCALE_LAYOUTS,
    CacheElement,
    Codes,
    cache_element,
    element_of,
)
from .latent_records import Record


@dataclass(frozen=True)
class KVCacheFormat:
    """How to read a KV cache.

    The same ``uint8`` tensor is an FP8 cache to vLLM, which stores FP8 as bytes, and an NVFP4 cache
    to FlashInfer (vllm-project/vllm#38822): a cache says what it is, or is refused.

    Attributes:
        element: one of ``CACHE_ELEMENTS``: ``"float16"``, ..., ``"float8_e4m3fn"``,
            ``"float8_e5m2"`` or ``"nvfp4"``: two e2m1 codes a byte, the even channel in the low
            nibble, with an e4m3 scale for each 16 channels in ``kv_cache_sf`` and the global scale
            in ``k_scale`` and ``v_scale``. ``"int8_per_token_head"`` and ``"fp8_per_token_head"``
            (e4m3) have a float32 scale for each token and key-value head in ``kv_cache_sf``
            (vLLM's ``kv_quant_mode`` of these names). ``"int4_per_token_head"`` has two codes in a
            byte and a zero point in the lowest bits of each scale, see ``formats/int4.py``.
            ``"int8_zero_point"`` and ``"int4_zero_point"`` have a scale and a zero point for each
            token and head in ``kv_cache_sf``, see ``formats/zero_points.py``.
            ``"fp8_ds_mla"`` and ``"nvfp4_ds_mla"`` are records of latent attention, see
            ``formats/latent_records.py``: K and V are one tensor of bytes.
        storage: dtype of the tensor: ``"uint8"``, or empty for the element's own.
        kv_layout: ``"NHD"`` or ``"HND"``, of codes and block scales alike.
        v_scale_layout: layout of V's block scales: ``"linear"``, or ``"interleaved"`` in groups of
            four tokens, as trtllm-gen kernels read them.

    Raises:
        ValueError: an unknown element, storage or layout.
    """

    element: str
    storage: str = ""
    kv_layout: KVLayout = "NHD"
    v_scale_layout: str = "linear"

    def __post_init__(self) -> None:
        """Refuse what no cache is."""
        if self.element == "uint8":
            raise ValueError(AMBIGUOUS.format(name="element"))
        allowed = ("", "uint8") if self.quantised else ("",)
        if self.storage not in allowed:
            message = (
                f"storage is {self.storage!r}; {self.element} may be stored as {listed(allowed)}"
            )
            raise ValueError(message)
        check_kv_layout(self.kv_layout)
        if self.v_scale_layout not in tuple(SCALE_LAYOUTS):
            message = (
                f"v_scale_layout is {self.v_scale_layout!r}; it must be one of "
                f"{listed(SCALE_LAYOUTS)}"
            )
            raise ValueError(message)

    @property
    def entry(self) -> CacheElement:
        """The element's entry in the table of cache elements."""
        return cache_element(self.element)

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor that holds the cache."""
        return torch.uint8 if self.storage else self.entry.dtype

    @property
    def quantised(self) -> bool:
        """Whether elements are narrower than 16 bits."""
        return bool(self.entry.feature)

    @property
    def packed(self) -> int:
        """Elements a byte or entry of the tensor."""
        return self.entry.packed

    def view(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the tensor as what it holds: bytes of FP8 as the FP8 dtype; no copy."""
        return cache.view(self.entry.dtype) if cache.dtype == torch.uint8 else cache

    def decode(self, rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """Return the values of gathered rows [..., head_dim / packed] without the call's scale.

        They are exact: an e2m1 code times an e4m3 scale has six bits, and a code of eight bits
        times a float32 scale is a float64.

        Args:
            rows: codes, as ``view`` gives them.
            scales: block scales [..., scales of a row], linear; None where there are none.
        """
        return self.entry.decode(Codes(rows, scales))


def check_kv_format(kv_format: object, *, needed: bool = False) -> None:
    """Refuse what is no format, as the name of one.

    Raises:
        ValueError: it says what to give.
    """
    if (kv_format is None and not needed) or isinstance(kv_format, KVCacheFormat):
        return
    known = ", ".join(CACHE_ELEMENTS)
    message = (
        f"kv_format is {kv_format!r}; it must be a KVCacheFormat, such as "
        f"KVCacheFormat('float8_e4m3fn'); its elements are {known}"
    )
    raise ValueError(message)


def stored_head_dim(cache: torch.Tensor, kv_format: KVCacheFormat | None) -> int:
    """Return the channels of the values in a cache, whose entries may hold several of them."""
    check_kv_format(kv_format)
    if kv_format is not None and kv_format.entry.record is not None:
        return kv_format.entry.record.head_dim_vo
    return cache.shape[-1] * (kv_format.packed if kv_format else 1)


AMBIGUOUS = (
    "{name} is uint8, which does not say what the bytes hold: vLLM stores FP8 caches as uint8, "
    "FlashInfer reads uint8 as NVFP4. Give kv_format=KVCacheFormat('float8_e4m3fn', "
    "storage='uint8') (or float8_e5m2), or KVCacheFormat('nvfp4') with kv_cache_sf"
)


Scales = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class CheckedCache:
    """A cache whose format, dtypes and shapes agree.

    Attributes:
        kv_format: format of both tensors.
        k, v: the tensors that ``KVCacheFormat.view`` returns.
        k_scales, v_scales: block scales, linear; None where the format has none.
        head_dim_qk, head_dim_vo: channels, not bytes.
    """

    kv_format: KVCacheFormat
    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None

    @property
    def head_dim_qk(self) -> int:
        """Channels of a key."""
        record = self.kv_format.entry.record
        return record.head_dim_qk if record else self.k.shape[-1] * self.kv_format.packed

    @property
    def head_dim_vo(self) -> int:
        """Channels of a value."""
        return stored_head_dim(self.v, self.kv_format)


def checked_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_layout: KVLayout,
    kv_format: KVCacheFormat | None,
    kv_cache_sf: Scales | None,
) -> CheckedCache:
    """Bring a cache and its format together.

    Args:
        k_cache, v_cache, kv_layout: the same as in ``paged_attention``.
        kv_format: None where the dtype says what the cache holds.
        kv_cache_sf: block scales of K and V, as in ``paged_attention``.

    Raises:
        ValueError: uint8 without a format, a dtype that is not the format's, scales that are
            missing, in the way or of another shape; the argument is named.
    """
    check_kv_format(kv_format)
    found = _format_of(k_cache, v_cache, kv_layout, kv_format)
    if found.entry.record is not None:
        for name, cache in (("k", k_cache), ("v", v_cache)):
            _check_record(name, cache, kv_layout, found.entry, found.entry.record)
    if not found.entry.scaled:
        if kv_cache_sf is not None:
            message = f"kv_cache_sf is given, but {found.element} has no block scales"
            raise ValueError(message)
        return CheckedCache(found, found.view(k_cache), found.view(v_cache), None, None)
    if kv_cache_sf is None:
        message = f"kv_cache_sf is missing: an {found.element} cache has block scales"
        raise ValueError(message)
    k_scales, v_scales = kv_cache_sf
    _check_scales("k", k_cache, k_scales, found.entry)
    _check_scales("v", v_cache, v_scales, found.entry)
    v_scales = SCALE_LAYOUTS[found.v_scale_layout].load(v_scales, kv_layout)
    return CheckedCache(found, k_cache, v_cache, k_scales, v_scales)


def _format_of(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_layout: KVLayout,
    kv_format: KVCacheFormat | None,
) -> KVCacheFormat:
    if kv_format is None:
        if torch.uint8 in {k_cache.dtype, v_cache.dtype}:
            raise ValueError(AMBIGUOUS.format(name="the dtype of k_cache"))
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            if cache.dtype == torch.int8:
                message = (
                    f"{name} is torch.int8: kv_format must say by which scales its codes are read"
                )
                raise ValueError(message)
        return KVCacheFormat(element_of(k_cache).name, kv_layout=kv_layout)
    if kv_format.kv_layout != kv_layout:
        message = f"kv_format is in layout {kv_format.kv_layout}, but kv_layout is {kv_layout}"
        raise ValueError(message)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype != kv_format.dtype:
            message = f"{name} is {cache.dtype}; {kv_format} is stored as {kv_format.dtype}"
            raise ValueError(message)
    return kv_format


def _check_record(
    name: str, cache: torch.Tensor, kv_layout: KVLayout, entry: CacheElement, record: Record
) -> None:
    heads = cache.shape[2 if kv_layout == "NHD" else 1]
    if (heads, cache.shape[-1]) != (1, record.size):
        message = (
            f"{name}_cache has {heads} heads of {cache.shape[-1]} bytes; {entry.name} has records "
            f"of {record.size} bytes, and one head"
        )
        raise ValueError(message)


def _check_scales(
    name: str, cache: torch.Tensor, scales: torch.Tensor, entry: CacheElement
) -> None:
    check_values(f"kv_cache_sf of {name}", scales)
    channels, multiple = entry.packed * cache.shape[-1], entry.multiple
    if channels % multiple:
        needed = f"{entry.name} needs a multiple of {multiple}"
        message = f"{name}_cache has {channels} channels; {needed}"
        raise ValueError(message)
    wanted = [*cache.shape[:-1], entry.scales_of(channels)]
    if scales.dtype not in entry.scale_dtypes or list(scales.shape) != wanted:
        allowed = " or ".join(str(each).removeprefix("torch.") for each in entry.scale_dtypes)
        message = (
            f"kv_cache_sf of {name} is {scales.dtype} {list(scales.shape)}; it must be "
            f"{allowed} {wanted}"
        )
        raise ValueError(message)
