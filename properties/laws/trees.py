"""Laws of draft trees: their paths alone, and their tokens in another order.

Both move tokens of a request: their queries, and their keys and values in the same tensors, so that
a kernel is called twice over one cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from ...reference import AttentionOutput, AttentionProblem
from ...reference.problems.mask_fields import PLAIN_MASK
from ...reference.tensors.inputs import AttentionInputs, PagedAttentionInputs
from ...reference.tensors.trees import ancestry, mask_of_trees, tree_parents
from ..verdicts.comparison import Result, agree
from ..verdicts.subject import Subject
from ..verdicts.verdict import VACUOUS, Verdict
from .general import run_on
from .law import ATTENTION, Law, chosen
from .selection import Part, described, select

Orders = Sequence[Sequence[int]]
"""Rows of each request's query tokens in their new order."""


def tree_paths(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Judge one path of each tree alone: a causal chain of its tokens behind the same keys."""
    tree = _as_tree(subject, problem)
    if tree is None:
        return VACUOUS
    paths = [_path(tree_parents(tree, request), tree.seed) for request in range(tree.num_requests)]
    chain = replace(tree, tree=0, causal=True, causal_by_request=False)
    # Kernels that take equally many tokens of each request are given the beginnings of the paths.
    shortest = min(map(len, paths))
    for tried in (paths, [path[:shortest] for path in paths]):
        parts = [
            Part(request, range(len(path)), (range(s - t + len(path)),))
            for request, (path, t, s) in enumerate(
                zip(tried, tree.query_lens, tree.seq_lens, strict=True)
            )
        ]
        alone = described(chain, parts)
        if alone is not None and subject.supports(alone):
            break
    else:
        return VACUOUS
    inputs = subject.materialise(tree)
    if getattr(inputs, "kv_cache_sf", None) is not None:
        return VACUOUS  # scales of blocks do not move with a token
    orders = [
        [*path, *(row for row in range(t) if row not in path)]
        for path, t in zip(tried, tree.query_lens, strict=True)
    ]
    result, bounded = run_on(subject, tree, inputs)
    moved = _moved(inputs, tree, orders)
    second = replace(moved, causal=True, custom_mask=None, tree_mask=None)
    kept = [(order[: len(path)]) for order, path in zip(orders, tried, strict=True)]
    rows = _rows(tree, kept).to(inputs.q.device)
    other, other_bounded = run_on(subject, alone, select(second, parts))
    return agree(
        _picked(result, rows),
        other,
        (_bound(bounded.bound, rows), other_bounded.bound),
        exact=subject.exact(tree),
    )


def tree_siblings(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Put siblings into the opposite order, with all that follows from them: rows move along."""
    tree = _as_tree(subject, problem)
    if tree is None:
        return VACUOUS
    parents = [tree_parents(tree, request) for request in range(tree.num_requests)]
    orders = [_opposite(each) for each in parents]
    inputs = subject.materialise(tree)
    if getattr(inputs, "kv_cache_sf", None) is not None:
        return VACUOUS  # scales of blocks do not move with a token
    if all(order == sorted(order) for order in orders):
        return VACUOUS
    result, bounded = run_on(subject, tree, inputs)
    device = inputs.q.device
    masks = [ancestry(each)[order][:, order] for each, order in zip(parents, orders, strict=True)]
    second = replace(
        _moved(inputs, tree, orders),
        custom_mask=mask_of_trees(masks, tree.seq_lens).to(device),
        tree_mask=torch.cat([mask.flatten() for mask in masks]).to(device),
    )
    rows = _rows(tree, orders).to(device)
    other, other_bounded = run_on(subject, tree, second)
    return agree(
        _picked(result, rows),
        other,
        (_bound(bounded.bound, rows), other_bounded.bound),
        exact=subject.exact(tree),
    )


def _as_tree(subject: Subject, problem: AttentionProblem) -> AttentionProblem | None:
    """Return the problem with a tree and no window; None where there is none, or no support.

    Windows, chunks and ALiBi count rows, which change when tokens move.
    """
    if problem.more_queries_than_keys or problem.most_queries <= 1:
        return None
    number = problem.tree or 1 + problem.seed % 3
    tree = replace(
        problem,
        **PLAIN_MASK,
        tree=number,
        window_left=-1,
        window_right=-1,
        alibi=False,
        shared_prefix_pages=0,
    )
    return tree if subject.supports(tree) else None


def _path(parents: Sequence[int], seed: int) -> list[int]:
    """Return the rows from a token without parent to one that the seed chooses."""
    if not parents:
        return []
    row = len(parents) - 1 - seed % len(parents) // 2
    path = [row]
    while (row := parents[row]) >= 0:
        path.append(row)
    return path[::-1]


def _opposite(parents: Sequence[int]) -> list[int]:
    """Return the rows of a tree, parents first, the last sibling before the others."""
    children: dict[int, list[int]] = {}
    for row, parent in enumerate(parents):
        children.setdefault(parent, []).append(row)
    order: list[int] = []
    left = list(children.get(-1, []))
    while left:
        order.append(row := left.pop())
        left += children.get(row, [])
    return order


def _rows(problem: AttentionProblem, orders: Orders) -> torch.Tensor:
    """Return the rows of the whole batch that rows of its requests are."""
    starts = accumulate(problem.query_lens, initial=0)
    found = [start + row for start, order in zip(starts, orders, strict=False) for row in order]
    return torch.tensor(found, dtype=torch.int64)


def _moved(inputs: AttentionInputs, problem: AttentionProblem, orders: Orders) -> AttentionInputs:
    """Move keys and values of each request's last tokens in place; return the inputs so."""
    lengths = list(zip(problem.query_lens, problem.seq_lens, strict=True))
    keys = [
        (request, s - t + row, s - t + place)
        for request, ((t, s), order) in enumerate(zip(lengths, orders, strict=True))
        for place, row in enumerate(order)
    ]
    if isinstance(inputs, PagedAttentionInputs):
        size, table = inputs.metadata.page_size, inputs.block_table.tolist()
        old: list[tuple[int, ...]]
        old = [(table[request][key // size], key % size) for request, key, _ in keys]
        new: list[tuple[int, ...]]
        new = [(table[request][key // size], key % size) for request, _, key in keys]
        tensors = [inputs.k_cache] if problem.values_in_keys else [inputs.k_cache, inputs.v_cache]
        tensors = [each if inputs.kv_layout == "NHD" else each.transpose(1, 2) for each in tensors]
    else:
        starts = list(accumulate(problem.seq_lens, initial=0))
        old = [(starts[request] + key,) for request, key, _ in keys]
        new = [(starts[request] + key,) for request, _, key in keys]
        tensors = [inputs.k, inputs.v]
    sources, targets = (torch.tensor(each).unbind(1) for each in (old, new))
    device = inputs.q.device
    sources, targets = (tuple(i.to(device) for i in each) for each in (sources, targets))
    for tensor in tensors:
        codes = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        codes[targets] = codes[sources].clone()
    return replace(inputs, q=inputs.q[_rows(problem, orders).to(device)])


def _picked(result: Result, rows: torch.Tensor) -> Result:
    out, lse = result
    return out[rows], None if lse is None else lse[rows]


def _bound(bound: AttentionOutput, rows: torch.Tensor) -> AttentionOutput:
    return AttentionOutput(bound.out[rows], bound.lse[rows])


LAWS = (
    Law(
        "tree_paths",
        ATTENTION,
        tree_paths,
        "each path of a draft tree, judged alone as a causal chain, has the rows that it has in "
        "the tree",
        weight=0.5,
        needs=("tree",),
        looks_at=({"tree": chosen},),
    ),
    Law(
        "tree_siblings",
        ATTENTION,
        tree_siblings,
        "siblings of a draft tree in the opposite order have the same rows, in that order",
        weight=0.5,
        needs=("tree",),
        looks_at=({"tree": chosen},),
    ),
)
