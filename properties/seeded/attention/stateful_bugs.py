"""Faults that show only in the next call: what a wrapper remembers of the last one.

A single call gives the right answer, so that parity, which looks at one call, passes most of the
time: these are for the laws that compare two.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch

from ....reference.tensors.inputs import (
    AttentionOptions,
    MergeInputs,
    PagedAttentionInputs,
    RaggedAttentionInputs,
)
from ..catalogue import SeededBug, seeded
from ..honest import merge_states
from ..kernels import HONEST, attend, finite, gather_pages, key_counts, page_ids

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED, RAGGED, MERGE = "paged_attention", "ragged_attention", "merge_state"
MOST_PLANS = 4096
_plans: dict[str, dict[Hashable, Any]] = {}


def planned(key: tuple[Hashable, ...], plan: Any, *, most: int = 1) -> Any:  # noqa: ANN401
    """Return the remembered plan of a key, as from a cache that nothing invalidates.

    The key starts with the cache's name. It holds ``most`` plans, and forgets all when it is full.
    """
    plans = _plans.setdefault(str(key[0]), {})
    if key not in plans and len(plans) >= most:
        plans.clear()
    return plans.setdefault(key, plan)


def checksum(tensor: torch.Tensor) -> int:
    """Add up bits, in any order: it stands for an address, by which wrappers know a tensor."""
    return int(tensor.contiguous().flatten().view(torch.uint8).long().square().sum())


def batch_of(inputs: PagedAttentionInputs) -> tuple[int, ...]:
    """Return a key of the batch: its lengths, and a checksum for the queries' address."""
    lengths = (*inputs.metadata.qo_indptr.tolist(), *inputs.metadata.seq_lens.tolist())
    return (*lengths, *inputs.q.shape, checksum(inputs.q))


@seeded(BUGS, PAGED, "sensitivity", model="flashinfer#1193")
def options_of_first_plan(inputs: PagedAttentionInputs) -> Pair:
    """Keep the options of the first call with these queries and shapes."""
    key = ("options", batch_of(inputs), tuple(inputs.k_cache.shape), inputs.kv_layout,
           inputs.sinks is None)  # fmt: skip
    options = {
        name: getattr(inputs, name)
        for name in AttentionOptions.__dataclass_fields__
        if name not in ("sinks", "custom_mask")
    }
    return attend(replace(inputs, **planned(key, options)))


@seeded(BUGS, RAGGED, "sensitivity")
def window_of_first_plan(inputs: RaggedAttentionInputs) -> Pair:
    """Keep the window of the first call with these queries and lengths."""
    key = ("window", tuple(inputs.q.shape), checksum(inputs.q), tuple(inputs.kv_indptr.tolist()))
    return attend(replace(inputs, window_left=planned(key, inputs.window_left)))


@seeded(BUGS, PAGED, "page_relabelling", model="vllm#39546")
def pages_of_first_plan(inputs: PagedAttentionInputs) -> Pair:
    """Keep the page indices of the first call with these queries and lengths."""
    first_row = tuple(inputs.q[:1].flatten().tolist())
    key = ("pages", batch_of(inputs), first_row, tuple(inputs.k_cache.shape), inputs.kv_layout)
    first = planned(key, [row.clone() for row in page_ids(inputs)])

    def pages(inputs: PagedAttentionInputs) -> list[torch.Tensor]:
        del inputs
        return list(first)

    return attend(inputs, replace(HONEST, pages=pages))


@seeded(BUGS, PAGED, "layout_invariance")
def layout_of_first_plan(inputs: PagedAttentionInputs) -> Pair:
    """Keep the order of axes of the first cache with this many pages, slots and heads."""
    dims = inputs.k_cache.shape
    slots, heads = (dims[1], dims[2]) if inputs.kv_layout == "NHD" else (dims[2], dims[1])
    key = ("layout", batch_of(inputs), dims[0], slots, heads, dims[3])
    layout = planned(key, inputs.kv_layout)
    if layout == inputs.kv_layout:
        return attend(inputs)

    def gather(
        cache: torch.Tensor, pages: torch.Tensor, inputs: PagedAttentionInputs
    ) -> torch.Tensor:
        mistaken = cache.reshape(cache.shape[0], cache.shape[2], cache.shape[1], -1)
        return gather_pages(mistaken, pages, replace(inputs, kv_layout=layout))

    return attend(inputs, replace(HONEST, gather=gather))


