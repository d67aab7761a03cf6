"""vLLM's Triton kernels that prepare requests whose drafts are verified, and drafted anew."""

from __future__ import annotations

from typing import Any

import torch

from ....reference import BatchProblem
from ....reference.tensors.preparation import MASK_TOKEN, VOCABULARY, BatchInputs
from ...features import FAR_SLOTS, INT64_INPUTS
from ..sources import load
from ..vllm_stubs import stubs
from .batches import (
    MOST_DECODED,
    builder,
    every_request_drafts,
    few_tokens,
    has_columns,
    keeps_tokens,
    next_power_of_two,
    scratch,
)
from .vllm_batches import BATCH_FILE

DRAFTS_FILE = "vllm.v1.spec_decode.utils"
NEVER_COMPUTED = 2**20
"""Tokens of the prefill of requests that no batch has."""
WIDEST_BLOCK = 256
"""Most entries that one program of the expanding kernels writes."""


def _launch(kernel: str, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:  # noqa: ANN401
    with load(DRAFTS_FILE, stubs) as kernels:
        getattr(kernels, kernel)[grid](*arguments, **options)


def _blocks(longest: int) -> tuple[int, int]:
    """Return the width of a block and the blocks of the longest request, as vLLM chooses them."""
    block = min(WIDEST_BLOCK, next_power_of_two(longest))
    return block, -(-longest // block)


def _longest(inputs: BatchInputs) -> int:
    return int(inputs.query_start_loc.diff().max()) if len(inputs.rows) else 0


def _positions(inputs: BatchInputs) -> torch.Tensor:
    """Return the positions of all new tokens."""
    first = inputs.computed[inputs.rows.long()] - inputs.query_start_loc[:-1]
    tokens = torch.arange(len(inputs.tokens), device=first.device)
    return first.repeat_interleave(inputs.query_start_loc.diff()) + tokens


@builder(
    "vllm-rejected-tokens",
    DRAFTS_FILE,
    "eagle_prepare_inputs_padded_kernel",
    {"num_rejected_tokens": "kept", "token_indices_to_sample": "kept"},
    more=keeps_tokens,
)
def rejected_tokens(inputs: BatchInputs) -> None:
    """Write how many tokens are rejected, and which is the last that is not."""
    news, requests = inputs.query_start_loc.diff(), len(inputs.rows)
    _launch(
        "eagle_prepare_inputs_padded_kernel",
        (requests + 1,),  # a program more than there are requests does nothing
        (news - 1).clamp(min=0).cumsum(0).int(),
        news - inputs.rejected,
        inputs.query_start_loc,
        scratch(inputs, "token_indices_to_sample", requests, torch.int32),
        scratch(inputs, "num_rejected_tokens", requests, torch.int32),
        requests,
    )


@builder(
    "vllm-last-tokens",
    DRAFTS_FILE,
    "eagle_prepare_next_token_padded_kernel",
    {"last_tokens": "kept", "valid_sampled_tokens_count": "kept"},
    more=few_tokens,
)
def last_tokens(inputs: BatchInputs) -> None:
    """Write how many tokens are valid, and the last of them or another one where none is.

    Rejected tokens are -1, or none of the vocabulary. Every other request without a valid token is
    one to discard, whose row is garbage.
    """
    requests, width = len(inputs.rows), max(_longest(inputs), 1)
    accepted = inputs.query_start_loc.diff() - inputs.rejected
    places = torch.arange(width, device=accepted.device)
    is_valid = places < accepted.unsqueeze(1)
    discarded = (accepted == 0) & (torch.arange(requests, device=accepted.device) % 2 == 0)
    invalid = torch.where(places % 2 == 0, -1, VOCABULARY + 1).int()
    sampled = torch.where(discarded.unsqueeze(1), places.int(), invalid)
    source = inputs.query_start_loc[:-1].unsqueeze(1) + places
    known = torch.nn.functional.pad(inputs.tokens, (0, width))
    sampled = torch.where(is_valid, known[source.long()], sampled)
    _launch(
        "eagle_prepare_next_token_padded_kernel",
        (requests,),
        sampled,
        discarded,
        inputs.next_tokens,
        scratch(inputs, "last_tokens", requests, torch.int32),
        scratch(inputs, "valid_sampled_tokens_count", requests, torch.int32),
        VOCABULARY + 1,
        width,
        requests,
        sampled.stride(0),
        BLOCK_SIZE_TOKENS=next_power_of_two(width),
    )


def _step(inputs: BatchInputs, behind: int) -> None:
    # Not far_slots: page ids and sizes are multiplied in int32.
    requests, table = len(inputs.rows), inputs.block_table[inputs.rows.long()]
    ends = inputs.seq_lens - inputs.rejected
    lengths = scratch(inputs, "next_seq_lens", requests, torch.int32)
    lengths[:requests] = ends  # the kernel reads and writes them
    _launch(
        "eagle_step_slot_mapping_metadata_kernel",
        (requests + behind,),
        ends.long() - 1,
        table,
        table.stride(0),
        lengths,
        scratch(inputs, "next_positions", requests, torch.int64),
        scratch(inputs, "next_slots", requests + behind, torch.int64),
        block_size=inputs.page_size,
        max_model_len=inputs.max_model_len,
        n_blocks_per_req=table.shape[1],
        PAD_ID=-1,
        batch_size=requests,
    )


@builder(
    "vllm-draft-step",
    DRAFTS_FILE,
    "eagle_step_slot_mapping_metadata_kernel",
    {"next_positions": "kept", "next_slots": "kept", "next_seq_lens": "kept"},
    more=has_columns,
    sized=True,
)
def draft_step(inputs: BatchInputs) -> None:
    """Write position, slot and length of the next draft of each request."""
    _step(inputs, 0)


@builder(
    "vllm-draft-step-graph",
    DRAFTS_FILE,
    "eagle_step_slot_mapping_metadata_kernel",
    {"next_slots": "zero_rows"},
    more=has_columns,
    sized=True,
)
def draft_step_graph(inputs: BatchInputs) -> None:
    """Write the slot of the next draft of each request, and none for a graph's other requests."""
    _step(inputs, len(inputs.buffer) - len(inputs.rows))


def _given_to_a_drafter(problem: BatchProblem) -> str | bool:
    if problem.output == "hidden_state_mapping" and not problem.is_shifted:
        return "a draft model takes no hidden states"
    return every_request_drafts(problem)


@builder(
    "vllm-expanded-drafts",
    DRAFTS_FILE,
    "copy_and_expand_eagle_inputs_kernel",
    {
        "draft_input_ids": "kept",
        "draft_positions": "kept",
        "is_rejected_token_mask": "kept",
        "is_masked_token_mask": "kept",
        "new_token_indices": "kept",
        "hidden_state_mapping": "kept",
    },
    more=_given_to_a_drafter,
)
def expanded_drafts(inputs: BatchInputs) -> None:
    """Write the inputs of a draft model, or of a drafter beside hidden states of tokens before."""
    requests, tokens = len(inputs.rows), len(inputs.tokens)
    slots = inputs.num_drafts - inputs.is_shifted
    entries = max(tokens + requests * slots, 0)
    block, blocks = _blocks(_longest(inputs) + slots)
    _launch(
        "copy_and_expand_eagle_inputs_kernel",
        (requests, blocks),
        inputs.tokens,
        _positions(inputs),
        inputs.next_tokens,
        scratch(inputs, "draft_input_ids", entries, torch.int32),
        scratch(inputs, "draft_positions", entries, torch.int64),
        scratch(inputs, "is_rejected_token_mask", entries, torch.bool),
        scratch(inputs, "is_masked_token_mask", entries, torch.bool),
        scratch(inputs, "new_token_indices", requests * inputs.num_drafts, torch.int32),
        scratch(inputs, "hidden_state_mapping", tokens, torch.int32),
        inputs.query_start_loc,
        inputs.query_start_loc[1:] - 1 - inputs.rejected,
        0,
        MASK_TOKEN,
        tokens,
        inputs.num_drafts,
        inputs.is_shifted,
        BLOCK_SIZE_TOKENS=block,
    )


def _has_tokens(problem: BatchProblem) -> str | bool:
    if not all(tokens for new, _ in problem.steps for tokens in new):
        return "each request has a new token"
    return keeps_tokens(problem) if problem.columns else has_columns(problem)


@builder(
    "vllm-dflash-inputs",
    DRAFTS_FILE,
    "copy_and_expand_dflash_inputs_kernel",
    {
        "positions": "kept",
        "slot_mapping": "kept",
        "query_input_ids": "kept",
        "query_positions": "kept",
        "query_slots": "kept",
        "query_indices_to_sample": "kept",
    },
    more=_has_tokens,
    features=(FAR_SLOTS, INT64_INPUTS),
)
def dflash_inputs(inputs: BatchInputs) -> None:
    """Write what a drafter is given that attends to the target's tokens."""
    requests, tokens = len(inputs.rows), len(inputs.tokens)
    queries = 1 + inputs.num_drafts
    table = inputs.block_table[inputs.rows.long()]
    block, blocks = _blocks(_longest(inputs) + queries)
    has_rejected = bool(inputs.rejected.any())
    _launch(
        "copy_and_expand_dflash_inputs_kernel",
        (requests, blocks),
        inputs.next_tokens,
        _positions(inputs),
        scratch(inputs, "query_input_ids", requests * queries, torch.int32),
        scratch(inputs, "positions", tokens, torch.int64),
        scratch(inputs, "query_positions", requests * queries, torch.int64),
        scratch(inputs, "slot_mapping", tokens, torch.int64),
        scratch(inputs, "query_slots", requests * queries, torch.int64),
        scratch(inputs, "query_indices_to_sample", requests * inputs.num_drafts, torch.int32),
        table,
        table.stride(0),
        inputs.query_start_loc,
        inputs.rejected if has_rejected else 0,
        MASK_TOKEN,
        inputs.page_size,
        queries,
        inputs.num_drafts,
        tokens,
        BLOCK_SIZE=block,
        HAS_NUM_REJECTED=has_rejected,
    )


def _of_rows(inputs: BatchInputs, of_requests: torch.Tensor, other: int) -> torch.Tensor:
    """Return what is known of each row of a table, something else of rows without a request."""
    found = torch.full_like(inputs.computed, other)
    found[inputs.rows.long()] = of_requests.to(found.dtype)
    return found


@builder(
    "vllm-sampled-and-rejected",
    BATCH_FILE,
    "get_num_sampled_and_rejected",
    {"num_rejected_tokens": "kept", "valid_sampled_tokens_count": "kept"},
)
def sampled_and_rejected(inputs: BatchInputs) -> None:
    """Count the tokens that are kept and rejected; none of a request amid its prefill."""
    news, requests = inputs.query_start_loc.diff(), len(inputs.rows)
    is_prefilled = news > 0
    sampled = torch.where(is_prefilled, news - inputs.rejected, 1 + news)
    with load(BATCH_FILE, stubs) as kernels:
        found = kernels.get_num_sampled_and_rejected(
            sampled,
            inputs.seq_lens,
            inputs.query_start_loc,
            inputs.rows,
            _of_rows(inputs, inputs.seq_lens + (~is_prefilled).int(), NEVER_COMPUTED),
        )
    names = ("valid_sampled_tokens_count", "num_rejected_tokens")
    inputs.buffer[:requests] = found[names.index(inputs.output)]


@builder(
    "vllm-computed-tokens",
    BATCH_FILE,
    "post_update_num_computed_tokens",
    {"accepted_seq_lens": "kept"},
)
def computed_tokens(inputs: BatchInputs) -> None:
    """Add the tokens that are kept to the computed keys of their requests."""
    rows, after = inputs.rows.long(), inputs.computed.clone()
    kept = inputs.query_start_loc.diff() - inputs.rejected
    starts = torch.nn.functional.pad(kept.cumsum(0), (1, 0)).int()
    with load(BATCH_FILE, stubs) as kernels:
        kernels.post_update_num_computed_tokens(inputs.rows, after, starts)
    inputs.buffer[: len(rows)] = after[rows]
    after[rows] = inputs.computed[rows]
    if not torch.equal(after, inputs.computed):
        message = "the computed keys of a request that is not in the batch have changed"
        raise RuntimeError(message)


@builder(
    "vllm-input-ids",
    BATCH_FILE,
    "LOOKAHEAD_BLOCK",
    {"accepted_tokens": "kept"},
    features=(),  # what the runner keeps beside it is int32
)
def input_ids(inputs: BatchInputs) -> None:
    """Write the tokens that are kept: of every other short request as a sampled one and drafts."""
    device, rows = inputs.rows.device, inputs.rows.long()
    kept = inputs.query_start_loc.diff() - inputs.rejected
    before = inputs.seq_lens - inputs.query_start_loc.diff()
    requests = torch.arange(len(rows), device=device)
    is_decoded = (requests % 2 == 0) & (kept > 0) & (kept <= MOST_DECODED) & (before > 0)
    starts = torch.nn.functional.pad(kept.cumsum(0), (1, 0)).int()
    logits = torch.where(is_decoded, kept, kept.clamp(max=1))
    logit_starts = torch.nn.functional.pad(logits.cumsum(0), (1, 0)).int()
    known = torch.zeros(
        (len(inputs.computed), inputs.token_table.shape[1] + 1), dtype=torch.int32, device=device
    )
    sampled, drafts = known[:, 0].clone(), known.new_zeros((len(known), MOST_DECODED))
    for request, row in enumerate(rows.tolist()):
        start, count = int(inputs.query_start_loc[request]), int(kept[request])
        tokens = inputs.tokens[start : start + count]
        if is_decoded[request]:
            sampled[row], drafts[row, : count - 1] = tokens[0], tokens[1:]
        else:
            first = int(before[request])
            known[row, first : first + count] = tokens
            known[row, first + count] = row + 1
    prefills = _of_rows(inputs, torch.where(is_decoded, before, before + kept + 1), NEVER_COMPUTED)
    ahead = torch.full((2, len(known)), -1, dtype=torch.int32, device=device)
    with load(BATCH_FILE, stubs) as kernels:
        kernels.prepare_prefill_inputs(
            inputs.buffer, ahead, inputs.rows, starts, known, prefills, inputs.computed
        )
        indices = kernels.combine_sampled_and_draft_tokens(
            inputs.buffer, inputs.rows, sampled, starts, before + kept, prefills, drafts,
            logit_starts, int(logit_starts[-1]),
        )  # fmt: skip
    expected = torch.full_like(ahead, -1)
    expected[:, rows] = torch.where(is_decoded, -1, torch.stack([inputs.rows + 1, kept * 0]))
    wanted = [
        torch.arange(int(end - count), int(end), device=device)
        for end, count in zip(starts[1:], logits, strict=True)
    ]
    if not torch.equal(ahead, expected):
        message = "the tokens behind a prefill's are other ones"
        raise RuntimeError(message)
    if not torch.equal(indices, torch.cat([indices[:0], *wanted])):
        message = "logits are asked for of other tokens"
        raise RuntimeError(message)
