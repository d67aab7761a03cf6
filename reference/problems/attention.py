"""Problems of attention: calls over pages, over ragged keys, and the appending to a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..formats.cache_elements import FP8, CacheElement, cache_element
from ..validation import KVLayout
from .base import (
    DTYPES,
    BaseProblem,
    check_at_least,
    check_lengths,
    check_one_of,
    is_power_of_two,
    refuse,
)
from .cache_names import (
    KV_CACHES,
    Q_DTYPES,
    cache_fits,
    element_of,
    has_tensor_scales,
    multiples_of,
    query_dtypes,
    storage_of,
)
from .field_types import check_types
from .mask_fields import check_masks

PAGED = ("paged_attention", "append_paged_kv")
"""Operations with a paged cache."""
ATTENTION_OPERATIONS = ("paged_attention", "ragged_attention", "append_paged_kv")
ATTENTION_REGIMES = (
    "iid",
    "dominant_key",
    "position_coded",
    "shifted_logits",
    "outlier_channels",
    "exact_grid",
    "one_sign",
)
KV_VIEWS = ("", "row", "page", "slot", "head", "layers", "channels")
"""Ways in which K and V share one allocation: not, in one row of channels, interleaved by page, by
slot or by head, between the pages of other layers; or each by itself with every second channel."""
EXACT_KEYS = 256
"""Keys a request that the exact grid tells apart in a quantised cache: four digits of base 4."""
EXACT_RANKS = 2**12
"""Keys a request that the exact grid tells apart in any other cache, by a permutation."""
LARGEST_EXACT_QUERY = {"": 2.0**14, "float8_e4m3fn": 2.0**8, "float8_e5m2": 2.0**14}
"""Largest query that its dtype holds; beyond it, the weight is spread over several channels."""
MAX_REQUESTS = 2**11
"""Most identities of requests: the hash's row numbers also have to hold shared prefixes."""
EXACT_GAP = 128.0
"""Distance of neighbouring logits on the exact grid: exp(-128) is 0 in float32."""
LEAST_EXACT_SCALE = 2.0**-7
"""Below, the exact grid's queries would not fit into float16."""


