"""The slots of a paged cache that new tokens are written into, as serving stacks map them.

Slot ``page * page_size + offset`` is the place of one token in a rank's caches. The definition is
vLLM's ``slot_mapping``: one int64 for each token of a batch, -1 for what the rank does not write.
Under decode context parallelism the keys of a request are dealt to the ranks in runs, and the block
table counts in pages of the whole group, see ``context_parallel``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from ..validation import check_indptr, checked_integer, host_integers
from .context_parallel import checked_group
from .metadata import table_rows

PAD_SLOT: Final = -1
"""Slot of a token that is not written here, and of the room behind a batch."""


def map_slots(
    query_start_loc: torch.Tensor | Sequence[int],
    positions: torch.Tensor | Sequence[int],
    block_table: torch.Tensor | Sequence[Sequence[int]],
    page_size: int,
    *,
    rows: torch.Tensor | Sequence[int] | None = None,
    num_slots: int | None = None,
    rank: int = 0,
    world: int = 1,
    interleave: int = 1,
) -> torch.Tensor:
    """Return the slot of each token of a batch of R requests, by definition.

    Args:
        query_start_loc: [R + 1] integers from 0; request i owns tokens ``[i]`` to ``[i + 1]``.
        positions: [tokens] integers, the place of each token in its own request, from 0.
        block_table: [rows, pages] integers, the pages of all requests that an engine knows; entries
            that no token lies in are garbage and never read.
        page_size: tokens a page of one rank.
        rows: [R] integers, the row of each request in the block table; -1: it has no pages, and
            none of its tokens is written. None: request i has row i.
        num_slots: entries of the result, at least as many as tokens. None: as many as tokens.
        rank: the rank of the group, from 0.
        world: ranks of the group; a page of the block table has ``page_size * world`` tokens.
        interleave: consecutive tokens on one rank; it divides ``page_size``.

    Returns:
        [num_slots] int64 on the block table's device (the CPU for a nested list): ``PAD_SLOT``
        where another rank writes the token, where its request has no pages, and behind the last
        token.

    Raises:
        ValueError: arguments that contradict each other, a token outside its row of the block
            table, a negative page id among those that are read; argument and position are named.
    """
    starts = host_integers("query_start_loc", query_start_loc)
    places = host_integers("positions", positions)
    check_indptr("query_start_loc", starts, len(places), "positions")
    table = table_rows(block_table)
    requests = len(starts) - 1
    known = list(range(requests)) if rows is None else host_integers("rows", rows)
    if len(known) != requests:
        message = f"rows has {len(known)} entries; query_start_loc has {requests} requests"
        raise ValueError(message)
    rank, world, interleave = checked_group(rank, world, interleave)
    page_size = _checked(page_size, interleave)
    most = len(places) if num_slots is None else checked_integer("num_slots", num_slots)
    if most < len(places):
        message = f"num_slots is {most}; the batch has {len(places)} tokens"
        raise ValueError(message)
    slots = [PAD_SLOT] * most
    for request, row in enumerate(known):
        if not -1 <= row < len(table):
            message = f"rows[{request}] is {row}; block_table has {len(table)} rows, -1 means none"
            raise ValueError(message)
        for token in range(starts[request], starts[request + 1]):
            if places[token] < 0:
                message = f"positions[{token}] is {places[token]}; the first token has 0"
                raise ValueError(message)
            turn, within = divmod(places[token], interleave)
            if row >= 0 and turn % world == rank:
                # Place of the token among those of its request on this rank. Whole turns of the
                # ranks fill a page of the group, so that these fill one local page each.
                page, offset = divmod(turn // world * interleave + within, page_size)
                slots[token] = _page_id(table, row, page) * page_size + offset
    device = block_table.device if isinstance(block_table, torch.Tensor) else torch.device("cpu")
    return torch.tensor(slots, dtype=torch.int64, device=device)


def _page_id(table: list[list[int]], row: int, page: int) -> int:
    if page >= len(table[row]):
        message = f"block_table[{row}] has {len(table[row])} entries; a token lies in page {page}"
        raise ValueError(message)
    if table[row][page] < 0:
        message = f"block_table[{row}][{page}] is {table[row][page]}; a page id is at least 0"
        raise ValueError(message)
    return table[row][page]


def _checked(page_size: int, interleave: int) -> int:
    """Return a page size that an interleave divides."""
    page_size = checked_integer("page_size", page_size)
    if page_size < 1:
        message = f"page_size is {page_size}; it must be at least 1"
        raise ValueError(message)
    if page_size % interleave:
        message = f"interleave is {interleave}; it must divide page_size {page_size}"
        raise ValueError(message)
    return page_size
