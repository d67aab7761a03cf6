"""Laws of appending to a paged cache: of copies, of codes, and of rows that are turned first."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ...reference import AttentionProblem, RopeAppendProblem, oracle
from ...reference.attention.append_bounds import as_compared
from ...reference.formats.cache_elements import cache_element
from ...reference.problems.cache_names import element_of, has_block_scales
from ...reference.tensors.inputs import AppendInputs
from ...reference.tensors.rope_append import RopeAppendInputs, with_other_turns
from ...reference.tensors.values import bits, choose, stream
from ..verdicts.appended import Caches, by_slot, copied, judge_codes, judges_codes
from ..verdicts.comparison import Check, all_within, bitwise, fail, same_bits, worse
from ..verdicts.contained import Stop
from ..verdicts.operations import APPENDED, AS_READ, OPERATIONS, appended_caches
from ..verdicts.rope import judge_appended
from ..verdicts.subject import Subject
from ..verdicts.verdict import PASS, VACUOUS, Verdict
from .law import APPEND, ROPE, Law, Values

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


class Expected(NamedTuple):
    """What caches are to be after a call, which may change its inputs.

    Attributes:
        wanted: the caches, and scales where there are some; as they are given, where codes are
            judged by their ends.
        bounds: bounds of each element of what ``as_compared`` returns; None where bits are right,
            or codes are judged.
        given: a copy of what the call is given, where codes are judged; else None.
    """

    wanted: Caches
    bounds: Caches | None = None
    given: AppendInputs | None = None


def expected_of(inputs: AppendInputs) -> Expected:
    """Return what a call with these inputs is to answer."""
    if judges_codes(inputs):
        given = copied(inputs)
        return Expected(given.written, given=given)
    return Expected(*oracle.bounded_append(inputs))


def compared(
    subject: Subject,
    inputs: AppendInputs,
    caches: Caches,
    expected: Expected,
    written: torch.Tensor | None = None,
) -> Verdict:
    """Compare caches by codes and their ends, element by element within bounds, or bit by bit.

    Args:
        subject: what answered.
        inputs: what it was given.
        caches: its answer.
        expected: what it is to be.
        written: bool [tokens], which tokens have a slot, where codes are judged; None: all.
    """
    if expected.given is not None:
        return judge_codes(expected.given, caches, subject.arithmetic_of(inputs), written)
    if expected.bounds is not None:
        found = as_compared(caches, inputs.kv_format)
        columns = zip((*APPENDED, *AS_READ), found, expected.wanted, expected.bounds, strict=False)
        checks = [Check(*each) for each in columns]
        # What is read first: it says more than a code or a scale.
        return all_within([*checks[len(APPENDED) :], *checks[: len(APPENDED)]])
    verdict = Verdict("PASS", ratio=0.0)
    for name, cache, wanted in zip(APPENDED, caches, expected.wanted, strict=False):
        if not same_bits(cache, wanted):
            verdict = worse(verdict, bitwise(name, cache, wanted))
    return verdict


def append_parity(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Check every slot, the untouched ones included: bit by bit, new scales within bounds."""
    inputs = subject.materialise(problem)
    expected = expected_of(inputs)
    caches = appended(subject, problem, inputs)
    for name, cache, given in zip(APPENDED, caches, inputs.written, strict=False):
        if inputs.in_place and cache.data_ptr() != given.data_ptr():
            return fail("shape", f"in_place: the returned {name} is another tensor")
    return compared(subject, inputs, caches, expected)


