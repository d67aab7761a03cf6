"""Faults where a request has several query tokens behind long keys: verifies and draft trees."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ....reference.tensors.inputs import AttentionInputs, PagedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..kernels import (
    HONEST,
    TILE,
    Request,
    State,
    assemble,
    attend,
    close,
    finite,
    first_position,
    scan,
)

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
PAGED = "paged_attention"
TREE = ("tree",)
MOST_DRAFTS = 16
"""Most query tokens of what these kernels take for a verify."""
TILE_ROWS = 4
BITS = 8


def _drafts(request: Request) -> int:
    """Count the query tokens of a verify; 0 for other requests."""
    return request.num_queries if 1 < request.num_queries <= MOST_DRAFTS else 0


def _with_trees(inputs: PagedAttentionInputs, masks: list[torch.Tensor]) -> PagedAttentionInputs:
    """Return the inputs with other bool [t, t] masks of the requests' trees."""
    parts = [torch.empty(0, dtype=torch.bool)]
    for mask, keys in zip(masks, inputs.metadata.seq_lens.tolist(), strict=True):
        seen = mask.new_ones((len(mask), keys - len(mask)))
        parts.append(torch.cat([seen, mask], dim=1).flatten())
    return replace(inputs, custom_mask=torch.cat(parts))


def _trees(inputs: PagedAttentionInputs) -> list[torch.Tensor]:
    """Return the bool [t, t] masks of the requests' trees; nothing where there are none."""
    if inputs.tree_mask is None:
        return []
    lengths = inputs.metadata.qo_indptr.diff().tolist()
    parts = inputs.tree_mask.split([t * t for t in lengths])
    return [part.view(t, t) for part, t in zip(parts, lengths, strict=True)]


@seeded(BUGS, PAGED, "batch_independence", model="flashinfer#4382")
def reduction_without_offset(inputs: PagedAttentionInputs) -> Pair:
    """Take the batch's first queries where a request of 5 tokens or more has several tiles."""

    def one(request: Request) -> Pair:
        rows = request.rows
        if _drafts(request) > TILE_ROWS and request.num_keys > TILE:
            rows = slice(0, request.num_queries)
        moved = request._replace(rows=rows)
        return close(scan(moved, inputs), moved, inputs)

    return assemble(inputs, one)


@seeded(BUGS, PAGED, "parity", model="flashinfer#4137")
def window_of_last_draft(inputs: PagedAttentionInputs) -> Pair:
    """Begin the window of every row of a verify where that of its last token begins."""

    def window(position: torch.Tensor, key: torch.Tensor, left: int) -> torch.Tensor:
        last = position[-1:] if len(position) <= MOST_DRAFTS else position
        return key >= last - left

    return attend(inputs, replace(HONEST, window=window))


