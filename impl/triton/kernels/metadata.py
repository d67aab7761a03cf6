"""Building batch metadata as a Triton kernel; ``triton_metadata`` launches it.

This module imports triton, so nothing imports it before it is needed.
"""

# Every argument is a tensor to a kernel. Annotated as an int, it would be passed as 32 bits and not
# be specialised: strides of 1 would not be seen, and memory read in pieces of two bytes.
# Compile-time constants are upper case in Triton, and what a kernel reads are its arguments.
# ruff: noqa: N803, PLR0917

from __future__ import annotations

import triton
import triton.language as tl

REQUESTS_AT_ONCE = tl.constexpr(1024)


def _build(
    query_lens: tl.tensor,  # [requests]
    seq_lens: tl.tensor,  # [requests]
    block_table: tl.tensor,  # [requests, columns]
    qo_indptr: tl.tensor,  # [requests + 1] int32
    kv_indptr: tl.tensor,  # [requests + 1] int32
    page_ids: tl.tensor,  # [requests * columns] int32
    last_page_lens: tl.tensor,  # [requests] int32
    seq_lens_out: tl.tensor,  # [requests] int32
    num_requests: tl.tensor,
    page_size: tl.tensor,
    query_lens_stride: tl.tensor,
    seq_lens_stride: tl.tensor,
    table_row: tl.tensor,
    table_column: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write one request's entries and BLOCK of its page ids; the program after the last, the ends.

    Each program adds up the requests before its own: no program waits for another.
    """
    request = tl.program_id(0)
    tokens = tl.full((), 0, tl.int32)
    pages = tl.full((), 0, tl.int32)
    for first in range(0, request, REQUESTS_AT_ONCE):
        index = first + tl.arange(0, REQUESTS_AT_ONCE)
        before = index < request
        lengths = tl.load(query_lens + index * query_lens_stride, mask=before, other=0)
        keys = tl.load(seq_lens + index * seq_lens_stride, mask=before, other=0)
        tokens += tl.sum(lengths.to(tl.int32), axis=0)
        pages += tl.sum(((keys + page_size - 1) // page_size).to(tl.int32), axis=0)
    if tl.program_id(1) == 0:
        tl.store(qo_indptr + request, tokens)
        tl.store(kv_indptr + request, pages)
    if request == num_requests:
        return
    num_keys = tl.load(seq_lens + request * seq_lens_stride).to(tl.int32)
    num_pages = (num_keys + page_size - 1) // page_size
    if tl.program_id(1) == 0:
        tl.store(seq_lens_out + request, num_keys)
        # 1 to page_size keys on the last page, and 0 where there is none.
        tl.store(last_page_lens + request, num_keys - tl.maximum(num_pages - 1, 0) * page_size)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_page = column < num_pages
    row = block_table + request.to(tl.int64) * table_row
    page = tl.load(row + column * table_column, mask=is_page, other=0)
    tl.store(page_ids + pages + column, page, mask=is_page)


build = triton.jit(_build, do_not_specialize=("num_requests", "page_size", "table_row"))
