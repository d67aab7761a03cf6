"""Faults in preparing batches: lengths, positions, indices, tables and drafts that kernels read."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from ...impl.protocol import Supports
from ...impl.torch.preparation import hidden_state_mapping, new_token_indices, prepare_batch
from ...reference import BatchProblem
from ...reference.tensors.preparation import BatchInputs
from .catalogue import SeededBug, seeded

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
BATCH = "prepare_batch"
LEAST_GARBAGE = 2**30
"""Least number of what a new buffer holds: no page, slot, position or length is as large."""


def _builds(*outputs: str, rest: str = "") -> Supports:
    """Return what takes these outputs only, and one rest if it is named."""

    def supports(problem: BatchProblem, _: object) -> bool | str:
        wanted = problem.output in outputs and (not rest or problem.rest == rest)
        return wanted or f"builds {', '.join(outputs)}"

    return supports


def _right(inputs: BatchInputs, **others: Any) -> torch.Tensor:  # noqa: ANN401  fields
    """Write what is right of a record with other fields."""
    written: torch.Tensor = prepare_batch(replace(inputs, **others))
    return written


@seeded(BUGS, BATCH, "batch_one_buffer", model="vllm#39546", supports=_builds("page_indices"))
def page_of_the_batch_before(inputs: BatchInputs) -> torch.Tensor:
    """Leave the last page of each request that the buffer has one for already."""
    before, pages = inputs.buffer.clone(), _right(inputs)
    ends = inputs.page_indptr[1:].long() - 1
    ends = ends[inputs.seq_lens > 0]
    known = ends[(before[ends] >= 0) & (before[ends] < LEAST_GARBAGE)]
    pages[known] = before[known]
    return pages


@seeded(BUGS, BATCH, "batch_one_buffer", supports=_builds("seq_lens", rest="zero_rows"))
def lengths_of_the_batch_before(inputs: BatchInputs) -> torch.Tensor:
    """Leave lengths of a larger batch behind those of this one."""
    before, lengths = inputs.buffer.clone(), _right(inputs)
    return torch.where((lengths == 0) & (before < LEAST_GARBAGE), before, lengths)


@seeded(BUGS, BATCH, "batch_one_buffer", supports=_builds("page_table", rest="kept"))
def longer_row_of_the_batch_before(inputs: BatchInputs) -> torch.Tensor:
    """Write no row whose request seems to be the one that had the row before."""
    before, table = inputs.buffer.clone(), _right(inputs)
    rows = len(inputs.rows)
    same = (before[:rows, :1] >= 0) & (before[:rows, :1] < LEAST_GARBAGE)
    table[:rows] = torch.where(same, before[:rows], table[:rows])
    return table


@seeded(BUGS, BATCH, "inputs_changed_after", supports=_builds("kv_indptr"))
def input_instead_of_the_buffer(inputs: BatchInputs) -> torch.Tensor:
    """Return the input that holds the same numbers, where the buffer has no room for more."""
    if inputs.buffer.shape == inputs.kv_indptr.shape:
        return inputs.kv_indptr
    return _right(inputs)


@seeded(
    BUGS,
    BATCH,
    "batch_far_slots",
    supports=_builds("slot_mapping", "next_slots", "query_slots"),
    features=("far_slots",),
)
def slots_of_keys_in_int32(inputs: BatchInputs) -> torch.Tensor:
    """Compute slots in int32, and store them as int64."""
    return _right(inputs, token_table=inputs.token_table.int())


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("kv_indices"))
def window_of_whole_pages(inputs: BatchInputs) -> torch.Tensor:
    """Copy slots from the beginning of the page in which a window begins."""
    size = inputs.page_size
    shifted = inputs.first_keys // size * size
    slots = _right(inputs)
    starts = inputs.kv_indptr.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        first, row = int(shifted[request]), int(inputs.rows[request])
        slots[start:end] = inputs.token_table[row, first : first + end - start]
    return slots


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("page_indices", "page_table"))
def last_page_left_out(inputs: BatchInputs) -> torch.Tensor:
    """Count whole pages, so that a last page which is not full is not copied."""
    before, pages = inputs.buffer.clone(), _right(inputs)
    for request, (start, end) in enumerate(pairwise(inputs.page_indptr.tolist())):
        if int(inputs.seq_lens[request]) % inputs.page_size:
            place = (request, end - start - 1) if pages.dim() > 1 else (end - 1,)
            pages[place] = before[place]
    return pages


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("kv_indices", "page_table", "token_rows"))
def rows_in_order(inputs: BatchInputs) -> torch.Tensor:
    """Read the row of a request's place in the batch, not the one that it was given."""
    return _right(inputs, rows=torch.arange(len(inputs.rows), dtype=torch.int32))


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("positions"))
def chunks_from_zero(inputs: BatchInputs) -> torch.Tensor:
    """Count the positions of every request from 0, as of a whole prefill."""
    return _right(inputs, computed=inputs.computed * 0)