@seeded(BUGS, PAGED, "parity", model="sglang#30805")
def counter_of_first_tile(inputs: PagedAttentionInputs) -> Pair:
    """Merge the parts of keys for the first four query rows only: later ones keep the last part."""

    def one(request: Request) -> Pair:
        whole = close(scan(request, inputs), request, inputs)
        if _drafts(request) <= TILE_ROWS or request.num_keys <= TILE:
            return whole
        half = slice(request.num_keys // 2, request.num_keys)
        part = close(scan(request, inputs, keys=half), request, inputs)
        out, lse = (
            torch.cat([a[:, :TILE_ROWS], b[:, TILE_ROWS:]], dim=1)
            for a, b in zip(whole, part, strict=True)
        )
        return out, lse

    return assemble(inputs, one)


@seeded(BUGS, PAGED, "batch_independence", features=TREE)
def first_tree_for_all(inputs: PagedAttentionInputs) -> Pair:
    """Mask every request by the first one's tree, if it has as many tokens."""
    masks = _trees(inputs)
    if not masks:
        return attend(inputs)
    like_first = [masks[0] if len(each) == len(masks[0]) else each for each in masks]
    return attend(_with_trees(inputs, like_first))


@seeded(BUGS, PAGED, "parity")
def tokens_rounded_to_eight(inputs: PagedAttentionInputs) -> Pair:
    """Align a verify's causal mask as if its number of tokens were rounded up to 8."""

    def position(request: Request, inputs: AttentionInputs) -> int:
        drafts = _drafts(request)
        return first_position(request, inputs) - (-drafts % BITS if request.causal else 0)

    return attend(inputs, replace(HONEST, position=position))


@seeded(BUGS, PAGED, "parity", features=TREE)
def second_byte_lost(inputs: PagedAttentionInputs) -> Pair:
    """Read the first byte of a tree's mask only: no row sees a token behind the eighth."""
    masks = [each & (torch.arange(len(each)) < BITS) for each in _trees(inputs)]
    return attend(_with_trees(inputs, masks) if masks else inputs)


@seeded(BUGS, PAGED, "parity", features=TREE)
def big_endian_bits(inputs: PagedAttentionInputs) -> Pair:
    """Read each byte of a tree's mask from its most significant bit."""
    return attend(
        _with_trees(inputs, [_swapped(each) for each in _trees(inputs)])
        if inputs.tree_mask is not None
        else inputs
    )


def _swapped(mask: torch.Tensor) -> torch.Tensor:
    """Reverse each eight columns, the last of which are padded by zeros."""
    padded = torch.nn.functional.pad(mask, (0, -len(mask) % BITS))
    return padded.view(len(mask), -1, BITS).flip(-1).flatten(1)[:, : len(mask)]


@seeded(BUGS, PAGED, "parity", features=TREE)
def sees_its_siblings(inputs: PagedAttentionInputs) -> Pair:
    """Let a token of a tree see the siblings before it."""
    masks = []
    for mask in _trees(inputs):
        ancestors = mask & ~torch.eye(len(mask), dtype=torch.bool)
        siblings = (ancestors.unsqueeze(0) == ancestors.unsqueeze(1)).all(-1).tril()
        masks.append(mask | siblings)
    return attend(_with_trees(inputs, masks) if masks else inputs)


@seeded(BUGS, PAGED, "sensitivity", features=TREE)
def tree_as_a_chain(inputs: PagedAttentionInputs) -> Pair:
    """Accept a tree and attend causally."""
    if inputs.tree_mask is None:
        return attend(inputs)
    return attend(replace(inputs, custom_mask=None, causal=True))


@seeded(BUGS, PAGED, "parity", features=TREE)
def window_by_depth(inputs: PagedAttentionInputs) -> Pair:
    """Count a window of a tree by depths, where FlashInfer and XQA count rows."""
    masks = iter(_trees(inputs))
    depths: list[torch.Tensor] = []

    def position(request: Request, inputs: AttentionInputs) -> int:
        mask = next(masks, torch.empty(0, 0))
        while request.num_queries and not len(mask):
            mask = next(masks)
        depths[:] = [mask.sum(dim=1, keepdim=True)]
        return first_position(request, inputs)

    def window(position: torch.Tensor, key: torch.Tensor, left: int) -> torch.Tensor:
        return key >= position[:1] + depths[0] - 1 - left

    stages = replace(HONEST, position=position, window=window)
    return attend(inputs, HONEST if inputs.tree_mask is None else stages)


@seeded(BUGS, PAGED, "parity")
def only_earlier_drafts(inputs: PagedAttentionInputs) -> Pair:
    """Let no token of a causal verify see itself."""

    def position(request: Request, inputs: AttentionInputs) -> int:
        return first_position(request, inputs) - (request.causal and _drafts(request) > 0)

    return attend(inputs, replace(HONEST, position=position))


@seeded(BUGS, PAGED, "parity")
def tokens_of_first_request(inputs: PagedAttentionInputs) -> Pair:
    """Take the first request's number of tokens for all of a batch of verifies."""
    out, lse = attend(inputs)
    lengths = inputs.metadata.qo_indptr.diff().tolist()
    if max(lengths, default=0) <= MOST_DRAFTS:
        for start, length in zip(inputs.metadata.qo_indptr.tolist(), lengths, strict=False):
            left = slice(start + min(length, lengths[0]), start + length)
            out[left], lse[left] = 0.0, -math.inf
    return out, lse


@seeded(BUGS, PAGED, "parity", features=TREE)
def mask_rows_of_longest(inputs: PagedAttentionInputs) -> Pair:
    """Read rows of a tree's mask that are as long as the longest request's."""
    masks, flat = _trees(inputs), inputs.tree_mask
    if flat is None:
        return attend(inputs)
    longest, start, found = max(map(len, masks), default=0), 0, []
    for mask in masks:
        t = len(mask)
        index = start + torch.arange(t).unsqueeze(1) * longest + torch.arange(t)
        found.append(flat[index.clamp(max=len(flat) - 1)] if t else mask)
        start += t * t
    return attend(_with_trees(inputs, found))


@seeded(BUGS, PAGED, "parity", model="flashinfer#4137")
def window_starts_at_first_draft(inputs: PagedAttentionInputs) -> Pair:
    """Begin the window of every row of a verify where that of its first token begins."""

    def window(position: torch.Tensor, key: torch.Tensor, left: int) -> torch.Tensor:
        first = position[:1] if len(position) <= MOST_DRAFTS else position
        return key >= first - left

    return attend(inputs, replace(HONEST, window=window))


@seeded(BUGS, PAGED, "parity")
def one_maximum_a_tile(inputs: PagedAttentionInputs) -> Pair:
    """Rescale all rows of a verify by the first row's running maximum."""

    def rescale(state: State, factor: torch.Tensor) -> State:
        rows = factor.shape[1]
        if 1 < rows <= MOST_DRAFTS:
            factor = factor[:, :1].expand_as(factor)
        return State(state.weighted * factor, state.total * factor, state.largest)

    return attend(inputs, replace(HONEST, rescale=rescale))


@seeded(BUGS, PAGED, "parity")
def lse_of_last_draft(inputs: PagedAttentionInputs) -> Pair:
    """Return the LSE of the last token of a verify for each of its tokens."""

    def lse(total: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        found = finite(largest) + torch.log(total)
        return found[:, -1:].expand_as(found) if 1 < found.shape[1] <= MOST_DRAFTS else found

    return attend(inputs, replace(HONEST, lse=lse))


@dataclass
class _Before:
    """What a kernel keeps of its last call."""

    inputs: PagedAttentionInputs | None = None

    def over_the_same_cache(self, inputs: PagedAttentionInputs) -> PagedAttentionInputs | None:
        """Return the call before, if it was one over this cache; keep this one."""
        before, self.inputs = self.inputs, inputs
        return before if before is not None and before.k_cache is inputs.k_cache else None


_chain, _tree, _packed = _Before(), _Before(), _Before()


@seeded(BUGS, PAGED, "verify_chain")
def decodes_with_plan_of_verify(inputs: PagedAttentionInputs) -> Pair:
    """Decode the tokens of a verify by its plan, without its mask, if the cache is the same."""
    before = _chain.over_the_same_cache(inputs)
    fits = before is not None and len(before.q) == len(inputs.q)
    if before is not None and fits and before.metadata.num_requests < inputs.metadata.num_requests:
        return attend(replace(inputs, metadata=before.metadata, causal=False))
    return attend(inputs)


@seeded(BUGS, PAGED, "tree_paths", features=TREE)
def tree_stays(inputs: PagedAttentionInputs) -> Pair:
    """Mask a call that has no tree by that of the call before, if the cache is the same."""
    before = _tree.over_the_same_cache(inputs)
    if before is None or before.tree_mask is None or inputs.tree_mask is not None:
        return attend(inputs)
    lengths = inputs.metadata.qo_indptr.diff().tolist()
    masks = [torch.eye(t, dtype=torch.bool) for t in lengths]
    for mask, old in zip(masks, _trees(before), strict=False):
        t = min(len(mask), len(old))
        mask[:t, :t] = old[:t, :t]
    return attend(_with_trees(inputs, masks))


@seeded(BUGS, PAGED, "tree_siblings", features=TREE)
def tree_packed_once(inputs: PagedAttentionInputs) -> Pair:
    """Pack the bits of trees of the same lengths over the same cache once."""
    before = _packed.over_the_same_cache(inputs)
    if before is None or before.tree_mask is None or inputs.tree_mask is None:
        return attend(inputs)
    if not torch.equal(before.metadata.seq_lens, inputs.metadata.seq_lens):
        return attend(inputs)
    if not torch.equal(before.metadata.qo_indptr, inputs.metadata.qo_indptr):
        return attend(inputs)
    return attend(replace(inputs, custom_mask=before.custom_mask))
