"""Slices of a context-parallel group: each key on its rank, page ids kept, arguments refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelproof.impl.torch.context_parallel import slice_context_parallel as by_torch
from kernelproof.reference import (
    BatchMetadata,
    ContextParallelProblem,
    build_metadata,
    materialise,
    slice_context_parallel,
)
from kernelproof.reference.tensors.context_parallel import ContextParallelInputs


@st.composite
def groups(draw: st.DrawFn) -> tuple[BatchMetadata, int, int]:
    """Draw a batch in virtual pages, with the group's ranks and interleave."""
    interleave, turns, world = (draw(st.integers(1, most)) for most in (4, 3, 4))
    virtual = interleave * turns * world
    seq_lens = draw(st.lists(st.integers(0, 3 * virtual), max_size=4))
    pages = iter(draw(st.permutations(range(sum(-(-s // virtual) for s in seq_lens)))))
    table = [[next(pages) for _ in range(-(-s // virtual))] for s in seq_lens]
    return build_metadata([1] * len(seq_lens), seq_lens, table, virtual), world, interleave


@given(groups())
@settings(deadline=None)
def test_each_key_lies_on_its_rank_in_the_page_of_its_virtual_one(
    group: tuple[BatchMetadata, int, int],
) -> None:
    # A rank stores key after key; so does this, into (page id, offset), one key at a time.
    whole, world, interleave = group
    size, indices = whole.page_size // world, whole.paged_kv_indices.tolist()
    starts = whole.paged_kv_indptr.tolist()
    slices = [slice_context_parallel(whole, rank, world, interleave) for rank in range(world)]
    for request, seq_len in enumerate(whole.seq_lens.tolist()):
        stored: list[list[tuple[int, int]]] = [[] for _ in range(world)]
        for key in range(seq_len):
            page = indices[starts[request] + key // whole.page_size]
            own = stored[(key // interleave) % world]
            own.append((page, len(own) % size))
        for rank, found in enumerate(slices):
            first, end = found.paged_kv_indptr[request : request + 2].tolist()
            pages = found.paged_kv_indices[first:end].tolist()
            local = int(found.seq_lens[request])
            assert [(pages[j // size], j % size) for j in range(local)] == stored[rank]
            assert len(pages) == -(-local // size)
            assert int(found.paged_kv_last_page_len[request]) == (local - 1) % size + 1 or not local
    for found in slices:
        assert found.page_size == size
        assert torch.equal(found.qo_indptr, whole.qo_indptr)
        assert all(tensor.dtype == torch.int32 for tensor in found.tensors().values())


@given(groups())
@settings(deadline=None)
def test_lengths_looked_up_among_positions_are_lengths_counted_in_runs(
    group: tuple[BatchMetadata, int, int],
) -> None:
    whole, world, interleave = group
    for rank in range(world):
        found = by_torch(ContextParallelInputs(whole, rank, world, interleave))
        expected = slice_context_parallel(whole, rank, world, interleave)
        assert found.page_size == expected.page_size
        for name, tensor in expected.tensors().items():
            assert torch.equal(found.tensors()[name], tensor), name
            assert found.tensors()[name].dtype == tensor.dtype, name


def test_by_hand() -> None:
    # Runs of 2 keys: 0 1 | 2 3 | 4 5 of 3 ranks, then 6 7 | 8 | nothing.
    whole = build_metadata([1, 2], [9, 1], [[5, 3], [7, 0]], 6)
    lengths = [slice_context_parallel(whole, rank, 3, 2).seq_lens.tolist() for rank in range(3)]
    assert lengths == [[4, 1], [3, 0], [2, 0]]
    second = slice_context_parallel(whole, 1, 3, 2)
    assert second.paged_kv_indices.tolist() == [5, 3]
    assert second.paged_kv_indptr.tolist() == [0, 2, 2]
    assert second.paged_kv_last_page_len.tolist() == [1, 0]
    assert slice_context_parallel(whole, 2, 3, 2).paged_kv_indices.tolist() == [5]


def test_a_group_of_one_holds_everything() -> None:
    whole = build_metadata([3, 1], [5, 8], [[1, 2], [0, 4]], 4)
    alone = slice_context_parallel(whole, 0, 1, 4)
    for name, tensor in whole.tensors().items():
        assert torch.equal(alone.tensors()[name], tensor)
        assert alone.tensors()[name].data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize(
    ("rank", "world", "interleave", "said"),
    [
        (2, 2, 1, "rank is 2; the group has 2 ranks"),
        (-1, 2, 1, "rank is -1"),
        (0, 0, 1, "world is 0; it must be at least 1"),
        (0, 2, 0, "interleave is 0; it must be at least 1"),
        (0, 3, 1, "metadata.page_size is 8, not a multiple of the 3 ranks"),
        (0, 2, 3, "interleave is 3; it must divide a rank's page of 4 keys"),
        (0, 2, 8, "interleave is 8; it must divide a rank's page of 4 keys"),
        (0.5, 2, 1, "rank is 0.5, not an integer"),
    ],
)
def test_what_no_group_can_be_is_refused(rank: int, world: int, interleave: int, said: str) -> None:
    whole = build_metadata([1], [5], [[0]], 8)
    with pytest.raises(ValueError, match=re.escape(said)):
        slice_context_parallel(whole, rank, world, interleave)


def test_metadata_that_contradict_themselves_are_refused_with_the_position() -> None:
    whole = build_metadata([1, 1], [5, 9], [[0, 0], [1, 2]], 8)
    whole.seq_lens[1] = 7
    with pytest.raises(ValueError, match=r"seq_lens\[1\] is 7 with page_size 8"):
        slice_context_parallel(whole, 0, 2, 1)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rank": 2}, "rank is 2; it must be less than world = 2"),
        ({"interleave": 2}, "interleave is 2; it must be a divisor of page_size = 1"),
        ({"query_lens": (2,)}, r"query_lens[0] is 2; it must be at most seq_lens[0] = 1"),
        ({"seq_lens": ()}, "seq_lens is ()"),
        ({"world": 0}, "world is 0; it must be at least 1"),
    ],
)
def test_a_problem_that_no_call_is_like_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        ContextParallelProblem(**fields)


def test_a_problem_is_materialised_in_virtual_pages() -> None:
    problem = ContextParallelProblem((1, 3), (9, 4), page_size=2, world=2, rank=1, page_order=1)
    inputs = materialise(problem)
    assert isinstance(inputs, ContextParallelInputs)
    assert inputs.metadata.page_size == 4
    assert inputs.metadata.seq_lens.tolist() == [9, 4]
    assert inputs.metadata.qo_indptr.tolist() == [0, 1, 4]
    assert (inputs.rank, inputs.world, inputs.interleave) == (1, 2, 1)
    assert problem.contexts == (9, 1)
