"""Recording a run of paged attention as a CUDA graph, on tensors of its own.

A graph reads and writes the addresses that it was captured with. So values are copied to where it
reads them before each replay, and plans write into buffers that stay where they are. On a CPU there
are no graphs: a replay runs the function once more on the same tensors, and nothing else.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from typing import Any

import torch

from ...reference import BatchMetadata
from ...reference.tensors.inputs import PagedAttentionInputs
from ..protocol import GraphSession

Pair = tuple[torch.Tensor, torch.Tensor]
WARM_UPS = 2
"""Runs before a capture: what is built, tuned or allocated at first is none of the graph's."""
GRAPHS_KEPT = 8
LEAST_ROOM, LEAST_PAGES = 4, 64
OUTSIDE = ("metadata", "block_table", "out", "lse", "storages")
"""Fields of a call that a graph does not read: plans put the first two into buffers that stay."""
OF_THE_BATCH = ("causal", "custom_mask", "tree_mask", "spans", "logits_bias")
"""Fields with tensors whose shapes follow from the batch, so that they may differ in a replay."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes in which an element's bits are copied, by its size in bytes."""


class Recorded:
    """A function recorded once on tensors of its own, and replayed on other values.

    Args:
        function: attends; on a GPU it must neither wait for it nor read its memory.
        inputs: a call. What it describes of the batch is for ``function`` to read or not.
        tokens: query tokens that there is room for.
    """

    def __init__(
        self,
        function: Callable[[PagedAttentionInputs], Pair],
        inputs: PagedAttentionInputs,
        tokens: int,
    ) -> None:
        self._function = function
        self._inputs = _own(inputs, tokens)
        self._graph: torch.cuda.CUDAGraph | None = None
        if inputs.q.is_cuda:
            self._graph, self._result = _captured(lambda: function(self._inputs), inputs.q.device)

    def replay(self, inputs: PagedAttentionInputs) -> Pair:
        """Copy values to where the function reads them, and run it.

        Returns:
            out and lse of these query tokens, in ``inputs.out`` and ``inputs.lse`` where given.
        """
        mine, theirs = tensors_by_field(self._inputs), tensors_by_field(inputs)
        if mine.keys() != theirs.keys():
            odd = ", ".join(sorted(mine.keys() ^ theirs.keys()))
            message = f"the recorded call and its replay differ in which tensors there are: {odd}"
            raise ValueError(message)
        for name, tensor in theirs.items():
            _take(mine[name], tensor, of_the_batch=name in OF_THE_BATCH)
        if self._graph is None:
            self._result = self._function(self._inputs)
        else:
            self._graph.replay()
        tokens = len(inputs.q)
        out, lse = (each[:tokens].clone() for each in self._result)
        for given, result in ((inputs.out, out), (inputs.lse, lse)):
            if given is not None:
                given.copy_(result)
        return out, lse


def _captured(
    function: Callable[[], Pair], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Pair]:
    """Warm up and capture on a stream of its own, as capturing needs one."""
    here, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(here)
    graph = torch.cuda.CUDAGraph()
    # torch.cuda.graph would give all cached memory back to the device each time.
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            function()
        graph.capture_begin()
        try:
            result = function()
        finally:
            graph.capture_end()
    here.wait_stream(side)
    return graph, result


def tensors_by_field(inputs: PagedAttentionInputs) -> dict[str, torch.Tensor]:
    """Return the tensors that a replay reads, by field and place in it: all but ``OUTSIDE``."""
    found: dict[str, torch.Tensor] = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        parts = value if isinstance(value, tuple) else (value,)
        for place, part in enumerate(parts):
            if field.name not in OUTSIDE and isinstance(part, torch.Tensor):
                found[f"{field.name}[{place}]" if place else field.name] = part
    return found


def _take(mine: torch.Tensor, theirs: torch.Tensor, *, of_the_batch: bool) -> None:
    """Copy values of a call to where a recorded function reads them.

    Nothing old is left of what a batch describes: where it has another shape, a plan's buffers hold
    it, and what is here hides all keys, or is NaN.
    """
    if of_the_batch:
        mine.fill_(math.nan if mine.is_floating_point() else 0)
        if mine.shape[1:] != theirs.shape[1:] or len(mine) < len(theirs):
            return
    part = mine[: len(theirs)] if mine.dim() else mine
    _bits(part).copy_(_bits(theirs))


def _own(inputs: PagedAttentionInputs, tokens: int) -> PagedAttentionInputs:
    """Copy the tensors of a call, with room for ``tokens`` query tokens."""

    def copied(value: Any, rows: int = 0) -> Any:  # noqa: ANN401  a field's
        if isinstance(value, tuple):
            return tuple(copied(each) for each in value)
        if not isinstance(value, torch.Tensor):
            return value
        return with_rows(value, rows) if value.dim() else value.clone()

    named = {
        each.name: copied(getattr(inputs, each.name), tokens if each.name == "q" else 0)
        for each in fields(inputs)
        if each.name not in OUTSIDE
    }
    return replace(inputs, **named, out=None, lse=None, storages={})


