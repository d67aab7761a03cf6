"""What prepare_batch is given, and making it from a problem."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from ..attention.branches import ONE_BRANCH, Branches
from ..attention.drafts import LONGEST_MODEL, Drafts
from ..attention.preparation import OUTPUTS, prepare_batch
from ..attention.splits import USUAL_SPLITS, Splits
from ..problems.preparation import BatchProblem
from .allocation import Allocator
from .slots import drawn_table
from .values import Part, bits, bits_of, stream

VOCABULARY = 50_000
"""Tokens that ids are drawn of, beside padding and the mask."""
MASK_TOKEN = VOCABULARY + 1
"""Id of a token that is drafted in parallel."""


@dataclass(frozen=True, eq=False)
class BatchInputs:
    """Arguments of ``prepare_batch`` for a batch of R requests.

    Attributes:
        output: the name of the tensor that is built.
        query_start_loc: [R + 1] int32; request i owns new tokens ``[i]`` to ``[i + 1]``.
        seq_lens: [R] int32, the keys of each request, its new tokens included.
        rows: [R] int32, the row of each request in the tables below.
        block_table: [rows, pages] int32; entries behind a request's pages are garbage.
        token_table: [rows, keys] int32, the slots of all keys, int64 where they do not fit; those
            behind a request's keys are garbage.
        computed: [rows] int32, the keys of each request before its new tokens; garbage elsewhere.
        first_keys: [R] int32, the first key of each request's window; 0 without a window.
        kv_indptr: [R + 1] int32, where the keys of each request begin, from ``first_keys`` on.
        page_indptr: [R + 1] int32, where its pages begin.
        rejected: [R] int32, how many of each request's new tokens are rejected, its last ones.
        tokens: [T] int32, the ids of the new tokens.
        parents: [T] int32, the token of the same request before each new token, -1 of the first.
        mask: flat bool, which keys each new token sees, where a mask is packed; else empty.
        next_tokens: [R] int32, the id of the token that follows the accepted ones.
        buffer: the buffer that is written; what it holds before is garbage, or what an earlier
            batch left there. A table has a row for each request.
        page_size: keys a page.
        rest: what becomes of the buffer behind the entries, one of ``RESTS``.
        window_left: keys before its own that a request's first new token sees; -1: all.
        rank: the rank whose keys are counted.
        world: ranks of the group.
        interleave: consecutive keys on one rank.
        num_drafts: tokens that are drafted next, of each request.
        is_shifted: whether a drafter is not given a request's first new token.
        max_model_len: keys that a request has at most.
        splits: what the numbers of parts depend on, into which keys are divided.
        branches: the branches that are drafted, each of ``num_drafts`` tokens.
        lookahead: keys behind each request's that its pages have room for.
        storages: flat buffers by field name, of which the tensors are views.
    """

    output: str
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    rows: torch.Tensor
    block_table: torch.Tensor
    token_table: torch.Tensor
    computed: torch.Tensor
    first_keys: torch.Tensor
    kv_indptr: torch.Tensor
    page_indptr: torch.Tensor
    rejected: torch.Tensor
    tokens: torch.Tensor
    next_tokens: torch.Tensor
    parents: torch.Tensor
    mask: torch.Tensor
    buffer: torch.Tensor
    page_size: int
    rest: str = "kept"
    window_left: int = -1
    rank: int = 0
    world: int = 1
    interleave: int = 1
    num_drafts: int = 0
    is_shifted: bool = False
    max_model_len: int = LONGEST_MODEL
    splits: Splits = USUAL_SPLITS
    branches: Branches = ONE_BRANCH
    lookahead: int = 0
    storages: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def drafts(self) -> Drafts:
        """What became of the requests' drafts, and what is drafted next."""
        return Drafts(
            self.rejected,
            self.tokens,
            self.next_tokens,
            self.num_drafts,
            MASK_TOKEN,
            self.is_shifted,
            self.max_model_len,
            self.parents,
            self.branches,
        )


