"""Tensors that an engine prepares for each batch before attention runs, by definition.

Every tensor is a function of a request: its entries follow one another in the order of the
requests, or make the request's row of a table. Engines write them into buffers that batches share,
so that what lies behind the entries is part of the definition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Final, Literal, NamedTuple

import torch

from ..validation import check_indptr, checked_integer, host_integers, listed
from . import drafts as drafting
from .context_parallel import checked_group, local_keys
from .drafts import Drafts, Verified
from .metadata import table_rows
from .slots import PAD_SLOT
from .splits import USUAL_SPLITS, Splits, num_kv_splits

NULL_PAGE: Final = 0
"""Page that a table has in place of one that lies wholly before a request's window."""
RESTS: Final = ("kept", "zero_rows", "zero_tails")
"""What becomes of a buffer behind the entries: it keeps what it holds, it is zero (of slots -1)
behind the rows of the batch, or zero behind the entries of each row of a table."""


class _Batch(NamedTuple):
    """A batch of requests on the host; keys before ``firsts`` lie before a request's window."""

    query_starts: list[int]
    seq_lens: list[int]
    rows: list[int]
    table: list[list[int]]
    page_size: int
    firsts: list[int]
    rank: int
    world: int
    interleave: int
    drafts: Drafts
    splits: Splits

    def new(self, request: int) -> int:
        """Count the new tokens of a request."""
        return self.query_starts[request + 1] - self.query_starts[request]

    def pages(self, request: int) -> list[int]:
        """Return the pages of a request's keys, ``NULL_PAGE`` for those before its window."""
        pages = self.table[self.rows[request]][: -(-self.seq_lens[request] // self.page_size)]
        hidden = self.firsts[request] // self.page_size
        return [NULL_PAGE] * min(hidden, len(pages)) + pages[hidden:]

    def slots(self, request: int) -> list[int]:
        """Return the slots of a request's keys, from the first of its window on."""
        pages, size = self.table[self.rows[request]], self.page_size
        keys = range(self.firsts[request], self.seq_lens[request])
        return [pages[key // size] * size + key % size for key in keys]

    def verified(self, request: int) -> Verified:
        """Return a request after its drafts were verified."""
        start, end = self.query_starts[request : request + 2]
        drafts, new = self.drafts, self.new(request)
        return Verified(
            request,
            start,
            self.seq_lens[request] - new,
            list(drafts.tokens[start:end]),
            list(range(-1, new - 1)) if drafts.parents is None else list(drafts.parents[start:end]),
            new - int(drafts.rejected[request]),
            int(drafts.next_tokens[request]),
            self.table[self.rows[request]],
            self.page_size,
            drafts,
        )


class Output(NamedTuple):
    """A tensor that engines prepare.

    Attributes:
        entries: the entries that a request has.
        size: what a request has one entry of: ``requests``, ``keys``, ``pages``, or what
            ``entry_counts`` counts.
        dtype: the tensor's dtype.
        first: entries before those of the first request.
        is_table: whether each request has a row of its own.
        is_relative: whether a request's entries depend on the requests before it.
        is_drafted: whether it depends on drafts.
        blank: what is written behind the rows of the batch where that is cleared.
    """

    entries: Callable[[_Batch, int], Iterable[int]]
    size: Literal[
        "tokens",
        "requests",
        "keys",
        "pages",
        "accepted",
        "expanded",
        "queries",
        "drafts",
        "squares",
        "bytes",
        "branches",
        "seen",
    ]
    dtype: torch.dtype = torch.int32
    first: tuple[int, ...] = ()
    is_table: bool = False
    is_relative: bool = False
    is_drafted: bool = False
    blank: int = 0


def _positions(batch: _Batch, request: int) -> Iterable[int]:
    return range(batch.seq_lens[request] - batch.new(request), batch.seq_lens[request])


def _local_seq_len(batch: _Batch, request: int) -> list[int]:
    return [local_keys(batch.seq_lens[request], batch.rank, batch.world, batch.interleave)]


def _keys_so_far(batch: _Batch, request: int) -> list[int]:
    keys = zip(batch.firsts[: request + 1], batch.seq_lens, strict=False)
    return [sum(last - first for first, last in keys)]


def _of_verified(entries: Callable[[Verified], Iterable[int]]) -> Callable[..., Iterable[int]]:
    return lambda batch, request: entries(batch.verified(request))


def _in_expanded(entries: Callable[..., Iterable[int]]) -> Callable[..., Iterable[int]]:
    """Return entries that are places among all that a drafter is given."""

    def found(batch: _Batch, request: int) -> Iterable[int]:
        before = sum(batch.verified(other).expanded for other in range(request))
        return entries(batch.verified(request), before)

    return found


def _num_kv_splits(batch: _Batch, request: int) -> Iterable[int]:
    queries = 1 + batch.drafts.num_drafts
    return [num_kv_splits(batch.seq_lens, queries, batch.splits)[request]] * queries


def _draft_kv_indptr(batch: _Batch, request: int) -> Iterable[int]:
    def lengths() -> Iterable[int]:
        for other in range(request + 1):
            one = batch.verified(other)
            branches, steps = one.drafts.branches, one.drafts.num_drafts
            yield from [len(branches.seen(one.end)) + steps] * branches.topk

    return list(accumulate(lengths()))[-batch.drafts.branches.topk :]


_drafted = functools.partial(Output, is_drafted=True)


OUTPUTS: Final = {
    "kv_indices": Output(_Batch.slots, "keys"),
    "page_indices": Output(_Batch.pages, "pages"),
    "page_table": Output(_Batch.pages, "pages", is_table=True),
    "kv_indptr": Output(_keys_so_far, "requests", first=(0,), is_relative=True),
    "query_start_loc": Output(lambda batch, request: [batch.query_starts[request + 1]],
                              "requests", first=(0,), is_relative=True),
    "query_starts": Output(lambda batch, request: [batch.query_starts[request]],
                           "requests", is_relative=True),
    "positions": Output(_positions, "tokens", torch.int64),
    "token_seq_lens": Output(lambda batch, request: [p + 1 for p in _positions(batch, request)],
                             "tokens"),
    "local_positions": Output(lambda batch, request: range(batch.new(request)), "tokens"),
    "seq_lens": Output(lambda batch, request: [batch.seq_lens[request]], "requests"),
    "local_seq_lens": Output(_local_seq_len, "requests"),
    "token_to_request": Output(lambda batch, request: [request] * batch.new(request),
                               "tokens", is_relative=True),
    "token_rows": Output(lambda batch, request: [batch.rows[request]] * batch.new(request),
                         "tokens"),
    "slot_mapping": Output(_of_verified(drafting.slots_of_tokens), "tokens", torch.int64,
                           blank=PAD_SLOT),
    "num_rejected_tokens": _drafted(_of_verified(drafting.num_rejected_tokens), "requests"),
    "token_indices_to_sample": _drafted(_of_verified(drafting.token_indices_to_sample), "requests",
                                        is_relative=True),
    "valid_sampled_tokens_count": _drafted(_of_verified(drafting.valid_sampled_tokens_count),
                                           "requests"),
    "accepted_seq_lens": _drafted(_of_verified(drafting.accepted_seq_lens), "requests"),
    "last_tokens": _drafted(_of_verified(drafting.last_tokens), "requests"),
    "accepted_tokens": _drafted(_of_verified(drafting.accepted_tokens), "accepted"),
    "padded_tokens": _drafted(_of_verified(drafting.new_tokens), "tokens", is_table=True),
    "next_positions": _drafted(_of_verified(drafting.next_positions), "requests", torch.int64),
    "next_slots": _drafted(_of_verified(drafting.next_slots), "requests", torch.int64,
                           blank=PAD_SLOT),
    "next_seq_lens": _drafted(_of_verified(drafting.next_seq_lens), "requests"),
    "draft_input_ids": _drafted(_of_verified(drafting.draft_input_ids), "expanded"),
    "draft_positions": _drafted(_of_verified(drafting.draft_positions), "expanded", torch.int64),
    "is_rejected_token_mask": _drafted(_of_verified(drafting.is_rejected_token), "expanded",
                                       torch.bool),
    "is_masked_token_mask": _drafted(_of_verified(drafting.is_masked_token), "expanded",
                                     torch.bool),
    "new_token_indices": _drafted(_in_expanded(drafting.new_token_indices), "drafts",
                                  is_relative=True),
    "hidden_state_mapping": _drafted(_in_expanded(drafting.hidden_state_mapping), "tokens",
                                     is_relative=True),
    "query_input_ids": _drafted(_of_verified(drafting.query_input_ids), "queries"),
    "query_positions": _drafted(_of_verified(drafting.query_positions), "queries", torch.int64),
    "query_slots": _drafted(_of_verified(drafting.query_slots), "queries", torch.int64,
                            blank=PAD_SLOT),
    "query_indices_to_sample": _drafted(_of_verified(drafting.query_indices_to_sample), "drafts",
                                        is_relative=True),
    "num_kv_splits": _drafted(_num_kv_splits, "queries", is_relative=True),
    "tree_mask": _drafted(_of_verified(drafting.tree_mask), "squares", torch.bool),
    "tree_positions": _drafted(_of_verified(drafting.tree_positions), "tokens", torch.int64),
    "first_children": _drafted(_of_verified(drafting.first_children), "tokens", torch.int64),
    "next_siblings": _drafted(_of_verified(drafting.next_siblings), "tokens", torch.int64),
    "packed_mask": _drafted(_of_verified(drafting.packed_mask), "bytes", torch.uint8),
    "draft_kv_indices": _drafted(_of_verified(drafting.draft_kv_indices), "seen"),
    "draft_kv_indptr": _drafted(_draft_kv_indptr, "branches", first=(0,), is_relative=True),
}  # fmt: skip
"""What ``prepare_batch`` can be asked for, by name."""


def prepare_batch(
    output: str,
    query_start_loc: torch.Tensor | Sequence[int],
    seq_lens: torch.Tensor | Sequence[int],
    block_table: torch.Tensor | Sequence[Sequence[int]],
    page_size: int,
    *,
    rows: torch.Tensor | Sequence[int] | None = None,
    buffer: torch.Tensor | None = None,
    rest: str = "kept",
    window_left: int = -1,
    rank: int = 0,
    world: int = 1,
    interleave: int = 1,
    drafts: Drafts | None = None,
    splits: Splits = USUAL_SPLITS,
) -> torch.Tensor:
    """Return one of the tensors that engines prepare for a batch of R requests, by definition.

    Args:
        output: ``kv_indices`` (slots of all keys), ``page_indices``, ``page_table`` (a row of pages
            a request), ``kv_indptr``, ``query_start_loc``, ``query_starts``, ``seq_lens``,
            ``local_seq_lens`` (keys on the rank); of each new token ``positions``,
            ``token_seq_lens`` (keys up to its own), ``local_positions`` (among the request's new
            ones), ``token_to_request`` or ``token_rows``; one of those that depend on drafts.
        query_start_loc: [R + 1] integers from 0; request i owns new tokens ``[i]`` to ``[i + 1]``.
        seq_lens: [R] integers, the keys of each request; its new tokens are the last of them.
        block_table: [rows, pages] integers, the pages of all requests that an engine knows; entries
            behind a request's pages are garbage and never read.
        page_size: keys a page.
        rows: [R] integers, the row of each request in the block table. None: request i has row i.
        buffer: what the entries are written into. None: a tensor that holds them and no more.
        rest: what becomes of the buffer behind the entries, see ``RESTS``.
        window_left: keys before its own that a request's first new token sees; -1: all. Keys before
            them have no slot, and pages that hold no others are page 0.
        rank: the rank of a context-parallel group, from 0.
        world: ranks of the group.
        interleave: consecutive keys on one rank.
        drafts: what became of the requests' drafts. None: no output that depends on them.
        splits: what the numbers of parts depend on, into which keys are divided.

    Returns:
        The buffer after the call, a new tensor.

    Raises:
        ValueError: arguments that contradict each other, a request outside its row of the block
            table, a negative page id among those that are read, a buffer that is too small or of
            another dtype; argument and position are named.
    """
    for name, value, allowed in ("output", output, tuple(OUTPUTS)), ("rest", rest, RESTS):
        if value not in allowed:
            message = f"{name} is {value!r}; it must be one of {listed(allowed)}"
            raise ValueError(message)
    table = table_rows(block_table)
    starts = host_integers("query_start_loc", query_start_loc)
    check_indptr("query_start_loc", starts, None, "tokens")
    keys = host_integers("seq_lens", seq_lens)
    known = list(range(len(keys))) if rows is None else host_integers("rows", rows)
    window = checked_integer("window_left", window_left)
    size = checked_integer("page_size", page_size)
    if size < 1:
        message = f"page_size is {size}; it must be at least 1"
        raise ValueError(message)
    for name, wanted in ("query_start_loc", len(starts) - 1), ("rows", len(known)):
        if wanted != len(keys):
            message = f"{name} has {wanted} requests; seq_lens has {len(keys)}"
            raise ValueError(message)
    given = _checked_drafts(output, drafts, starts)
    for request, (start, end) in enumerate(pairwise(starts)):
        _check_request(request, end - start, keys[request], known[request], table, size)
    news = [end - start for start, end in pairwise(starts)]
    seen = [max(s - t - window, 0) if window >= 0 else 0 for t, s in zip(news, keys, strict=True)]
    group = checked_group(rank, world, interleave)
    batch = _Batch(starts, keys, known, table, size, seen, *group, given, splits)
    entries = [list(OUTPUTS[output].entries(batch, request)) for request in range(len(keys))]
    device = block_table.device if isinstance(block_table, torch.Tensor) else torch.device("cpu")
    return _written(OUTPUTS[output], entries, buffer, rest, device)


def _written(
    output: Output,
    entries: list[list[int]],
    buffer: torch.Tensor | None,
    rest: str,
    device: torch.device,
) -> torch.Tensor:
    """Return a buffer, or a new tensor, with the entries of all requests in it."""
    rows = entries if output.is_table else [[*output.first, *(e for each in entries for e in each)]]
    width = max(map(len, rows), default=0)
    if buffer is None:
        shape = (len(rows), width) if output.is_table else (width,)
        buffer = torch.zeros(shape, dtype=output.dtype, device=device)
    dims = 1 + output.is_table
    if not isinstance(buffer, torch.Tensor) or buffer.dtype != output.dtype or buffer.dim() != dims:
        message = f"buffer must be a tensor of {output.dtype} with {dims} axes, not {buffer!r}"
        raise ValueError(message)
    least = (len(rows), width) if output.is_table else (width,)
    if any(has < needs for has, needs in zip(buffer.shape, least, strict=True)):
        message = f"buffer has shape {tuple(buffer.shape)}; the entries need {least}"
        raise ValueError(message)
    found = buffer.clone()
    if not output.is_table:
        found[:width] = torch.tensor(rows[0], dtype=output.dtype)
        if rest == "zero_rows":
            found[width:] = output.blank
        return found
    for request, row in enumerate(rows):
        found[request, : len(row)] = torch.tensor(row, dtype=output.dtype)
        if rest == "zero_tails":
            found[request, len(row) :] = 0
    if rest == "zero_rows":
        found[len(rows) :] = 0
    return found


def _check_request(
    request: int, new: int, keys: int, row: int, table: list[list[int]], page_size: int
) -> None:
    """Refuse a request with fewer keys than new tokens, or without a page for each of its keys."""
    if keys < new:
        message = f"seq_lens[{request}] is {keys}; the request has {new} new tokens"
        raise ValueError(message)
    if not 0 <= row < len(table):
        message = f"rows[{request}] is {row}; block_table has {len(table)} rows"
        raise ValueError(message)
    pages = -(-keys // page_size)
    if len(table[row]) < pages:
        message = f"block_table[{row}] has {len(table[row])} entries; a request needs {pages}"
        raise ValueError(message)
    for page, number in enumerate(table[row][:pages]):
        if not isinstance(number, int) or number < 0:
            message = f"block_table[{row}][{page}] is {number}; a page id is at least 0"
            raise ValueError(message)


def _checked_drafts(output: str, drafts: Drafts | None, starts: list[int]) -> Drafts:
    """Return drafts as lists, none where no output asks for them."""
    requests = len(starts) - 1
    if drafts is None:
        if OUTPUTS[output].is_drafted:
            message = f"output is {output!r}; it needs drafts"
            raise ValueError(message)
        return Drafts([0] * requests, [0] * starts[-1], [0] * requests)
    given = drafting.on_the_host(drafts)
    counts = {"rejected": requests, "tokens": starts[-1], "next_tokens": requests}
    for name, wanted in counts.items():
        if len(getattr(given, name)) != wanted:
            message = f"{name} has {len(getattr(given, name))} entries; the batch has {wanted}"
            raise ValueError(message)
    if given.parents is not None:
        _check_parents(list(given.parents), starts)
    for request, (start, end) in enumerate(pairwise(starts)):
        if not 0 <= given.rejected[request] <= end - start:
            found = f"rejected[{request}] is {given.rejected[request]}"
            message = f"{found}; the request has {end - start} new tokens"
            raise ValueError(message)
    return given


def _check_parents(parents: list[int], starts: list[int]) -> None:
    """Refuse trees whose tokens do not follow tokens before them, the first one none."""
    if len(parents) != starts[-1]:
        message = f"parents has {len(parents)} entries; the batch has {starts[-1]}"
        raise ValueError(message)
    for start, end in pairwise(starts):
        for token, parent in enumerate(parents[start:end]):
            if not (0 <= parent < token if token else parent == -1):
                message = f"parents[{start + token}] is {parent}; it must be a token before it"
                raise ValueError(message)
