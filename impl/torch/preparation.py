"""Preparing batches with torch operations only; it shares no code with the oracle's lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...reference.tensors.preparation import MASK_TOKEN, BatchInputs
from ..protocol import implementation


class _Units(NamedTuple):
    """Tokens, keys or pages of a batch, one after the other: the request of each, its number."""

    request: torch.Tensor
    number: torch.Tensor


def _units(counts: torch.Tensor) -> _Units:
    counts = counts.long()
    request = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    ends = counts.cumsum(0)
    number = torch.arange(len(request), device=counts.device) - (ends - counts)[request]
    return _Units(request, number)


def _tokens(inputs: BatchInputs) -> _Units:
    return _units(inputs.query_start_loc.diff())


def _pages(inputs: BatchInputs) -> tuple[_Units, torch.Tensor]:
    """Return the pages of all requests, 0 for those before a window."""
    size = inputs.page_size
    units = _units((inputs.seq_lens + size - 1) // size)
    found = inputs.block_table[inputs.rows.long()[units.request], units.number]
    seen = units.number >= inputs.first_keys[units.request] // size
    return units, torch.where(seen, found, 0)


def _slots(inputs: BatchInputs) -> torch.Tensor:
    units = _units(inputs.seq_lens - inputs.first_keys)
    keys = units.number + inputs.first_keys[units.request]
    return inputs.token_table[inputs.rows.long()[units.request], keys]


def _positions(inputs: BatchInputs) -> torch.Tensor:
    units = _tokens(inputs)
    return inputs.computed[inputs.rows.long()[units.request]] + units.number


def _local_seq_lens(inputs: BatchInputs) -> torch.Tensor:
    turn = inputs.world * inputs.interleave
    rest = inputs.seq_lens % turn - inputs.rank * inputs.interleave
    return inputs.seq_lens // turn * inputs.interleave + rest.clamp(0, inputs.interleave)


def _slots_at(inputs: BatchInputs, request: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the slots of these keys of these requests."""
    return inputs.token_table[inputs.rows.long()[request], key].long()


def _slot_mapping(inputs: BatchInputs) -> torch.Tensor:
    return _slots_at(inputs, _tokens(inputs).request, _positions(inputs))


def _ends(inputs: BatchInputs) -> torch.Tensor:
    """Return the positions behind the accepted tokens of all requests."""
    return (inputs.seq_lens - inputs.rejected).long()


def _is_accepted(inputs: BatchInputs) -> torch.Tensor:
    units = _tokens(inputs)
    return units.number < (inputs.query_start_loc.diff() - inputs.rejected)[units.request]


def _last_tokens(inputs: BatchInputs) -> torch.Tensor:
    found, accepted = inputs.next_tokens.clone(), _is_accepted(inputs)
    # Accepted tokens come first, so that the last one that is written is the last accepted one.
    last = (inputs.query_start_loc[1:] - inputs.rejected).long() - 1
    some = torch.zeros_like(found, dtype=torch.bool)
    some[_tokens(inputs).request[accepted]] = True
    found[some] = inputs.tokens[last[some]]
    return found


def _next(inputs: BatchInputs, found: torch.Tensor, other: int) -> torch.Tensor:
    """Return what is found of each request, something else where the model takes no more keys."""
    return torch.where(_ends(inputs) < inputs.max_model_len, found, other)


def _next_slots(inputs: BatchInputs) -> torch.Tensor:
    requests = torch.arange(len(inputs.rows), device=inputs.rows.device)
    return _next(inputs, _slots_at(inputs, requests, _ends(inputs)), -1)


class _Given(NamedTuple):
    """What a drafter is given: its entries, the kept tokens of each entry's request, how many."""

    units: _Units
    kept: torch.Tensor
    sizes: torch.Tensor

    @property
    def behind(self) -> torch.Tensor:
        """How far each entry lies behind the kept tokens."""
        return self.units.number - self.kept


def _given(inputs: BatchInputs) -> _Given:
    news = inputs.query_start_loc.diff().long()
    shift = (news > 0).long() * int(inputs.is_shifted)
    kept = (news - inputs.rejected - shift).clamp(min=0)
    sizes = news - shift + inputs.num_drafts
    units = _units(sizes)
    return _Given(units, kept[units.request], sizes)


def _draft_input_ids(inputs: BatchInputs) -> torch.Tensor:
    units, kept, _ = given = _given(inputs)
    source = inputs.query_start_loc.long()[units.request] + units.number + int(inputs.is_shifted)
    room = torch.nn.functional.pad(inputs.tokens, (0, 1))
    token = room[source.clamp(max=len(inputs.tokens))]
    following = torch.where(given.behind == 0, inputs.next_tokens[units.request], MASK_TOKEN)
    drafted = torch.where(given.behind < inputs.num_drafts, following, 0)
    return torch.where(units.number < kept, token, drafted)


