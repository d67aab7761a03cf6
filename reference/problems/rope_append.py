"""The problem of turning queries and keys, quantising them and the values, and appending these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import BaseProblem, check_at_least, check_lengths, check_one_of, refuse
from .field_types import check_types
from .quantize import QUANTIZE_REGIMES

ROPE_DTYPES = ("bfloat16", "float16")
ROPE_CODES = ("float8_e4m3fn", "float8_e5m2", "")
"""Dtypes of the cache; the last is the dtype of the rows."""
INDEX_DTYPES = ("int64", "int32")
"""Dtypes of positions and slots."""
LEAST_SCALE, LARGEST_SCALE = 2.0**-60, 2.0**60
"""Scales whose reciprocals and products with rows no GPU flushes or overflows by themselves."""


@dataclass(frozen=True)
class RopeAppendProblem(BaseProblem):
    """One call of rope_and_append.

    Attributes:
        query_lens: new tokens of each request.
        seq_lens: its keys after the call, the new ones the last.
        page_size: slots a page.
        num_qo_heads: heads of queries.
        num_kv_heads: heads of keys and values.
        rope_dim: channels of a head that are turned.
        plain_dim: channels that are not.
        dtype: dtype of queries, keys and values.
        codes: dtype of the cache, one of ``ROPE_CODES``.
        quantised_q: whether queries are quantised as the cache is; else they keep their dtype.
        latent: whether keys hold the values (MLA): then they have one head, the rotary channels
            are the last ones, and there is one cache.
        interleaved: whether pairs of channels are neighbours; else half the rotary channels apart.
        kv_layout: ``NHD`` or ``HND``.
        q_scale, k_scale, v_scale: what is divided by before the rounding to FP8.
        shift: the difference of the position that turns a token and that in its request.
        index_dtype: dtype of positions and slots.
        skipped: whether some tokens have the slot -1.
        spare_channels: channels by which rows of tokens lie further apart than they are wide.
        strided_kv: whether the caches are views of one buffer [pages, 2, ...], as of engines.
        regime: how values are made, as of a QuantizeProblem with a scale of the whole matrix; in
            ``ties`` all turns are by quarters, which round nothing.
        seed: the seed of values, pages and turns.
    """

    kind: ClassVar[str] = "rope_and_append"
    operation: ClassVar[str] = "rope_and_append"

    query_lens: tuple[int, ...] = (1,)
    seq_lens: tuple[int, ...] = (1,)
    page_size: int = 16
    num_qo_heads: int = 1
    num_kv_heads: int = 1
    rope_dim: int = 64
    plain_dim: int = 0
    dtype: str = "bfloat16"
    codes: str = "float8_e4m3fn"
    quantised_q: bool = True
    latent: bool = False
    interleaved: bool = False
    kv_layout: str = "NHD"
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    shift: int = 0
    index_dtype: str = "int64"
    skipped: bool = False
    spare_channels: int = 0
    strided_kv: bool = False
    regime: str = "iid"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        check_types(self)
        for name, allowed in (
            ("dtype", ROPE_DTYPES), ("codes", ROPE_CODES), ("regime", QUANTIZE_REGIMES),
            ("kv_layout", ("NHD", "HND")), ("index_dtype", INDEX_DTYPES),
        ):  # fmt: skip
            check_one_of(name, getattr(self, name), allowed)
        positive = ("page_size", "num_qo_heads", "num_kv_heads")
        counts = ("plain_dim", "shift", "spare_channels", "seed")
        least = {"rope_dim": 2, **dict.fromkeys(positive, 1), **dict.fromkeys(counts, 0)}
        check_at_least(self, list(least.items()))
        if len(self.query_lens) != len(self.seq_lens):
            requests = f"of {len(self.query_lens)} requests, as query_lens is"
            refuse("seq_lens", self.seq_lens, requests)
        for name in ("query_lens", "seq_lens"):
            check_lengths(name, getattr(self, name))
        if any(new > keys for new, keys in zip(self.query_lens, self.seq_lens, strict=True)):
            refuse("query_lens", self.query_lens, "of no more new tokens than keys")
        if self.rope_dim % 2:
            refuse("rope_dim", self.rope_dim, "even: channels turn in pairs")
        if self.latent and (self.num_kv_heads, self.kv_layout) != (1, "NHD"):
            refuse("latent", self.latent, "false unless keys have one head and kv_layout is NHD")
        if self.latent and self.strided_kv:
            refuse("strided_kv", self.strided_kv, "false where there is one cache")
        self._check_scales()

    def _check_scales(self) -> None:
        """Refuse scales that nothing divides by."""
        if self.quantised_q and not self.codes:
            unless = "false unless codes name a format: the cache is not quantised"
            refuse("quantised_q", self.quantised_q, unless)
        for name, used in (
            ("q_scale", self.quantised_q), ("k_scale", self.codes != ""),
            ("v_scale", self.codes != "" and not self.latent),
        ):  # fmt: skip
            value = getattr(self, name)
            if not LEAST_SCALE <= value <= LARGEST_SCALE:
                refuse(name, value, f"from {LEAST_SCALE:g} to {LARGEST_SCALE:g}")
            if value != 1 and not used:
                refuse(name, value, "1 where nothing is quantised by it")

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(self.query_lens)

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.rope_dim + self.plain_dim

    @property
    def exact(self) -> bool:
        """Codes are always compared as codes."""
        return True

    @property
    def work(self) -> int:
        """Elements of new rows, and a part of those of the cache."""
        heads = self.num_qo_heads + self.num_kv_heads * (2 - self.latent)
        pages = sum(-(-keys // self.page_size) for keys in self.seq_lens)
        held = pages * self.page_size * self.num_kv_heads * self.head_dim
        return self.num_tokens * heads * self.head_dim + held // 8 + 1
