"""Laws of keys that no query sees: whatever lies there, scales included, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from ...reference import AttentionProblem
from ...reference.formats.cache_elements import SCALE_LAYOUTS
from ...reference.oracle import seen_keys
from ...reference.problems.cache_names import multiples_of
from ...reference.tensors.allocation import CANARY
from ...reference.tensors.inputs import AttentionInputs, PagedAttentionInputs
from ...reference.tensors.placement import placement
from ...reference.tensors.values import choose
from ..verdicts.comparison import agree
from ..verdicts.subject import Subject
from ..verdicts.verdict import VACUOUS, Verdict
from .general import kept, run, run_on
from .law import ATTENTION, PAGED, Law, Values, chosen

SMALLER_PAGES = (16, 8, 4, 1)
"""Page sizes to fall back on, where no page of a request is behind its window."""


class Fill(NamedTuple):
    """What hidden keys hold: numbers, and codes of one byte."""

    number: float
    code: int


NAN, HARMLESS = Fill(torch.nan, 0xFF), Fill(CANARY, int(CANARY))
"""NaN, which the byte 0xFF is in FP8 and, repeated, in every wider type; and finite garbage."""
FILLS = (NAN, NAN, Fill(torch.inf, 0x7F), Fill(-torch.inf, 0x80))
"""What hidden keys hold, each as often as it stands here; the last bytes are int8's extremes."""


