"""What an operation is given: the oracle's own parameters as attributes.

The same records go to the oracle and to the implementation under test. ``storages`` holds, by
field name, the flat buffer that each tensor is a view of: whatever lies outside the view is a
canary, or another tensor's home, and must keep its bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..attention.batches import Call
from ..attention.metadata import BatchMetadata
from ..attention.options import Options
from ..attention.requests import paged_call, ragged_call
from ..formats.kv_format import KVCacheFormat, stored_head_dim
from ..validation import KVLayout
from .batched_moe import BatchedMoEInputs
from .context_parallel import ContextParallelInputs
from .moe_inputs import MoEInputs, RouteInputs
from .plan import PlanInputs
from .preparation import BatchInputs
from .quantize import QuantizeInputs
from .rearrange import RearrangeInputs
from .rope_append import RopeAppendInputs
from .slots import SlotInputs
from .steps import StepsInputs


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """Options of both attention operations, see ``paged_attention``.

    With an ``output_scale``, ``out_dtype`` is float8_e4m3fn.
    """

    causal: bool | torch.Tensor
    sm_scale: float
    window_left: int
    logits_soft_cap: float
    sinks: torch.Tensor | None
    custom_mask: torch.Tensor | None
    k_scale: float | torch.Tensor
    v_scale: float | torch.Tensor
    q_scale: float | torch.Tensor = field(default=1.0, kw_only=True)
    window_right: int = field(default=-1, kw_only=True)
    alibi_slopes: torch.Tensor | None = field(default=None, kw_only=True)
    output_scale: float | None = field(default=None, kw_only=True)
    spans: torch.Tensor | None = field(default=None, kw_only=True)
    attention_chunk_size: int = field(default=0, kw_only=True)
    window_dilation: int = field(default=1, kw_only=True)
    sink_tokens: int = field(default=0, kw_only=True)
    logits_bias: torch.Tensor | None = field(default=None, kw_only=True)
    alibi_function: str = field(default="linear", kw_only=True)
    output_divisor: float = field(default=1.0, kw_only=True)
    spans_in_window: bool = field(default=False, kw_only=True)

    def keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments of the oracle."""
        return {name: getattr(self, name) for name in AttentionOptions.__dataclass_fields__}


@dataclass(frozen=True, eq=False)
class _WithOutput:
    """What a result goes into.

    Attributes:
        out_dtype: dtype of the result.
        out: buffer for the result of implementations with ``writes_out``, else None.
        lse: float32 buffer for the LSE of implementations with ``writes_out``, else None.
        storages: flat buffers by field name, of which the tensors are views.
    """

    out_dtype: torch.dtype
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    storages: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _HostBounds:
    """Bounds of lengths that an engine's host gives, larger than the truth under a graph.

    Attributes:
        q_len_bound: least ``max_q_len``; 0 asks for the longest request's own.
        kv_len_bound: least ``max_kv_len``, alike.
    """

    q_len_bound: int = 0
    kv_len_bound: int = 0

    @property
    def max_q_len(self) -> int:
        """Most query tokens of a request, or a larger number; reading it may wait for a GPU."""
        lengths: list[int] = self.lengths()[0].tolist()
        return max([self.q_len_bound, *lengths])

    @property
    def max_kv_len(self) -> int:
        """Most keys of a request, or a larger number; reading it may wait for a GPU."""
        lengths: list[int] = self.lengths()[1].tolist()
        return max([self.kv_len_bound, *lengths])

    def lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the query tokens [R] and the keys [R] of each request."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class _Drafts:
    """Draft tokens that are verified.

    Attributes:
        tree_mask: bool [sum of query_len ** 2], request after request a row for each query token:
            which of the request's query tokens it sees, True keeps; None where there is no tree.
            ``custom_mask`` then says the same of all keys.
    """

    tree_mask: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class _Quantised:
    kv_format: KVCacheFormat | None = None
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True, eq=False)
class _PagedTensors:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    metadata: BatchMetadata
    block_table: torch.Tensor
    kv_layout: KVLayout


@dataclass(frozen=True, eq=False)
class PagedAttentionInputs(
    _Drafts, _HostBounds, _Quantised, _WithOutput, AttentionOptions, _PagedTensors
):
    """Arguments of ``paged_attention``.

    Attributes:
        block_table: [R, pages] int32, the page ids of each request as engines keep them.
        max_q_len, max_kv_len: what a host knows of the lengths, int: the longest request's or, for
            implementations with the feature ``host_bounds``, more.
        new_k, new_v: [tokens, kv_heads, head_dim], what the call appends before it attends, for
            implementations with the feature ``append_and_attend``, else None.
    """

    new_k: torch.Tensor | None = field(default=None, kw_only=True)
    new_v: torch.Tensor | None = field(default=None, kw_only=True)

    def keywords(self) -> dict[str, Any]:
        """Return the options, and what the cache holds, as keyword arguments of the oracle."""
        quantised = {"kv_format": self.kv_format, "kv_cache_sf": self.kv_cache_sf}
        return {**super().keywords(), **quantised}

    @property
    def qo_indptr(self) -> torch.Tensor:
        """Where each request's query tokens begin and end."""
        return self.metadata.qo_indptr

    def lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the query tokens [R] and the keys [R] of each request."""
        return self.metadata.qo_indptr.diff(), self.metadata.seq_lens

    @property
    def keys(self) -> torch.Tensor:
        """The tensor that K is read from."""
        return self.k_cache

    @property
    def values(self) -> torch.Tensor:
        """The tensor that V is read from."""
        return self.v_cache

    @property
    def head_dim_vo(self) -> int:
        """Channels of V and of the output."""
        return stored_head_dim(self.v_cache, self.kv_format)

    def call(self, options: Options) -> Call:
        """Return the call that the record describes, checked."""
        return paged_call(
            self.q, self.k_cache, self.v_cache, self.metadata, self.kv_layout, options
        )


@dataclass(frozen=True, eq=False)
class _RaggedTensors:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor


@dataclass(frozen=True, eq=False)
class RaggedAttentionInputs(_Drafts, _HostBounds, _WithOutput, AttentionOptions, _RaggedTensors):
    """Arguments of ``ragged_attention``; ``max_q_len`` and ``max_kv_len`` as of pages."""

    def lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the query tokens [R] and the keys [R] of each request."""
        return self.qo_indptr.diff(), self.kv_indptr.diff()

    @property
    def keys(self) -> torch.Tensor:
        """The tensor that K is read from."""
        return self.k

    @property
    def values(self) -> torch.Tensor:
        """The tensor that V is read from."""
        return self.v

    @property
    def head_dim_vo(self) -> int:
        """Channels of V and of the output."""
        return self.v.shape[-1]

    def call(self, options: Options) -> Call:
        """Return the call that the record describes, checked."""
        return ragged_call(self.q, self.k, self.v, self.qo_indptr, self.kv_indptr, options)


