"""Laws of every operation that computes out and lse: attention and merging."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ...reference import AttentionProblem, MergeProblem, oracle
from ...reference.bounds import Judged
from ...reference.inputs import MergeInputs
from ..comparison import Result, against_oracle, agree, fail, same_bits, worse
from ..subject import Snapshot, Subject
from ..verdict import PASS, Verdict
from .law import ATTENTION, MERGE, Law

Computing = AttentionProblem | MergeProblem


def judged(subject: Subject, inputs: Any) -> Judged:  # noqa: ANN401  any record with out
    """Ask the oracle, with the subject's own arithmetic."""
    arithmetic = subject.implementation.arithmetic
    if isinstance(inputs, MergeInputs):
        return oracle.judge_merge(inputs, arithmetic)
    return oracle.judge_attention(inputs, arithmetic)


def run(subject: Subject, problem: Computing, **options: Any) -> tuple[Result, Judged]:  # noqa: ANN401
    """Materialise a problem, run the subject on it and ask the oracle."""
    inputs = subject.materialise(problem, **options)
    # The oracle looks first: a subject that changes its inputs must not change the answer too.
    expectation = judged(subject, inputs)
    return subject.attend(problem, inputs), expectation


def same_result(
    subject: Subject,
    problem: Computing,
    other: Computing,
    **options: Any,  # noqa: ANN401
) -> Verdict:
    """Check that two problems with equal answers are given equal answers."""
    first, first_judged = run(subject, problem)
    second, second_judged = run(subject, other, **options)
    return agree(first, second, (first_judged.bound, second_judged.bound), exact=problem.exact)


def parity(subject: Subject, problem: Computing) -> Verdict:
    """Check out and lse against the oracle, element by element."""
    result, expectation = run(subject, problem)
    return against_oracle(result, expectation, exact=problem.exact)


def well_formed(subject: Subject, problem: Computing) -> Verdict:
    """Check shapes, dtypes and finiteness, whatever the values are."""
    inputs = subject.materialise(problem)
    out, lse = subject.attend(problem, inputs)
    heads = inputs.q if isinstance(problem, AttentionProblem) else inputs.outs[0]
    width = problem.head_dim_vo if isinstance(problem, AttentionProblem) else problem.head_dim
    rows = tuple(heads.shape[:2])
    verdict = _well_formed("out", out, (*rows, width), (inputs.out_dtype,))
    if verdict.bad or lse is None:
        return verdict
    # An lse of -inf is the answer of a row that sees no key.
    finite = torch.where(lse.isneginf(), 0.0, lse)
    return _well_formed("lse", finite, rows, (torch.float32, torch.float64))


def _well_formed(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> Verdict:
    if tuple(tensor.shape) != shape:
        return fail("shape", f"{name} has shape {list(tensor.shape)}, not {list(shape)}")
    if tensor.dtype not in dtypes:
        return fail("dtype", f"{name} is {tensor.dtype}, not {dtypes[0]}")
    count = int((~tensor.isfinite()).sum())
    if count:
        return fail("nan", f"{name} has {count} of {tensor.numel()} elements that are not finite")
    return PASS


def inputs_unchanged(subject: Subject, problem: Computing) -> Verdict:
    """Check that inputs keep their bits, and so does everything around them and around out."""
    inputs = subject.materialise(problem)
    before = Snapshot(inputs)
    subject.attend(problem, inputs)
    changed = before.changed_views()
    if changed:
        return fail("mutated_input", f"the call changed its input {', '.join(changed)}")
    outside = [*before.changed_outside()]
    buffer = subject.written_outside() if subject.implementation.writes_out else None
    if buffer:
        outside.append(buffer)
    if outside:
        return fail("wrote_outside", f"the call wrote outside of {', '.join(outside)}")
    return PASS


def repeated_calls(subject: Subject, problem: Computing) -> Verdict:
    """Check that the same call gives the same bits again, or the same within the bounds."""
    first, expectation = run(subject, problem)
    first = _kept(first)
    verdict = PASS
    for _ in range(2):
        second = subject.attend(problem, subject.materialise(problem))
        if "nondeterministic" in subject.implementation.features:
            bounds = (expectation.bound, expectation.bound)
            verdict = worse(verdict, agree(first, second, bounds, exact=problem.exact))
        else:
            verdict = worse(verdict, _same_bits(first, second))
    if verdict.bad:
        return dataclasses.replace(
            verdict, kind="nondeterministic" if verdict.kind == "numeric" else verdict.kind
        )
    return verdict


def _kept(result: Result) -> Result:
    """Copy a result that may live in a buffer which the next call reuses."""
    out, lse = result
    return out.clone(), None if lse is None else lse.clone()


def _same_bits(first: Result, second: Result) -> Verdict:
    for name, a, b in zip(("out", "lse"), first, second, strict=True):
        if a is None or b is None:
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return fail("shape", f"{name} changed from {a.dtype} {list(a.shape)} between calls")
        if not same_bits(a, b):
            count = int((a != b).sum())
            return fail("numeric", f"{name} has other bits in a repeated call ({count} elements)")
    return PASS


LAWS = (
    Law(
        "parity",
        ATTENTION + MERGE,
        parity,
        "out and lse lie within the error bound around the oracle's, bitwise on the exact grid",
        weight=3.0,
    ),
    Law(
        "well_formed",
        ATTENTION + MERGE,
        well_formed,
        "out and lse have the promised shapes and dtypes and hold no NaN",
        weight=0.5,
    ),
    Law(
        "inputs_unchanged",
        ATTENTION + MERGE,
        inputs_unchanged,
        "inputs, and the canaries around inputs and outputs, keep every bit",
        weight=0.5,
    ),
    Law(
        "repeated_calls",
        ATTENTION + MERGE,
        repeated_calls,
        "the same call gives the same bits every time",
        weight=0.5,
    ),
)
