"""The batch metadata: its invariants, its phases, and where the decodes of a batch end."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelproof.reference import (
    BatchMetadata,
    build_metadata,
    slice_phases,
    split_decodes_and_prefills,
)

GARBAGE = (-1, -(2**31), 2**31 - 1, 10**6)


class Batch(NamedTuple):
    """What ``build_metadata`` takes; entries of the table past a request's pages are garbage."""

    query_lens: list[int]
    seq_lens: list[int]
    block_table: list[list[int]]
    page_size: int


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draw lengths at and around the edges of pages, pages in any order, garbage behind them."""
    page_size = draw(st.integers(1, 9))
    edges = st.sampled_from([0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size])
    seq_lens = draw(st.lists(edges | st.integers(0, 40), max_size=6))
    query_lens = [draw(st.integers(0, 5)) for _ in seq_lens]
    width = max([pages_of(length, page_size) for length in seq_lens], default=0)
    width += draw(st.integers(0, 2))
    table = []
    for length in seq_lens:
        used = pages_of(length, page_size)
        row = draw(st.lists(st.integers(0, 99), min_size=used, max_size=used))
        table.append(row + [draw(st.sampled_from(GARBAGE)) for _ in range(width - used)])
    return Batch(query_lens, seq_lens, table, page_size)


def pages_of(length: int, page_size: int) -> int:
    """Count the pages that a request owns, one page at a time."""
    pages = 0
    while pages * page_size < length:
        pages += 1
    return pages


def assert_well_formed(metadata: BatchMetadata, batch: Batch) -> None:
    """Assert what serving stacks and kernels take for granted of a batch's metadata."""
    requests = len(batch.seq_lens)
    assert all(tensor.dtype == torch.int32 for tensor in metadata.tensors().values())
    assert metadata.page_size == batch.page_size
    assert metadata.num_requests == requests
    qo_indptr, indptr = metadata.qo_indptr.tolist(), metadata.paged_kv_indptr.tolist()
    indices, last = metadata.paged_kv_indices.tolist(), metadata.paged_kv_last_page_len.tolist()
    assert len(qo_indptr) == len(indptr) == requests + 1
    assert qo_indptr[0] == indptr[0] == 0
    assert qo_indptr[-1] == sum(batch.query_lens)
    assert indptr[-1] == len(indices)
    assert metadata.seq_lens.tolist() == batch.seq_lens
    for i in range(requests):
        pages = pages_of(batch.seq_lens[i], batch.page_size)
        assert qo_indptr[i + 1] - qo_indptr[i] == batch.query_lens[i]
        assert indptr[i + 1] - indptr[i] == pages
        assert indices[indptr[i] : indptr[i + 1]] == batch.block_table[i][:pages]
        if pages:
            assert 1 <= last[i] <= batch.page_size
            assert (pages - 1) * batch.page_size + last[i] == batch.seq_lens[i]
        else:
            assert last[i] == 0


FEW = settings(max_examples=80)


@FEW
@given(batches())
def test_the_invariants_hold(batch: Batch) -> None:
    assert_well_formed(build_metadata(*batch), batch)


@FEW
@given(batches())
def test_tensors_and_lists_build_the_same(batch: Batch) -> None:
    from_lists = build_metadata(*batch)
    width = len(batch.block_table[0]) if batch.block_table else 3
    for dtype in (torch.int32, torch.int64):
        query_lens = torch.tensor(batch.query_lens, dtype=dtype)
        seq_lens = torch.tensor(batch.seq_lens, dtype=dtype)
        table = torch.tensor(batch.block_table, dtype=dtype).reshape(len(batch.seq_lens), width)
        before = [query_lens.clone(), seq_lens.clone(), table.clone()]
        built = build_metadata(query_lens, seq_lens, table, batch.page_size)
        for name, tensor in built.tensors().items():
            assert torch.equal(tensor, from_lists.tensors()[name]), name
            assert tensor.dtype == torch.int32
        assert all(
            torch.equal(*pair) for pair in zip(before, (query_lens, seq_lens, table), strict=True)
        )


@FEW
@given(batches(), st.data())
def test_garbage_past_the_pages_is_never_read(batch: Batch, data: st.DataObject) -> None:
    table = [
        [
            page if slot < pages_of(length, batch.page_size) else data.draw(st.integers())
            for slot, page in enumerate(row)
        ]
        for row, length in zip(batch.block_table, batch.seq_lens, strict=True)
    ]
    expected = build_metadata(*batch).tensors()
    found = build_metadata(batch.query_lens, batch.seq_lens, table, batch.page_size).tensors()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@FEW
@given(batches(), st.data())
def test_phases_are_rebased_and_cover_the_batch(batch: Batch, data: st.DataObject) -> None:
    metadata = build_metadata(*batch)
    before = {name: tensor.clone() for name, tensor in metadata.tensors().items()}
    decodes = data.draw(st.integers(0, len(batch.seq_lens)))
    for phase, part in zip(
        slice_phases(metadata, decodes), (slice(None, decodes), slice(decodes, None)), strict=True
    ):
        alone = Batch(
            batch.query_lens[part], batch.seq_lens[part], batch.block_table[part], batch.page_size
        )
        assert_well_formed(phase, alone)
        tokens, pages = [0], [0]
        for query_len, seq_len in zip(alone.query_lens, alone.seq_lens, strict=True):
            tokens.append(tokens[-1] + query_len)
            pages.append(pages[-1] + pages_of(seq_len, batch.page_size))
        assert phase.cum_seq_lens_q.tolist() == tokens
        assert phase.cum_pages_kv.tolist() == pages
        assert phase.cum_seq_lens_q.dtype == phase.cum_pages_kv.dtype == torch.int32
    assert all(torch.equal(before[name], now) for name, now in metadata.tensors().items())


