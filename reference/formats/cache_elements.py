"""The table of cache elements: everything that differs from one dtype of a KV cache to another.

Whatever reads, writes, draws or names a cache asks this table; ``CONTRIBUTING.md`` says how an
element is added. Kernels, and the honest ones that judge the laws, decode on their own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..validation import KVLayout
from .code_ends import Ends, fp8_record_ends, int4_ends, nvfp4_ends
from .fp4 import pack_e2m1, quantize_e2m1
from .fp8 import quantize_fp8
from .int4 import LARGEST_CODE, dequantize_int4, quantize_int4
from .latent_records import (
    FP4_EXTREMES,
    FP4_RECORD,
    FP8_EXTREMES,
    FP8_RECORD,
    Record,
    decode_fp4_record,
    decode_fp8_record,
    encode_fp4_record,
    encode_fp8_record,
    power_of_two,
)
from .quantization import NVFP4_BLOCK, dequantize_nvfp4, quantize_nvfp4
from .scale_layouts import deinterleave_v_scales, interleave_v_scales
from .zero_points import dequantize_zero_points, quantize_zero_points

PLAIN = ("float64", "float32", "float16", "bfloat16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
NVFP4 = "nvfp4"
TOKEN_SCALED = ("int8_per_token_head", "fp8_per_token_head")
"""Elements with a float32 scale for each token and head, by vLLM's names of such caches."""
INT4 = "int4_per_token_head"
"""Element with a zero point besides, and two codes a byte, by vLLM's name."""
ZERO_POINTS = ("int8_zero_point", "int4_zero_point")
"""Elements with a scale and a zero point for each token and head, lmdeploy's int8 and int4."""
RECORDS = ("fp8_ds_mla", "nvfp4_ds_mla")
"""Elements whose rows are all of a token's latent channels and their scales, by vLLM's names."""
LEAST_TOKEN_SCALE = 1e-6
"""Least scale of a token and head: a row of zeros has this one, as in vLLM."""
TABLE = "CACHE_ELEMENTS in kernelproof/reference/formats/cache_elements.py"


Reorder = Callable[[torch.Tensor, KVLayout], torch.Tensor]
Scale = float | torch.Tensor
Bytes = tuple[int, ...]


class Codes(NamedTuple):
    """Rows as a cache stores them.

    Attributes:
        codes: [keys, kv_heads, head_dim / packed] in the element's dtype.
        scales: [keys, kv_heads, scales of a row] in the dtype of block scales; None without.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None = None


class ScaleLayout(NamedTuple):
    """An order of V's block scales in memory.

    Attributes:
        feature: optional feature that names it; empty for the linear order.
        group: tokens, and block scales of a token, whose scales lie side by side. Page sizes and
            the number of scales of a token are multiples of it.
        store, load: functions from the linear order into this one, and back; they take scales and
            their kv_layout.
    """

    feature: str = ""
    group: int = 1
    store: Reorder = lambda scales, _: scales
    load: Reorder = lambda scales, _: scales


SCALE_LAYOUTS = {
    "linear": ScaleLayout(),
    # Read by trtllm-gen kernels.
    "interleaved": ScaleLayout(
        "interleaved_v_scales",
        4,
        lambda scales, kv_layout: interleave_v_scales(scales, kv_layout=kv_layout),
        lambda scales, kv_layout: deinterleave_v_scales(scales, kv_layout=kv_layout),
    ),
}
"""Layouts of V's block scales by name, the usual one first."""


def _encode_plain(rows: torch.Tensor, scale: Scale, dtype: torch.dtype) -> Codes:
    if isinstance(scale, float | int) and scale == 1:
        return Codes(rows.to(dtype))
    return Codes((rows.double() / scale).to(dtype))


def _encode_fp8(rows: torch.Tensor, scale: Scale, dtype: torch.dtype) -> Codes:
    return Codes(quantize_fp8(rows, dtype, scale))


def _encode_nvfp4(rows: torch.Tensor, scale: Scale, _: torch.dtype) -> Codes:
    return Codes(*quantize_nvfp4(rows, scale)[:2])


def _encode_nvfp4_exactly(rows: torch.Tensor, scale: Scale, _: torch.dtype) -> Codes:
    """Quantise with block scales that are powers of two: small integers keep their digits."""
    blocks = (rows.double() / scale).unflatten(-1, (-1, NVFP4_BLOCK))
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    scales = torch.exp2(torch.ceil(torch.log2(largest.clamp_min(2.0**-5) / 6.0)))
    codes = pack_e2m1(quantize_e2m1(blocks / scales).flatten(-2))
    return Codes(codes, scales.squeeze(-1).to(torch.float8_e4m3fn))


