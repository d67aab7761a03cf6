"""Laws of appending to a paged cache: bits, compared exactly, and what a call quantises anew."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ...reference import AttentionProblem, oracle
from ...reference.attention.append_bounds import as_compared
from ...reference.problems.cache_names import has_block_scales
from ...reference.tensors.inputs import AppendInputs
from ...reference.tensors.values import bits, choose, stream
from ..verdicts.comparison import Check, all_within, bitwise, fail, same_bits, worse
from ..verdicts.contained import Stop
from ..verdicts.operations import APPENDED, AS_READ, appended_caches
from ..verdicts.subject import Subject
from ..verdicts.verdict import VACUOUS, Verdict
from .law import APPEND, Law, Values

Caches = tuple[torch.Tensor, ...]
"""Both caches, and their scales where each token and head has one."""
PADDED_ROWS = 3
"""Rows of keys and values behind a batch's tokens."""
SLOTS_BEHIND, SLOTS_IN_BUFFER = (2**62, -1, -(2**63)), 64
"""What stands behind a slot mapping in its buffer, and in how many places."""


def appended(subject: Subject, problem: AttentionProblem, inputs: AppendInputs) -> Caches:
    """Run the subject; return (k_cache, v_cache), or (k_cache, v_cache, k_scales, v_scales).

    Raises:
        Stop: it gave something else.
    """
    result = subject.call(problem, inputs)
    found = subject.read(partial(appended_caches, scaled=inputs.kv_cache_sf is not None), result)
    if isinstance(found, str):
        raise Stop(fail("shape", f"returned {found}"))
    caches = tuple(subject.usable(*each) for each in zip(APPENDED, found, strict=False))
    for name, cache, given in zip(APPENDED, caches, inputs.written, strict=False):
        if cache.shape != given.shape or cache.dtype != given.dtype:
            message = f"{name} became {cache.dtype} {list(cache.shape)}"
            raise Stop(fail("shape" if cache.shape != given.shape else "dtype", message))
    return caches


def compared(
    inputs: AppendInputs, caches: Caches, wanted: Caches, bounds: Caches | None
) -> Verdict:
    """Compare caches bit by bit, or element by element where there are bounds."""
    if bounds is not None:
        found = as_compared(caches, inputs.kv_format)
        columns = zip((*APPENDED, *AS_READ), found, wanted, bounds, strict=False)
        checks = [Check(*each) for each in columns]
        # What is read first: it says more than a code or a scale.
        return all_within([*checks[len(APPENDED) :], *checks[: len(APPENDED)]])
    verdict = Verdict("PASS", ratio=0.0)
    for name, cache, expected in zip(APPENDED, caches, wanted, strict=False):
        if not same_bits(cache, expected):
            verdict = worse(verdict, bitwise(name, cache, expected))
    return verdict


