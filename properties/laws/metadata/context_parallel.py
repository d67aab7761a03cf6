"""Laws of context parallelism: what the ranks of a group hold, and that it adds up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ....reference import (
    AttentionOutput,
    BatchMetadata,
    ContextParallelProblem,
    merge_error_bound,
    merge_states,
    oracle,
)
from ....reference.attention.bounds import Bounded
from ....reference.tensors.context_parallel import ContextParallelInputs, slice_of_rank
from ....reference.tensors.inputs import AttentionInputs
from ...verdicts.comparison import agree, bitwise, fail
from ...verdicts.contained import Stop
from ...verdicts.subject import Subject
from ...verdicts.verdict import PASS, VACUOUS, Verdict
from ..law import CONTEXT_PARALLEL, Law
from ..partition import EXACT_MERGE
from ..selection import Part, select
from .builders import fields_of


class _Slice(NamedTuple):
    """What a rank was given; nothing of it is checked yet."""

    fields: dict[str, torch.Tensor]
    page_size: int


def _page_size(result: object) -> int | None:
    value = getattr(result, "page_size", None)
    return None if value is None else int(value)


def _slice(
    subject: Subject, problem: ContextParallelProblem, inputs: ContextParallelInputs
) -> _Slice:
    """Run the subject for the record's rank."""
    result = subject.call(problem, inputs)
    page_size = subject.read(_page_size, result)
    if page_size != problem.page_size:
        message = f"page_size is {page_size}, not the {problem.page_size} keys of a rank's page"
        raise Stop(fail("numeric", message))
    return _Slice(fields_of(subject, result), problem.page_size)


def parity(subject: Subject, problem: ContextParallelProblem) -> Verdict:
    """Check every tensor against the oracle's, values and dtype."""
    inputs = subject.materialise(problem)
    expected = slice_of_rank(inputs).tensors()
    for name, value in _slice(subject, problem, inputs).fields.items():
        found = bitwise(name, value, expected[name])
        if found.bad:
            return found
        if value.dtype != torch.int32:
            return fail("dtype", f"{name} is {value.dtype}, not int32")
    return Verdict("PASS", ratio=0.0)