def test_a_batch_by_hand() -> None:
    table = [[7, 2, -1], [5, -1, -1], [-1, -1, -1], [9, 9, 4]]
    metadata = build_metadata([1, 1, 1, 3], [6, 4, 0, 9], table, 4)
    assert metadata.qo_indptr.tolist() == [0, 1, 2, 3, 6]
    assert metadata.paged_kv_indptr.tolist() == [0, 2, 3, 3, 6]
    assert metadata.paged_kv_indices.tolist() == [7, 2, 5, 9, 9, 4]
    assert metadata.paged_kv_last_page_len.tolist() == [2, 4, 0, 1]
    decodes, prefills = slice_phases(metadata, 3)
    assert decodes.cum_pages_kv.tolist() == [0, 2, 3, 3]
    assert prefills.cum_pages_kv.tolist() == [0, 3]
    assert prefills.cum_seq_lens_q.tolist() == [0, 3]
    assert prefills.paged_kv_indices.tolist() == [9, 9, 4]


def test_an_empty_batch() -> None:
    tables: list[list[list[int]] | torch.Tensor] = [[], torch.zeros((0, 5), dtype=torch.int32)]
    for table in tables:
        metadata = build_metadata([], [], table, 16)
        assert metadata.qo_indptr.tolist() == metadata.paged_kv_indptr.tolist() == [0]
        assert metadata.paged_kv_indices.numel() == metadata.num_requests == 0


def test_a_phase_does_not_alias_the_batch() -> None:
    metadata = build_metadata([1, 2], [3, 5], [[0, 1], [2, 3]], 4)
    for phase in slice_phases(metadata, 1):
        for tensor in phase.tensors().values():
            tensor.fill_(77)
    assert metadata.paged_kv_indices.tolist() == [0, 2, 3]
    assert metadata.seq_lens.tolist() == [3, 5]


@pytest.mark.parametrize(
    ("query_lens", "threshold", "uniform", "expected"),
    [
        ([], 1, False, (0, 0, 0, 0)),
        ([1, 1, 1], 1, False, (3, 0, 3, 0)),
        ([1, 1, 5, 9], 1, False, (2, 2, 2, 14)),
        ([5, 9], 1, False, (0, 2, 0, 14)),
        ([5, 1, 1], 1, False, (0, 3, 0, 7)),  # not reordered: what follows a prefill is one
        ([1, 5, 1], 1, False, (1, 2, 1, 6)),
        ([1, 0, 1, 4], 1, False, (3, 1, 2, 4)),
        ([2, 1, 4, 3], 2, False, (2, 2, 3, 7)),
        ([3, 4, 5], 4, False, (2, 1, 7, 5)),
        ([1, 2], 0, False, (0, 2, 0, 3)),
        ([0, 0, 2], 0, False, (2, 1, 0, 2)),
        ([3, 3, 3], 3, True, (3, 0, 9, 0)),
        ([3, 3, 2], 3, True, (2, 1, 6, 2)),  # shorter than the first: no uniform decode
        ([2, 3, 3], 3, True, (1, 2, 2, 6)),
        ([3, 3, 7], 3, True, (2, 1, 6, 7)),
        ([7, 3, 3], 3, True, (0, 3, 0, 13)),
        ([3, 3, 0, 0], 3, True, (4, 0, 6, 0)),  # padding rows of a captured graph
        ([3, 0, 3], 3, True, (3, 0, 6, 0)),
        ([3, 3, 0, 7], 3, True, (2, 2, 6, 7)),  # zeros are padding only where all else is uniform
        ([1, 1, 0, 0], 1, True, (4, 0, 2, 0)),
        ([0, 0], 3, True, (2, 0, 0, 0)),
    ],
)
def test_where_the_decodes_end(
    query_lens: list[int], threshold: int, *, uniform: bool, expected: tuple[int, ...]
) -> None:
    for lengths in (query_lens, torch.tensor(query_lens, dtype=torch.int32)):
        found = split_decodes_and_prefills(
            lengths, decode_threshold=threshold, require_uniform=uniform
        )
        assert found == expected


@FEW
@given(st.lists(st.integers(0, 6), max_size=8), st.integers(0, 6), st.booleans())
def test_a_split_covers_the_batch(lengths: list[int], threshold: int, uniform: bool) -> None:
    decodes, prefills, decode_tokens, prefill_tokens = split_decodes_and_prefills(
        lengths, decode_threshold=threshold, require_uniform=uniform
    )
    assert decodes + prefills == len(lengths)
    assert decode_tokens == sum(lengths[:decodes])
    assert prefill_tokens == sum(lengths[decodes:])
    assert all(length <= threshold for length in lengths[:decodes])
    if not uniform and prefills:
        assert lengths[decodes] > threshold
    if uniform and decodes:
        assert set(lengths[:decodes]) <= {lengths[0], 0}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_metadata_follow_the_block_table_to_the_gpu() -> None:
    table = torch.tensor([[3, 1], [2, -7]], device="cuda")
    metadata = build_metadata([1, 1], [6, 2], table, 4)
    assert all(tensor.is_cuda for tensor in metadata.tensors().values())
    on_cpu = build_metadata([1, 1], [6, 2], table.cpu(), 4)
    for name, tensor in metadata.to("cpu").tensors().items():
        assert torch.equal(tensor, on_cpu.tensors()[name])


def test_slots_follow_the_pages() -> None:
    table = torch.tensor([[5, 2, 9], [7, 9, 9]])
    metadata = build_metadata([3, 0, 2], [5, 4, 2], torch.cat([table, table[:1]]), 2)
    assert metadata.slot_mapping().tolist() == [4, 5, 18, 10, 11]
