"""Laws of appending to a paged cache: bits, compared exactly."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...reference import AttentionProblem, oracle
from ...reference.tensors.inputs import AppendInputs
from ..verdicts.comparison import bitwise, fail, same_bits, worse
from ..verdicts.contained import Stop
from ..verdicts.operations import pair_of_caches
from ..verdicts.subject import Subject
from ..verdicts.verdict import VACUOUS, Verdict
from .law import APPEND, Law

Caches = tuple[torch.Tensor, torch.Tensor]


def _appended(subject: Subject, problem: AttentionProblem, inputs: AppendInputs) -> Caches:
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
    caches = _appended(subject, problem, inputs)
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
    k_cache, v_cache = _appended(subject, problem, inputs)
    attended = oracle.attention(replace(attention, k_cache=k_cache, v_cache=v_cache))
    return bitwise("out after the append", attended.out, oracle.attention(attention).out)


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
)