def unused_memory(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Poison with NaN what must not be read: unused pages, last pages' tails, canaries.

    So are pages behind every window, unless the implementation needs finite numbers there.
    """
    first, bounded = run(subject, problem)
    inputs = subject.materialise(problem, unused=torch.nan)
    if isinstance(inputs, PagedAttentionInputs):
        if inputs.k_cache.element_size() == 1:  # bytes are no NaN by themselves
            overwrite(inputs, ~_owned(problem).to(inputs.q.device), NAN)
        if subject.implementation.hidden_keys == "any" and _frees_pages(problem):
            overwrite(inputs, behind_windows(inputs, problem), NAN)
    second, poisoned = run_on(subject, problem, inputs)
    bounds = (bounded.bound, poisoned.bound)
    return agree(first, second, bounds, exact=subject.exact(problem))


def _owned(problem: AttentionProblem) -> torch.Tensor:
    """Return which slots, bool [pages, page_size], hold a key of some request."""
    placed = placement(problem)
    owned = torch.zeros(placed.num_pages, problem.page_size, dtype=torch.bool)
    owned[placed.slots[0], placed.slots[1]] = True
    return owned


def pages_behind_window(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Overwrite the pages that lie wholly behind every query's window, with their scales."""
    windowed = next(filter(subject.supports, _windowed(problem)), None)
    return VACUOUS if windowed is None else _unchanged(subject, windowed, everything=False)


def unread_hidden_keys(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Overwrite each slot that no query sees, with its scales, where it is promised to be inert."""
    if "unread_hidden_keys" not in subject.implementation.features:
        return VACUOUS
    if not hides(problem):
        problem = next(filter(subject.supports, _hiding(problem)), problem)
    return _unchanged(subject, problem, everything=True)


def hides(problem: AttentionProblem) -> bool:
    """Whether a window, a chunk or a mask may hide keys from every query of a request."""
    return _frees_pages(problem) or problem.custom_mask


def _frees_pages(problem: AttentionProblem) -> bool:
    """Whether pages may lie behind a window, or in chunks before the queries' own."""
    return problem.window_left >= 0 or problem.chunk > 0


def _hiding(problem: AttentionProblem) -> Iterator[AttentionProblem]:
    """Yield the problem with a mask, and with a window that hides a key: either comes first."""
    window = max((_longest(problem) - 1) // 2, 0)
    windowed, masked = (
        replace(problem, window_left=window),
        replace(problem, custom_mask=True, tree=0),
    )
    yield from (masked, windowed) if problem.seed % 2 else (windowed, masked)


def _longest(problem: AttentionProblem) -> int:
    """Return most keys before the queries of a request; 0 where no request has a query."""
    pairs = zip(problem.query_lens, problem.seq_lens, strict=True)
    return max((s - t for t, s in pairs if t), default=0)


def _windowed(problem: AttentionProblem) -> Iterator[AttentionProblem]:
    """Yield problems with a page behind the window, or the chunk, of a request's queries.

    Those most like the problem come first.
    """
    least = multiples_of(problem.kv_cache).get("page_size", 1)
    smaller = [size for size in SMALLER_PAGES if size < problem.page_size and not size % least]
    for size in (problem.page_size, *smaller):
        if problem.chunk or problem.seed % 2:
            before = _longest(problem)
            for chunk in dict.fromkeys((problem.chunk, max(size, 2))):
                if chunk and before // chunk * chunk >= size:
                    yield replace(problem, page_size=size, window_left=-1, chunk=chunk)
        widest = _longest(problem) - size  # that leaves the request's first page behind it
        for window in dict.fromkeys((problem.window_left, widest // 2, 0)):
            if 0 <= window <= widest:
                yield replace(problem, page_size=size, window_left=window)


def _unchanged(subject: Subject, problem: AttentionProblem, *, everything: bool) -> Verdict:
    first, bounded = run(subject, problem)
    inputs = subject.materialise(problem)
    hidden = ~seen_keys(inputs) if everything else behind_windows(inputs, problem)
    if not hidden.any():
        return VACUOUS
    fill = FILLS[choose(problem.seed, "hidden keys", 0, len(FILLS))]
    if subject.implementation.hidden_keys == "finite" and not everything:
        fill = HARMLESS
    overwrite(inputs, hidden, fill)
    second = kept(subject.run_operation(problem, inputs))
    verdict = agree(first, second, (bounded.bound,) * 2, exact=subject.exact(problem))
    if not verdict.bad:
        return verdict
    where = "each slot that no query sees" if everything else "the pages behind every window"
    message = f"with {fill.number} in {where}: {verdict.message}"
    return replace(verdict, message=message, about=problem.to_json())


def behind_windows(inputs: AttentionInputs, problem: AttentionProblem) -> torch.Tensor:
    """Return the slots, bool [pages, page_size], of pages behind the windows of all their requests.

    Pages of chunks before the queries' own are among them, as those behind windows are: an engine
    frees both. What no query sees for another reason, such as a custom mask or the gaps of a
    dilated window, is not among them, and nor are pages with tokens that are seen from everywhere.
    """
    if not isinstance(inputs, PagedAttentionInputs) or not _frees_pages(problem):
        return torch.zeros_like(seen_keys(inputs))
    # An engine frees no page for the sake of a mask: first tokens and spans keep theirs under one.
    seen = seen_keys(replace(inputs, custom_mask=None, tree_mask=None))
    behind = torch.zeros(len(seen), dtype=torch.bool)
    kept_pages = torch.zeros_like(behind)
    indptr = inputs.metadata.paged_kv_indptr.tolist()
    indices = inputs.metadata.paged_kv_indices.long().cpu()
    for begin, end, t, s in zip(
        indptr, indptr[1:], problem.query_lens, problem.seq_lens, strict=False
    ):
        pages = indices[begin:end]
        whole = _first_kept(problem, s - t) // problem.page_size
        behind[pages[:whole]] = True
        kept_pages[pages[whole:]] = True
    freed = (behind & ~kept_pages).to(seen.device) & ~seen.any(dim=1)
    return freed.unsqueeze(1).expand_as(seen)


def _first_kept(problem: AttentionProblem, position: int) -> int:
    """Return the first key that windows and chunks leave to a query at a position, or to later."""
    first = max(position, 0)
    of_window = position - problem.window_left if problem.window_left >= 0 else 0
    of_chunk = first // problem.chunk * problem.chunk if problem.chunk else 0
    return max(of_window, of_chunk, 0)


def overwrite(inputs: AttentionInputs, slots: torch.Tensor, fill: Fill) -> None:
    """Fill slots [pages, page_size] of K and V, and of their scales, with ``fill`` or its bytes."""
    if not isinstance(inputs, PagedAttentionInputs):
        for each in (inputs.k, inputs.v):
            _fill(each.unsqueeze(1), slots, fill)
        return
    caches = (inputs.k_cache, inputs.v_cache)
    hnd = inputs.kv_layout == "HND"
    for cache in caches:
        _fill(cache.transpose(1, 2) if hnd else cache, slots, fill)
    if inputs.kv_cache_sf is None:
        return
    layout = "linear" if inputs.kv_format is None else inputs.kv_format.v_scale_layout
    for number, scales in enumerate(inputs.kv_cache_sf):
        by_slot = torch.zeros_like(scales, dtype=torch.uint8)
        (by_slot.transpose(1, 2) if hnd else by_slot)[slots] = 1
        if number:  # the scales of V may be stored in another order
            by_slot = SCALE_LAYOUTS[layout].store(by_slot, inputs.kv_layout)
        _put(scales, by_slot.bool(), fill)


def _fill(by_slot: torch.Tensor, slots: torch.Tensor, fill: Fill) -> None:
    if by_slot.element_size() == 1:
        of_integers = by_slot.dtype == torch.int8 and fill == NAN  # they have none
        by_slot.view(torch.uint8)[slots] = 0x80 if of_integers else fill.code
    else:
        by_slot[slots] = fill.number


def _put(scales: torch.Tensor, where: torch.Tensor, fill: Fill) -> None:
    if scales.element_size() == 1:
        scales.view(torch.uint8)[where] = fill.code
    else:
        scales[where] = fill.number


def _windows(values: Values) -> Values:
    return tuple(value for value in values if value >= 0)


LAWS = (
    Law(
        "pages_behind_window",
        PAGED,
        pages_behind_window,
        "NaN in pages that lie behind every window or chunk, and in their scales, changes nothing: "
        "engines free and reuse them",
        weight=0.5,
        looks_at=({"window_left": _windows}, {"chunk": chosen}),
        overlap="unused_memory poisons such pages too, where a problem happens to have some",
    ),
    Law(
        "unread_hidden_keys",
        ATTENTION,
        unread_hidden_keys,
        "whatever lies in a slot that no query sees, and in its scales, changes nothing, where "
        "that is promised",
        weight=0.5,
        needs=("unread_hidden_keys",),
    ),
)
