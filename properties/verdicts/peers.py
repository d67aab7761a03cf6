"""Calls as peers take them: what some features change of a record, of an answer, and beside it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...impl.features import APPENDS, ROUTES, UNDEFINED
from ...reference import BatchMetadata, oracle
from ...reference.problems import MoEProblem, Problem
from ...reference.tensors.inputs import AttentionInputs, Inputs, PagedAttentionInputs
from ...reference.tensors.moe_inputs import MoEInputs
from ...reference.tensors.values import bits, stream
from .comparison import Result, fail, same_bits
from .contained import Stop
from .verdict import VACUOUS, Verdict

BELOW = 0.25
"""Least distance of a logit that is not chosen from the lowest that is: without a tie, but so near
that a softmax over all experts is far from one over the chosen."""
SUM_OF_WEIGHTS = 1e-5
"""Largest distance from 1 of a sum of weights that a softmax has given."""


class Taken(NamedTuple):
    """A record as an implementation takes it.

    Attributes:
        inputs: the record.
        wrong: what the call did that it may not, once it is over; None where nothing is wrong.
    """

    inputs: Any
    wrong: Callable[[], Verdict | None] = lambda: None


def made(features: Collection[str], problem: Problem, inputs: Any) -> Any:  # noqa: ANN401
    """Return a record of a problem whose routing weights are a softmax's, where a call routes."""
    if ROUTES not in features or not isinstance(problem, MoEProblem):
        return inputs
    inputs.topk_weights.div_(inputs.topk_weights.sum(dim=1, keepdim=True))
    return inputs


def check_expressible(features: Collection[str], inputs: Inputs) -> None:
    """Check that a record, which a law may have changed, can be handed over as a call takes it.

    Raises:
        Stop: VACUOUS: it cannot.
    """
    for word in _words(features, inputs):
        if not word.fits(inputs):
            raise Stop(VACUOUS)


def as_taken(features: Collection[str], inputs: Any) -> Taken:  # noqa: ANN401  any record
    """Return the record that an implementation with these features is called with."""
    for word in _words(features, inputs):
        return word.taken(inputs)
    return Taken(inputs)


def _brings_keys(inputs: PagedAttentionInputs) -> bool:
    """Whether each query token has a key of its own, in a slot that is no other key's.

    Another's could not be empty before the call.
    """
    metadata = inputs.metadata
    if (metadata.qo_indptr.diff() > metadata.seq_lens).any():
        return False
    return bool((_times_read(metadata)[metadata.slot_mapping()] == 1).all())


def _times_read(metadata: BatchMetadata) -> torch.Tensor:
    """Return how many keys of the batch's requests lie in each slot."""
    pages, size = metadata.paged_kv_indices[: int(metadata.paged_kv_indptr[-1])], metadata.page_size
    held = torch.full_like(pages, size)
    ends, some = metadata.paged_kv_indptr[1:].long(), metadata.seq_lens > 0
    held[ends[some] - 1] = metadata.paged_kv_last_page_len[some]
    offsets = torch.arange(size, device=pages.device)
    slots = pages.long().unsqueeze(1) * size + offsets
    return slots[offsets < held.unsqueeze(1)].bincount()


def _is_softmax(inputs: MoEInputs) -> bool:
    """Whether a softmax can give the routing weights, of experts that differ."""
    weights, ordered = inputs.topk_weights, inputs.topk_ids.sort(dim=1).values
    off = (weights.sum(dim=1) - 1).abs() > SUM_OF_WEIGHTS
    repeated = (ordered.diff(dim=1) == 0).any() or (ordered < 0).any()
    return not (off.any() or (weights <= 0).any() or repeated)


def _to_route(inputs: MoEInputs) -> Taken:
    """Hand over logits whose softmax over the largest gives the routing weights."""
    ids, weights = inputs.topk_ids.long(), inputs.topk_weights
    matrix = inputs.w13 if isinstance(inputs.w13, torch.Tensor) else inputs.w13.codes
    experts, chosen = inputs.num_experts or len(matrix), weights.log()
    # Below the lowest that is chosen, by a number of each expert's own: a token keeps its logits
    # in every batch.
    row = torch.zeros(1, dtype=torch.int64, device=ids.device)
    hashes = bits(stream(experts, "router_logits"), row, experts)
    less = BELOW + (hashes >> 12).to(torch.float32) * 2.0**-18
    logits = (chosen.amin(dim=1, keepdim=True) - less).scatter(1, ids, chosen)
    # A call that reads the answer goes wrong, but nowhere outside of its weights.
    others = ((ids + 1) % experts).to(inputs.topk_ids.dtype)
    unread = torch.full_like(weights, torch.nan)
    given = replace(inputs, topk_ids=others, topk_weights=unread, router_logits=logits)
    return Taken(given)