@seeded(BUGS, BATCH, "batch_garbage", supports=_builds("positions", "seq_lens"))
def computed_by_request(inputs: BatchInputs) -> torch.Tensor:
    """Read the computed keys of a request's place in the batch, not of its row."""
    rows = inputs.rows.long()
    computed = inputs.computed.clone()
    computed[rows] = inputs.computed[: len(rows)]
    return _right(inputs, computed=computed)


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("kv_indices", rest="kept"))
def one_block_of_slots(inputs: BatchInputs) -> torch.Tensor:
    """Copy the slots of the first 512 keys of each request."""
    before, slots = inputs.buffer.clone(), _right(inputs)
    for start, end in pairwise(inputs.kv_indptr.tolist()):
        slots[start + 512 : end] = before[start + 512 : end]
    return slots


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("positions"))
def blocks_from_the_next_token(inputs: BatchInputs) -> torch.Tensor:
    """Count from the next position on in every block of 1024 new tokens but the first."""
    positions = _right(inputs)
    for start, end in pairwise(inputs.query_start_loc.tolist()):
        positions[start + 1024 : end] += 1
    return positions


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("token_to_request"))
def requests_without_tokens(inputs: BatchInputs) -> torch.Tensor:
    """Take the first token behind requests without new tokens for one of the first of them."""
    requests, starts = _right(inputs), inputs.query_start_loc.tolist()
    for request, (start, end) in reversed(list(enumerate(pairwise(starts)))):
        if start == end < starts[-1]:
            requests[start] = request
    return requests


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("local_seq_lens"))
def interleave_ignored_in_lengths(inputs: BatchInputs) -> torch.Tensor:
    """Deal the keys one by one, whatever the interleave is."""
    return _right(inputs, interleave=1)


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("local_seq_lens"))
def ranks_rest_is_whole(inputs: BatchInputs) -> torch.Tensor:
    """Count a whole run of keys for a rank that has part of one."""
    lengths = _right(inputs)
    runs = lengths[: len(inputs.rows)]
    runs.copy_(-(-runs // inputs.interleave) * inputs.interleave)
    return lengths


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("kv_indptr"))
def starts_of_all_keys(inputs: BatchInputs) -> torch.Tensor:
    """Count the keys before a window too."""
    whole = torch.zeros_like(inputs.kv_indptr)
    whole[1:] = inputs.seq_lens.cumsum(0)
    return _right(inputs, kv_indptr=whole)


@seeded(BUGS, BATCH, "batch_garbage", supports=_builds("local_seq_lens", rest="zero_rows"))
def one_block_of_rows(inputs: BatchInputs) -> torch.Tensor:
    """Clear 1024 lengths behind the batch, and no more."""
    before, lengths, end = inputs.buffer.clone(), _right(inputs), len(inputs.rows) + 1024
    lengths[end:] = before[end:]
    return lengths


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("page_table", rest="zero_tails"))
def tails_from_the_next_multiple(inputs: BatchInputs) -> torch.Tensor:
    """Clear tails from the next multiple of 4 pages on."""
    before, table = inputs.buffer.clone(), _right(inputs)
    for request, pages in enumerate(inputs.page_indptr.diff().tolist()):
        end = -(-pages // 4) * 4
        table[request, pages:end] = before[request, pages:end]
    return table


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("positions", "kv_indices", rest="kept"))
def whole_blocks(inputs: BatchInputs) -> torch.Tensor:
    """Write the entries behind the last one of a block of 8 too."""
    buffer = _right(inputs)
    indptr = inputs.query_start_loc if inputs.output == "positions" else inputs.kv_indptr
    entries = int(indptr[-1])
    buffer[entries : -(-entries // 8) * 8] = 0
    return buffer


@seeded(BUGS, BATCH, "batch_parts", supports=_builds("page_indices", "kv_indices"))
def remembered_by_length(inputs: BatchInputs) -> torch.Tensor:
    """Look up the row once for all requests of one length."""
    known: dict[int, int] = {}
    lengths = zip(inputs.seq_lens.tolist(), inputs.rows.tolist(), strict=True)
    rows = [known.setdefault(length, row) for length, row in lengths]
    return _right(inputs, rows=torch.tensor(rows, dtype=torch.int32))


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("positions"))
def positions_as_int32(inputs: BatchInputs) -> torch.Tensor:
    """Return the positions in int32."""
    return _right(inputs).int()


@seeded(BUGS, BATCH, "integer_inputs_unchanged", supports=_builds("seq_lens"))
def lengths_counted_in_place(inputs: BatchInputs) -> torch.Tensor:
    """Add the new tokens to the computed keys, whose next batch then has them twice."""
    lengths = _right(inputs)
    inputs.computed[inputs.rows.long()] += inputs.query_start_loc.diff()
    return lengths


@seeded(BUGS, BATCH, "integer_inputs_unchanged", supports=_builds("kv_indptr", "query_start_loc"))
def one_start_too_many(inputs: BatchInputs) -> torch.Tensor:
    """Write an entry behind the buffer."""
    starts = _right(inputs)
    behind = starts.as_strided((1,), (1,), starts.storage_offset() + len(starts))
    behind.fill_(int(inputs.kv_indptr[-1]))
    return starts


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("token_indices_to_sample"))
def samples_rejected_tokens(inputs: BatchInputs) -> torch.Tensor:
    """Take the last new token of each request, rejected or not."""
    return _right(inputs, rejected=inputs.rejected * 0)


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("next_positions", "next_seq_lens"))
def drafts_behind_rejected_tokens(inputs: BatchInputs) -> torch.Tensor:
    """Draft behind all new tokens, rejected ones among them."""
    return _right(inputs, rejected=inputs.rejected * 0)


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("next_positions", "next_slots"))
def drafts_beyond_the_model(inputs: BatchInputs) -> torch.Tensor:
    """Go on where a request is as long as the model takes."""
    return _right(inputs, max_model_len=inputs.max_model_len + 1)


