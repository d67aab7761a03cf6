"""A kernel's algebra: computed in float64, its answer is the oracle's.

A rounding to 16 bits hides what is smaller: a key left out among 3,000, an eps added to a
denominator, an exponent cut off at -20. Triton's interpreter can compute any kernel in float64
(``impl.gpu.widened``), and then nothing hides. So only kernels are judged that promise it by the
feature ``float64_algebra``: of others a factor may be a float32 on purpose, or an exponential a
polynomial.

What is allowed is ``SHARE`` of the bound of a kernel that computes in float32 throughout. Every
term of that bound is proportional to the unit roundoff u = 2^-24: of a sum of n terms of size A it
has min(n, LAMBDA sqrt(n)) u A (Higham & Mary, SIAM J. Sci. Comput. 41(5), 2019; derived in
``reference.attention.error_terms`` and ``reference.moe.bounds``). So ``SHARE`` of it is the bound
of an arithmetic whose u is 2^-36, that is 1.5e-11 of the natural scale of each element, and
131,072 times what float64 needs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...impl.features import ALGEBRA
from ...impl.gpu.wide_memory import WideMemory
from ...impl.gpu.widened import widened
from ...reference import Arithmetic, AttentionOutput, Problem, Routing, oracle
from ...reference.attention.bounds import Bounded
from ...reference.formats.arithmetic import UNIT_ROUNDOFF
from ...reference.moe.routing_rules_bounds import sparsemixer_jump
from ...reference.operations import bounded_answer
from ...reference.tensors.moe_inputs import RouteInputs
from .comparison import Result, against_oracle
from .contained import Stop
from .routes import guarded, misshapen
from .subject import Subject
from .verdict import VACUOUS, Verdict

SHARE = 2.0**-12
"""Share of the float32 bound that is allowed: of a unit roundoff of 2^-24 it makes 2^-36."""
FLOAT32 = Arithmetic()


def algebra(subject: Subject, problem: Problem) -> Verdict:
    """Check the answer of a kernel in Triton's interpreter that computes in float64."""
    if ALGEBRA not in subject.declares or _quantises(subject, problem):
        return VACUOUS
    inputs = subject.materialise(problem)
    before = guarded(inputs) if isinstance(inputs, RouteInputs) else inputs
    expected = None
    if not isinstance(before, RouteInputs):
        expected = bounded_answer(replace(inputs, out_dtype=torch.float32), FLOAT32)
    try:
        with widened() as memory:
            result = subject.run_operation(problem, inputs)
            if memory.outdated:
                with memory.anew():  # else inputs would be those before their rounding to 16 bits
                    inputs = subject.materialise(problem)
                result = subject.run_operation(problem, inputs)
            wide = _wide(memory, result)
    except Stop as stop:
        # Whether a call fails as it is, other laws ask.
        if stop.verdict.status in {"CRASH", "REJECTED"}:
            return VACUOUS
        raise
    if not memory.launches or memory.rounded:
        return VACUOUS
    if expected is None:
        wrong = misshapen(before, result)
        if wrong is not None:
            return wrong
        wide, expected = _of_route(before, wide)
    bound = AttentionOutput(*(SHARE * each for each in expected.bound))
    verdict = against_oracle(wide, Bounded(expected.expected, bound), exact=False)
    if not verdict.bad:
        return verdict
    return replace(verdict, message=f"with every float of the kernel in float64, {verdict.message}")


def _quantises(subject: Subject, problem: Problem) -> bool:
    """Whether the kernel makes codes on purpose: of its output, or of what an activation gives."""
    codes = subject.arithmetic_of(problem).intermediate
    return (codes or "inputs") not in {"inputs", "float32", "float16", "bfloat16"} or bool(
        getattr(problem, "output_scale", None)
    )


def _wide(memory: WideMemory, result: Result) -> Result:
    first, second = (
        each if each is None or not each.is_floating_point() else memory.wide(each)
        for each in result
    )
    assert first is not None  # noqa: S101  of a pair the second only may be missing
    return first, second


def _of_route(inputs: RouteInputs, result: Result) -> tuple[Result, Bounded]:
    """Return weights, and 1 where a token's experts are right; near scores may go either way."""
    weights, ids = result
    assert ids is not None  # noqa: S101  of route there are always both
    compared = oracle.judge_routing(inputs, Routing(ids, weights), FLOAT32)
    right = compared.ids_right.double()
    wanted = AttentionOutput(compared.expected, torch.ones_like(right))
    bound = torch.where(_is_open(inputs, ids), compared.bound / SHARE, compared.bound)
    return (weights, right), Bounded(wanted, AttentionOutput(bound, torch.zeros_like(right)))


def _is_open(inputs: RouteInputs, ids: torch.Tensor) -> torch.Tensor:
    """Whether a weight depends on which side of a threshold a rounding in float32 leaves an expert.

    A kernel is given the threshold as a float32, however wide it computes.
    """
    if inputs.method != "sparsemixer":
        return torch.zeros_like(ids, dtype=torch.bool)
    taken = ids.long().clamp(0, inputs.logits.shape[1] - 1)
    roundoff = UNIT_ROUNDOFF["float32"]
    return sparsemixer_jump(inputs.logits.double(), taken, inputs.jitter, roundoff) > 0
