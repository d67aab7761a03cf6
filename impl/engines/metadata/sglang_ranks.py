"""SGLang's Triton kernels of decode context parallelism, and of windows behind a prefill.

A rank holds every ``world``-th key of a request. These adapters make a table of all ranks' keys in
which those of one rank are a problem's, so that the kernel has to find them among the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ....reference.tensors.preparation import BatchInputs
from ...gpu.triton_interpreter import scalar_conditions
from ..sglang_calls import file_of, stubs
from ..sources import load
from .batches import builder
from .sglang_batches import INDICES_FILE, is_power_of_two, other_pool

RANKS_FILE = file_of("dcp_kernels")
WINDOW_FILE = file_of("pa_page_table")
PACK_FILE = "sglang.kernels.ops.kvcache.pd_dcp_gather"
WINDOW = 7
"""Keys of the window that decodes see besides their whole prefill."""
BLOCK = 128
"""Keys that a program copies, as the planner of SGLang chooses them."""
QUERIES = 2
"""Rows of a verified request in a table of slots."""
UNTOUCHED = 0xA5
"""What the bytes behind a pack hold."""


class _Group(NamedTuple):
    """A group of ranks, and one of them."""

    world: int
    rank: int


def _group(inputs: BatchInputs) -> _Group:
    """Return a group by the size of pages, for which kernels are compiled anew anyway."""
    size = inputs.page_size
    world = 2 + size % 3
    return _Group(world, size.bit_length() % world)


def _starts(lengths: torch.Tensor) -> torch.Tensor:
    """Return where each of several requests begins, and where the last one ends."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def _tokens_of_all_ranks(tokens: torch.Tensor, group: _Group) -> torch.Tensor:
    """Return a table [rows, keys of all ranks] whose every ``world``-th slot is the rank's."""
    of_others = (tokens ^ 1).unsqueeze(2) * group.world + torch.arange(
        group.world, dtype=tokens.dtype, device=tokens.device
    )
    of_others[:, :, group.rank] = tokens * group.world + group.rank
    return of_others.flatten(1)


@builder(
    "sglang-dcp-kv-indices",
    RANKS_FILE,
    "create_triton_kv_indices_for_dcp_triton",
    {"kv_indices": "kept"},
    windows=True,
    sized=True,
)
def kv_indices(inputs: BatchInputs) -> None:
    """Copy a rank's slots from a table of all ranks' slots."""
    group, requests = _group(inputs), len(inputs.rows)
    table = _tokens_of_all_ranks(inputs.token_table, group)
    # From the rank's own key on, or from one of the others' before it.
    before = torch.arange(requests, device=table.device) % group.world
    first = inputs.first_keys * group.world + group.rank - before
    with load(RANKS_FILE, stubs) as kernels:
        kernels.create_triton_kv_indices_for_dcp_triton[(requests,)](
            table,
            inputs.rows.long(),
            inputs.seq_lens - inputs.first_keys,
            inputs.kv_indptr,
            first.clamp(min=0).int() if inputs.window_left >= 0 else None,
            inputs.buffer,
            table.stride(0),
            *group,
        )


def _page_table(
    inputs: BatchInputs, tokens: torch.Tensor, table: torch.Tensor, pages: torch.Tensor | None
) -> None:
    group, size = _group(inputs), inputs.page_size
    of_all = _tokens_of_all_ranks(tokens, group)
    with load(INDICES_FILE, stubs) as indices, load(RANKS_FILE, stubs) as kernels:
        blocks = indices.get_num_kv_index_blocks_flashmla(table.shape[1], size)
        kernels.create_mla_kv_page_table_for_dcp[(len(inputs.rows), blocks)](
            of_all,
            inputs.rows.long(),
            inputs.seq_lens,
            table,
            pages,
            of_all.stride(0),
            table.stride(0),
            PHYSICAL_PAGE_SIZE=size,
            DCP_SIZE=group.world,
            DCP_RANK=group.rank,
            PAGES_PER_BLOCK=indices.get_num_page_per_block_flashmla(size),
            HAS_V2P=pages is not None,
        )


@builder(
    "sglang-dcp-page-table",
    RANKS_FILE,
    "create_mla_kv_page_table_for_dcp",
    {"page_table": "kept"},
    more=is_power_of_two,
    sized=True,
)
def page_table(inputs: BatchInputs) -> None:
    """Compute a rank's table of pages from a table of all ranks' slots."""
    _page_table(inputs, inputs.token_table, inputs.buffer, None)


