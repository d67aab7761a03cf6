"""A law of codes that stand for NaN: what reads one has NaN in its answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ...reference import AttentionProblem, MoEProblem, QuantizedMatrix
from ...reference.formats.cache_elements import FP8, NVFP4
from ...reference.tensors.inputs import PagedAttentionInputs
from ...reference.tensors.moe_inputs import MoEInputs
from ...reference.tensors.values import choose
from ..verdicts.comparison import fail
from ..verdicts.subject import Subject
from ..verdicts.verdict import PASS, VACUOUS, Verdict
from .general import run_on
from .law import MOE, PAGED, Law, Values

NAN_CODE, SIGN = 0x7F, 0x80
"""Code of NaN in e4m3fn and in e5m2, and the bit of a code's sign."""
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
NAMES = ("out", "lse")
CLAIM = "nan_codes"
"""Promise that NaN codes of either sign are read as NaN."""


def nan_codes(subject: Subject, problem: Any) -> Verdict:  # noqa: ANN401  of the operations
    """Write a code of NaN, of either sign, where it is read: the oracle says what has it then.

    What else has it is left to ``row_containment``.
    """
    problem = replace(problem, regime="iid")
    if CLAIM not in subject.implementation.features or not subject.supports(problem):
        return VACUOUS
    inputs = subject.materialise(problem)
    codes = list(READ[problem.operation](problem, inputs))
    if not codes:
        return VACUOUS
    code = NAN_CODE + SIGN * (choose(problem.seed, "sign of NaN", 0, 4) > 0)
    for each in codes:
        each.fill_(code)
    result, expectation = run_on(subject, problem, inputs)
    for name, got, expected in zip(NAMES, result, expectation.expected, strict=True):
        if got is None:
            continue
        lost = expected.isnan() & ~got.isnan()
        if lost.any():
            where = lost.nonzero()[0].tolist()
            message = f"{name}{where} is {got[tuple(where)].item():.6g}, expected NaN of {code:#x}"
            return fail("nan", message)
    return PASS


def _of_cache(problem: AttentionProblem, inputs: PagedAttentionInputs) -> Iterator[torch.Tensor]:
    """Yield the bytes of a channel of each key or value, or of its block's scale."""
    of_values = choose(problem.seed, "NaN in values", 0, 2)
    if problem.kv_element in FP8 and problem.num_tokens:
        yield (inputs.k_cache, inputs.v_cache)[of_values].view(torch.uint8)[..., 0]
    elif inputs.kv_cache_sf and inputs.kv_cache_sf[0].dtype in CODES and problem.num_tokens:
        yield inputs.kv_cache_sf[of_values].view(torch.uint8)[..., 0]


def _of_experts(problem: MoEProblem, inputs: MoEInputs) -> Iterator[torch.Tensor]:
    """Yield the bytes of a weight of the second product of each expert."""
    w2 = inputs.w2
    if isinstance(w2, QuantizedMatrix) and w2.codes.dtype in CODES and problem.num_tokens:
        yield w2.codes.view(torch.uint8)[:, 0, 0]


READ: dict[str, Callable[[Any, Any], Iterator[torch.Tensor]]] = {
    "paged_attention": _of_cache,
    "moe": _of_experts,
}


def _with_nan(formats: Values) -> Values:
    return tuple(each for each in formats if each[0].startswith(("fp8_", *FP8, NVFP4)))


def _law(name: str, operations: tuple[str, ...], axis: str, statement: str) -> Law:
    looks_at = ({axis: _with_nan},)
    return Law(name, operations, nan_codes, statement, weight=0.5, needs=(CLAIM,),
               looks_at=looks_at)  # fmt: skip


LAWS = (
    _law(
        "nan_codes", PAGED, "caches",
        "a code of NaN in a cache or in a block's scale, of either sign, is NaN where it is read",
    ),
    _law(
        "nan_weights", MOE, "quantisation",
        "a code of NaN among FP8 weights, of either sign, gives NaN where it is read",
    ),
)  # fmt: skip