@seeded(BUGS, BATCH, "batch_one_buffer", supports=_builds("num_rejected_tokens", rest="kept"))
def rejections_of_the_batch_before(inputs: BatchInputs) -> torch.Tensor:
    """Write nothing of requests without drafts, which reject none."""
    before, rejected = inputs.buffer.clone(), _right(inputs)
    few = inputs.query_start_loc.diff() < 2  # noqa: PLR2004  no draft
    known = few & (before[: len(few)] < LEAST_GARBAGE)
    rejected[: len(few)] = torch.where(known, before[: len(few)], rejected[: len(few)])
    return rejected


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("is_masked_token_mask"))
def first_draft_masked(inputs: BatchInputs) -> torch.Tensor:
    """Mark the token that follows the accepted ones, too, as one drafted in parallel."""
    mask = _right(inputs)
    indices = new_token_indices(inputs)
    mask[indices] = True
    return mask


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("draft_positions", "draft_input_ids"))
def rejected_tokens_not_padded(inputs: BatchInputs) -> torch.Tensor:
    """Leave what the buffer holds in the entries of rejected tokens."""
    before, found = inputs.buffer.clone(), _right(inputs)
    room = torch.zeros_like(found, dtype=torch.bool)
    _right(inputs, output="is_rejected_token_mask", buffer=room, rest="kept")
    return torch.where(room, before, found)


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("hidden_state_mapping", "new_token_indices"))
def requests_one_by_one(inputs: BatchInputs) -> torch.Tensor:
    """Count the entries of requests before as if each drafted one token only."""
    indices = _right(inputs)
    found = hidden_state_mapping if "hidden" in inputs.output else new_token_indices
    entries = found(replace(inputs, num_drafts=1))
    indices[: len(entries)] = entries.int()
    return indices


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("query_slots"))
def drafts_in_one_page(inputs: BatchInputs) -> torch.Tensor:
    """Look up the page of each request's first draft only."""
    slots, size, each = _right(inputs), inputs.page_size, 1 + inputs.num_drafts
    of_requests = slots[: len(inputs.rows) * each].view(-1, each)
    ends = (inputs.seq_lens - inputs.rejected).long().unsqueeze(1)
    offsets = (ends + torch.arange(each, device=slots.device)) % size
    of_requests.copy_(of_requests[:, :1] // size * size + offsets)
    return slots


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("padded_tokens", rest="zero_tails"))
def tails_of_the_longest_row(inputs: BatchInputs) -> torch.Tensor:
    """Clear tails as far as the longest request of the batch goes."""
    before, table = inputs.buffer.clone(), _right(inputs)
    longest = max(inputs.query_start_loc.diff().tolist(), default=0)
    table[:, longest:] = before[:, longest:]
    return table


