"""Errors that look like roundings: which declared arithmetic would allow them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ...reference import Arithmetic
from ...reference.attention.bounds import Bounded
from ...reference.formats.arithmetic import UNIT_ROUNDOFF, dtype_name
from ...reference.operations import bounded_answer
from .comparison import Result, against_oracle
from .verdict import Verdict

FEW = 8.0
"""Unit roundoffs of the working dtype, of a row's largest element, that a rounding error may be."""
FEWEST = 16
"""Fewest elements from whose errors a bias can be told."""
BIAS = 4.0
"""Standard errors of the mean from which errors are called biased."""
HALF = 0.5
"""Share of the rows that must have an error for it to be everywhere."""
TABLE = "docs/error-bounds.md"
"""The page whose table lists every field and value of ``Arithmetic``."""
ROUNDED_TWICE = (
    "; the output looks rounded twice: v_scale multiplies what has the output's dtype already. "
    "Multiply before out is rounded, or refuse such a v_scale in supports"
)
"""What is said where rounding an output before ``v_scale`` explains its errors."""


def with_rounding(
    verdict: Verdict,
    inputs: Any,  # noqa: ANN401  any record with out
    result: Result,
    bounded: Bounded,
    arithmetic: Arithmetic,
) -> Verdict:
    """Return a numeric FAIL whose message names ``arithmetic=`` where its error may be a rounding.

    Args:
        verdict: the verdict on the result; any other than a numeric FAIL is returned as it is.
        inputs: the inputs of the call.
        result: the result of the call.
        bounded: what the oracle expects.
        arithmetic: the arithmetic that the implementation declares.
    """
    if verdict.kind != "numeric" or not looks_rounded(inputs, result[0], bounded):
        return verdict
    if _rounded_before_v_scale(inputs, result, arithmetic):
        return replace(verdict, message=verdict.message + ROUNDED_TWICE)
    declared = next(
        (
            change
            for change in _undeclared(inputs, arithmetic)
            if _allowed(inputs, result, replace(arithmetic, **change))
        ),
        None,
    )
    what = ", ".join(f"{name}={value!r}" for name, value in (declared or {}).items())
    allowed = f"Arithmetic({what}) allows it" if what else "no single field of Arithmetic allows it"
    said = (
        f"; the error looks like a rounding (few units of {working_dtype(inputs)}, unbiased): "
        f"{allowed}. Declare with arithmetic= what the kernel rounds, if it does: {TABLE}"
    )
    return replace(verdict, message=verdict.message + said)


def working_dtype(inputs: Any) -> str:  # noqa: ANN401  any record with out
    """Return the format in which a kernel of this call may be expected to round."""
    name = dtype_name(inputs.out_dtype)
    return "tfloat32" if UNIT_ROUNDOFF.get(name, 1.0) < UNIT_ROUNDOFF["tfloat32"] else name


def looks_rounded(inputs: Any, out: torch.Tensor, bounded: Bounded) -> bool:  # noqa: ANN401
    """Whether errors are a few units of the working dtype, in most rows, and unbiased."""
    expected = bounded.expected.out
    unit = UNIT_ROUNDOFF.get(working_dtype(inputs))
    if unit is None or out.shape != expected.shape or out.numel() < FEWEST:
        return False
    error = out.to(expected.dtype) - expected
    if not bool(error.isfinite().all()):
        return False
    largest = expected.abs().amax(-1, keepdim=True)
    rows = largest.squeeze(-1) > 0
    if bool(error[~rows].any()):  # no rounding makes a number of zeros
        return False
    # Towards zero or away from it: what is scaled, or summed with too few keys, goes one way.
    outwards = (error * expected.sign() / largest.clamp(min=torch.finfo(largest.dtype).tiny))[rows]
    if outwards.numel() < FEWEST or bool((outwards.abs() > FEW * unit).any()):
        return False
    everywhere = float((outwards != 0).any(-1).double().mean()) >= HALF
    standard_error = outwards.std() / outwards.numel() ** 0.5
    return everywhere and bool(outwards.mean().abs() <= BIAS * standard_error)


def _undeclared(inputs: Any, arithmetic: Arithmetic) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    """Yield what an implementation may round and does not declare, the commonest first."""
    dtype = dtype_name(inputs.out_dtype)
    narrow = "inputs" if dtype in ("bfloat16", "float16") else "bfloat16"
    # Fields that an operation does not have leave its bound as it is, and allow nothing more.
    choices: tuple[dict[str, Any], ...] = (
        {"probabilities": narrow},
        {"probabilities": narrow, "row_sum": "probabilities"},
        {"intermediate": narrow},
        {"projections": narrow},
        {"operands": "tfloat32"},
        {"partial_outputs": True},
        {"products": "inputs"},
        {"dequantized": "inputs"},
        {"logits": narrow},
        {"probabilities": narrow, "partial_outputs": True},
        {"projections": narrow, "intermediate": narrow},
        {"projections": narrow, "intermediate": narrow, "partial_outputs": True},
        {"combine": narrow},
    )
    for change in choices:
        if any(getattr(arithmetic, name) != value for name, value in change.items()):
            yield change
    yield {"accumulate": dtype if narrow == "inputs" else narrow}


def _allowed(inputs: Any, result: Result, arithmetic: Arithmetic) -> bool:  # noqa: ANN401
    return not against_oracle(result, bounded_answer(inputs, arithmetic), exact=False).bad


def _rounded_before_v_scale(inputs: Any, result: Result, arithmetic: Arithmetic) -> bool:  # noqa: ANN401
    """Whether an output of 16 bits is right if ``v_scale`` multiplied it when it was rounded."""
    scale = getattr(inputs, "v_scale", 1.0)
    if isinstance(scale, torch.Tensor) or scale == 1 or inputs.out_dtype.itemsize != 2:  # noqa: PLR2004
        return False
    expected, bound = (
        each.out * scale for each in bounded_answer(replace(inputs, v_scale=1.0), arithmetic)
    )
    unit = UNIT_ROUNDOFF[dtype_name(inputs.out_dtype)]
    error = (result[0].to(expected.dtype) - expected).abs()
    return bool((error <= (1 + unit) * bound + unit * expected.abs()).all())
