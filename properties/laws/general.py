"""Laws of every operation that computes: attention, merging, experts, and in part routing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from ...impl.features import ALGEBRA
from ...reference import (
    AttentionProblem,
    BatchedMoEProblem,
    MergeProblem,
    MoEProblem,
    Problem,
    RouteProblem,
)
from ...reference.attention.bounds import Bounded
from ...reference.problems import LSE_LAYOUTS
from ...reference.tensors.values import choose
from ..verdicts.algebra import algebra
from ..verdicts.comparison import (
    Result,
    against_oracle,
    agree,
    fail,
    same_bits,
    within_bounds_of_zero,
    worse,
)
from ..verdicts.contained import Stop
from ..verdicts.hints import with_hint
from ..verdicts.on_host import answered
from ..verdicts.operations import OPERATIONS
from ..verdicts.rounding import with_rounding
from ..verdicts.snapshot import Snapshot
from ..verdicts.subject import Subject
from ..verdicts.verdict import PASS, VACUOUS, Verdict
from .law import ATTENTION, BATCHED, MERGE, MOE, ROUTE, Law

Computing = AttentionProblem | MergeProblem | MoEProblem | BatchedMoEProblem
Running = Computing | RouteProblem
OTHER_FILL = -416.0
"""Second fill of output buffers: a kernel may clear NaN first; float8_e4m3fn can hold it, too."""


def expectation_of(subject: Subject, problem: Problem, inputs: Any) -> Bounded:  # noqa: ANN401
    """Ask the oracle about inputs of a problem, with the subject's own arithmetic."""
    return answered(problem, inputs, subject.arithmetic_of(inputs))


def run(subject: Subject, problem: Running, **options: Any) -> tuple[Result, Bounded]:  # noqa: ANN401
    """Materialise a problem, run the subject on it and ask the oracle."""
    return run_on(subject, problem, subject.materialise(problem, **options))


def run_on(subject: Subject, problem: Running, inputs: Any) -> tuple[Result, Bounded]:  # noqa: ANN401
    """Run the subject on these inputs, which the problem describes, and ask the oracle."""
    # The oracle looks first: a subject that changes its inputs must not change the answer too.
    expectation = expectation_of(subject, problem, inputs)
    result = kept(subject.run_operation(problem, inputs))
    # Two answers of the same wrong shape agree with each other, and with no bound.
    names = OPERATIONS[problem.operation].names
    for name, tensor, bound in zip(names, result, expectation.bound, strict=True):
        if tensor is not None and tensor.shape != bound.shape:
            shapes = f"{list(tensor.shape)}, not {list(bound.shape)}"
            raise Stop(fail("shape", f"{name} has shape {shapes}"))
    return result, expectation


def same_result(
    subject: Subject,
    problem: Computing,
    other: Computing,
    **options: Any,  # noqa: ANN401
) -> Verdict:
    """Check that a subject answers two equivalent problems alike."""
    first, first_bounded = run(subject, problem)
    second, second_bounded = run(subject, other, **options)
    return agree(
        first, second, (first_bounded.bound, second_bounded.bound), exact=subject.exact(problem)
    )


def as_expected(
    subject: Subject, problem: Computing, result: Result, expected: Bounded, *, exact: bool
) -> Verdict:
    """Check a result against the oracle; the verdict says what explains what is wrong."""
    verdict = against_oracle(result, expected, exact=exact)
    if not (verdict.bad and subject.explains):
        return verdict
    # Afresh: the call may have changed its own inputs.
    inputs = subject.materialise(problem)
    arithmetic = subject.arithmetic_of(inputs)
    hinted = with_hint(verdict, inputs, result, expected, arithmetic)
    if hinted is not verdict or exact:
        return hinted
    return with_rounding(verdict, inputs, result, expected, arithmetic)


def parity(subject: Subject, problem: Computing) -> Verdict:
    """Check out and lse against the oracle, element by element."""
    result, expectation = run(subject, problem)
    exact = subject.exact(problem)
    verdict = as_expected(subject, problem, result, expectation, exact=exact)
    # Zeros would be called right, whatever is given: experts whose activation cancels everywhere,
    # many values that an arithmetic of few bits sums up. An lse is judged by itself.
    nothing = not exact and result[1] is None and within_bounds_of_zero(expectation)
    return VACUOUS if nothing and not verdict.bad else verdict


def well_formed(subject: Subject, problem: Computing) -> Verdict:
    """Check shapes, dtypes and finiteness, whatever the values are."""
    inputs = subject.materialise(problem)
    out, lse = subject.run_operation(problem, inputs)
    wanted = OPERATIONS[problem.operation].outputs(inputs)
    shape, dtype, _ = wanted["out"]
    verdict = _well_formed("out", out, shape, (dtype,))
    if verdict.bad or lse is None:
        return verdict
    # An lse of -inf is the answer of a row that sees no key.
    finite = torch.where(lse.isneginf(), 0.0, lse)
    dtypes = (torch.float32, torch.float64, subject.lse_dtype(inputs))
    return _well_formed("lse", finite, wanted["lse"][0], tuple(dict.fromkeys(dtypes)))