def _first_changed(cache: torch.Tensor, before: torch.Tensor, layout: str) -> str:
    """Return the first slot of a cache that holds something else than before; empty if none."""
    differ = (cache != before) & ~(cache.isnan() & before.isnan())
    if not differ.any():
        return ""
    page, *place = differ.nonzero()[0].tolist()
    return f"slot {place[0 if layout == 'NHD' else 1]} of page {page}"


def _to_append(inputs: PagedAttentionInputs) -> Taken:
    """Hand over the last keys and values as new ones; their slots in copies of the caches are NaN.

    What the copies hold after the call is compared bit by bit, whole allocations of them.
    """
    slots = inputs.metadata.slot_mapping()
    copies: dict[int, torch.Tensor] = {}

    def copied(cache: torch.Tensor) -> torch.Tensor:
        home = cache.untyped_storage()
        if home.data_ptr() not in copies:
            whole = cache.new_empty(0).set_(home, 0, (home.nbytes() // cache.itemsize,), (1,))
            copies[home.data_ptr()] = whole.clone()
        copy = copies[home.data_ptr()]
        return copy.as_strided(cache.shape, cache.stride(), cache.storage_offset())

    caches = {"k_cache": inputs.k_cache, "v_cache": inputs.v_cache}
    given: dict[str, Any] = {name: copied(cache) for name, cache in caches.items()}
    size = inputs.metadata.page_size
    place = (slots // size, slots % size)
    at = place if inputs.kv_layout == "NHD" else (place[0], slice(None), place[1])
    new = [cache[at].clone() for cache in caches.values()]
    before = {pointer: copy.clone() for pointer, copy in copies.items()}
    for copy in given.values():
        copy[at] = torch.nan

    def wrong() -> Verdict | None:
        for name, each in zip(given, new, strict=True):
            held = given[name][at]
            missing = ((held != each) & ~(held.isnan() & each.isnan())).flatten(1).any(dim=1)
            if missing.any():
                token = int(missing.nonzero()[0])
                message = f"{name} does not hold what the call was to append of token {token}"
                return fail("numeric", f"{message} ({int(missing.sum())} of {len(slots)} tokens)")
        if all(same_bits(copies[each], before[each]) for each in copies):
            return None
        for name, cache in caches.items():
            earlier = before[cache.untyped_storage().data_ptr()]
            was = earlier.as_strided(cache.shape, cache.stride(), cache.storage_offset())
            if slot := _first_changed(given[name], was, inputs.kv_layout):
                return fail("wrote_outside", f"the call wrote into {slot} of {name}, no new one")
        return fail("wrote_outside", "the call wrote between the slots of the caches")

    return Taken(replace(inputs, **given, new_k=new[0], new_v=new[1]), wrong)


def with_defined_rows(features: Collection[str], inputs: Inputs, result: Result) -> Result:
    """Return an answer with what the oracle has in rows that see no key, if nothing is promised."""
    if UNDEFINED not in features or not isinstance(inputs, AttentionInputs):
        return result
    out, lse = result
    whole = oracle.attention(replace(inputs, sinks=None)).lse
    unseen = whole.isneginf()
    if not unseen.any():
        return result
    nothing = torch.full_like(whole, -torch.inf)
    if inputs.sinks is not None:
        nothing = inputs.sinks.to(whole.dtype).expand_as(whole)
    return (
        out.masked_fill(unseen.unsqueeze(-1), 0.0),
        None if lse is None else torch.where(unseen, nothing.to(lse.dtype), lse),
    )


class Word(NamedTuple):
    """What a feature changes of a call's record.

    Attributes:
        record: type of the records that it is about.
        fits: whether such a record can be handed over so.
        taken: hands it over.
    """

    record: type
    fits: Callable[[Any], bool]
    taken: Callable[[Any], Taken]


WORDS = {
    APPENDS: Word(PagedAttentionInputs, _brings_keys, _to_append),
    ROUTES: Word(MoEInputs, _is_softmax, _to_route),
}
"""Features that change what a call is handed."""


def _words(features: Collection[str], inputs: object) -> Iterator[Word]:
    return (
        word for name, word in WORDS.items() if name in features and type(inputs) is word.record
    )
