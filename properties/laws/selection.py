"""Batches made of parts of another batch's requests, over the same tensors of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch

from ...reference import AttentionProblem, build_metadata
from ...reference.problems import MAX_SEQ_LEN
from ...reference.tensors.inputs import (
    AttentionInputs,
    PagedAttentionInputs,
    RaggedAttentionInputs,
)


class Part(NamedTuple):
    """Some queries and keys of one request of a batch.

    Attributes:
        request: which one.
        queries: the queries of its query rows.
        keys: ranges of its keys, one after the other; where the cache is paged, each starts at a
            page, and all but the last end at one.
    """

    request: int
    queries: range
    keys: tuple[range, ...]

    @property
    def num_keys(self) -> int:
        """Keys of all ranges."""
        return sum(len(keys) for keys in self.keys)


def whole(problem: AttentionProblem) -> list[Part]:
    """Make every request a part of its own."""
    pairs = zip(problem.query_lens, problem.seq_lens, strict=True)
    return [Part(request, range(t), (range(s),)) for request, (t, s) in enumerate(pairs)]


def described(problem: AttentionProblem, parts: Sequence[Part]) -> AttentionProblem | None:
    """Return a problem of the selection's lengths, to ask for support; None if one is too long."""
    if any(part.num_keys > MAX_SEQ_LEN for part in parts):
        return None
    return replace(
        problem,
        query_lens=tuple(len(part.queries) for part in parts),
        seq_lens=tuple(part.num_keys for part in parts),
        shared_prefix_pages=0,
        request_ids=(),
    )


def select(inputs: AttentionInputs, parts: Sequence[Part]) -> AttentionInputs:
    """Return the inputs of a batch of these parts; it must have no custom mask and no bias.

    Spans go with their requests: they are of positions, so that parts are to begin at the first.
    """
    requests = [part.request for part in parts]
    if isinstance(inputs.causal, torch.Tensor):
        inputs = replace(inputs, causal=inputs.causal[requests])
    if inputs.spans is not None:
        inputs = replace(inputs, spans=inputs.spans[requests])
    if isinstance(inputs, PagedAttentionInputs):
        return _select_paged(inputs, parts)
    return _select_ragged(inputs, parts)


def rows_of(inputs: AttentionInputs, parts: Sequence[Part]) -> torch.Tensor:
    """Return the rows of q, and so of out, that the parts' queries are in the whole batch."""
    starts = inputs.qo_indptr.tolist()
    return _rows(starts, [(part.request, (part.queries,)) for part in parts], inputs.q.device)


def _rows(
    starts: list[int], ranges: Sequence[tuple[int, tuple[range, ...]]], device: torch.device
) -> torch.Tensor:
    pieces = [
        torch.arange(starts[request] + piece.start, starts[request] + piece.stop, device=device)
        for request, pieces in ranges
        for piece in pieces
    ]
    return torch.cat([torch.arange(0, device=device), *pieces])


def _select_paged(inputs: PagedAttentionInputs, parts: Sequence[Part]) -> PagedAttentionInputs:
    metadata, size = inputs.metadata, inputs.metadata.page_size
    starts, indices = metadata.paged_kv_indptr.tolist(), metadata.paged_kv_indices.tolist()
    table: list[list[int]] = []
    for part in parts:
        pages = indices[starts[part.request] : starts[part.request + 1]]
        table.append(
            [
                page
                for keys in part.keys
                for page in pages[keys.start // size : -(-keys.stop // size)]
            ]
        )
    width = max((len(row) for row in table), default=0)
    block_table = torch.tensor([row + [0] * (width - len(row)) for row in table], dtype=torch.int32)
    block_table = block_table.view(len(table), width)
    lengths = [len(part.queries) for part in parts], [part.num_keys for part in parts]
    selected = build_metadata(*lengths, block_table, size).to(inputs.q.device)
    return replace(
        inputs,
        q=inputs.q[rows_of(inputs, parts)],
        metadata=selected,
        block_table=block_table.to(inputs.q.device),
    )


def _select_ragged(inputs: RaggedAttentionInputs, parts: Sequence[Part]) -> RaggedAttentionInputs:
    starts = inputs.kv_indptr.tolist()
    rows = _rows(starts, [(part.request, part.keys) for part in parts], inputs.q.device)
    return replace(
        inputs,
        q=inputs.q[rows_of(inputs, parts)],
        k=inputs.k[rows],
        v=inputs.v[rows],
        qo_indptr=_indptr([len(part.queries) for part in parts], inputs.q.device),
        kv_indptr=_indptr([part.num_keys for part in parts], inputs.q.device),
    )


def _indptr(lengths: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