def append_then_attend(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Attend, with the oracle, to a cache that the subject completed: as if it had been whole."""
    # Codes and scales of tokens may differ within bounds, from which attention would inherit.
    if not problem.num_tokens or problem.cache_entry.scaled or problem.cache_entry.ends:
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
    mapping, expected = inputs.slot_mapping, expected_of(inputs)
    skipped = bits(stream(problem.seed, "padded slots"), tokens.cpu(), 1).flatten() % 3 == 0
    skipped = skipped.to(tokens.device)
    page, slot = mapping[skipped] // problem.page_size, mapping[skipped] % problem.page_size
    for cache, given in zip(
        expected.wanted, as_compared(inputs.written, inputs.kv_format), strict=True
    ):
        pair = given.to(cache.dtype), cache
        old, new = (by_slot(each, problem.kv_layout).view(torch.uint8) for each in pair)
        new[page, slot] = old[page, slot]
    for bound in expected.bounds or ():
        by_slot(bound, problem.kv_layout)[page, slot] = 0
    rows = [
        torch.cat([each, each.new_full((PADDED_ROWS, *each.shape[1:]), torch.nan)])
        for each in (inputs.k, inputs.v)
    ]
    slots = mapping.masked_fill(skipped, -1)
    if choose(problem.seed, "padded slots", 1, 2):
        slots = torch.cat([slots, slots.new_full((PADDED_ROWS,), -1)])
    given = replace(inputs, k=rows[0], v=rows[1], slots=_in_a_buffer(slots, problem.seed))
    return compared(subject, inputs, appended(subject, problem, given), expected, ~skipped)


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
    if problem.values_in_keys:
        changed["v"] = changed["k"][..., : problem.head_dim_vo]
    given = replace(inputs, **changed)
    expected = expected_of(given)
    return compared(subject, given, appended(subject, problem, given), expected)


def turned(subject: Subject, problem: RopeAppendProblem, inputs: RopeAppendInputs) -> Caches:
    """Run the subject; return the queries and the caches, which it wrote.

    Queries of tokens without a slot are 0: nothing is promised of them.

    Raises:
        Stop: it gave something else.
    """
    shape, kept = inputs.q.shape, inputs.slots >= 0
    found = subject.read(OPERATIONS[problem.operation].pair, subject.call(problem, inputs))
    if isinstance(found, str):
        raise Stop(fail("shape", f"returned {found}"))
    q = subject.usable("q", found[0])
    if q.dtype != inputs.q_dtype or q.shape != shape:
        wrong = "dtype" if q.dtype != inputs.q_dtype else "shape"
        raise Stop(fail(wrong, f"q is {q.dtype} of shape {list(q.shape)}"))
    q = q.clone(memory_format=torch.contiguous_format)
    q.view(torch.uint8)[~kept] = 0
    return (q, *(each.clone() for each in inputs.caches))


def rope_parity(subject: Subject, problem: RopeAppendProblem) -> Verdict:
    """Check every query, every new slot, and that no other byte of the caches changed."""
    return _judged(subject, problem, subject.materialise(problem))


def _judged(subject: Subject, problem: RopeAppendProblem, inputs: RopeAppendInputs) -> Verdict:
    """Compare a call with the oracle, by what it was given: it may change its inputs."""
    names = ("q", "k", "v", "positions", "slots", "cos_sin")
    given = {name: getattr(inputs, name) for name in names}
    copies: dict[str, Any] = {
        name: None if each is None else each.clone() for name, each in given.items()
    }
    arithmetic = subject.arithmetic_of(inputs)
    q = turned(subject, problem, inputs)[0]
    return judge_appended(replace(inputs, **copies), q, arithmetic)


def rope_at_zero(subject: Subject, problem: RopeAppendProblem) -> Verdict:
    """Turn all tokens by the position 0: queries and keys are quantised as they are."""
    inputs = subject.materialise(problem)
    return _judged(subject, problem, replace(inputs, positions=torch.zeros_like(inputs.positions)))


def rope_never_written(subject: Subject, problem: RopeAppendProblem) -> Verdict:
    """Set the slots of some tokens to -1, with NaN in their rows: the call writes none of them."""
    inputs = subject.materialise(problem)
    tokens = torch.arange(problem.num_tokens)
    skipped = bits(stream(problem.seed, "never written"), tokens, 1).flatten() % 2 == 0
    if not skipped.any():
        return VACUOUS
    skipped = skipped.to(inputs.slots.device)
    for rows in (inputs.q, inputs.k, inputs.v):
        if rows is not None:
            rows[skipped] = torch.nan
    none = {name: getattr(inputs, name).masked_fill(skipped, -1) for name in ("slots", "requests")}
    return _judged(subject, problem, replace(inputs, **none))


TOKENS = ("q", "k", "v", "positions", "slots", "requests", "places")
"""What has a row for each token."""


def rope_rows(subject: Subject, problem: RopeAppendProblem) -> Verdict:
    """Reorder the tokens: queries come in that order, and the caches become the same."""
    tokens = problem.num_tokens
    if tokens < 2:  # noqa: PLR2004  no other order
        return VACUOUS
    first = turned(subject, problem, subject.materialise(problem))
    inputs = subject.materialise(problem)
    by = 1 + choose(problem.seed, "order of tokens", 0, tokens - 1)
    for name in TOKENS:
        rows = getattr(inputs, name)
        if rows is not None:
            rows.copy_(rows.roll(by, 0))
    q, *caches = turned(subject, problem, inputs)
    q.view(torch.uint8).copy_(q.view(torch.uint8).roll(-by, 0))
    return _alike("in another order of the tokens", first, (q, *caches))


def rope_pages(subject: Subject, problem: RopeAppendProblem) -> Verdict:
    """Renumber the pages: each holds what it held under its own number."""
    first = turned(subject, problem, subject.materialise(problem))
    inputs = subject.materialise(problem)
    pages = len(inputs.k_cache)
    by = 1 + choose(problem.seed, "numbers of pages", 0, pages - 1)
    for cache in inputs.caches:
        bytes_of = cache.view(torch.uint8)
        bytes_of.copy_(bytes_of.roll(by, 0))
    moved = (inputs.slots + by * inputs.page_size) % (pages * inputs.page_size)
    inputs.slots.copy_(torch.where(inputs.slots < 0, inputs.slots, moved))
    inputs.page_indices.copy_((inputs.page_indices + by) % pages)
    q, *caches = turned(subject, problem, inputs)
    back = [each.view(torch.uint8).roll(-by, 0).view(each.dtype) for each in caches]
    return _alike("with other numbers of pages", first, (q, *back))


def rope_plain(subject: Subject, problem: RopeAppendProblem) -> Verdict:
    """Turn tokens by other positions: channels that do not turn, and values, keep their bits."""
    if not problem.plain_dim and problem.latent:
        return VACUOUS
    inputs = subject.materialise(problem)
    plain = inputs.plain
    first = turned(subject, problem, inputs)
    other = subject.materialise(problem)
    positions = with_other_turns(other, problem.seed)
    second = turned(subject, problem, replace(other, positions=positions))
    pairs = [(q[..., plain], k[..., plain], *v) for q, k, *v in (first, second)]
    return _alike("at other positions, what does not turn", *pairs)


def rope_again(subject: Subject, problem: RopeAppendProblem) -> Verdict:
    """Repeat a call, also after one on another batch: everything has the same bits."""
    first = turned(subject, problem, subject.materialise(problem))
    other = replace(problem, shift=problem.shift + 1, seed=problem.seed + 1, regime="iid")
    for each in (None, other):
        if each is not None and not subject.supports(each):
            continue
        if each is not None:
            turned(subject, each, subject.materialise(each))
        second = turned(subject, problem, subject.materialise(problem))
        after = " after another batch" if each else ""
        verdict = _alike(f"repeated{after}", first, second)
        if verdict.bad:
            return replace(verdict, kind="nondeterministic")
    return PASS


def _alike(what: str, first: Caches, second: Caches) -> Verdict:
    """Check that queries and caches have the same bits."""
    for name, one, other in zip(("q", *APPENDED), first, second, strict=False):
        pair = one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
        different = int((pair[0] != pair[1]).sum())
        if different:
            return fail("numeric", f"{what}: {name} has other bits ({different} bytes)")
    return PASS


def _scales_of_no_token(caches: Values) -> Values:
    return tuple(pair for pair in caches if not (has_block_scales(pair[0]) or _has_ends(pair[0])))


def _has_ends(kv_cache: str) -> bool:
    return bool(kv_cache) and cache_element(element_of(kv_cache)).ends is not None


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
    Law(
        "rope_parity",
        ROPE,
        rope_parity,
        "queries and new slots hold what turns and scales make of the rows, to the last bit where "
        "the rounding is defined, else one of two codes; all other slots keep their bits",
        weight=3.0,
        overlap="slack_rows compares with the oracle too, with garbage behind the rows",
    ),
    Law(
        "rope_at_zero",
        ROPE,
        rope_at_zero,
        "at position 0 queries and keys are quantised as they are",
        weight=0.5,
        overlap="rope_parity sees every code; here none has two that are right",
    ),
    Law(
        "rope_never_written",
        ROPE,
        rope_never_written,
        "tokens of slot -1, NaN in their rows, are not written and change nothing",
    ),
    Law(
        "rope_rows",
        ROPE,
        rope_rows,
        "tokens in another order have the queries and slots that they have in this one",
        weight=0.5,
        overlap="rope_parity sees every code; this asks no oracle",
    ),
    Law(
        "rope_pages",
        ROPE,
        rope_pages,
        "pages with other numbers hold what they held under their own",
        weight=0.5,
        overlap="rope_parity sees every slot; this asks no oracle",
    ),
    Law(
        "rope_plain",
        ROPE,
        rope_plain,
        "channels that do not turn, and values, do not depend on positions",
        weight=0.5,
        overlap="rope_parity sees every code; this asks no oracle",
    ),
    Law(
        "rope_again",
        ROPE,
        rope_again,
        "the same call gives the same bits again, and after a call on another batch",
        weight=0.5,
        overlap="rope_parity, too, sees what a call before it has left",
    ),
)