def batch_inputs(problem: BatchProblem, home: Allocator, *, step: int = 0) -> BatchInputs:
    """Make the tensors of one call of ``prepare_batch``, that of a step."""
    news, keys = (torch.tensor(each, dtype=torch.long) for each in problem.steps[step])
    size, window = problem.page_size, problem.window_left
    room = keys + problem.lookahead
    order, table = drawn_table(problem, -(-room // size), step)
    rows = order[: len(keys)]
    width = problem.columns * size
    offsets = torch.arange(width) % size
    tokens = table.repeat_interleave(size, dim=1) * size + offsets
    is_key = torch.zeros(tokens.shape, dtype=torch.bool)
    is_key[rows] = torch.arange(width) < room.unsqueeze(1)
    output, numbers, lines = OUTPUTS[problem.output], torch.arange(len(order)), torch.arange(1)
    other_slots, computed, before, tokens_at, next_at = bits_of([
        Part(stream(problem.seed, f"{tag} {step}"), at, columns)
        for tag, at, columns in (
            ("slots", numbers, width),
            ("computed", numbers, 1),
            ("buffer", lines, math.prod(problem.shape)),
            ("tokens", lines, int(news.sum())),
            ("next tokens", lines, len(news)),
        )
    ])  # fmt: skip
    computed = computed.flatten()
    computed[rows] = keys - news
    first = (keys - news - window).clamp(min=0) if window >= 0 else torch.zeros_like(keys)
    # Beyond all entries: what an earlier batch may have left there is for a law to say.
    before = before.view(problem.shape) % 2**30 + (2**30 if output.dtype == torch.int32 else 2**40)
    before = before % 3 > 0 if output.dtype == torch.bool else before

    def token_ids(ids: torch.Tensor) -> torch.Tensor:
        return (1 + ids.flatten() % VOCABULARY).int()

    def indptr(counts: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0, *accumulate(counts.tolist())])

    integers = home.place_integers({
        "query_start_loc": indptr(news).int(),
        "seq_lens": keys.int(),
        "rows": rows.int(),
        "block_table": table.to(torch.int32),
        "token_table": torch.where(is_key, tokens, other_slots).to(torch.int32),
        "computed": computed.to(torch.int32),
        "first_keys": first.int(),
        "kv_indptr": indptr(keys - first).int(),
        "page_indptr": indptr(-(-keys // size)).int(),
        "rejected": torch.tensor(problem.rejected_in(step), dtype=torch.int32),
        "tokens": token_ids(tokens_at),
        "next_tokens": token_ids(next_at),
        "parents": _parents(problem, step),
    })  # fmt: skip
    return BatchInputs(
        output=problem.output,
        **integers,
        mask=home.place("mask", _mask(problem, step)),
        buffer=home.place("buffer", before.to(output.dtype)),
        page_size=size,
        rest=problem.rest,
        window_left=window,
        rank=problem.rank,
        world=problem.world,
        interleave=problem.interleave,
        num_drafts=problem.drafts,
        is_shifted=problem.is_shifted,
        max_model_len=problem.max_model_len,
        splits=Splits(*problem.splits),
        branches=Branches(*problem.branches),
        lookahead=problem.lookahead,
        storages=home.storages,
    )


def _parents(problem: BatchProblem, step: int) -> torch.Tensor:
    """Return of each new token the one before it: the last one, or in a tree any by the seed."""
    news, _ = problem.steps[step]
    place = torch.tensor([token for new in news for token in range(new)], dtype=torch.long)
    parents = place - 1
    if problem.is_tree:
        key = stream(problem.seed, f"parents {step}")
        drawn = bits(key, torch.arange(1), len(place)).flatten() % place.clamp(min=1)
        parents = torch.where(place > 0, drawn, -1)
    return parents.int()


def _mask(problem: BatchProblem, step: int) -> torch.Tensor:
    """Return which keys each new token sees, flat, where a mask is packed; else nothing."""
    rows = [torch.zeros(0, dtype=torch.bool)]
    if problem.output != "packed_mask":
        return rows[0]
    parents = _parents(problem, step).tolist()
    start = 0
    for new, keys in zip(*problem.steps[step], strict=True):
        seen = torch.ones((new, keys), dtype=torch.bool)
        for token, parent in enumerate(parents[start : start + new]):
            seen[token, keys - new :] = seen[parent, keys - new :] if token else False
            seen[token, keys - new + token] = True
        rows.append(seen.flatten())
        start += new
    return torch.cat(rows)


def prepared(inputs: BatchInputs) -> torch.Tensor:
    """Prepare the record's batch, by definition."""
    return prepare_batch(
        inputs.output,
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.block_table,
        inputs.page_size,
        rows=inputs.rows,
        buffer=inputs.buffer,
        rest=inputs.rest,
        window_left=inputs.window_left,
        rank=inputs.rank,
        world=inputs.world,
        interleave=inputs.interleave,
        drafts=inputs.drafts,
        splits=inputs.splits,
    )