@builder(
    "sglang-dcp-page-table-virtual",
    RANKS_FILE,
    "create_mla_kv_page_table_for_dcp",
    {"page_table": "kept"},
    more=is_power_of_two,
    sized=True,
)
def virtual_page_table(inputs: BatchInputs) -> None:
    """Compute it from virtual pages, and page 0 for those that are freed or never written."""
    tokens, pages = inputs.token_table ^ inputs.page_size, other_pool(inputs, 1)
    _page_table(inputs, tokens, inputs.buffer, pages)
    pages[::3] = -1
    tokens = torch.where(inputs.token_table // inputs.page_size % 5 == 0, -1, tokens)
    second = torch.zeros_like(inputs.buffer)
    _page_table(inputs, tokens, second, pages)
    counts = inputs.page_indptr.diff().unsqueeze(1)
    first = inputs.buffer[: len(inputs.rows)]
    is_page = torch.arange(first.shape[1], device=first.device) < counts
    is_lost = (first % 5 == 0) | ((first ^ 1) % 3 == 0)
    if not torch.equal(second[: len(first)], torch.where(is_page & ~is_lost, first, 0)):
        message = "a page that is freed, or never written, is not page 0"
        raise RuntimeError(message)


@builder(
    "sglang-dcp-verify-indices",
    RANKS_FILE,
    "compact_dcp_verify_token_table_to_ragged",
    {"kv_indices": "kept"},
    sized=True,
)
def verify_indices(inputs: BatchInputs) -> None:
    """Copy slots from the first of each request's rows of a table; one slot where it has none."""
    table = inputs.token_table[inputs.rows.long()].repeat_interleave(QUERIES, dim=0).contiguous()
    starts = _starts(inputs.seq_lens.clamp(min=1))
    is_empty = inputs.seq_lens == 0
    buffer = inputs.buffer
    if is_empty.any():  # whose slot 0 is no entry of the problem
        buffer = torch.full((int(starts[-1]) + 1,), -1, dtype=buffer.dtype, device=buffer.device)
    with load(RANKS_FILE, stubs) as kernels, scalar_conditions(buffer):
        kernels.compact_dcp_verify_token_table_to_ragged[(len(inputs.rows),)](
            table,
            inputs.seq_lens,
            starts,
            buffer,
            table_stride=table.shape[1],
            Q_LEN=QUERIES,
            BLOCK_SIZE=BLOCK,
        )
    if is_empty.any():
        is_slot = torch.ones_like(buffer, dtype=torch.bool)
        is_slot[-1] = False
        is_slot[starts[:-1][is_empty].long()] = False
        if buffer[-1] != -1 or buffer[starts[:-1][is_empty].long()].any():
            message = "the only slot of a request without keys is not 0, or one behind all is"
            raise RuntimeError(message)
        inputs.buffer[: int(is_slot.sum())] = buffer[is_slot]


@builder("sglang-dcp-gathered-indices", RANKS_FILE, "create_dcp_kv_indices", {"kv_indices": "kept"})
def gathered_indices(inputs: BatchInputs) -> None:
    """Write the places of all keys in a buffer of all prefixes, behind which all new keys lie."""
    news = inputs.query_start_loc.diff()
    prefixes = inputs.seq_lens - news
    entries = int(inputs.kv_indptr[-1])
    with load(RANKS_FILE, stubs) as kernels:
        kernels.create_dcp_kv_indices[(len(inputs.rows),)](
            inputs.kv_indptr,
            news,
            inputs.query_start_loc[:-1],
            prefixes,
            _starts(prefixes)[:-1],
            inputs.buffer,
            int(prefixes.sum()),
            _group(inputs).world,
        )
    gathered = [
        inputs.token_table[row, start:end]
        for starts, ends in ((prefixes * 0, prefixes), (prefixes, inputs.seq_lens))
        for row, start, end in zip(inputs.rows.long(), starts, ends, strict=True)
    ]
    places = inputs.buffer[:entries].long()
    inputs.buffer[:entries] = torch.cat([places.int()[:0], *gathered])[places].int()


@builder(
    "sglang-dcp-local-indices",
    RANKS_FILE,
    "update_kv_lens_and_indices",
    {"kv_indices": "kept"},
    windows=True,
)
def local_indices(inputs: BatchInputs) -> None:
    """Copy a rank's slots from those of all ranks."""
    group, lengths = _group(inputs), inputs.seq_lens - inputs.first_keys
    requests, device = torch.arange(len(lengths), device=lengths.device), lengths.device
    # Behind the rank's last key some of the others' may follow.
    behind = requests % group.world
    whole = torch.where(lengths > 0, (lengths - 1) * group.world + group.rank + 1 + behind, 0)
    starts, longest = _starts(whole), max([1, *lengths.tolist()])
    request = requests.repeat_interleave(lengths)
    number = torch.arange(len(request), device=device) - inputs.kv_indptr[request]
    slots = torch.full((int(starts[-1]),), -1, dtype=torch.int32, device=device)
    tokens = inputs.token_table[inputs.rows.long()[request], inputs.first_keys[request] + number]
    slots[starts[request] + number * group.world + group.rank] = tokens.int()
    with load(RANKS_FILE, stubs) as kernels:
        kernels.update_kv_lens_and_indices[(len(lengths), -(-longest // BLOCK))](
            whole,
            starts,
            slots,
            lengths,
            inputs.kv_indptr,
            inputs.buffer,
            dcp_rank=group.rank,
            dcp_world_size=group.world,
            BLOCK_SIZE=BLOCK,
        )


@builder(
    "sglang-dcp-packed-rows",
    PACK_FILE,
    "copy_mla_rows_into_pack",
    {"kv_indices": "kept"},
    windows=True,
)
def packed_rows(inputs: BatchInputs) -> None:
    """Copy the rows of keys of two layers, whose rows here are slots, in rows of 8 bytes."""
    table, lengths = inputs.token_table, inputs.seq_lens - inputs.first_keys
    request = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    number = torch.arange(len(request), device=lengths.device) - inputs.kv_indptr[request]
    keys = inputs.first_keys[request] + number
    rows, count = inputs.rows.long()[request] * table.shape[1] + keys, len(request)
    wide = table.long().contiguous()
    narrow = wide + (5 << 32)  # whose upper half is not copied
    pack = torch.full((12 * count + 8,), UNTOUCHED, dtype=torch.uint8, device=table.device)
    with load(PACK_FILE, stubs) as kernels:
        kernels.copy_mla_rows_into_pack(
            [narrow.data_ptr(), wide.data_ptr()], rows, pack[: 12 * count], [4, 8], [8, 8]
        )
    inputs.buffer[:count] = pack[: 4 * count].view(torch.int32)
    second = torch.frombuffer(pack[4 * count :].cpu().numpy().tobytes(), dtype=torch.uint8)
    layer = second[: 8 * count].clone().view(torch.int64)
    expected = wide.flatten()[rows].cpu()
    if not torch.equal(layer, expected) or (second[8 * count :] != UNTOUCHED).any():
        message = "rows of the second layer are other ones, or bytes behind them are written"
        raise RuntimeError(message)


@builder(
    "sglang-pa-page-table", WINDOW_FILE, "_build_pa_page_table", {"page_table": "kept"}, sized=True
)
def windowed_table(inputs: BatchInputs) -> None:
    """Copy the pages of a prefill and of the window behind it, and none of those in between."""
    counts = inputs.page_indptr.diff()
    requests = torch.arange(len(counts), device=counts.device)
    has_gap = (requests % 2 == 0) & (counts > WINDOW)
    prefills = torch.where(has_gap, counts - WINDOW, counts)
    gaps = torch.where(has_gap, 3 + 5 * requests, 0)
    # Any page at all: no table has this one.
    width = inputs.block_table.shape[1] + max([0, *gaps.tolist()])
    table = torch.full(
        (len(inputs.block_table), width), -1, dtype=torch.int32, device=counts.device
    )
    lengths = torch.full((len(table),), width, dtype=torch.int32, device=counts.device)
    lengths[inputs.rows.long()] = prefills.int()
    for row, prefill, gap, count in zip(inputs.rows.long(), prefills, gaps, counts, strict=True):
        table[row, :prefill] = inputs.block_table[row, :prefill]
        table[row, prefill + gap : count + gap] = inputs.block_table[row, prefill:count]
    found = torch.full_like(counts, -1)
    with load(WINDOW_FILE, stubs) as kernels:
        getattr(kernels, "_build_pa_page_table")(  # noqa: B009
            table,
            inputs.rows.long(),
            counts + gaps,
            lengths,
            WINDOW,
            len(counts),
            inputs.buffer.shape[1],
            counts.device,
            inputs.buffer,
            found,
        )
    if inputs.buffer.shape[1] and not torch.equal(found, counts):
        message = f"requests with {counts.tolist()} pages are said to have {found.tolist()}"
        raise RuntimeError(message)
