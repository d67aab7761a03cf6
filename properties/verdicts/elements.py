"""Naming the elements of an answer by request, token, head, page and channel."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from ...reference import (
    AttentionProblem,
    BatchedMoEProblem,
    MergeProblem,
    MoEProblem,
    Problem,
    QuantizeProblem,
    RouteProblem,
)
from ...reference.tensors.placement import placement
from .operations import APPENDED, AS_READ
from .verdict import Verdict

Place = dict[str, int]


def with_places(verdict: Verdict, problem: Problem) -> Verdict:
    """Return a verdict whose wrong elements are named by the axes of the problem's answer.

    Elements of other tensors, such as answers to a part of the problem, have their index only.
    """
    named = [_named(each, problem) for each in verdict.worst]
    return replace(verdict, worst=named) if named else verdict


def _named(listed: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
    name, index = listed["name"], listed["index"]
    numbers = {key: listed[key] for key in ("got", "expected", "bound")}
    place = PLACES[problem.operation](problem, name, listed["shape"], index)
    return {"where": f"{name}{index}", "at": place, **numbers}


def _of_attention(
    problem: AttentionProblem, name: str, shape: Sequence[int], index: Sequence[int]
) -> Place:
    whole = [problem.num_tokens, problem.num_qo_heads, problem.head_dim_vo]
    if (name, list(shape)) not in (("out", whole), ("lse", whole[:2])):
        return {}
    ends = list(accumulate(problem.query_lens))
    request = bisect_right(ends, index[0])
    token = index[0] - ends[request] + problem.query_lens[request]
    place = {"request": request, "token": token, "head": index[1]}
    # The key at the token's own position: the last one that it sees where attention is causal.
    key = problem.seq_lens[request] - problem.query_lens[request] + token
    if problem.operation == "paged_attention" and key >= 0:
        place["page"] = key // problem.page_size
    return place | dict(zip(("channel",), index[2:], strict=False))


def _of_append(
    problem: AttentionProblem, name: str, shape: Sequence[int], index: Sequence[int]
) -> Place:
    if name not in (*APPENDED, *AS_READ) or len(shape) != 4:  # noqa: PLR2004  pages, slots, ...
        return {}
    slot, head = (1, 2) if problem.kv_layout == "NHD" else (2, 1)
    place = {"page": index[0], "slot": index[slot], "head": index[head], "channel": index[3]}
    metadata = placement(problem).metadata
    if index[0] not in (pages := metadata.paged_kv_indices.tolist()):
        return place  # a page of no request
    entry = pages.index(index[0])
    starts = metadata.paged_kv_indptr.tolist()
    request = bisect_right(starts, entry) - 1
    first = problem.seq_lens[request] - problem.query_lens[request]
    token = (entry - starts[request]) * problem.page_size + index[slot] - first
    return {"request": request, **({"token": token} if token >= 0 else {}), **place}


def _of_rows(*axes: str) -> Callable[..., Place]:
    """Return what names the elements of answers with one row a token."""

    def place(
        problem: MergeProblem | MoEProblem | RouteProblem | QuantizeProblem,
        name: str,
        shape: Sequence[int],
        index: Sequence[int],
    ) -> Place:
        del name
        if shape[:1] != [problem.num_tokens]:
            return {}
        return dict(zip(axes, index, strict=False))

    return place


def _of_experts(
    problem: BatchedMoEProblem, name: str, shape: Sequence[int], index: Sequence[int]
) -> Place:
    del name
    if list(shape[:2]) != [problem.num_experts, problem.most_rows]:
        return {}
    return dict(zip(("expert", "row", "channel"), index, strict=False))


def _unnamed(*_: object) -> Place:
    return {}


PLACES: dict[str, Callable[[Any, str, Sequence[int], Sequence[int]], Place]] = {
    "paged_attention": _of_attention,
    "ragged_attention": _of_attention,
    "merge_state": _of_rows("token", "head", "channel"),
    "append_paged_kv": _of_append,
    "build_metadata": _unnamed,
    "slice_context_parallel": _unnamed,
    "map_slots": _unnamed,
    "prepare_batch": _unnamed,
    "prepare_steps": _unnamed,
    "plan": _unnamed,
    "route": _of_rows("token", "choice"),
    "moe": _of_rows("token", "channel"),
    "batched_moe": _of_experts,
    "quantize": _of_rows("token", "channel"),
    "norm_and_quantize": _of_rows("token", "channel"),
    "rearrange": _unnamed,
    "rope_and_append": _unnamed,
}
"""What names an element of each operation's answer, of its tensor's name, shape and index."""
