"""Batches that a session is planned for in turn, and the tensors of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ...impl.gpu.cuda_graphs import with_rows
from ...reference import AttentionProblem, BatchMetadata, build_metadata
from ...reference.problems import MAX_SEQ_LEN
from ...reference.problems.base import DTYPES
from ...reference.problems.mask_fields import WITHOUT_TABLES
from ...reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs
from ...reference.tensors.mask_patterns import mask_values
from ...reference.tensors.placement import block_table
from ...reference.tensors.values import choose
from ..verdicts.subject import Subject
from .general import others

Inputs = PagedAttentionInputs | RaggedAttentionInputs
PLANNED, OTHER = "plan the batch", "plan another batch"
REPAGED, LONGER = "plan the same lengths on other pages", "plan longer requests"
RETYPED = "plan the batch in another dtype"
MASKED = "plan the batch with a custom mask"
PLANS = (PLANNED, OTHER, REPAGED, LONGER, RETYPED, MASKED)
MORE_KEYS = 5
"""Keys that longer requests have more: another page, where pages are small."""


@dataclass(frozen=True)
class Batch:
    """What a session is planned for.

    Attributes:
        problem: the call.
        room: the same with a key more a request where keys have pages: values and pages are its.
        pages: the pages of the cache; more than the batch needs.
    """

    problem: AttentionProblem
    room: AttentionProblem
    pages: int = 0

    def fits(self, other: Batch) -> bool:
        """Whether what was captured for this batch may be replayed on another."""
        mine, theirs = self.problem, other.problem
        return (
            mine.dtype == theirs.dtype
            and mine.custom_mask == theirs.custom_mask
            and len(theirs.query_lens) <= len(mine.query_lens)
            and theirs.num_tokens <= mine.num_tokens
        )

    @property
    def full(self) -> bool:
        """Whether there is no room for another key."""
        return self.problem == self.room

    def shortened(self, step: int) -> Batch:
        """Return the same batch with fewer keys a request, though as many as query tokens."""
        seed, lengths = self.problem.seed + step, []
        for request, (t, s) in enumerate(
            zip(self.problem.query_lens, self.problem.seq_lens, strict=True)
        ):
            least = min(max(t, 1), s)
            lengths.append(least + choose(seed, "exact length", request, s - least + 1))
        return replace(self, problem=replace(self.problem, seq_lens=tuple(lengths)))

    def grown(self) -> Batch:
        """Return the same batch with a key more a request, which it has room for."""
        return replace(self, problem=self.room)


def batches_of(subject: Subject, problem: AttentionProblem) -> dict[str, Batch]:
    """Return the batches of plans by action, only those that the subject claims.

    Their caches have equally many pages, as an engine has one cache; empty where not even the
    problem itself can be planned.
    """
    # A mask is planned by some and given to each run by others: one batch alone has any, in full.
    problem = replace(problem, **WITHOUT_TABLES, tree=0)
    other = next(others(problem))
    assert isinstance(other, AttentionProblem)  # noqa: S101  of the same kind
    wanted = {
        PLANNED: problem,
        OTHER: other,
        REPAGED: replace(problem, page_order=problem.page_order + 1),
        LONGER: _with_more_keys(problem, MORE_KEYS),
        RETYPED: _in_another_dtype(subject, problem),
        MASKED: replace(problem, custom_mask=True, causal=False, window_left=-1, window_right=-1),
    }
    paged = problem.operation == "paged_attention"
    if not paged:
        del wanted[REPAGED]
    found = {
        name: Batch(each, _with_more_keys(each, 1) if paged and name != MASKED else each)
        for name, each in wanted.items()
        if each is not None
    }
    found = {
        name: batch
        for name, batch in found.items()
        if subject.supports(batch.problem) and subject.supports(batch.room)
    }
    if PLANNED not in found or not problem.num_tokens:
        return {}
    if paged:
        pages = max(block_table(batch.room)[1] for batch in found.values())
        found = {name: replace(batch, pages=pages) for name, batch in found.items()}
    return found


def _in_another_dtype(subject: Subject, problem: AttentionProblem) -> AttentionProblem | None:
    retyped = (replace(problem, dtype=dtype) for dtype in DTYPES if dtype != problem.dtype)
    return next((each for each in retyped if subject.supports(each)), None)


def _with_more_keys(problem: AttentionProblem, keys: int) -> AttentionProblem:
    return replace(problem, seq_lens=tuple(min(s + keys, MAX_SEQ_LEN) for s in problem.seq_lens))


def tensors(subject: Subject, batch: Batch, step: int) -> Any:  # noqa: ANN401  Inputs, for replace
    """Make a batch's tensors with the values of a step; slots that it has room for hold zeros."""
    made = subject.materialise(replace(batch.room, seed=batch.room.seed + step))
    if made.custom_mask is not None:  # the one that was planned
        made = replace(made, custom_mask=mask_values(batch.room, made.q.device))
    if isinstance(made, RaggedAttentionInputs):
        return made
    inputs = described(_on_pages(made, batch.pages), batch.problem)
    if not batch.full and not batch.room.shared_prefix_pages:
        _clear_new_slots(inputs, batch)
    return inputs


