"""Recording a run of paged attention as a CUDA graph, on tensors of its own.

A graph reads and writes the addresses that it was captured with. So values are copied to where it
reads them before each replay, and plans write into buffers that stay where they are. On a CPU there
are no graphs: a replay runs the function once more on the same tensors, and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
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
        for mine, theirs in zip(_values(self._inputs), _values(inputs), strict=True):
            _bytes(mine[: len(theirs)]).copy_(_bytes(theirs))
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


def _own(inputs: PagedAttentionInputs, tokens: int) -> PagedAttentionInputs:
    """Copy the tensors of a call, with room for ``tokens`` query tokens."""

    def copied(value: Any) -> Any:  # noqa: ANN401  a number, a tensor or None
        return value.clone() if isinstance(value, torch.Tensor) else value

    scales = inputs.kv_cache_sf
    return replace(
        inputs,
        q=with_rows(inputs.q, tokens),
        k_cache=with_rows(inputs.k_cache, len(inputs.k_cache)),
        v_cache=with_rows(inputs.v_cache, len(inputs.v_cache)),
        kv_cache_sf=scales and (with_rows(scales[0], len(scales[0])),
                                with_rows(scales[1], len(scales[1]))),
        sinks=copied(inputs.sinks),
        alibi_slopes=copied(inputs.alibi_slopes),
        q_scale=copied(inputs.q_scale),
        k_scale=copied(inputs.k_scale),
        v_scale=copied(inputs.v_scale),
        out=None,
        lse=None,
        storages={},
    )  # fmt: skip


def _values(inputs: PagedAttentionInputs) -> Iterator[torch.Tensor]:
    yield from (inputs.q, inputs.k_cache, inputs.v_cache, *(inputs.kv_cache_sf or ()))
    for each in (
        inputs.sinks, inputs.alibi_slopes, inputs.q_scale, inputs.k_scale, inputs.v_scale
    ):  # fmt: skip
        if isinstance(each, torch.Tensor):
            yield each


def with_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Copy a tensor into one of ``rows`` rows, or as many as it has, with the same strides.

    The rows behind its own are zeros.
    """
    shape = (max(rows, len(tensor)), *tensor.shape[1:])
    made = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    _bytes(made).zero_()
    _bytes(made[: len(tensor)]).copy_(_bytes(tensor))
    return made


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Not every dtype of codes can be filled and copied everywhere.
    return tensor.view(torch.uint8)


def padded(metadata: BatchMetadata, requests: int, tokens: int | None = None) -> BatchMetadata:
    """Add requests without keys at the end, as engines do for a graph.

    Args:
        metadata: on the host.
        requests: that the result has.
        tokens: query tokens that the result has, those of the batch if None. The requests that are
            added share what is added: with ``requests`` times as many as each of the batch has,
            all have equally many.

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
    nothing = metadata.seq_lens.new_zeros(more)

    def repeated(indptr: torch.Tensor) -> torch.Tensor:
        return torch.cat([indptr, indptr[-1:].expand(more)])

    shares = torch.arange(1, more + 1) * (tokens - there) // max(more, 1)
    qo_indptr = repeated(metadata.qo_indptr)
    qo_indptr[metadata.num_requests + 1 :] += shares
    return BatchMetadata(
        qo_indptr=qo_indptr,
        paged_kv_indptr=repeated(metadata.paged_kv_indptr),
        paged_kv_indices=metadata.paged_kv_indices.clone(),
        paged_kv_last_page_len=torch.cat([metadata.paged_kv_last_page_len, nothing]),
        seq_lens=torch.cat([metadata.seq_lens, nothing]),
        page_size=metadata.page_size,
    )


def room_for(count: int, least: int = LEAST_ROOM) -> int:
    """Round requests or tokens up to a power of two: sizes for which engines capture a graph."""
    return max(least, 1 << max(count - 1, 0).bit_length())


def options_of(inputs: PagedAttentionInputs) -> Hashable:
    """Return what is part of a recorded run besides sizes: dtypes, strides, layout and options."""
    numbers = (inputs.q_scale, inputs.k_scale, inputs.v_scale)
    tensors = (inputs.q, inputs.k_cache, inputs.v_cache, *(inputs.kv_cache_sf or ()))
    return (
        *((each.dtype, each.stride(), each.shape[1:], each.device) for each in tensors),
        *(None if isinstance(each, torch.Tensor) else each for each in numbers),
        inputs.kv_layout, inputs.kv_format, inputs.out_dtype, inputs.causal, inputs.sm_scale,
        inputs.window_left, inputs.logits_soft_cap, inputs.sinks is None,
        inputs.custom_mask is None,
        inputs.window_right, inputs.alibi_slopes is None, inputs.output_scale,
        inputs.spans is None, inputs.attention_chunk_size, inputs.window_dilation,
        inputs.sink_tokens, inputs.logits_bias is None, inputs.alibi_function,
        inputs.output_divisor,
        inputs.metadata.page_size,
    )  # fmt: skip


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
