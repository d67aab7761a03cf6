"""Laws of layouts: each element lies, with every bit, where the kernel reads it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ....reference import RearrangeProblem
from ....reference.tensors.rearrange import RearrangeInputs, rearranged
from ....reference.tensors.values import choose
from ...verdicts.comparison import bitwise, fail, same_bits
from ...verdicts.contained import Stop
from ...verdicts.subject import Subject
from ...verdicts.verdict import PASS, VACUOUS, Verdict
from ..law import REARRANGE, Law, several

BITS = {1: torch.uint8, 2: torch.int16}
"""Integers of elements by their bytes."""


def answered(
    subject: Subject, problem: RearrangeProblem, inputs: RearrangeInputs | None = None
) -> torch.Tensor:
    """Return the bits of what a call answers; a clone, for another may write where it did.

    Raises:
        Stop: it is no tensor of the inputs' dtype.
    """
    record: RearrangeInputs = subject.materialise(problem) if inputs is None else inputs
    result: Any = subject.call(problem, record)
    found = subject.read(lambda given: given if isinstance(given, torch.Tensor) else None, result)
    if found is None:
        raise Stop(fail("shape", f"returned {type(result).__name__}, not a tensor"))
    found = subject.usable("out", found)
    if found.dtype != record.x.dtype:
        raise Stop(fail("dtype", f"out is {found.dtype}, not {record.x.dtype}"))
    return _bits(found).clone()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(BITS[tensor.element_size()])


def parity(subject: Subject, problem: RearrangeProblem) -> Verdict:
    """Compare every element with the oracle's, as bits."""
    inputs: RearrangeInputs = subject.materialise(problem)
    # Compute the expectation first: a call may change its inputs.
    expected = _bits(rearranged(inputs))
    return bitwise("out", answered(subject, problem, inputs), expected)


def one_element(subject: Subject, problem: RearrangeProblem) -> Verdict:
    """Change the bits of one element: the answer changes at one place, to these bits."""
    before = answered(subject, problem)
    inputs: RearrangeInputs = subject.materialise(problem)
    flat = inputs.x.view(BITS[inputs.x.element_size()]).view(-1)
    place = choose(problem.seed, "element", 0, flat.numel())
    flat[place] ^= 0x55
    wanted = int(flat[place])
    after = answered(subject, problem, inputs)
    if after.shape != before.shape:
        return fail("shape", f"out has shape {list(after.shape)}, and had {list(before.shape)}")
    changed = after[after != before].tolist()
    if changed != [wanted]:
        said = f"{len(changed)} elements changed, to {changed[:4]}"
        return fail("numeric", f"element {place} was set to {wanted}: {said}")
    return PASS


def experts(subject: Subject, problem: RearrangeProblem) -> Verdict:
    """Rearrange each expert's matrix without the others: it is its part of the whole."""
    if problem.matrices < 2:  # noqa: PLR2004  nothing to part
        return VACUOUS
    alone = replace(problem, matrices=1)
    if not subject.supports(alone):
        return VACUOUS
    whole = answered(subject, problem).view(-1)
    if whole.numel() % problem.matrices:
        return fail("shape", f"{whole.numel()} elements are not of {problem.matrices} experts")
    parts = whole.view(problem.matrices, -1)
    given: RearrangeInputs = subject.materialise(problem)
    for expert, part in enumerate(parts):
        inputs: RearrangeInputs = subject.materialise(alone)
        inputs.x.copy_(given.x[expert : expert + 1])
        if not same_bits(answered(subject, alone, inputs).view(-1), part):
            return fail("numeric", f"expert {expert} alone has another layout than among others")
    return PASS


def again(subject: Subject, problem: RearrangeProblem) -> Verdict:
    """Repeat a call, also after one of other values: the answer has the same bits."""
    first = answered(subject, problem)
    for other in (problem, replace(problem, seed=problem.seed ^ 1)):
        answered(subject, other)
        second = answered(subject, problem)
        if first.shape != second.shape or not same_bits(first, second):
            return fail("nondeterministic", "the same call has other bits the second time")
    return PASS


LAWS = (
    Law(
        "rearrange_parity",
        REARRANGE,
        parity,
        "each element lies where the oracle has it, with the same bits, and 0 where there is none",
        weight=3.0,
        overlap="slack_rows compares with the oracle too, with garbage behind the matrix",
    ),
    Law(
        "rearrange_one_element",
        REARRANGE,
        one_element,
        "another element changes the answer at one place, to its own bits",
        overlap="rearrange_parity sees every element; this asks no oracle",
    ),
    Law(
        "rearrange_experts",
        REARRANGE,
        experts,
        "an expert's matrix alone has the layout that it has among others",
        looks_at=({"matrices": several},),
        overlap="rearrange_parity sees every element; this asks no oracle",
    ),
    Law(
        "rearrange_again",
        REARRANGE,
        again,
        "the same call has the same bits again, and after a call of other values",
        weight=0.5,
        overlap="rearrange_parity, too, sees what a call before it has left",
    ),
)