@seeded(BUGS, BATCH, "batch_one_buffer", supports=_builds("padded_tokens", rest="kept"))
def tokens_of_the_batch_before(inputs: BatchInputs) -> torch.Tensor:
    """Write no first token over one that the buffer holds."""
    before, table = inputs.buffer.clone(), _right(inputs)
    rows = len(inputs.rows)
    known = before[:rows, :1] < LEAST_GARBAGE
    table[:rows, :1] = torch.where(known, before[:rows, :1], table[:rows, :1])
    return table


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("last_tokens"))
def one_token_is_none(inputs: BatchInputs) -> torch.Tensor:
    """Take the other token where one token is accepted."""
    tokens = _right(inputs)
    one = inputs.query_start_loc.diff() - inputs.rejected == 1
    tokens[: len(one)] = torch.where(one, inputs.next_tokens, tokens[: len(one)])
    return tokens


@seeded(BUGS, BATCH, "batch_parts", supports=_builds("accepted_tokens", "draft_input_ids"))
def first_and_last_token_swapped(inputs: BatchInputs) -> torch.Tensor:
    """Swap the first and the last accepted token where several requests are in a batch."""
    tokens = _right(inputs)
    count = int((inputs.query_start_loc.diff() - inputs.rejected).sum())
    if len(inputs.rows) > 1 and count:
        tokens[[0, count - 1]] = tokens[[count - 1, 0]]
    return tokens


