"""Masks with a structure as vLLM's ``unified_attention`` takes them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from ...reference import AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs

FEATURES = ("image_spans", "chunked_attention", "sink_tokens", "alibi_sqrt")
"""Optional features of problems that these arguments say."""
LATER: tuple[tuple[str, Callable[[AttentionProblem], bool], str], ...] = (
    ("MAX_MM_RANGES", lambda problem: bool(problem.spans), "no ranges that see both ways"),
    ("chunk_lookback", lambda problem: problem.chunk > 0, "no chunks"),
    ("rswa_window", lambda problem: problem.sink_tokens > 0, "no keys that a window never hides"),
    ("use_alibi_sqrt", lambda problem: problem.alibi_function == "sqrt", "no root of a distance"),
)
"""What older releases do not have: a word of the file, whose problems need it, and the reason."""


def refusal(problem: AttentionProblem, *, causal: bool) -> str | None:
    """Return which masks the arguments cannot say; None if they say a problem's.

    Args:
        problem: the problem of attention.
        causal: whether all of its requests are.
    """
    for holds, why in (
        (problem.chunk and not causal, "chunks hide earlier keys only"),
        (problem.chunk and problem.window_left >= 0, "a chunk is the window of the call"),
        (problem.chunk and problem.spans, "no model has chunks and ranges that see both ways"),
        (
            problem.chunk and problem.sink_tokens,
            "the first keys are those of a window, not a chunk",
        ),
    ):
        if holds:
            return why
    return None


def compile_key(problem: AttentionProblem) -> tuple[Hashable, ...]:
    """Name what is compiled in."""
    kept = problem.sink_tokens > 0 and problem.window_left >= 0
    return problem.spans, problem.chunk, kept, problem.alibi_function


def arguments(inputs: PagedAttentionInputs) -> tuple[int, dict[str, Any]]:
    """Return how many keys before a query are seen, -1 for all, and the arguments beside it."""
    left, found = inputs.window_left, dict[str, Any]()
    lengths = inputs.metadata.seq_lens
    if inputs.spans is not None and inputs.spans.shape[1]:
        # vLLM's ranges are of tokens that are there, and end with their last one.
        start, stop = inputs.spans.unbind(-1)
        stop = torch.minimum(stop, lengths[:, None])
        found["mm_prefix_range"] = torch.stack((start, stop - 1), -1).int().contiguous()
    if inputs.attention_chunk_size:
        # A window of a whole number of chunks is that many chunks, less those looked back at.
        left, found["chunk_lookback"] = inputs.attention_chunk_size - 1, 0
    if inputs.sink_tokens and left >= 0:
        found["rswa_prefix_lens"] = torch.full_like(lengths, inputs.sink_tokens)
        found["rswa_window"] = left + 1
        left = -1  # a layer has either window
    if inputs.alibi_function == "sqrt":
        found["use_alibi_sqrt"] = True
    return left, found
