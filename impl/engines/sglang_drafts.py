"""SGLang's Triton kernels that prepare requests whose drafts are verified, and drafted anew."""

from __future__ import annotations

import torch

from ...reference import BatchProblem
from ...reference.tensors.preparation import BatchInputs
from .batches import builder, few_tokens
from .sglang_batches import PAD_FILE
from .sglang_calls import stubs
from .sources import load

HEADS, CHANNELS = 2, 3
"""Heads and channels of the tensors whose tokens are padded."""


def _rows_of(tokens: torch.Tensor) -> torch.Tensor:
    """Return rows [..., heads, channels] of int64, different ones, of tokens [...]."""
    places = torch.arange(HEADS * CHANNELS, device=tokens.device).view(HEADS, CHANNELS)
    return tokens.long()[..., None, None] * places.numel() + places


def _tokens_of(rows: torch.Tensor) -> torch.Tensor:
    """Return the tokens whose rows these are.

    Raises:
        RuntimeError: a head or a channel is another token's.
    """
    tokens = rows[..., 0, 0] // (HEADS * CHANNELS)
    if not torch.equal(_rows_of(tokens), rows):
        message = "heads and channels of one row are of different tokens"
        raise RuntimeError(message)
    return tokens.to(torch.int32)


def _verified(problem: BatchProblem) -> str | bool:
    """Say that requests have few tokens, of which a program pads each."""
    if not any(len(news) for news, _ in problem.steps) or not problem.shape[-1]:
        return "a batch has a request, and a row a token"
    return few_tokens(problem)


@builder(
    "sglang-pad-draft-query",
    PAD_FILE,
    "pad_draft_extend_query",
    {"padded_tokens": "kept"},
    more=_verified,
)
def pad_draft_query(inputs: BatchInputs) -> None:
    """Copy the queries of drafts into a row for each request, those of two heads."""
    rows = inputs.buffer[: len(inputs.rows)]
    padded = _rows_of(rows)
    with load(PAD_FILE, stubs) as kernels:
        kernels.pad_draft_extend_query(
            q=_rows_of(inputs.tokens),
            padded_q=padded,
            seq_lens_q=inputs.query_start_loc.diff(),
            cu_seqlens_q=inputs.query_start_loc,
        )
    rows.copy_(_tokens_of(padded))


@builder(
    "sglang-unpad-draft-output",
    PAD_FILE,
    "unpad_draft_extend_output",
    {"accepted_tokens": "kept"},
    more=few_tokens,
)
def unpad_draft_output(inputs: BatchInputs) -> None:
    """Copy the outputs of accepted drafts out of a row for each request."""
    news = inputs.query_start_loc.diff()
    accepted, width = news - inputs.rejected, max([1, *news.tolist()])
    padded = inputs.tokens.new_full((len(news), width), -1)
    request = torch.arange(len(news), device=news.device).repeat_interleave(news)
    place = torch.arange(len(request), device=news.device) - inputs.query_start_loc[request]
    padded[request, place] = inputs.tokens
    total = int(accepted.sum())
    with load(PAD_FILE, stubs) as kernels:
        found = kernels.unpad_draft_extend_output(
            raw_out=_rows_of(padded),
            cu_seqlens_q=torch.nn.functional.pad(accepted.cumsum(0), (1, 0)).int(),
            seq_lens_q=accepted,
            sum_seq_lens_q=total,
            unpad_output_buffer=_rows_of(inputs.buffer),
        )
    inputs.buffer[:total] = _tokens_of(found)


@builder(
    "sglang-pad-sequence",
    PAD_FILE,
    "pad_sequence_with_mask",
    {"padded_tokens": "zero_tails"},
    more=_verified,
)
def pad_sequence(inputs: BatchInputs) -> None:
    """Copy tokens into a row for each request, with zeros behind them, beside a mask."""
    rows, news = inputs.buffer[: len(inputs.rows)], inputs.query_start_loc.diff()
    with load(PAD_FILE, stubs) as kernels:
        _, padded, mask = kernels.pad_sequence_with_mask(
            input_emb=_rows_of(inputs.tokens).flatten(1),
            offsets=inputs.query_start_loc[:-1],
            lengths=news,
            max_len=rows.shape[1],
        )
    places = torch.arange(rows.shape[1], device=news.device)
    if not torch.equal(mask.view(rows.shape), places < news.unsqueeze(1)):
        message = "the mask is not that of the tokens of each request"
        raise RuntimeError(message)
    blank = torch.where(mask.view(*rows.shape, 1, 1), 0, _rows_of(rows * 0))
    rows.copy_(_tokens_of(padded.view(*rows.shape, HEADS, CHANNELS) + blank))