def with_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Copy a tensor into one of ``rows`` rows, or as many as it has, with the same strides.

    The rows behind its own are zeros.
    """
    shape, stride = (max(rows, len(tensor)), *tensor.shape[1:]), tensor.stride()
    if len(tensor) == 1:  # any number may stand there for one row
        inner = zip(shape[1:], stride[1:], strict=True)
        stride = (1 + sum((size - 1) * step for size, step in inner), *stride[1:])
    made = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
    _bits(made).zero_()
    _bits(made[: len(tensor)]).copy_(_bits(tensor))
    return made


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Not every dtype of codes can be filled and copied everywhere; channels may have a stride.
    return tensor.view(INTEGERS[tensor.itemsize])


def padded(
    metadata: BatchMetadata, requests: int, tokens: int | None = None, *, keys: int = 0
) -> BatchMetadata:
    """Add requests without keys at the end, as engines do for a graph.

    Args:
        metadata: metadata on the host.
        requests: the requests that the result has.
        tokens: query tokens that the result has, those of the batch if None. The requests that are
            added share what is added: with ``requests`` times as many as each of the batch has,
            all have equally many.
        keys: the keys that each request that is added has, on the first page of the cache; for
            plans that ask for as many keys as query tokens, at least.

    Raises:
        ValueError: the batch has more requests or tokens than that, or no request is added to
            own the tokens.
    """
    more = requests - metadata.num_requests
    there = int(metadata.qo_indptr[-1])
    tokens = there if tokens is None else tokens
    if more < 0 or tokens < there or (tokens > there and more == 0):
        message = (
            f"a batch of {metadata.num_requests} requests and {there} tokens cannot be padded to "
            f"{requests} requests and {tokens} tokens"
        )
        raise ValueError(message)
    added = torch.arange(1, more + 1)
    pages = -(-keys // metadata.page_size)

    def longer(indptr: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        return torch.cat([indptr, (indptr[-1:] + steps).to(indptr.dtype)])

    def filled(lengths: torch.Tensor, value: int, count: int = more) -> torch.Tensor:
        return torch.cat([lengths, lengths.new_full((count,), value)])

    last = keys - (pages - 1) * metadata.page_size if keys else 0
    return BatchMetadata(
        qo_indptr=longer(metadata.qo_indptr, added * (tokens - there) // max(more, 1)),
        paged_kv_indptr=longer(metadata.paged_kv_indptr, added * pages),
        paged_kv_indices=filled(metadata.paged_kv_indices, 0, more * pages),
        paged_kv_last_page_len=filled(metadata.paged_kv_last_page_len, last),
        seq_lens=filled(metadata.seq_lens, keys),
        page_size=metadata.page_size,
    )


def room_for(count: int, least: int = LEAST_ROOM) -> int:
    """Round requests or tokens up to a power of two: sizes for which engines capture a graph."""
    return max(least, 1 << max(count - 1, 0).bit_length())


def options_of(inputs: PagedAttentionInputs) -> Hashable:
    """Return what is part of a recorded run besides sizes: dtypes, strides, layout and options."""
    tensors = (inputs.q, inputs.k_cache, inputs.v_cache, *(inputs.kv_cache_sf or ()))
    values = (getattr(inputs, each.name) for each in fields(inputs) if each.name not in OUTSIDE)
    return (
        *((each.dtype, each.stride(), each.shape[1:], each.device) for each in tensors),
        *("tensor" if isinstance(each, torch.Tensor | tuple) else each for each in values),
        inputs.metadata.page_size,
    )


class Replays:
    """Makes single calls of a session's replays: a graph for each of the options and sizes.

    The few that were used last are kept. Sizes are rounded up to powers of two, so that a graph
    sees many batches. Where a session is ``uniform``, a graph is of one number of query tokens a
    request.
    """

    def __init__(self, session: Callable[[], GraphSession], *, uniform: bool = False) -> None:
        self._session, self._uniform = session, uniform
        self._kept: OrderedDict[Hashable, GraphSession] = OrderedDict()

    def __call__(self, inputs: PagedAttentionInputs) -> Pair:
        """Plan, capture where there is no graph yet, and replay."""
        pages = room_for(len(inputs.k_cache), LEAST_PAGES)
        scales = inputs.kv_cache_sf
        roomy = replace(
            inputs,
            k_cache=with_rows(inputs.k_cache, pages),
            v_cache=with_rows(inputs.v_cache, pages),
            kv_cache_sf=scales and (with_rows(scales[0], pages), with_rows(scales[1], pages)),
        )
        requests = inputs.metadata.num_requests
        each = len(inputs.q) // max(requests, 1) if self._uniform else None
        key = options_of(roomy), pages, room_for(len(inputs.q)), room_for(requests), each
        session = self._kept.pop(key, None)
        new = session is None
        if session is None:
            session = self._session()
        planned = replace(
            roomy, metadata=inputs.metadata.to("cpu"), block_table=inputs.block_table.cpu()
        )
        session.plan(planned)
        if new:
            session.capture(roomy)
        self._kept[key] = session
        while len(self._kept) > GRAPHS_KEPT:
            self._kept.popitem(last=False)
        result: Pair = session.replay(roomy)
        return result