def _draft_positions(inputs: BatchInputs) -> torch.Tensor:
    given = _given(inputs)
    first = inputs.computed[inputs.rows.long()][given.units.request]
    return torch.where(given.behind < inputs.num_drafts, first + given.units.number, 0)


def _is_masked(inputs: BatchInputs) -> torch.Tensor:
    behind = _given(inputs).behind
    return (behind > 0) & (behind < inputs.num_drafts)


def new_token_indices(inputs: BatchInputs) -> torch.Tensor:
    """Return the places of the tokens to draft among all that a drafter is given."""
    behind = _given(inputs).behind
    return ((behind >= 0) & (behind < inputs.num_drafts)).nonzero().flatten()


def hidden_state_mapping(inputs: BatchInputs) -> torch.Tensor:
    """Return the places of the new tokens' hidden states among all that a drafter is given."""
    units, sizes = _tokens(inputs), _given(inputs).sizes
    return (sizes.cumsum(0) - sizes)[units.request] + units.number


def _queries(inputs: BatchInputs) -> _Units:
    return _units(torch.full_like(inputs.rows, 1 + inputs.num_drafts))


def _query_input_ids(inputs: BatchInputs) -> torch.Tensor:
    units = _queries(inputs)
    return torch.where(units.number > 0, MASK_TOKEN, inputs.next_tokens[units.request])


def _query_positions(inputs: BatchInputs) -> torch.Tensor:
    units = _queries(inputs)
    return _ends(inputs)[units.request] + units.number


def _paths(inputs: BatchInputs) -> torch.Tensor:
    """Return a matrix of all new tokens: which ones of the same request each sees."""
    units = _tokens(inputs)
    starts = inputs.query_start_loc.long()[units.request]
    parents = torch.where(inputs.parents < 0, -1, starts + inputs.parents)
    current = torch.arange(len(parents), device=parents.device)
    seen = torch.zeros((len(parents), len(parents) + 1), dtype=torch.bool, device=parents.device)
    # The last column is that of no token, at which all paths end.
    parents = torch.nn.functional.pad(parents, (0, 1), value=-1)
    for _ in range(int(units.number.max()) + 1 if len(current) else 0):
        seen[torch.arange(len(current), device=current.device), current] = True
        current = parents[current]
    return seen[:, :-1]


def _tree_mask(inputs: BatchInputs) -> torch.Tensor:
    request = _tokens(inputs).request
    return _paths(inputs)[request.unsqueeze(1) == request]


def _tree_positions(inputs: BatchInputs) -> torch.Tensor:
    first = inputs.computed[inputs.rows.long()][_tokens(inputs).request]
    return first + _paths(inputs).sum(1) - 1


def _first_children(inputs: BatchInputs) -> torch.Tensor:
    units = _tokens(inputs)
    starts = inputs.query_start_loc.long()[units.request]
    found = torch.full_like(units.number, -1)
    # From the last to the first, so that the first child is what stays.
    for token in reversed(range(len(found))):
        if inputs.parents[token] >= 0:
            found[starts[token] + inputs.parents[token]] = units.number[token]
    return found


def _next_siblings(inputs: BatchInputs) -> torch.Tensor:
    units = _tokens(inputs)
    found = torch.full_like(units.number, -1)
    last: dict[tuple[int, int], int] = {}
    pairs = zip(units.request.tolist(), inputs.parents.tolist(), strict=True)
    for token, pair in enumerate(pairs):
        if pair in last:
            found[last[pair]] = units.number[token]
        last[pair] = token
    return found


def _packed_mask(inputs: BatchInputs) -> torch.Tensor:
    counts = inputs.query_start_loc.diff() * inputs.seq_lens
    weights = 2 ** torch.arange(8, device=counts.device)
    packed = [inputs.tokens.new_zeros(0, dtype=torch.long)]
    for bits in inputs.mask.split(counts.tolist()):
        whole = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
        packed.append((whole * weights).sum(1))
    return torch.cat(packed)


class _Branches(NamedTuple):
    """What the branches that are drafted see: its entries, and how many each branch has."""

    units: _Units
    counts: torch.Tensor


def _branches(inputs: BatchInputs) -> _Branches:
    count, window, sinks = inputs.branches
    ends = _ends(inputs)
    seen = ends.clamp(max=window + sinks) if window else ends
    counts = (seen + inputs.num_drafts).repeat_interleave(count)
    return _Branches(_units(counts), counts)


def _draft_kv_indices(inputs: BatchInputs) -> torch.Tensor:
    count, window, sinks = inputs.branches
    (branch, number), counts = _branches(inputs)
    request = branch // count
    end, seen = _ends(inputs)[request], counts[branch] - inputs.num_drafts
    of_request = torch.where(number < sinks, number, number + end - seen) if window else number
    room, size = torch.full_like(end, inputs.num_drafts), inputs.page_size
    if count > 1:
        room = (end % size + room + size - 1) // size * size
    own = end + branch % count * room + number - seen
    return _slots_at(inputs, request, torch.where(number < seen, of_request, own))