def _well_formed(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> Verdict:
    if tuple(tensor.shape) != shape:
        return fail("shape", f"{name} has shape {list(tensor.shape)}, not {list(shape)}")
    if tensor.dtype not in dtypes:
        return fail("dtype", f"{name} is {tensor.dtype}, not {dtypes[0]}")
    count = int((~tensor.double().isfinite()).sum())  # FP8 has no isfinite
    if count:
        return fail("nan", f"{name} has {count} of {tensor.numel()} elements that are not finite")
    return PASS


def inputs_unchanged(subject: Subject, problem: Running) -> Verdict:
    """Check that inputs keep their bits, and so does everything around them and around out."""
    inputs = subject.materialise(problem)
    before = Snapshot(inputs)
    subject.run_operation(problem, inputs)
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


def repeated_calls(subject: Subject, problem: Running) -> Verdict:
    """Check that the same call gives the same bits again, or the same within the bounds."""
    first = run(subject, problem)
    return worse(_again(subject, problem, first), _again(subject, problem, first))


def _again(subject: Subject, problem: Running, before: tuple[Result, Bounded]) -> Verdict:
    """Repeat a call: the same bits, or the same within the bounds where that was declared."""
    first, expectation = before
    second = subject.run_operation(problem, subject.materialise(problem))
    judge_apart = OPERATIONS[problem.operation].judge_apart
    if "nondeterministic" not in subject.implementation.features:
        verdict = _same_bits(first, second)
    elif judge_apart is not None:
        verdict = judge_apart(subject.implementation, subject.materialise(problem), second)
    else:
        bounds = (expectation.bound, expectation.bound)
        verdict = agree(first, second, bounds, exact=subject.exact(problem))
    if verdict.kind == "numeric":
        return dataclasses.replace(verdict, kind="nondeterministic")
    return verdict


def call_order(subject: Subject, problem: Running) -> Verdict:
    """Repeat a call after one on another batch: nothing of that may be left."""
    other = next((each for each in others(problem) if subject.supports(each)), None)
    if other is None:
        return VACUOUS
    first = run(subject, problem)
    subject.run_operation(other, subject.materialise(other))
    verdict = _again(subject, problem, first)
    if verdict.bad:
        message = f"repeated after a call on another batch: {verdict.message}"
        return dataclasses.replace(verdict, message=message)
    return verdict


def others(problem: Running) -> Iterator[Running]:
    """Yield other batches of the same kind, the most different first."""
    fresh = dataclasses.replace(problem, seed=problem.seed + 1)
    yield OPERATIONS[problem.operation].other_batch(fresh)
    yield fresh


def output_buffers(subject: Subject, problem: Computing) -> Verdict:
    """Fill the given output buffers with something else: whatever they held, it is overwritten."""
    if not subject.implementation.writes_out:
        return VACUOUS
    poisoned = kept(subject.run_operation(problem, subject.materialise(problem)))
    filled = subject.run_operation(problem, subject.materialise(problem), fill=OTHER_FILL)
    verdict = _same_bits(poisoned, filled)
    if verdict.bad:
        message = f"output buffers that held {OTHER_FILL} and not NaN before: {verdict.message}"
        return dataclasses.replace(verdict, message=message)
    if "lse_views" in subject.implementation.features and isinstance(problem, AttentionProblem):
        return _lse_views(subject, problem, poisoned)
    return verdict


def _lse_views(subject: Subject, problem: AttentionProblem, dense: Result) -> Verdict:
    """Check that the result has the same bits where the buffer for the LSE is a view.

    Engines keep LSEs as [heads, padded tokens], for example.
    """
    layouts = LSE_LAYOUTS[1:]
    layout = layouts[choose(problem.seed, "lse_layout", 0, len(layouts))]
    with subject.lse_laid_out(layout):
        result = subject.run_operation(problem, subject.materialise(problem))
        outside = subject.written_outside()
    said = f"with an lse whose buffer is {layout}"
    if outside:
        return fail("wrote_outside", f"{said}: the call wrote outside of {outside}")
    verdict = _same_bits(dense, result)
    if verdict.bad:
        return dataclasses.replace(verdict, message=f"{said}: {verdict.message}")
    return verdict


def kept(result: Result) -> Result:
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
        ATTENTION + MERGE + MOE + BATCHED,
        parity,
        "the answer (out, and lse where there is one) lies within the error bound around the "
        "oracle's, bitwise on the exact grid",
        weight=3.0,
        overlap="soak compares its first launch with the oracle too, on few of the problems",
        pairs=True,
    ),
    Law(
        "algebra",
        ATTENTION + MERGE + MOE + BATCHED + ROUTE,
        algebra,
        "a Triton kernel that the interpreter computes in float64 gives the oracle's answer to "
        "1.5e-11 of its natural scale",
        weight=0.25,
        needs=(ALGEBRA,),
    ),
    Law(
        "well_formed",
        ATTENTION + MERGE + MOE + BATCHED,
        well_formed,
        "out and lse have the promised shapes and dtypes and hold no NaN",
        weight=0.5,
    ),
    Law(
        "inputs_unchanged",
        ATTENTION + MERGE + MOE + BATCHED + ROUTE,
        inputs_unchanged,
        "inputs, and the canaries around inputs and outputs, keep every bit",
        weight=0.5,
    ),
    Law(
        "repeated_calls",
        ATTENTION + MERGE + MOE + BATCHED + ROUTE,
        repeated_calls,
        "the same call gives the same bits every time",
        weight=0.5,
        overlap="soak repeats a call far more often, on less than half of the problems",
    ),
    Law(
        "call_order",
        ATTENTION + MERGE + MOE + BATCHED + ROUTE,
        call_order,
        "the same call gives the same bits after a call on another batch",
        weight=0.5,
    ),
    Law(
        "output_buffers",
        ATTENTION + MERGE + MOE + BATCHED,
        output_buffers,
        "what the given output buffers held before makes no difference",
        weight=0.5,
        needs=("writes_out",),
    ),
)