def _encode_tokens(rows: torch.Tensor, scale: Scale, dtype: torch.dtype) -> Codes:
    """Quantise each row by a scale with which its largest element is the largest code."""
    return _encode_rows(rows.double() / scale, dtype, lambda exact: exact)


def _encode_tokens_exactly(rows: torch.Tensor, scale: Scale, dtype: torch.dtype) -> Codes:
    """Quantise each row by a scale that is a power of two: small integers keep their digits."""
    return _encode_rows(
        rows.double() / scale, dtype, lambda exact: torch.exp2(torch.ceil(torch.log2(exact)))
    )


def _encode_rows(
    rows: torch.Tensor, dtype: torch.dtype, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> Codes:
    largest = _largest(dtype)
    scales = rounded(token_scales(rows, dtype)).float()
    codes = rows / scales
    if dtype == torch.int8:
        return Codes(codes.round().clamp(-largest, largest).to(dtype), scales)
    return Codes(quantize_fp8(codes, dtype), scales)


def token_scales(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale [..., 1] by which the largest element of each row is the largest code."""
    amax = rows.abs().amax(dim=-1, keepdim=True)
    return (amax / _largest(dtype)).clamp_min(LEAST_TOKEN_SCALE)


def _encode_int4(rows: torch.Tensor, scale: Scale, _: torch.dtype) -> Codes:
    """Quantise each row between its least and its largest number."""
    return Codes(*quantize_int4(rows.double() / scale))


def _encode_int4_exactly(rows: torch.Tensor, scale: Scale, _: torch.dtype) -> Codes:
    """Quantise each row by a scale that is a power of two: small integers keep their digits."""
    return Codes(*quantize_int4(rows.double() / scale, power_of_two))


def _decode_int4(rows: Codes) -> torch.Tensor:
    assert rows.scales is not None  # noqa: S101  `checked_cache` has refused their absence
    return dequantize_int4(rows.codes, rows.scales)


def _zero_point_encoder(
    bits: int, rounded: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales
) -> Callable[[torch.Tensor, Scale, torch.dtype], Codes]:
    return lambda rows, scale, _: Codes(*quantize_zero_points(rows.double() / scale, bits, rounded))


def _zero_point_decoder(bits: int) -> Callable[[Codes], torch.Tensor]:
    def decode(rows: Codes) -> torch.Tensor:
        assert rows.scales is not None  # noqa: S101  `checked_cache` has refused their absence
        return dequantize_zero_points(rows.codes, rows.scales, bits)

    return decode


def _record_encoder(
    encode: Callable[..., torch.Tensor], rounded: Callable[[torch.Tensor], torch.Tensor] | None
) -> Callable[[torch.Tensor, Scale, torch.dtype], Codes]:
    return lambda rows, scale, _: Codes(encode(rows.double() / scale, rounded))


def _largest(dtype: torch.dtype) -> float:
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return float(limits.max)


def _decode_tokens(rows: Codes) -> torch.Tensor:
    assert rows.scales is not None  # noqa: S101  `checked_cache` has refused their absence
    return rows.codes.double() * rows.scales.double()


def _decode_nvfp4(rows: Codes) -> torch.Tensor:
    assert rows.scales is not None  # noqa: S101  `checked_cache` has refused their absence
    return dequantize_nvfp4(rows.codes, rows.scales, 1.0, dtype=torch.float32)


@dataclass(frozen=True)
class CacheElement:
    """What the entries of a KV cache are, and how they are made and read.

    Attributes:
        name: the name that ``KVCacheFormat.element``, problems and the support rules use.
        dtype: torch dtype of the tensor of codes, where the cache is not stored as bytes.
        encoder: function from rows [keys, kv_heads, head_dim], the scale that the call will
            multiply by (``k_scale`` or ``v_scale``: one for the tensor, or one a head) and
            ``dtype`` to codes. No row depends on another.
        feature: optional feature that an implementation names to be given such caches; empty for
            plain numbers.
        variants: what may follow the name in a problem's ``kv_cache``: nothing, ``" as uint8"``
            where the tensor may be one of bytes, or a layout of V's block scales. Empty for plain
            numbers, whose dtype is the problem's.
        query_dtypes: dtypes of queries that may meet such a cache; empty string: the problem's.
        extremes: bytes, repeated over the channels, of zeros, of the smallest numbers, and of the
            largest and their negatives.
        packed: channels of one entry of the tensor.
        block: channels that share a block scale; 0: all of a token and head, or none.
        scale_dtype: dtype of the encoded block scales; None where there are none.
        extreme_scales: bytes of one block scale each: zero, the smallest and the largest. None of
            scales whose dtype is the model's.
        exact_encoder: ``encoder`` on the exact grid, where the digits 0 to 3 must survive; None
            where ``encoder`` keeps them.
        decode: function from codes and their block scales, linear, to numbers without the call's
            scale, exactly. Codes whose dtype says what they are stay as they are: torch widens
            them.
        zero_point: whether a zero point, no integer, follows the scale of each token and head, and
            both have the model's dtype.
        ends: function that says which codes and scales an honest kernel may write of new rows, see
            ``code_ends.py``; None where ``append_error_bound`` does, or the bits are defined.
        record: the record of elements whose row is a token's whole entry; K and V are then one
            tensor, and ``decode`` gives the key, whose first channels are the value. None for
            others.
    """

    name: str
    dtype: torch.dtype
    encoder: Callable[[torch.Tensor, Scale, torch.dtype], Codes]
    feature: str = ""
    variants: tuple[str, ...] = ()
    query_dtypes: tuple[str, ...] = ("",)
    extremes: tuple[Bytes, ...] = ()
    packed: int = 1
    block: int = 0
    scale_dtype: torch.dtype | None = None
    extreme_scales: tuple[Bytes, ...] = ()
    exact_encoder: Callable[[torch.Tensor, Scale, torch.dtype], Codes] | None = None
    decode: Callable[[Codes], torch.Tensor] = operator.itemgetter(0)
    zero_point: bool = False
    ends: Ends | None = None
    record: Record | None = None

    def encode(self, rows: torch.Tensor, scale: Scale, *, exactly: bool = False) -> Codes:
        """Return the codes of rows; with ``exactly`` those that keep the exact grid's digits."""
        return ((exactly and self.exact_encoder) or self.encoder)(rows, scale, self.dtype)

    @property
    def scaled(self) -> bool:
        """Whether a cache comes with block scales, ``kv_cache_sf``."""
        return self.scale_dtype is not None

    @property
    def scaled_by_token(self) -> bool:
        """Whether all channels of a token and head have one scale."""
        return self.scaled and not self.block

    @property
    def appendable(self) -> bool:
        """Whether problems of ``append_paged_kv`` may have it: it is known what may be written."""
        return self.record is None or self.ends is not None

    def scales_of(self, channels: int) -> int:
        """Return the block scales of a token and head, with zero points; 0 where there are none."""
        if self.zero_point:
            return 2
        return channels // (self.block or channels) if self.scaled else 0

    @property
    def scale_dtypes(self) -> tuple[torch.dtype | None, ...]:
        """Dtypes that the tensors of scales may have."""
        return MODEL_DTYPES if self.zero_point else (self.scale_dtype,)

    @property
    def largest_code(self) -> float:
        """The largest number of a code, where codes are numbers, or four bits of a byte."""
        return LARGEST_CODE if self.packed > 1 else _largest(self.dtype)

    @property
    def multiple(self) -> int:
        """Channels that share an entry or a block scale: head dims are a multiple of it."""
        return max(self.packed, self.block)


MODEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of scales and zero points that lie in the model's."""
INT4_SCALES = ((0x0F, 0x00, 0x00, 0x00), (0x00, 0x00, 0x80, 0x35), (0x08, 0x00, 0x00, 0x42))
"""Bytes of float32 scales and zero points: 0 and 15, 2^-20 and 0, 2^5 and 8."""
FLOAT_SCALES = ((0x00, 0x00, 0x00, 0x00), (0x00, 0x00, 0x80, 0x35), (0x00, 0x00, 0x00, 0x42))
"""Bytes of the float32 scales 0, 2^-20 and 2^5: with the last, codes still fit into float16."""

CACHE_ELEMENTS = {
    each.name: each
    for each in (
        *(CacheElement(name, getattr(torch, name), _encode_plain) for name in PLAIN),
        # FA3 takes queries, keys and values of one FP8 dtype.
        *(
            CacheElement(
                name, getattr(torch, name), _encode_fp8, "fp8_kv", ("", " as uint8"), ("", name),
                ((0x00, 0x80), (0x01, 0x83), (largest, 0x80 | largest)),
            )
            for name, largest in zip(FP8, (0x7E, 0x7B), strict=True)
        ),
        # trtllm-gen multiplies FP8 queries with nvfp4 keys (FlashInfer 0.7.2).
        CacheElement(
            NVFP4, torch.uint8, _encode_nvfp4, "nvfp4_kv", ("", " interleaved"), ("", *FP8),
            ((0x00, 0x88), (0x11, 0x91), (0x77, 0xF7)),
            2, NVFP4_BLOCK, torch.float8_e4m3fn, ((0x00,), (0x01,), (0x7E,)),
            _encode_nvfp4_exactly, _decode_nvfp4, ends=nvfp4_ends,
        ),
        *(
            CacheElement(
                name, dtype, _encode_tokens, "per_token_head_kv", ("",), ("",),
                ((0x00,), (0x01, minus), (largest, minus_largest)),
                1, 0, torch.float32, FLOAT_SCALES, _encode_tokens_exactly, _decode_tokens,
            )
            for name, dtype, minus, largest, minus_largest in zip(
                TOKEN_SCALED, (torch.int8, torch.float8_e4m3fn),
                (0xFF, 0x81), (0x7F, 0x7E), (0x80, 0xFE), strict=True,
            )
        ),
        CacheElement(
            INT4, torch.uint8, _encode_int4, "int4_kv", ("",), ("",),
            ((0x00,), (0x01, 0x10), (0x0F, 0xF0)),
            2, 0, torch.float32, INT4_SCALES, _encode_int4_exactly, _decode_int4, ends=int4_ends,
        ),
        *(
            CacheElement(
                name, torch.uint8, _zero_point_encoder(bits), "zero_point_kv", ("",), ("",),
                extremes, 8 // bits, 0, torch.float32, (),
                _zero_point_encoder(bits, power_of_two), _zero_point_decoder(bits), zero_point=True,
            )
            for name, bits, extremes in zip(
                ZERO_POINTS, (8, 4),
                (((0x00,), (0x01,), (0xFF, 0x00)), ((0x00,), (0x01, 0x10), (0x0F, 0xF0))),
                strict=True,
            )
        ),
        *(
            CacheElement(
                name, torch.uint8, _record_encoder(encode, None), name, ("",), ("",), extremes,
                exact_encoder=_record_encoder(encode, power_of_two),
                decode=lambda rows, decode=decode: decode(rows.codes),  # type: ignore[misc]
                ends=ends, record=record,
            )
            for name, encode, decode, record, extremes, ends in zip(
                RECORDS, (encode_fp8_record, encode_fp4_record),
                (decode_fp8_record, decode_fp4_record), (FP8_RECORD, FP4_RECORD),
                (FP8_EXTREMES, FP4_EXTREMES), (fp8_record_ends, None), strict=True,
            )
        ),
    )
}  # fmt: skip
"""Every element that a KV cache may have, by name."""
QUANTISED_KV = tuple(dict.fromkeys(each.feature for each in CACHE_ELEMENTS.values()))[1:]
"""Optional features of quantised caches."""
CACHE_FEATURES = (*QUANTISED_KV, *(each.feature for each in SCALE_LAYOUTS.values() if each.feature))
"""The same, and those of the layouts of block scales."""


def element_of(cache: torch.Tensor) -> CacheElement:
    """Return the entry of the element that the dtype of a cache names.

    Raises:
        ValueError: it names none; the message names the table.
    """
    return cache_element(str(cache.dtype).removeprefix("torch."))


def stored_dtypes() -> set[torch.dtype]:
    """Return the dtypes that the tensor of a cache may have: its element's, or bytes."""
    return {torch.uint8, *(each.dtype for each in CACHE_ELEMENTS.values())}


def cache_element(name: str) -> CacheElement:
    """Return the entry of an element.

    Raises:
        ValueError: there is none; the message names the table.
    """
    if name not in tuple(CACHE_ELEMENTS):
        message = f"element is {name!r}; it must be one of {', '.join(CACHE_ELEMENTS)} ({TABLE})"
        raise ValueError(message)
    return CACHE_ELEMENTS[name]