def _num_kv_splits(inputs: BatchInputs) -> torch.Tensor:
    """Divide as many times as the shortest request fits, and until each core has a program."""
    keys, queries = inputs.seq_lens.long(), 1 + inputs.num_drafts
    if not len(keys):
        return keys
    heads, kv_heads, most, cores = inputs.splits
    longest, shortest = keys.max(), keys.min()
    shortest = torch.where(longest * 4 < shortest * 5, longest, shortest)
    doublings = (longest / 64).float().log2()
    wanted = (doublings.clamp(min=1) * cores).long()
    head_blocks = (heads + min(16, heads // kv_heads) - 1) // min(16, heads // kv_heads)
    programs = len(keys) * queries * head_blocks
    found = torch.zeros_like(keys)
    for parts in ((longest + shortest - 1) // shortest, (wanted + programs - 1) // programs):
        parts_of_all = parts.clamp(max=most)
        chunk = (longest + parts_of_all - 1) // parts_of_all
        found = torch.maximum(found, (keys + chunk - 1) // chunk)
    return found.repeat_interleave(queries)


FLAT: dict[str, Callable[[BatchInputs], torch.Tensor]] = {
    "kv_indices": _slots,
    "page_indices": lambda inputs: _pages(inputs)[1],
    "kv_indptr": lambda inputs: inputs.kv_indptr,
    "query_start_loc": lambda inputs: inputs.query_start_loc,
    "query_starts": lambda inputs: inputs.query_start_loc[:-1],
    "positions": _positions,
    "token_seq_lens": lambda inputs: _positions(inputs) + 1,
    "local_positions": lambda inputs: _tokens(inputs).number,
    "seq_lens": lambda inputs: inputs.computed[inputs.rows.long()] + inputs.query_start_loc.diff(),
    "local_seq_lens": _local_seq_lens,
    "token_to_request": lambda inputs: _tokens(inputs).request,
    "token_rows": lambda inputs: inputs.rows[_tokens(inputs).request],
    "slot_mapping": _slot_mapping,
    "num_rejected_tokens": lambda inputs: inputs.rejected,
    "token_indices_to_sample": lambda inputs: inputs.query_start_loc[1:] - inputs.rejected - 1,
    "valid_sampled_tokens_count": lambda inputs: inputs.query_start_loc.diff() - inputs.rejected,
    "accepted_seq_lens": _ends,
    "last_tokens": _last_tokens,
    "accepted_tokens": lambda inputs: inputs.tokens[_is_accepted(inputs)],
    "next_positions": lambda inputs: _next(inputs, _ends(inputs), 0),
    "next_slots": _next_slots,
    "next_seq_lens": lambda inputs: _next(inputs, _ends(inputs) + 1, 1),
    "draft_input_ids": _draft_input_ids,
    "draft_positions": _draft_positions,
    "is_rejected_token_mask": lambda inputs: _given(inputs).behind >= inputs.num_drafts,
    "is_masked_token_mask": _is_masked,
    "new_token_indices": new_token_indices,
    "hidden_state_mapping": hidden_state_mapping,
    "query_input_ids": _query_input_ids,
    "query_positions": _query_positions,
    "query_slots": lambda inputs: _slots_at(
        inputs, _queries(inputs).request, _query_positions(inputs)
    ),
    "query_indices_to_sample": lambda inputs: _queries(inputs).number.nonzero().flatten(),
    "num_kv_splits": _num_kv_splits,
    "tree_mask": _tree_mask,
    "tree_positions": _tree_positions,
    "first_children": _first_children,
    "next_siblings": _next_siblings,
    "packed_mask": _packed_mask,
    "draft_kv_indices": _draft_kv_indices,
    "draft_kv_indptr": lambda inputs: torch.nn.functional.pad(
        _branches(inputs).counts.cumsum(0), (1, 0)
    ),
}
"""The entries of tensors without rows, by output."""


SLOTS = ("slot_mapping", "next_slots", "query_slots")
"""Outputs of slots, behind which -1 is written."""


@implementation("prepare_batch", name="torch-prepare-batch", features=("far_slots",))
def prepare_batch(inputs: BatchInputs) -> torch.Tensor:
    """Compute all entries at once, and write them into the buffer."""
    buffer, behind = inputs.buffer, len(inputs.rows)
    if buffer.dim() > 1:
        if inputs.rest == "zero_tails":
            buffer[:behind] = 0
        is_pages = inputs.output == "page_table"
        units, found = _pages(inputs) if is_pages else (_tokens(inputs), inputs.tokens)
        buffer[units.request, units.number] = found
    else:
        entries = FLAT[inputs.output](inputs)
        behind = len(entries)
        buffer[:behind] = entries.to(buffer.dtype)
    if inputs.rest == "zero_rows":
        buffer[behind:] = -1 if inputs.output in SLOTS else 0
    return buffer