def partition(subject: Subject, problem: ContextParallelProblem) -> Verdict:
    """Check that the ranks hold each key once, in the pages of its number, without the oracle."""
    inputs = subject.materialise(problem)
    starts = inputs.metadata.paged_kv_indptr.tolist()
    indices = inputs.metadata.paged_kv_indices.tolist()
    virtual = [indices[a:b] for a, b in pairwise(starts)]
    held: list[list[int]] = [[] for _ in problem.seq_lens]
    for rank in range(problem.world):
        built = _slice(subject, problem, replace(inputs, rank=rank)).fields
        local = {name: value.tolist() for name, value in built.items()}
        starts, lengths = local["paged_kv_indptr"], local["seq_lens"]
        if (len(lengths), len(starts)) != (len(held), len(held) + 1):
            return fail("shape", f"rank {rank}: {len(lengths)} requests, not {len(held)}")
        for request, (a, b, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
            pages = local["paged_kv_indices"][a:b]
            if len(pages) != -(-length // problem.page_size) or pages != virtual[request][: b - a]:
                where = f"rank {rank}, request {request}"
                message = f"{where}: {length} keys in pages {pages}, of {virtual[request]}"
                return fail("numeric", message)
            held[request] += [_position(problem, rank, key) for key in range(length)]
    for request, (keys, seq_len) in enumerate(zip(held, problem.seq_lens, strict=True)):
        counts = Counter(keys)
        for key in range(max(seq_len, *counts) + 1 if counts else seq_len):
            if counts[key] != (key < seq_len):
                where = f"request {request} of {seq_len} keys"
                return fail("numeric", f"{where}: key {key} is held {counts[key]} times")
    return PASS


def _position(problem: ContextParallelProblem, rank: int, key: int) -> int:
    """Return the position in its request of a rank's local key."""
    turn, within = divmod(key, problem.interleave)
    return (turn * problem.world + rank) * problem.interleave + within


def merge(subject: Subject, problem: ContextParallelProblem) -> Verdict:
    """Attend to each rank's keys as the ranks hold them, merge, and compare with one machine.

    Decodes attend to all their keys. Prefills attend to their context without a mask, and to their
    new tokens apart, as an engine does before those are written into the ranks' caches.
    """
    if not problem.whole.num_tokens:
        return VACUOUS
    group = subject.materialise(problem.whole, unused=torch.nan)
    ragged = subject.materialise(replace(problem.whole, operation="ragged_attention"))
    lengths = list(zip(problem.query_lens, problem.contexts, problem.seq_lens, strict=True))
    context: Any = select(
        group, [Part(i, range(t), (range(c),)) for i, (t, c, _) in enumerate(lengths)]
    )
    new = select(ragged, [Part(i, range(t), (range(c, s),)) for i, (t, c, s) in enumerate(lengths)])
    states = [_attended(new)]
    asked = replace(subject.materialise(problem), metadata=context.metadata)
    requests = torch.repeat_interleave(torch.tensor(problem.query_lens))
    for rank in range(problem.world):
        fields, page_size = _slice(subject, problem, replace(asked, rank=rank))
        caches = {
            name: _share(problem, rank, getattr(context, name)) for name in ("k_cache", "v_cache")
        }
        try:
            held = BatchMetadata(**fields, page_size=page_size)
            state = _attended(replace(context, **caches, metadata=held, causal=False))
        except ValueError as error:
            return fail("shape", f"rank {rank}: {error}")
        holds_none = torch.tensor(problem.contexts)[requests] <= rank * problem.interleave
        wrong = holds_none & ~state.expected.lse.isneginf().all(dim=1).cpu()
        if wrong.any():
            where = f"rank {rank} holds no key of request {int(requests[wrong][0])}"
            return fail("numeric", f"{where}: its lse must be -inf")
        states.append(state)
    outs, lses = (
        torch.stack([getattr(each.expected, name) for each in states]) for name in ("out", "lse")
    )
    bound = merge_error_bound(
        outs,
        lses,
        out_errors=torch.stack([each.bound.out for each in states]),
        lse_errors=torch.stack([each.bound.lse for each in states]),
        arithmetic=EXACT_MERGE,
        out_dtype=torch.float64,
    )
    whole = _attended(group)
    merged: AttentionOutput = merge_states(outs, lses)
    return agree(whole.expected, merged, (whole.bound, bound), exact=False)


def _attended(inputs: AttentionInputs) -> Bounded:
    """Ask the oracle, whose own rounding is the only error here."""
    return oracle.bounded_attention(replace(inputs, out_dtype=torch.float64), EXACT_MERGE)


def _share(problem: ContextParallelProblem, rank: int, cache: torch.Tensor) -> torch.Tensor:
    """Return a rank's cache [pages, page_size, heads, dim]: its runs of each virtual page."""
    pages, _, *rest = cache.shape
    turns = cache.view(pages, -1, problem.world, problem.interleave, *rest)
    return turns[:, :, rank].reshape(pages, problem.page_size, *rest)


LAWS = (
    Law(
        "context_parallel_parity",
        CONTEXT_PARALLEL,
        parity,
        "a rank's lengths, indptrs, page ids and page size are the oracle's",
        weight=2.0,
    ),
    Law(
        "context_parallel_partition",
        CONTEXT_PARALLEL,
        partition,
        "the ranks of a group hold each key of a request once, in the first of its pages",
        overlap="context_parallel_merge attends to the same keys; this names the one that is lost",
    ),
    Law(
        "context_parallel_merge",
        CONTEXT_PARALLEL,
        merge,
        "attention to each rank's keys, merged, is attention to all of them; a rank without keys "
        "gives lse -inf",
        weight=0.5,
    ),
)