@dataclass(frozen=True)
class AttentionProblem(BaseProblem):
    """One call of paged_attention, ragged_attention or append_paged_kv.

    Attributes:
        operation: which of the three operations.
        query_lens: query tokens of each request.
        seq_lens: keys of each request.
        num_kv_heads: key-value heads.
        group_size: query heads of each key-value head.
        head_dim_qk: channels of queries and keys.
        head_dim_vo: channels of values and output.
        dtype: the dtype of q, k, v and the output.
        q_dtype: dtype of FP8 queries, one of ``Q_DTYPES``; empty where queries have ``dtype``.
        page_size: keys a page; no meaning for ragged_attention.
        kv_layout: the same as in ``paged_attention``; no meaning for ragged_attention.
        page_order: 0: pages in order; n > 0: scattered over a larger cache, by hash of n.
        shared_prefix_pages: leading full pages that all requests share, where they have them.
        causal, window_left, window_right, logits_soft_cap, sm_scale: the same as in
            ``paged_attention``.
        q_scale: factor of FP8 queries; 1 for others.
        k_scale: factor of keys.
        v_scale: factor of values.
        sinks: whether each head has one more logit in its denominator.
        custom_mask: whether there is a mask besides causal and window_left.
        tree: 0, or the number of a draft tree: then the query tokens of each request are nodes of a
            tree that hashes of this number and of the request's identity choose, parents before
            children. Each sees all keys before the queries, and of the queries its ancestors and
            itself. Causal and windows count rows, not depths, as FlashInfer and XQA do.
        mask_pattern: what a custom mask keeps, one of ``MASK_PATTERNS``: about three of four keys,
            by hash, where empty; all but a tile of keys (``leading_tile``, ``inner_tile``) or one
            or two ``holes``, hidden from all rows of a request; the keys of the row's document;
            those of its block of positions and of all before (``block_causal``); some ``blocks`` of
            keys, or a few keys (``sparse``), which each row has chosen.
        mask_by_head: whether each key-value head has a custom mask of its own.
        spans: whether requests have ranges of tokens that see each other, one of ``SPANS``: those
            of up to three images, or of a prefix.
        spans_in_window: whether the window hides keys of a row's own range, too, as in
            ``paged_attention``.
        two_sided_window: whether ``window_right`` is ``window_left``: the window of a layer that is
            not causal has two sides.
        chunk: ``attention_chunk_size``, as in ``paged_attention``.
        window_dilation, sink_tokens: the same as in ``paged_attention``.
        logits_bias: whether there is a ``logits_bias``, one of ``BIASES``: a number of its own for
            each head, row and key (``dense``), the same of the keys nearest to a row's own
            (``near``), or one of the head and of the distance, from T5's buckets (``relative``).
        alibi_function: what slopes of ALiBi multiply, as in ``paged_attention``.
        causal_by_request: whether ``causal`` is a flag of each request: every second one, by its
            identity, is causal where the others are not.
        alibi: whether there are ``alibi_slopes``, as in ``paged_attention``.
        output_scale: scale of outputs in FP8 (float8_e4m3fn), as in ``paged_attention``; null where
            the output has ``dtype``.
        output_divisor: number by which outputs are divided, those in ``dtype`` too, as in
            ``paged_attention``; 1 where there is none.
        per_head_scales: whether head h has k_scale and v_scale times ``2 ** (h % 3 - 1)``.
        kv_cache: format of the cache, one of ``KV_CACHES``: any for paged_attention, those without
            scales of blocks, and packed codes only beside zero points, for append_paged_kv. Of
            ragged_attention, what k and v are: FP8 that is stored as FP8, or ``dtype``.
        values_in_keys: V is the first head_dim_vo channels of K, in the same memory: multi-head
            latent attention (DeepSeek-V2, arXiv:2405.04434) decodes so, after the projections were
            absorbed, with one latent head, 512 compressed channels and 64 rotary ones. With as many
            channels as K has, V is all of K (DeepSeek-V4). Caches of fp8_ds_mla and nvfp4_ds_mla
            are of such problems.
        strided_q: q is a slice of a packed QKV tensor; of append_paged_kv the new keys, the new
            values, or both, are.
        strided_kv: k and v are views of one larger allocation.
        different_kv_strides: v lies by itself, in wider rows and with pages further apart than k's;
            no meaning where values are in keys.
        kv_views: how K and V lie in memory, one of ``KV_VIEWS``; where it is not empty,
            ``strided_kv`` and ``different_kv_strides`` say nothing, and the strides of axes of
            size 1 are numbers that no dense tensor has.
        regime: how values are made, one of ``ATTENTION_REGIMES``.
        seed: the seed of the values.
        request_ids: identity of each request's values; its position if empty. A request keeps its
            values when it is run alone or in another order.
    """

    kind: ClassVar[str] = "attention"
    later_fields: ClassVar[tuple[str, ...]] = (
        "kv_cache",
        "q_dtype",
        "q_scale",
        "values_in_keys",
        "different_kv_strides",
        "window_right",
        "tree",
        "alibi",
        "causal_by_request",
        "output_scale",
        "mask_pattern",
        "mask_by_head",
        "spans",
        "chunk",
        "window_dilation",
        "sink_tokens",
        "logits_bias",
        "alibi_function",
        "kv_views",
        "output_divisor",
        "two_sided_window",
        "spans_in_window",
    )

    operation: str = "paged_attention"
    query_lens: tuple[int, ...] = (1,)
    seq_lens: tuple[int, ...] = (1,)
    num_kv_heads: int = 1
    group_size: int = 1
    head_dim_qk: int = 16
    head_dim_vo: int = 16
    dtype: str = "float32"
    page_size: int = 1
    kv_layout: KVLayout = "NHD"
    page_order: int = 0
    shared_prefix_pages: int = 0
    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sm_scale: float | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    sinks: bool = False
    custom_mask: bool = False
    per_head_scales: bool = False
    kv_cache: str = ""
    q_dtype: str = ""
    q_scale: float = 1.0
    values_in_keys: bool = False
    strided_q: bool = False
    strided_kv: bool = False
    different_kv_strides: bool = False
    window_right: int = -1
    tree: int = 0
    alibi: bool = False
    causal_by_request: bool = False
    output_scale: float | None = None
    mask_pattern: str = ""
    mask_by_head: bool = False
    spans: str = ""
    chunk: int = 0
    window_dilation: int = 1
    sink_tokens: int = 0
    logits_bias: str = ""
    alibi_function: str = "linear"
    kv_views: str = ""
    output_divisor: float = 1.0
    two_sided_window: bool = False
    spans_in_window: bool = False
    regime: str = "iid"
    seed: int = 0
    request_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no call can look like."""
        check_types(self)
        check_one_of("operation", self.operation, ATTENTION_OPERATIONS)
        check_one_of("dtype", self.dtype, DTYPES)
        check_one_of("kv_layout", self.kv_layout, ("NHD", "HND"))
        check_one_of("regime", self.regime, ATTENTION_REGIMES)
        check_one_of("kv_cache", self.kv_cache, KV_CACHES)
        check_one_of("q_dtype", self.q_dtype, Q_DTYPES)
        check_one_of("kv_views", self.kv_views, KV_VIEWS)
        self._check_cache()
        self._check_lengths()
        check_at_least(
            self,
            (
                ("num_kv_heads", 1),
                ("group_size", 1),
                ("head_dim_qk", 2),
                ("head_dim_vo", 1),
                ("page_size", 1),
                ("page_order", 0),
                ("shared_prefix_pages", 0),
                ("window_left", -1),
                ("window_right", -1),
                ("tree", 0),
                ("seed", 0),
            ),
        )
        for name in ("logits_soft_cap", "q_scale", "k_scale", "v_scale"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                refuse(name, getattr(self, name), "finite and not negative")
        if self.sm_scale is not None and not math.isfinite(self.sm_scale):
            refuse("sm_scale", self.sm_scale, "finite or null")
        check_masks(self)
        self._check_output()
        bent = self.logits_soft_cap or self.alibi or self.logits_bias
        if self.regime == "exact_grid" and (bent or not is_power_of_two(self.v_scale)):
            expected = "without soft cap, ALiBi and bias, and with v_scale a power of two"
            refuse("regime", self.regime, expected)
        if self.regime == "exact_grid" and self.scale * self.k_scale < LEAST_EXACT_SCALE:
            refuse("regime", self.regime, f"with sm_scale * k_scale at least {LEAST_EXACT_SCALE}")
        if self.operation == "append_paged_kv":
            self._check_append()
        if self.values_in_keys:
            self._check_values_in_keys()
        if self.tree:
            self._check_tree()

    def _check_lengths(self) -> None:
        check_lengths("query_lens", self.query_lens)
        check_lengths("seq_lens", self.seq_lens)
        if len(self.query_lens) != len(self.seq_lens):
            refuse("seq_lens", self.seq_lens, f"{len(self.query_lens)} lengths like query_lens")
        if self.request_ids and len(self.request_ids) != len(self.seq_lens):
            refuse("request_ids", self.request_ids, "empty or one a request")
        for position, identity in enumerate(self.request_ids):
            if not 0 <= identity < MAX_REQUESTS:
                refuse(f"request_ids[{position}]", identity, f"from 0 to {MAX_REQUESTS - 1}")

    def _check_cache(self) -> None:
        if self.operation == "ragged_attention" and self.kv_cache not in ("", *FP8):
            expected = f"empty or one of {', '.join(FP8)} for {self.operation}"
            refuse("kv_cache", self.kv_cache, expected)
        for name, number in multiples_of(self.kv_cache).items():
            if getattr(self, name) % number:
                expected = f"a multiple of {number} with a cache of {self.kv_cache}"
                refuse(name, getattr(self, name), expected)
        if not cache_fits(self.kv_cache, vars(self)) and self.cache_entry.record:
            dims = "{head_dim_qk} and {head_dim_vo}".format(**multiples_of(self.kv_cache))
            refuse("kv_cache", self.kv_cache, f"one of values_in_keys and head dims {dims}")
        if self.q_dtype not in query_dtypes(self.kv_cache):
            allowed = ", ".join(map(repr, query_dtypes(self.kv_cache)))
            refuse("q_dtype", self.q_dtype, f"{allowed} with kv_cache {self.kv_cache!r}")
        if self.q_scale != 1 and not self.q_dtype:
            refuse("q_scale", self.q_scale, "1 where q_dtype is empty")

    def _check_output(self) -> None:
        for name, or_null in (("output_scale", ", or null"), ("output_divisor", "")):
            scale = getattr(self, name)
            if scale is not None and not (math.isfinite(scale) and scale > 0):
                refuse(name, scale, f"positive and finite{or_null}")

    def _check_append(self) -> None:
        for position, (t, s) in enumerate(zip(self.query_lens, self.seq_lens, strict=True)):
            if t > s:
                refuse(f"query_lens[{position}]", t, f"at most seq_lens[{position}] = {s}")
        if not self.cache_entry.appendable:
            refuse("kv_cache", self.kv_cache, "one whose codes are known for append_paged_kv")
        of_a_tensor = has_tensor_scales(self.kv_cache)
        for name in ("k_scale", "v_scale"):
            scale = getattr(self, name)
            # Another one would round the new keys twice: once as a problem's values, once as codes.
            if not is_power_of_two(scale) or (scale != 1 and not of_a_tensor):
                expected = "1, or a power of two with a cache of FP8 or nvfp4, for append_paged_kv"
                refuse(name, scale, expected)
        if self.values_in_keys and self.v_scale != self.k_scale:
            refuse("v_scale", self.v_scale, f"k_scale, {self.k_scale}, with values_in_keys")
        if self.output_scale is not None:
            refuse("output_scale", self.output_scale, "null for append_paged_kv")
        if self.output_divisor != 1:
            refuse("output_divisor", self.output_divisor, "1 for append_paged_kv")
        if self.shared_prefix_pages:
            refuse("shared_prefix_pages", self.shared_prefix_pages, "0 for append_paged_kv")

    def _check_values_in_keys(self) -> None:
        for name, fits, expected in (
            ("operation", self.operation in PAGED, f"{PAGED[0]} or {PAGED[1]}"),
            ("num_kv_heads", self.num_kv_heads == 1, "1"),
            ("head_dim_vo", self.head_dim_vo <= self.head_dim_qk, "at most head_dim_qk"),
            ("kv_cache", not self.cache_entry.scaled, "one without block scales"),
            ("kv_views", not self.kv_views, "empty"),
        ):
            if not fits:
                refuse(name, getattr(self, name), f"{expected} with values_in_keys")

    def _check_tree(self) -> None:
        for fits, expected in (
            (self.operation != "append_paged_kv", "0 for append_paged_kv"),
            (not self.custom_mask, "0 with custom_mask: a tree is a mask"),
            (not self.more_queries_than_keys, "0 where a request has more queries than keys"),
        ):
            if not fits:
                refuse("tree", self.tree, expected)

    @property
    def kv_element(self) -> str:
        """Element format of the cache; empty where it is the problem's dtype."""
        return element_of(self.kv_cache)

    @property
    def kv_storage(self) -> str:
        """``"uint8"`` where the cache is a tensor of bytes that hold something else."""
        return storage_of(self.kv_cache)

    @property
    def cache_entry(self) -> CacheElement:
        """The entry of the cache's element in the table of cache elements."""
        return cache_element(self.kv_element or self.dtype)

    @property
    def num_qo_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group_size

    @property
    def scale(self) -> float:
        """The factor of q k^T as a number."""
        return self.sm_scale if self.sm_scale is not None else 1.0 / math.sqrt(self.head_dim_qk)

    @property
    def ids(self) -> tuple[int, ...]:
        """The requests' identities."""
        return self.request_ids or tuple(range(len(self.seq_lens)))

    @property
    def keys_to_the_right(self) -> int:
        """``window_right`` of the call."""
        return self.window_left if self.two_sided_window else self.window_right

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        return sum(self.query_lens)

    @property
    def num_requests(self) -> int:
        """Requests of the batch."""
        return len(self.seq_lens)

    @property
    def most_keys(self) -> int:
        """Keys of the longest request."""
        return max(self.seq_lens, default=0)

    @property
    def most_queries(self) -> int:
        """Query tokens of the request that has most."""
        return max(self.query_lens, default=0)

    @property
    def uniform_queries(self) -> bool:
        """Whether all requests have the same number of query tokens."""
        return len(set(self.query_lens)) <= 1

    @property
    def more_queries_than_keys(self) -> bool:
        """Whether some request has more queries than keys."""
        return any(t > s for t, s in zip(self.query_lens, self.seq_lens, strict=True))

    @property
    def num_pages(self) -> int:
        """Pages that the requests' keys take, shared ones counted for each."""
        return sum(-(-s // self.page_size) for s in self.seq_lens)

    @property
    def partial_last_page(self) -> bool:
        """Whether some request that has queries ends inside a page."""
        return any(
            t and s % self.page_size for t, s in zip(self.query_lens, self.seq_lens, strict=True)
        )

    @property
    def causal_flags(self) -> tuple[bool, ...]:
        """Whether each request is causal."""
        return tuple(self.causal != (self.causal_by_request and n % 2 == 1) for n in self.ids)

    @property
    def rows_without_keys(self) -> bool:
        """Whether some causal request has more queries than keys, so that a row sees none."""
        lengths = zip(self.query_lens, self.seq_lens, self.causal_flags, strict=True)
        return any(t > s for t, s, causal in lengths if causal)

    @property
    def most_packed_rows(self) -> int:
        """Query rows of the longest request, those of a group's heads packed into one tile."""
        return max(self.query_lens, default=0) * self.group_size

    @property
    def row_size(self) -> int:
        """Elements of a row of the output: query heads times channels of values."""
        return self.num_qo_heads * self.head_dim_vo

    @property
    def kv_row_size(self) -> int:
        """Elements of the values of a key, those of all key-value heads."""
        return self.num_kv_heads * self.head_dim_vo

    @property
    def empty_requests(self) -> bool:
        """Whether some request that has queries has no keys."""
        return any(t and not s for t, s in zip(self.query_lens, self.seq_lens, strict=True))

    @property
    def empty_batch(self) -> bool:
        """Whether there is no query at all."""
        return self.num_tokens == 0

    @property
    def exact(self) -> bool:
        """Whether the output is exactly representable, so that it is compared bitwise."""
        if self.regime != "exact_grid" or self.most_keys > EXACT_RANKS:
            return False
        if self.output_scale is not None or not is_power_of_two(self.output_divisor):
            return False  # FP8 does not hold the grid's values
        return not self.kv_cache or self._exact_in_codes

    @property
    def exact_gap(self) -> float:
        """Query weight at which the exact grid's logits are a unit rank of ``EXACT_GAP`` apart."""
        smallest = 0.5 if self.per_head_scales else 1.0
        if self.q_dtype:
            smallest *= self.q_scale * smallest
        return EXACT_GAP / (abs(self.scale) * self.k_scale * smallest or 1.0)

    @property
    def exact_weights(self) -> tuple[float, ...]:
        """Query weights of the base-4 digits of a rank in a quantised cache, and their channels.

        Each is a power of two; those beyond ``LARGEST_EXACT_QUERY`` are given to several channels.
        """
        largest = LARGEST_EXACT_QUERY[self.q_dtype]
        unit = 2.0 ** math.ceil(math.log2(self.exact_gap))
        found: list[float] = []
        for digit in range(4):
            weight = unit * 4.0**digit
            channels = max(1, math.ceil(weight / largest))
            found += [weight / channels] * channels
        return tuple(found)

    @property
    def exact_channels(self) -> int:
        """Channels in which the exact grid's queries are not zero."""
        return min(len(self.exact_weights), self.head_dim_qk) if self.kv_cache else 2

    @property
    def _exact_in_codes(self) -> bool:
        fits = len(self.exact_weights) <= self.head_dim_qk
        return fits and max(self.seq_lens, default=0) <= EXACT_KEYS

    @property
    def work(self) -> int:
        """Multiply-adds of the call plus elements of its tensors: what it costs, roughly."""
        channels = self.head_dim_qk + self.head_dim_vo
        products = sum(t * s for t, s in zip(self.query_lens, self.seq_lens, strict=True))
        keys = sum(self.seq_lens) * self.num_kv_heads
        tokens = self.num_tokens * self.num_qo_heads
        return (products * self.num_qo_heads + 8 * (keys + tokens)) * channels