@seeded(BUGS, PAGED, "page_size_invariance")
def page_size_of_first_plan(inputs: PagedAttentionInputs) -> Pair:
    """Keep the page size of the first call with these queries and lengths."""
    key = ("page_size", batch_of(inputs), inputs.kv_layout)
    size = min(planned(key, inputs.metadata.page_size), inputs.metadata.page_size)

    def gather(
        cache: torch.Tensor, pages: torch.Tensor, inputs: PagedAttentionInputs
    ) -> torch.Tensor:
        found = gather_pages(cache, pages, inputs)
        by_page = found.view(len(pages), inputs.metadata.page_size, *found.shape[1:])
        return by_page[:, :size].flatten(0, 1)

    return attend(inputs, replace(HONEST, gather=gather))


_last: dict[str, list[int]] = {}


_larger: dict[str, tuple[torch.Tensor, list[int]]] = {}


def _holds(queries: torch.Tensor, row: torch.Tensor) -> bool:
    """Whether one of the rows [T, H, D] is this one [1, H, D]."""
    if not len(row) or queries.shape[1:] != row.shape[1:]:
        return False
    return bool((queries == row).flatten(1).all(dim=1).any())


@seeded(BUGS, PAGED, "batch_independence", model="vllm#23737")
def lengths_of_larger_batch(inputs: PagedAttentionInputs) -> Pair:
    """Read sequence lengths before they are copied in, if the last batch held these queries too."""
    now = key_counts(inputs)
    queries, before = _larger.get("last", (inputs.q, now))
    _larger["last"] = (inputs.q.clone(), now)
    stale = now
    if now and len(before) > len(now) and _holds(queries, inputs.q[:1]):
        stale = before[-len(now) :]

    def counts(inputs: PagedAttentionInputs) -> list[int]:
        return [min(old, new) for old, new in zip(stale, key_counts(inputs), strict=True)]

    return attend(inputs, replace(HONEST, counts=counts))


@seeded(BUGS, MERGE, "merge_commutativity")
def weights_by_checksum(inputs: MergeInputs) -> Pair:
    """Reuse the weights of three states or more, none empty, that come again in another order."""
    if inputs.lses.isneginf().any() or len(inputs.outs) < 3:  # noqa: PLR2004
        return merge_states(inputs.outs, inputs.lses, inputs.out_dtype)
    key = ("checksum", tuple(inputs.outs.shape), checksum(inputs.outs), checksum(inputs.lses))
    outs, lses = planned(key, (inputs.outs.clone(), inputs.lses.clone()))
    if not torch.equal(outs.flip(0), inputs.outs):
        lses = inputs.lses
    return merge_states(inputs.outs, lses, inputs.out_dtype)


@seeded(BUGS, MERGE, "merge_associativity")
def weight_of_second_state(inputs: MergeInputs) -> Pair:
    """Reuse the weight of a second state that comes again, whatever the first one is."""
    if len(inputs.outs) != 2:  # noqa: PLR2004  a pair
        return merge_states(inputs.outs, inputs.lses, inputs.out_dtype)
    largest = inputs.lses.amax(dim=0)
    weights = torch.exp(inputs.lses - finite(largest))
    key = ("second", tuple(inputs.outs.shape), checksum(inputs.outs[1]),
           tuple(inputs.lses[1].flatten().tolist()))  # fmt: skip
    weights = torch.stack([weights[0], planned(key, weights[1].clone(), most=MOST_PLANS)])
    total = weights.sum(dim=0)
    out = (weights.unsqueeze(-1) * inputs.outs.float()).sum(dim=0)
    out = out / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return out.to(inputs.out_dtype), largest + torch.log(total)


@seeded(BUGS, MERGE, "merge_many_at_once")
def states_of_larger_merge(inputs: MergeInputs) -> Pair:
    """Count the last state twice, if the last call merged more states."""
    before = _last.get("states", [])
    _last["states"] = [0] * len(inputs.outs)
    outs, lses = inputs.outs, inputs.lses
    if len(before) > len(outs):
        outs, lses = torch.cat([outs, outs[-1:]]), torch.cat([lses, lses[-1:]])
    return merge_states(outs, lses, inputs.out_dtype)
