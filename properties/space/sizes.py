"""Problems of another size: on which a call is timed, and how the score names one."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from ...reference import (
    AttentionProblem,
    BatchProblem,
    MergeProblem,
    MetadataProblem,
    MoEProblem,
    PlanProblem,
    QuantizeProblem,
    RearrangeProblem,
    RouteProblem,
    SlotsProblem,
    StepsProblem,
)
from .simplifying import FEW_PAGES

COST_REQUESTS = 8
COST_ROWS, COST_KEYS = 8, 64
"""Factors by which the second call that is timed has more rows, and more keys a request."""
OfTokens = TypeVar("OfTokens", MergeProblem, MoEProblem, RouteProblem, QuantizeProblem)


def more_tokens(problem: OfTokens) -> OfTokens:
    """Return the problem with ``COST_ROWS`` times as many tokens."""
    return replace(problem, num_tokens=COST_ROWS * problem.num_tokens)


def some_tokens(problem: OfTokens) -> OfTokens:
    """Return the problem with ``COST_ROWS`` tokens."""
    return replace(problem, num_tokens=COST_ROWS)


def more_requests(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem with each request ``COST_REQUESTS`` times."""
    return replace(
        problem,
        query_lens=problem.query_lens * COST_REQUESTS,
        seq_lens=problem.seq_lens * COST_REQUESTS,
    )


def more_keys(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem with ``COST_KEYS`` times as many keys in each request."""
    return replace(problem, seq_lens=tuple(COST_KEYS * s for s in problem.seq_lens))


def of_batch(problem: AttentionProblem) -> str:
    """Return requests, tokens and keys of attention in words."""
    keys = sum(problem.seq_lens)
    return f"{len(problem.seq_lens)} requests, {problem.num_tokens} tokens, {keys} keys"


def of_pages(problem: AttentionProblem) -> str:
    """Return requests, tokens, keys and pages of attention in words."""
    return f"{of_batch(problem)} in {problem.num_pages} pages"


def of_states(problem: MergeProblem) -> str:
    """Return states and tokens of a merge in words."""
    return f"{problem.num_states} states, {problem.num_tokens} tokens"


def of_steps(problem: MetadataProblem | SlotsProblem | BatchProblem) -> str:
    """Return batches and requests of metadata in words."""
    requests = sum(len(lengths) for lengths, _ in problem.steps)
    return f"{len(problem.steps)} batches, {requests} requests"


def of_batches(problem: StepsProblem) -> str:
    """Return batches and requests of an engine's steps in words."""
    requests = sum(len(step.requests) for step in problem.steps)
    return f"{len(problem.steps)} batches, {requests} requests"


def of_experts(problem: MoEProblem | RouteProblem) -> str:
    """Return tokens and experts in words."""
    return f"{problem.num_tokens} tokens, {problem.top_k} of {problem.num_experts} experts"


def of_matrix(problem: QuantizeProblem) -> str:
    """Return rows and columns of a matrix in words."""
    return f"{problem.num_tokens} tokens, {problem.num_channels} channels"


def lengths_of_matrix(problem: QuantizeProblem) -> dict[str, int]:
    """Return rows and columns of a matrix."""
    return {"tokens": problem.num_tokens, "channels": problem.num_channels}


def of_weights(problem: RearrangeProblem) -> str:
    """Return rows and columns of weights or scales in words."""
    return f"{problem.rows} rows, {problem.columns} columns"


def lengths_of_weights(problem: RearrangeProblem) -> dict[str, int]:
    """Return rows and columns of weights or scales."""
    return {"rows": problem.rows, "columns": problem.columns}


def lengths_of_batch(problem: AttentionProblem) -> dict[str, int]:
    """Return keys and queries of the longest request, requests, and pages of the longest."""
    keys = max(problem.seq_lens, default=0)
    queries, requests = max(problem.query_lens, default=0), len(problem.seq_lens)
    return {"keys": keys, "queries": queries, "requests": requests,
            "pages": -(-keys // problem.page_size)}  # fmt: skip


def lengths_of_ragged(problem: AttentionProblem) -> dict[str, int]:
    """Return keys and queries of the longest request, and requests."""
    return {name: n for name, n in lengths_of_batch(problem).items() if name != "pages"}


def lengths_of_tokens(problem: MergeProblem | MoEProblem | RouteProblem) -> dict[str, int]:
    """Return tokens, and what each of them has several of: states or experts."""
    many = "states" if isinstance(problem, MergeProblem) else "experts"
    return {"tokens": problem.num_tokens, many: getattr(problem, f"num_{many}")}


def lengths_of_steps(problem: MetadataProblem | SlotsProblem | BatchProblem) -> dict[str, int]:
    """Return keys of the longest request, requests of the largest batch, and batches."""
    keys = max((key for _, seq_lens in problem.steps for key in seq_lens), default=0)
    requests = max((len(seq_lens) for _, seq_lens in problem.steps), default=0)
    return {"keys": keys, "requests": requests, "batches": len(problem.steps)}


def lengths_of_batches(problem: StepsProblem) -> dict[str, int]:
    """Return keys of the longest request, requests of the largest batch, and batches."""
    keys = max(request.keys for step in problem.steps for request in step.requests)
    requests = max(len(step.requests) for step in problem.steps)
    return {"keys": keys, "requests": requests, "batches": len(problem.steps)}


def of_plan(problem: PlanProblem) -> str:
    """Return requests and query tokens of a batch in words."""
    return f"{len(problem.kv_lens)} requests, {sum(problem.query_lens)} query tokens"


def lengths_of_plan(problem: PlanProblem) -> dict[str, int]:
    """Return keys and queries of the longest request, and requests."""
    keys, queries = max(problem.kv_lens), max(problem.query_lens)
    return {"keys": keys, "queries": queries, "requests": len(problem.kv_lens)}


def edges_of_batch(problem: AttentionProblem, tile: int, split: int) -> dict[str, bool]:
    """Return which structural edges a batch crosses.

    Args:
        problem: the batch.
        tile, split: numbers of keys that a kernel takes at once, and that it reduces over apart; 0
            where it names none.
    """
    reached = lengths_of_batch(problem)
    chunks = zip(problem.query_lens, problem.seq_lens, strict=True)
    edges = {
        "several_requests": reached["requests"] > 1,
        "request_without_keys": 0 in problem.seq_lens,
        "several_chunks": any(1 < queries < keys for queries, keys in chunks),
    }
    if problem.operation != "ragged_attention":
        edges["several_pages"] = reached["pages"] > 1
    if tile:
        edges["several_tiles"] = reached["keys"] > tile
    if split:
        edges["several_splits"] = reached["keys"] > split
    return edges


def is_one_request(problem: AttentionProblem) -> bool:
    """Whether a problem has at most one request."""
    return len(problem.seq_lens) <= 1


def is_on_few_pages(problem: AttentionProblem) -> bool:
    """Whether a problem has at most one request and two pages of keys."""
    return is_one_request(problem) and problem.num_pages <= FEW_PAGES
