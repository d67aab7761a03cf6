"""Counterexamples on fewer pages."""

from __future__ import annotations

from kernelproof.properties.axes import Axes, all_axes
from kernelproof.properties.simplify import FEW_PAGES, on_fewer_pages
from kernelproof.reference import AttentionProblem, MergeProblem

AXES = Axes("paged_attention", all_axes("paged_attention"), 10**6)


def test_many_small_pages_become_a_few_larger_ones_the_smallest_that_do_first() -> None:
    found = list(on_fewer_pages(AttentionProblem(seq_lens=(66,), page_size=1), AXES))
    assert found
    assert all(each.num_pages <= FEW_PAGES for each in found)
    assert all(each.seq_lens == (66,) for each in found)
    sizes = [each.page_size for each in found]
    assert sizes == sorted(sizes)
    smaller = [size for size in AXES.allows("page_size") if size < sizes[0]]
    assert all(-(-66 // size) > FEW_PAGES for size in smaller)


def test_each_of_several_requests_keeps_a_page() -> None:
    problem = AttentionProblem(query_lens=(1, 1, 1), seq_lens=(4, 4, 4), page_size=1)
    assert next(each.num_pages for each in on_fewer_pages(problem, AXES)) == 3


def test_what_has_few_pages_or_none_stays() -> None:
    assert not list(on_fewer_pages(AttentionProblem(seq_lens=(2,), page_size=1), AXES))
    assert not list(on_fewer_pages(AttentionProblem("ragged_attention", seq_lens=(66,)), AXES))
    assert not list(on_fewer_pages(MergeProblem(), AXES))