def append_parity(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Check every slot, the untouched ones included: bit by bit, new scales within bounds."""
    inputs = subject.materialise(problem)
    expected, bounds = oracle.bounded_append(inputs)
    caches = appended(subject, problem, inputs)
    for name, cache, given in zip(APPENDED, caches, inputs.written, strict=False):
        if inputs.in_place and cache.data_ptr() != given.data_ptr():
            return fail("shape", f"in_place: the returned {name} is another tensor")
    return compared(inputs, caches, expected, bounds)


def append_then_attend(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Attend, with the oracle, to a cache that the subject completed: as if it had been whole."""
    # Codes and scales of tokens may differ within bounds, from which attention would inherit.
    if not problem.num_tokens or problem.cache_entry.scaled:
        return VACUOUS
    inputs = subject.materialise(problem)
    attention = subject.materialise(replace(problem, operation="paged_attention"))
    k_cache, v_cache = appended(subject, problem, inputs)
    attended = oracle.attention(replace(attention, k_cache=k_cache, v_cache=v_cache))
    return bitwise("out after the append", attended.out, oracle.attention(attention).out)


def never_written(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Set slots of tokens to -1 and add rows behind the mapping: the call writes none of them.

    So engines pad a batch for a graph; what they leave in those rows is NaN here.
    """
    if "slot_mapping" not in subject.implementation.features or not problem.num_tokens:
        return VACUOUS
    inputs = subject.materialise(problem)
    tokens = torch.arange(problem.num_tokens, device=inputs.k.device)
    mapping, (wanted, bounds) = inputs.slot_mapping, oracle.bounded_append(inputs)
    skipped = bits(stream(problem.seed, "padded slots"), tokens.cpu(), 1).flatten() % 3 == 0
    skipped = skipped.to(tokens.device)
    page, slot = mapping[skipped] // problem.page_size, mapping[skipped] % problem.page_size
    for cache, given in zip(wanted, as_compared(inputs.written, inputs.kv_format), strict=True):
        pair = given.to(cache.dtype), cache
        old, new = (by_slot(each, problem.kv_layout).view(torch.uint8) for each in pair)
        new[page, slot] = old[page, slot]
    for bound in bounds or ():
        by_slot(bound, problem.kv_layout)[page, slot] = 0
    rows = [
        torch.cat([each, each.new_full((PADDED_ROWS, *each.shape[1:]), torch.nan)])
        for each in (inputs.k, inputs.v)
    ]
    slots = mapping.masked_fill(skipped, -1)
    if choose(problem.seed, "padded slots", 1, 2):
        slots = torch.cat([slots, slots.new_full((PADDED_ROWS,), -1)])
    given = replace(inputs, k=rows[0], v=rows[1], slots=_in_a_buffer(slots, problem.seed))
    return compared(inputs, appended(subject, problem, given), wanted, bounds)


def _in_a_buffer(slots: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the slots as the beginning of a buffer that holds slots of no cache behind them."""
    stale = SLOTS_BEHIND[choose(seed, "padded slots", 2, len(SLOTS_BEHIND))]
    return torch.cat([slots, slots.new_full((SLOTS_IN_BUFFER,), stale)])[: len(slots)]


def vectors_of_one_value(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Check the cache after new keys and values whose channels are all alike, or all zero.

    A quantiser divides by the range or the largest value of a vector, which may be 0 there.
    """
    if not problem.num_tokens:
        return VACUOUS
    inputs = subject.materialise(problem)
    changed = {}
    for name in ("k", "v"):
        rows = getattr(inputs, name).clone()
        tokens = torch.arange(len(rows))
        kind = bits(stream(problem.seed, f"alike {name}"), tokens, rows.shape[1]) % 3
        kind = kind.to(rows.device)[..., None]
        rows = torch.where(kind == 0, rows[..., :1], rows)
        changed[name] = torch.where(kind == 1, torch.zeros_like(rows), rows)
    given = replace(inputs, **changed)
    wanted, bounds = oracle.bounded_append(given)
    return compared(given, appended(subject, problem, given), wanted, bounds)


def _scales_of_no_token(caches: Values) -> Values:
    return tuple(pair for pair in caches if not has_block_scales(pair[0]))


def by_slot(cache: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """View a cache as [pages, page_size, kv_heads, channels]."""
    return cache if kv_layout == "NHD" else cache.transpose(1, 2)


LAWS = (
    Law(
        "append_parity",
        APPEND,
        append_parity,
        "new keys and values stand in their slots, scales of tokens and their codes, or what is "
        "read from codes and zero points, within the bound, and every other slot keeps its bits",
        weight=2.0,
    ),
    Law(
        "append_then_attend",
        APPEND,
        append_then_attend,
        "attention over a cache that was appended to is attention over the whole of it",
        weight=0.5,
        looks_at=({"caches": _scales_of_no_token},),
        overlap="append_parity sees every bit of the caches; this says what the bits are for",
    ),
    Law(
        "never_written",
        APPEND,
        never_written,
        "tokens of slot -1, and rows behind the slot mapping, are not written",
        weight=0.5,
        needs=("slot_mapping",),
    ),
    Law(
        "vectors_of_one_value",
        APPEND,
        vectors_of_one_value,
        "new keys and values whose channels are all alike, or all zero, are written as others are",
        weight=0.5,
    ),
)