@seeded(BUGS, BATCH, "batch_garbage", supports=_builds("slot_mapping"))
def slots_of_the_last_page(inputs: BatchInputs) -> torch.Tensor:
    """Take tokens of a last page that is not full for ones of the page behind it."""
    slots, table = _right(inputs), inputs.block_table
    starts, size = inputs.query_start_loc.tolist(), inputs.page_size
    for request, (start, end) in enumerate(pairwise(starts)):
        page = int(inputs.seq_lens[request]) // size
        if end > start and int(inputs.seq_lens[request]) % size and page + 1 < table.shape[1]:
            other = int(table[inputs.rows[request], page + 1])
            slots[end - 1] = other * size + slots[end - 1] % size
    return slots


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("tree_mask", "tree_positions"))
def trees_as_chains(inputs: BatchInputs) -> torch.Tensor:
    """Let each new token follow the one before it, whatever the tree is."""
    starts = inputs.query_start_loc.tolist()
    chain = [token for start, end in pairwise(starts) for token in range(-1, end - start - 1)]
    return _right(inputs, parents=torch.tensor(chain, dtype=torch.int32))


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("next_siblings"))
def siblings_of_other_parents(inputs: BatchInputs) -> torch.Tensor:
    """Take the next token that follows any one for a sibling."""
    starts = inputs.query_start_loc.tolist()
    roots = torch.full_like(inputs.parents, 0)
    roots[[start for start, end in pairwise(starts) if end > start]] = -1
    return _right(inputs, parents=roots)


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("packed_mask"))
def highest_bit_first(inputs: BatchInputs) -> torch.Tensor:
    """Pack the first key into the highest bit, as numpy does."""
    packed = _right(inputs)
    entries = int(((inputs.query_start_loc.diff() * inputs.seq_lens + 7) // 8).sum())
    bits = (packed[:entries].long().unsqueeze(1) >> torch.arange(8)) & 1
    packed[:entries] = (bits.flip(1) << torch.arange(8)).sum(1).to(torch.uint8)
    return packed


@seeded(BUGS, BATCH, "batch_parts", supports=_builds("packed_mask"))
def masks_in_one_row(inputs: BatchInputs) -> torch.Tensor:
    """Pack the masks of all requests behind one another, and not from a byte of its own each."""
    before, packed = inputs.buffer.clone(), _right(inputs)
    whole = torch.nn.functional.pad(inputs.mask, (0, -len(inputs.mask) % 8)).view(-1, 8)
    entries = int(((inputs.query_start_loc.diff() * inputs.seq_lens + 7) // 8).sum())
    packed[:entries] = before[:entries]
    packed[: len(whole)] = (whole.long() << torch.arange(8)).sum(1).to(torch.uint8)
    return packed


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("num_kv_splits"))
def almost_even_lengths_divided(inputs: BatchInputs) -> torch.Tensor:
    """Divide by the shortest request where lengths are almost the same, too."""
    parts = _right(inputs)
    keys = inputs.seq_lens.tolist()
    if keys and 8 * max(keys) < 10 * min(keys) and max(keys) > min(keys):
        chunk = -(-max(keys) // min(2, inputs.splits.most))
        divided = torch.maximum(parts[: len(keys) * (1 + inputs.num_drafts)], torch.tensor(1))
        least = (-(-inputs.seq_lens // chunk)).repeat_interleave(1 + inputs.num_drafts)
        parts[: len(divided)] = torch.maximum(divided, least.int())
    return parts


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("num_kv_splits"))
def parts_of_the_longest_for_all(inputs: BatchInputs) -> torch.Tensor:
    """Divide every request into as many parts as the longest one."""
    parts = _right(inputs)
    entries = len(inputs.rows) * (1 + inputs.num_drafts)
    if entries:
        parts[:entries] = parts[:entries].max()
    return parts


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("kv_indices"))
def windows_from_the_next_turn(inputs: BatchInputs) -> torch.Tensor:
    """Begin a window with the rank's next key where it begins with another rank's of two."""
    before, slots = inputs.buffer.clone(), _right(inputs)
    for request, (start, end) in enumerate(pairwise(inputs.kv_indptr.tolist())):
        if int(inputs.first_keys[request]) % 2 and end > start:
            slots[start : end - 1] = slots[start + 1 : end].clone()
            slots[end - 1] = before[end - 1]
    return slots


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("page_table", rest="kept"))
def one_block_of_pages_again(inputs: BatchInputs) -> torch.Tensor:
    """Read each block of 256 pages from where the first one begins."""
    table = _right(inputs)
    for request, pages in enumerate(inputs.page_indptr.diff().tolist()):
        behind = table[request, 256:pages]
        behind.copy_(table[request, : len(behind)].clone())
    return table


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("valid_sampled_tokens_count"))
def chunks_are_sampled(inputs: BatchInputs) -> torch.Tensor:
    """Count a sampled token of requests that keep none, as if their prefill were over."""
    counts, requests = _right(inputs), len(inputs.rows)
    counts[:requests] = counts[:requests].clamp(min=1)
    return counts


@seeded(BUGS, BATCH, "batch_one_buffer", supports=_builds("accepted_tokens", rest="kept"))
def sampled_token_of_the_batch_before(inputs: BatchInputs) -> torch.Tensor:
    """Leave the token of a decode where an earlier batch wrote one, and write drafts only."""
    before, tokens = inputs.buffer.clone(), _right(inputs)
    kept = (inputs.query_start_loc.diff() - inputs.rejected).tolist()
    start = 0
    for count in kept:
        if count == 1 and before[start] < LEAST_GARBAGE:
            tokens[start] = before[start]
        start += count
    return tokens


@seeded(BUGS, BATCH, "integer_inputs_unchanged", supports=_builds("accepted_seq_lens"))
def computed_keys_moved_on(inputs: BatchInputs) -> torch.Tensor:
    """Add the kept tokens to the computed keys of requests too, in place."""
    lengths = _right(inputs)
    kept = inputs.query_start_loc.diff() - inputs.rejected
    inputs.computed[inputs.rows.long()] += kept
    return lengths


def _with_branches(inputs: BatchInputs, **others: int) -> torch.Tensor:
    return _right(inputs, branches=inputs.branches._replace(**others))


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("draft_kv_indices"))
def branches_in_one_page(inputs: BatchInputs) -> torch.Tensor:
    """Let each branch follow the one before it at once, where it has pages of its own."""
    slots, (count, *_), each = _right(inputs), inputs.branches, inputs.num_drafts
    starts = _right(
        inputs, output="draft_kv_indptr", buffer=slots.new_zeros(1 + len(inputs.rows) * count)
    ).tolist()
    ends = (inputs.seq_lens - inputs.rejected).tolist()
    for branch, end in enumerate(starts[1:]):
        request, place = divmod(branch, count)
        first = ends[request] + place * each
        row = inputs.token_table[inputs.rows[request]]
        slots[end - each : end] = row[first : first + each]
    return slots


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("draft_kv_indices"))
def windows_without_sinks(inputs: BatchInputs) -> torch.Tensor:
    """Let branches see as many of the last keys as they should see last and first ones."""
    _, window, sinks = inputs.branches
    return _with_branches(inputs, window=window and window + sinks, sinks=0)