@dataclass(frozen=True, eq=False)
class _States:
    outs: torch.Tensor
    lses: torch.Tensor


@dataclass(frozen=True, eq=False)
class MergeInputs(_WithOutput, _States):
    """Arguments of ``merge_states``.

    Attributes:
        apart: the outs of states that lie by themselves, else None; ``states`` has them always. A
            kernel that takes a tensor of each state is given these.
        context_tokens: tokens of the first state, which is not to be read behind them; None: all.
        inf_marks_empty: whether an lse of inf marks a state of no keys, as -inf does.
        output_scale: scale of an out in FP8, else None.
    """

    apart: tuple[torch.Tensor, ...] | None = None
    context_tokens: int | None = None
    inf_marks_empty: bool = False
    output_scale: float | None = None

    @property
    def states(self) -> tuple[torch.Tensor, ...]:
        """The outs of each state, [tokens, heads, dim], maybe each with strides of its own."""
        return self.outs.unbind() if self.apart is None else self.apart


@dataclass(frozen=True, eq=False)
class AppendInputs:
    """Arguments of ``append_paged_kv``; scales are 1, except in caches of FP8 and nvfp4.

    Latent attention has one key-value head: ``v`` and ``v_cache`` are views of the first channels
    of ``k`` and ``k_cache``, and what a call returns may be. Of caches of records, ``v_cache`` is
    ``k_cache``.

    Attributes:
        kv_cache_sf: scales of K and V [pages, page_size, kv_heads, 1] float32, or by ``kv_layout``
            [pages, kv_heads, page_size, 1], of caches with a scale for each token and head, which
            the call computes and writes: it returns (k_cache, v_cache, k_scales, v_scales). Of
            caches with zero points, [..., 2] in the dtype of ``k``: the scale and the zero point.
            Of nvfp4, [..., head_dim / 16] float8_e4m3fn, V's in the order of ``kv_format``. None:
            the cache has none, and the call returns (k_cache, v_cache).
        slots: [tokens] int64, what ``slot_mapping`` gives; None: the slots of the metadata.
        storages: flat buffers by field name, of which the tensors are views.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    metadata: BatchMetadata
    kv_layout: KVLayout
    in_place: bool
    k_scale: float | torch.Tensor = 1.0
    v_scale: float | torch.Tensor = 1.0
    kv_format: KVCacheFormat | None = None
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None
    slots: torch.Tensor | None = None
    storages: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """What the call returns anew: both caches, and their scales where there are some."""
        return self.k_cache, self.v_cache, *(self.kv_cache_sf or ())

    @property
    def slot_mapping(self) -> torch.Tensor:
        """[tokens] int64, the slot (page * page_size + offset) of each token; -1: not written.

        There is a -1 only for implementations with the feature ``slot_mapping``. Rows of ``k`` and
        ``v`` beyond the mapping, as engines pad them, are not written either.
        """
        return self.metadata.slot_mapping() if self.slots is None else self.slots


@dataclass(frozen=True, eq=False)
class MetadataInputs:
    """Arguments of ``build_metadata``.

    Attributes:
        query_lens: [R] int32, query tokens of each request.
        seq_lens: [R] int32, keys of each request, its query tokens included.
        block_table: [R, pages] int32; entries past a request's pages are garbage.
        page_size: keys a page.
        decode_threshold: most query tokens of a decode, for builders that also split the batch
            into its phases; above 1 decodes are uniform (``split_decodes_and_prefills``).
        storages: flat buffers by field name, of which the tensors are views.
    """

    query_lens: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    page_size: int
    decode_threshold: int = 1
    storages: Mapping[str, torch.Tensor] = field(default_factory=dict)


AttentionInputs = PagedAttentionInputs | RaggedAttentionInputs
Inputs = (
    PagedAttentionInputs
    | RaggedAttentionInputs
    | MergeInputs
    | AppendInputs
    | MetadataInputs
    | ContextParallelInputs
    | SlotInputs
    | BatchInputs
    | StepsInputs
    | PlanInputs
    | RouteInputs
    | MoEInputs
    | BatchedMoEInputs
    | QuantizeInputs
    | RearrangeInputs
    | RopeAppendInputs
)
