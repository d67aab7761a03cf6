"""FlashInfer's wrappers with ``use_cuda_graph=True``: planned into buffers that stay, and replayed.

A wrapper fixes its number of requests when it is made, and the prefill wrapper its number of query
tokens at its first plan. So a batch is padded by requests without keys, as engines do, and the
first plan is one of as many tokens as there is room for. A prefill's plan owns every row of the
queries (0.7.2.post1 asks for it): the last request, always one more than a batch has, owns those
that are added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...reference import BatchMetadata
from ...reference.tensors.inputs import PagedAttentionInputs
from ..gpu.cuda_graphs import Recorded, Replays, options_of, padded, room_for, with_rows
from ..protocol import implementation
from .calls import (
    BUILD_MINUTES,
    CUDA_CORES,
    FA2,
    FA2_WIDE,
    FA3,
    module_key,
    session_wrapper,
    shared_workspace,
)
from .paged import cuda_core_decode, prefill_fa2, prefill_fa3
from .plans import Pair, plan_decode, plan_prefill, run
from .sessions import DECODE, PREFILL, Plan, owned

MOST_PAGES = 2**17
"""Entries of the persistent buffer of page indices: 512 KiB."""


@dataclass(frozen=True)
class Family:
    """One of the wrappers.

    Attributes:
        name: of FlashInfer's class.
        plan: calls its ``plan``.
        backend: of the support rules.
        options: arguments of the class.
        buffers: what it calls its buffers of metadata, by their names in ``BatchMetadata``.
    """

    name: str
    plan: Plan
    backend: str
    options: tuple[tuple[str, Any], ...]
    buffers: tuple[tuple[str, str], ...]


def _decode(backend: str, *, tensor_cores: bool) -> Family:
    return Family(
        DECODE,
        plan_decode,
        backend,
        (("use_tensor_cores", tensor_cores), ("backend", "fa2" if tensor_cores else "auto")),
        (
            ("paged_kv_indptr", "paged_kv_indptr_buffer"),
            ("paged_kv_indices", "paged_kv_indices_buffer"),
            ("paged_kv_last_page_len", "paged_kv_last_page_len_buffer"),
        ),
    )


def _prefill(backend: str) -> Family:
    return Family(
        PREFILL,
        plan_prefill,
        backend,
        (("backend", backend),),
        (
            ("qo_indptr", "qo_indptr_buf"),
            ("paged_kv_indptr", "paged_kv_indptr_buf"),
            ("paged_kv_indices", "paged_kv_indices_buf"),
            ("paged_kv_last_page_len", "paged_kv_last_page_len_buf"),
        ),
    )


class _Fixed:
    """A wrapper of fixed sizes, and the options that it is planned with."""

    def __init__(self, family: Family, inputs: PagedAttentionInputs) -> None:
        self.family = family
        self.options = options_of(inputs)
        self.most = self.requests = self.tokens = room_for(inputs.metadata.num_requests)
        if family.name == PREFILL:
            self.requests, self.tokens = self.most + 1, room_for(len(inputs.q))
        self.device = inputs.q.device
        sizes = {
            "qo_indptr": self.requests + 1,
            "paged_kv_indptr": self.requests + 1,
            "paged_kv_indices": MOST_PAGES,
            "paged_kv_last_page_len": self.requests,
        }
        self.wrapper = session_wrapper(
            family.name,
            self.device,
            kv_layout=inputs.kv_layout,
            use_cuda_graph=True,
            **dict(family.options),
            **{
                argument: torch.zeros(sizes[name], dtype=torch.int32, device=self.device)
                for name, argument in family.buffers
            },
        )
        if family.name == PREFILL:
            page_size = inputs.metadata.page_size
            family.plan(self.wrapper, inputs, self._largest(page_size), family.backend)

    def _largest(self, page_size: int) -> BatchMetadata:
        """Give a batch of one request with all the tokens, and one key."""

        def int32(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        one = BatchMetadata(
            int32(0, self.tokens), int32(0, 1), int32(0), int32(1), int32(1), page_size
        )
        return padded(one, self.requests)

    def fits(self, inputs: PagedAttentionInputs) -> bool:
        """Tell whether a batch may be planned here."""
        return (
            options_of(inputs) == self.options
            and inputs.metadata.num_requests <= self.most
            and len(inputs.q) <= self.tokens
        )

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Plan a batch into the buffers."""
        tokens = self.tokens if self.family.name == PREFILL else None
        metadata = owned(padded(inputs.metadata, self.requests, tokens), self.device)
        self.family.plan(self.wrapper, inputs, metadata, self.family.backend)

    def run(self, inputs: PagedAttentionInputs) -> Pair:
        """Run on queries of as many tokens as there is room for."""
        return run(self.wrapper, inputs, self.family.backend)