@seeded(BUGS, BATCH, "batch_parity", supports=_builds("draft_kv_indptr"))
def branches_begin_by_whole_lengths(inputs: BatchInputs) -> torch.Tensor:
    """Count all keys of each branch, where it sees a window of them."""
    return _with_branches(inputs, window=0)


@seeded(BUGS, BATCH, "batch_one_buffer", supports=_builds("draft_kv_indices"))
def drafts_of_the_batch_before(inputs: BatchInputs) -> torch.Tensor:
    """Leave the last slot that an earlier batch wrote at the end of this one's."""
    before, slots = inputs.buffer.clone(), _right(inputs)
    changed = (before != slots).nonzero().flatten()
    if len(changed) and before[changed[-1]] < LEAST_GARBAGE:
        slots[changed[-1]] = before[changed[-1]]
    return slots


@seeded(CONTROLS, BATCH, control="honest")
def own_batch_buffer(inputs: BatchInputs) -> torch.Tensor:
    """Return a tensor of its own, and leave the buffer as it was."""
    return _right(inputs, buffer=inputs.buffer.clone())


@seeded(CONTROLS, BATCH, control="honest", features=("far_slots",))
def written_batch_buffer(inputs: BatchInputs) -> torch.Tensor:
    """Write the buffer that it is given."""
    return _right(inputs)