def described(inputs: PagedAttentionInputs, problem: AttentionProblem) -> PagedAttentionInputs:
    """Return the same tensors with the lengths of a problem, which has these pages or fewer."""
    metadata = build_metadata(
        problem.query_lens, problem.seq_lens, inputs.block_table.cpu(), problem.page_size
    )
    return replace(inputs, metadata=metadata.to(inputs.q.device))


def _on_pages(inputs: PagedAttentionInputs, pages: int) -> PagedAttentionInputs:
    """Copy caches and block scales to caches with this number of pages and the same strides."""
    scales = inputs.kv_cache_sf
    if len(inputs.k_cache) == pages:
        return inputs
    return replace(
        inputs,
        k_cache=with_rows(inputs.k_cache, pages),
        v_cache=with_rows(inputs.v_cache, pages),
        kv_cache_sf=scales and (with_rows(scales[0], pages), with_rows(scales[1], pages)),
    )


def _clear_new_slots(inputs: PagedAttentionInputs, batch: Batch) -> None:
    """Clear the slot after each request's last key: nothing has been appended yet."""
    size, table = batch.problem.page_size, inputs.block_table.tolist()
    lengths = zip(batch.problem.seq_lens, batch.room.seq_lens, strict=True)
    new = [(row, s) for row, (s, room) in enumerate(lengths) if room > s]
    pages, slots = [table[row][s // size] for row, s in new], [s % size for _, s in new]
    for cache in (inputs.k_cache, inputs.v_cache):
        by_slot = cache if batch.problem.kv_layout == "NHD" else cache.transpose(1, 2)
        by_slot.view(torch.uint8)[pages, slots] = 0


def rewrite(inputs: Any, values: Any) -> None:  # noqa: ANN401  Inputs of the same shapes
    """Copy the values of other tensors into these: queries, keys, values and block scales."""
    names = ("q", "k_cache", "v_cache") if hasattr(values, "k_cache") else ("q", "k", "v")
    pairs = [(getattr(inputs, name), getattr(values, name)) for name in names]
    if getattr(values, "kv_cache_sf", None) is not None:
        pairs += zip(inputs.kv_cache_sf, values.kv_cache_sf, strict=True)
    for mine, theirs in pairs:
        mine.view(torch.uint8).copy_(theirs.view(torch.uint8))


def on_host(inputs: Inputs) -> tuple[Inputs, list[torch.Tensor]]:
    """Return inputs whose description of the batch is on the host, as engines keep it, and it."""
    given: list[torch.Tensor] = []

    def host(tensor: torch.Tensor) -> torch.Tensor:
        # Copies out of pinned memory are the ones that do not wait.
        copy = tensor.cpu().pin_memory() if tensor.is_cuda else tensor.clone()
        given.append(copy)
        return copy

    if isinstance(inputs, RaggedAttentionInputs):
        ragged = replace(inputs, qo_indptr=host(inputs.qo_indptr), kv_indptr=host(inputs.kv_indptr))
        return ragged, given
    held = {name: host(tensor) for name, tensor in inputs.metadata.tensors().items()}
    metadata = BatchMetadata(**held, page_size=inputs.metadata.page_size)
    return replace(inputs, metadata=metadata, block_table=host(inputs.block_table)), given


def blind(inputs: Inputs, problem: AttentionProblem) -> Inputs:
    """Return inputs that describe another batch, of one key a request: what was planned counts."""
    if isinstance(inputs, RaggedAttentionInputs):
        return replace(
            inputs,
            qo_indptr=torch.zeros_like(inputs.qo_indptr),
            kv_indptr=torch.zeros_like(inputs.kv_indptr),
        )
    table = torch.zeros_like(inputs.block_table)
    one_key = [1] * len(problem.seq_lens)
    metadata = build_metadata(problem.query_lens, one_key, table, problem.page_size)
    return replace(inputs, metadata=metadata, block_table=table)