class FixedSession:
    """Wrappers for CUDA graphs: one for each of the options and sizes, planned again and again.

    A batch is planned where a run was captured, if it fits there.
    """

    def __init__(self, family: Family) -> None:
        self._family = family
        self._wrappers: list[_Fixed] = []
        self._planned: _Fixed | None = None
        self._captured: tuple[_Fixed, Recorded] | None = None

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Plan a batch from metadata on the host."""
        known = [self._captured[0]] if self._captured else []
        fitting = [each for each in [*known, *self._wrappers] if each.fits(inputs)]
        if fitting:
            self._planned = fitting[0]
        else:
            self._planned = _Fixed(self._family, inputs)
            self._wrappers.append(self._planned)
        self._planned.plan(inputs)

    def run(self, inputs: PagedAttentionInputs) -> Pair:
        """Attend to the planned batch without a graph."""
        planned = self._ready()
        tokens = len(inputs.q)
        out, lse = planned.run(replace(inputs, q=with_rows(inputs.q, planned.tokens)))
        return out[:tokens], lse[:tokens]

    def capture(self, inputs: PagedAttentionInputs) -> None:
        """Capture a run of the planned batch."""
        planned = self._ready()
        self._captured = planned, Recorded(planned.run, inputs, planned.tokens)

    def replay(self, inputs: PagedAttentionInputs) -> Pair:
        """Replay the captured run on the planned batch.

        Raises:
            ValueError: nothing was captured, or the batch that was planned last is larger.
        """
        if self._captured is None or self._planned is not self._captured[0]:
            message = "replay comes after capture, and after a plan of a batch that fits"
            raise ValueError(message)
        return self._captured[1].replay(inputs)

    def scratch(self) -> list[torch.Tensor]:
        """Give the float workspace: partial results of one run, which the same run merges."""
        return [shared_workspace(self._planned.device)] if self._planned else []

    def _ready(self) -> _Fixed:
        if self._planned is None:
            message = "run and capture come after plan"
            raise ValueError(message)
        return self._planned


def _session(family: Family) -> Callable[[], FixedSession]:
    return functools.partial(FixedSession, family)


_DECODE = _session(_decode("cuda-core", tensor_cores=False))
_DECODE_FA2 = _session(_decode("fa2", tensor_cores=True))
_PREFILL_FA2 = _session(_prefill("fa2"))
_PREFILL_FA3 = _session(_prefill("fa3"))
_replays = functools.cache(Replays)


@implementation(
    "paged_attention",
    name="flashinfer-decode-graph",
    backend="cuda-core",
    supports=cuda_core_decode.supports,
    features=("fp8_kv",),
    arithmetic=CUDA_CORES,
    compile_key=module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["cuda-core"],
    session=_DECODE,
)
def decode_graph(inputs: PagedAttentionInputs) -> Pair:
    """Decode without tensor cores, replayed from a CUDA graph."""
    return _replays(_DECODE)(inputs)


@implementation(
    "paged_attention",
    name="flashinfer-decode-fa2-graph",
    backend="fa2",
    supports=cuda_core_decode.supports,
    features=("fp8_kv", "nvfp4_kv"),
    arithmetic=FA2,
    wide_arithmetic=FA2_WIDE,
    compile_key=module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["fa2"],
    session=_DECODE_FA2,
)
def decode_fa2_graph(inputs: PagedAttentionInputs) -> Pair:
    """Decode with tensor cores, replayed from a CUDA graph."""
    return _replays(_DECODE_FA2)(inputs)


@implementation(
    "paged_attention",
    name="flashinfer-prefill-fa2-graph",
    backend="fa2",
    supports=prefill_fa2.supports,
    features=("fp8_kv", "nvfp4_kv"),
    arithmetic=FA2,
    wide_arithmetic=FA2_WIDE,
    compile_key=module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["fa2"],
    session=_PREFILL_FA2,
)
def prefill_fa2_graph(inputs: PagedAttentionInputs) -> Pair:
    """Attend a whole batch in one prefill call of FA2, replayed from a CUDA graph."""
    return _replays(_PREFILL_FA2)(inputs)


@implementation(
    "paged_attention",
    name="flashinfer-prefill-fa3-graph",
    backend="fa3",
    supports=prefill_fa3.supports,
    arithmetic=FA3,
    compile_key=module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["fa3"],
    session=_PREFILL_FA3,
)
def prefill_fa3_graph(inputs: PagedAttentionInputs) -> Pair:
    """Attend a whole batch in one prefill call of FA3, replayed from a CUDA graph."""
    return _replays(_PREFILL_FA3)(inputs)
