"""Laws of appending to a paged cache: bits, compared exactly."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...reference import AttentionProblem, oracle
from ...reference.tensors.inputs import AppendInputs
from ...reference.tensors.values import bits, choose, stream
from ..verdicts.comparison import bitwise, fail, same_bits, worse
from ..verdicts.contained import Stop
from ..verdicts.operations import pair_of_caches
from ..verdicts.subject import Subject
from ..verdicts.verdict import VACUOUS, Verdict
from .law import APPEND, Law

Caches = tuple[torch.Tensor, torch.Tensor]
PADDED_ROWS = 3
"""Rows of keys and values behind a batch's tokens."""


def appended(subject: Subject, problem: AttentionProblem, inputs: AppendInputs) -> Caches:
    """Run the subject; give (k_cache, v_cache).

    Raises:
        Stop: it gave something else.
    """
    result = subject.call(problem, inputs)
    pair = subject.read(pair_of_caches, result)
    if isinstance(pair, str):
        raise Stop(fail("shape", f"returned {pair}"))
    k_cache, v_cache = subject.usable("k_cache", pair[0]), subject.usable("v_cache", pair[1])
    for name, cache, given in (
        ("k_cache", k_cache, inputs.k_cache), ("v_cache", v_cache, inputs.v_cache),
    ):  # fmt: skip
        if cache.shape != given.shape or cache.dtype != given.dtype:
            message = f"{name} became {cache.dtype} {list(cache.shape)}"
            raise Stop(fail("shape" if cache.shape != given.shape else "dtype", message))
    return k_cache, v_cache


def append_parity(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Check every slot of both caches, the untouched ones included, bit by bit."""
    inputs = subject.materialise(problem)
    expected = oracle.append(inputs)
    caches = appended(subject, problem, inputs)
    verdict = Verdict("PASS", ratio=0.0)
    for name, cache, wanted, given in zip(
        ("k_cache", "v_cache"), caches, expected, (inputs.k_cache, inputs.v_cache), strict=True
    ):
        if inputs.in_place and cache.data_ptr() != given.data_ptr():
            return fail("shape", f"in_place: the returned {name} is another tensor")
        if not same_bits(cache, wanted):
            verdict = worse(verdict, bitwise(name, cache, wanted))
    return verdict


def append_then_attend(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Attend, with the oracle, to a cache that the subject completed: as if it had been whole."""
    if not problem.num_tokens:
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
    mapping, wanted = inputs.slot_mapping, oracle.append(inputs)
    skipped = bits(stream(problem.seed, "padded slots"), tokens.cpu(), 1).flatten() % 3 == 0
    skipped = skipped.to(tokens.device)
    page, slot = mapping[skipped] // problem.page_size, mapping[skipped] % problem.page_size
    for cache, given in zip(wanted, (inputs.k_cache, inputs.v_cache), strict=True):
        old, new = (by_slot(each, problem.kv_layout).view(torch.uint8) for each in (given, cache))
        new[page, slot] = old[page, slot]
    rows = [torch.cat([each, each.new_full((PADDED_ROWS, *each.shape[1:]), torch.nan)])
            for each in (inputs.k, inputs.v)]  # fmt: skip
    slots = mapping.masked_fill(skipped, -1)
    if choose(problem.seed, "padded slots", 1, 2):
        slots = torch.cat([slots, slots.new_full((PADDED_ROWS,), -1)])
    given = replace(inputs, k=rows[0], v=rows[1], slots=slots)
    verdict = Verdict("PASS", ratio=0.0)
    for name, cache, expected in zip(
        ("k_cache", "v_cache"), appended(subject, problem, given), wanted, strict=True
    ):
        if not same_bits(cache, expected):
            verdict = worse(verdict, bitwise(name, cache, expected))
    return verdict


def by_slot(cache: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """View a cache as [pages, page_size, kv_heads, channels]."""
    return cache if kv_layout == "NHD" else cache.transpose(1, 2)


LAWS = (
    Law(
        "append_parity",
        APPEND,
        append_parity,
        "new keys and values stand in their slots, and every other slot keeps its bits",
        weight=2.0,
    ),
    Law(
        "append_then_attend",
        APPEND,
        append_then_attend,
        "attention over a cache that was appended to is attention over the whole of it",
        weight=0.5,
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
)
