"""What engines prepare for requests whose drafts are verified and drafted anew, by definition.

A request's new tokens are a sampled one and drafts; the target accepts the first of them and
rejects the last. A token follows the accepted ones, and engines draft anew behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import torch

from ..validation import host_integers
from .branches import ONE_BRANCH, Branches
from .slots import PAD_SLOT

Count = TypeVar("Count", int, torch.Tensor)
PADDING_TOKEN = 0
"""Token id in place of a rejected one, which no request has."""
LONGEST_MODEL = 2**18
"""Keys of the longest request that a model takes, where nothing else is said."""


class Drafts(NamedTuple):
    """What became of the drafts of R requests with T new tokens, and what is drafted next.

    Attributes:
        rejected: [R] integers, how many of a request's new tokens are rejected, its last ones.
        tokens: [T] integers, the ids of the new tokens.
        next_tokens: [R] integers, the token that follows the accepted ones of each request.
        num_drafts: tokens that are drafted next, of each request.
        mask_token: the id of a token that is drafted in parallel with those before it.
        is_shifted: whether a drafter sees each token beside the hidden state of the one before, so
            that a request's first new token is left out.
        max_model_len: keys that a request has at most; positions from it on are none.
        parents: [T] integers, the token of the same request before each new token, counted among
            the request's new ones; -1 of the first. None: each follows the last, a chain.
        branches: the branches of what is drafted next, each of ``num_drafts`` tokens.
    """

    rejected: torch.Tensor | Sequence[int]
    tokens: torch.Tensor | Sequence[int]
    next_tokens: torch.Tensor | Sequence[int]
    num_drafts: int = 0
    mask_token: int = 1
    is_shifted: bool = False
    max_model_len: int = LONGEST_MODEL
    parents: torch.Tensor | Sequence[int] | None = None
    branches: Branches = ONE_BRANCH


class Verified(NamedTuple):
    """One request of a batch after its drafts were verified.

    Attributes:
        request: its place in the batch.
        start: the place of its first new token among those of the batch.
        position: the position of its first new token.
        tokens: the ids of its new tokens.
        parents: the new token before each of them, -1 of the first.
        accepted: how many of these are accepted.
        next_token: the token that follows the accepted ones.
        pages: its row of the block table.
        page_size: keys a page.
        drafts: what is drafted next.
    """

    request: int
    start: int
    position: int
    tokens: list[int]
    parents: list[int]
    accepted: int
    next_token: int
    pages: list[int]
    page_size: int
    drafts: Drafts

    @property
    def end(self) -> int:
        """The position behind the accepted tokens."""
        return self.position + self.accepted

    @property
    def kept(self) -> list[int]:
        """The accepted tokens that a drafter is given."""
        return self.tokens[self.drafts.is_shifted : self.accepted]

    @property
    def expanded(self) -> int:
        """Entries that a drafter is given: the kept tokens, those to draft, the rejected ones."""
        shift = self.drafts.is_shifted
        return entry_counts(len(self.tokens), 0, 0, self.drafts.num_drafts, shift=shift)["expanded"]

    @property
    def drafted(self) -> list[int]:
        """The token that follows the accepted ones and masks, as many as are drafted."""
        return [self.next_token, *self._masks][: self.drafts.num_drafts]

    @property
    def _masks(self) -> list[int]:
        return [self.drafts.mask_token] * self.drafts.num_drafts

    def slot(self, position: int) -> int:
        """Return the slot of a position.

        Raises:
            ValueError: the position has no page.
        """
        page, offset = divmod(position, self.page_size)
        if page >= len(self.pages) or not self.pages[page] >= 0:
            message = f"request {self.request} has no page for position {position}"
            raise ValueError(message)
        return self.pages[page] * self.page_size + offset

    def path(self, token: int) -> list[int]:
        """Return a new token and those before it in the tree."""
        found = []
        while token >= 0:
            found.append(token)
            token = self.parents[token]
        return found

    @property
    def fits(self) -> bool:
        """Whether the model takes a token behind the accepted ones."""
        return self.end < self.drafts.max_model_len


def entry_counts(
    tokens: Count, rejected: Count, keys: Count, count: int, *, shift: bool
) -> dict[str, Count]:
    """Return how many entries requests have, by what they have one entry of.

    Args:
        tokens: new tokens, of one request or of each.
        rejected: how many of these are rejected.
        keys: keys, new tokens included.
        count: tokens that are drafted next.
        shift: whether a request's first new token is left out.
    """
    return {
        "tokens": tokens,
        "accepted": tokens - rejected,
        "expanded": tokens - (tokens > 0) * int(shift) + count,
        "queries": tokens * 0 + 1 + count,
        "drafts": tokens * 0 + count,
        "squares": tokens * tokens,
        "bytes": (tokens * keys + 7) // 8,
    }


def draft_kv_indices(one: Verified) -> Iterable[int]:
    """Return the slots that the last token of each branch sees, its own included."""
    drafts = one.drafts
    seen = drafts.branches.seen(one.end)
    drafted = drafts.branches.drafted(one.end, drafts.num_drafts, one.page_size)
    return [one.slot(position) for own in drafted for position in [*seen, *own]]


def num_rejected_tokens(one: Verified) -> Iterable[int]:
    """Return how many new tokens are rejected."""
    return [len(one.tokens) - one.accepted]


def token_indices_to_sample(one: Verified) -> Iterable[int]:
    """Return the place of the last accepted token in the batch."""
    return [one.start + one.accepted - 1]


def valid_sampled_tokens_count(one: Verified) -> Iterable[int]:
    """Return how many tokens are accepted."""
    return [one.accepted]


def accepted_seq_lens(one: Verified) -> Iterable[int]:
    """Return the keys without the rejected ones."""
    return [one.end]


def last_tokens(one: Verified) -> Iterable[int]:
    """Return the last accepted token, or the next one where none is."""
    return [one.tokens[one.accepted - 1] if one.accepted else one.next_token]


def accepted_tokens(one: Verified) -> Iterable[int]:
    """Return the accepted tokens."""
    return one.tokens[: one.accepted]


def new_tokens(one: Verified) -> Iterable[int]:
    """Return all new tokens."""
    return one.tokens


def slots_of_tokens(one: Verified) -> Iterable[int]:
    """Return the slots of all new tokens."""
    return [one.slot(one.position + token) for token in range(len(one.tokens))]


def next_positions(one: Verified) -> Iterable[int]:
    """Return the position behind the accepted tokens, 0 where the model takes none."""
    return [one.end if one.fits else 0]


def next_slots(one: Verified) -> Iterable[int]:
    """Return the slot behind the accepted tokens, none where the model takes none."""
    return [one.slot(one.end) if one.fits else PAD_SLOT]


def next_seq_lens(one: Verified) -> Iterable[int]:
    """Return the keys with the one behind the accepted tokens, 1 where the model takes none."""
    return [one.end + 1 if one.fits else 1]


def draft_input_ids(one: Verified) -> Iterable[int]:
    """Return what a drafter is given: kept tokens, those to draft, padding for the rejected."""
    given = one.kept + one.drafted
    return given + [PADDING_TOKEN] * (one.expanded - len(given))


def draft_positions(one: Verified) -> Iterable[int]:
    """Return the positions of what a drafter is given, 0 of rejected tokens."""
    given = len(one.kept + one.drafted)
    return [one.position + entry if entry < given else 0 for entry in range(one.expanded)]


def is_rejected_token(one: Verified) -> Iterable[int]:
    """Mark the entries of rejected tokens."""
    given = len(one.kept + one.drafted)
    return [entry >= given for entry in range(one.expanded)]


def is_masked_token(one: Verified) -> Iterable[int]:
    """Mark the entries of tokens that are drafted in parallel."""
    kept = len(one.kept)
    return [kept < entry < kept + one.drafts.num_drafts for entry in range(one.expanded)]


def new_token_indices(one: Verified, before: int) -> Iterable[int]:
    """Return the places of tokens to draft among all that a drafter is given.

    Args:
        one: the request.
        before: entries of the requests before it.
    """
    first = before + len(one.kept)
    return range(first, first + one.drafts.num_drafts)


def hidden_state_mapping(one: Verified, before: int) -> Iterable[int]:
    """Return the places of the new tokens' hidden states among all that a drafter is given.

    Args:
        one: the request.
        before: entries of the requests before it.
    """
    return range(before, before + len(one.tokens))


def query_input_ids(one: Verified) -> Iterable[int]:
    """Return the token that follows the accepted ones, and a mask for each token to draft."""
    return [one.next_token, *[one.drafts.mask_token] * one.drafts.num_drafts]


def query_positions(one: Verified) -> Iterable[int]:
    """Return the positions of that token and of the masks."""
    return range(one.end, one.end + 1 + one.drafts.num_drafts)


def query_slots(one: Verified) -> Iterable[int]:
    """Return the slots of that token and of the masks."""
    return map(one.slot, query_positions(one))


def query_indices_to_sample(one: Verified) -> Iterable[int]:
    """Return the places of the masks among these tokens of all requests."""
    first = one.request * (1 + one.drafts.num_drafts) + 1
    return range(first, first + one.drafts.num_drafts)


def tree_mask(one: Verified) -> Iterable[int]:
    """Return of each new token which new tokens it sees: itself and those before it."""
    tokens = range(len(one.tokens))
    paths = map(one.path, tokens)
    return [other in path for path in paths for other in tokens]


def tree_positions(one: Verified) -> Iterable[int]:
    """Return the positions of new tokens in their branches."""
    return [one.position + len(one.path(token)) - 1 for token in range(len(one.tokens))]


def first_children(one: Verified) -> Iterable[int]:
    """Return of each new token the first one that follows it, -1 where none does."""
    return [_first(one, token, after=token) for token in range(len(one.tokens))]


def next_siblings(one: Verified) -> Iterable[int]:
    """Return of each new token the next one that follows the same token, -1 where none does."""
    parents = enumerate(one.parents)
    return [_first(one, parent, after=token) if token else -1 for token, parent in parents]


def _first(one: Verified, parent: int, *, after: int) -> int:
    """Return the first new token behind another one that follows a token, -1 if none does."""
    later = range(after + 1, len(one.tokens))
    return next((token for token in later if one.parents[token] == parent), -1)


def packed_mask(one: Verified) -> Iterable[int]:
    """Return which keys each new token sees in bits, the first key's lowest, in whole bytes."""
    tokens, before = len(one.tokens), [True] * one.position
    seen = list(tree_mask(one))
    rows = [[*before, *seen[row * tokens : (row + 1) * tokens]] for row in range(tokens)]
    bits = [bit for row in rows for bit in row]
    bytes_of = range(0, len(bits), 8)
    return [sum(bit << place for place, bit in enumerate(bits[at : at + 8])) for at in bytes_of]


def on_the_host(drafts: Drafts) -> Drafts:
    """Return drafts as lists."""
    return drafts._replace(
        rejected=host_integers("rejected", drafts.rejected),
        tokens=host_integers("tokens", drafts.tokens),
        next_tokens=host_integers("next_tokens", drafts.next_tokens),
        parents=None if drafts.parents is None else host_integers("parents", drafts.parents),
    )
