"""What the adapters to quantisers of serving engines share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import torch

from ...reference import QuantizeProblem
from ...reference.formats.quantizers import LEAST_NORMAL
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from .claims import wrong_here
from .sources import Names, implementation, missing_name, unavailable

INT8 = ("int8",)
"""Codes of kernels that give no other."""
Answer = tuple[torch.Tensor, "torch.Tensor | None"]
"""Codes, and scales where none was given."""
Supports = Callable[[QuantizeProblem, Target], "Refusal | str | bool"]
USUAL_FLOOR = 1e-10


def key_of(problem: QuantizeProblem) -> Hashable:
    """Return all that a quantiser's kernel is compiled for."""
    how = problem.block, problem.scale is None, problem.scale_format, problem.scale_layout
    sizes = problem.num_channels, problem.spare_channels, problem.num_tokens == 1
    return problem.dtype, problem.codes, *how, *sizes


quantiser = functools.partial(
    implementation, "quantize", compile_key=key_of, build_ahead="cuda", build_minutes=0.02,
    build_compilers=1,
)  # fmt: skip
"""``implementation``, with what the adapters declare alike."""


def group_of(problem: QuantizeProblem) -> int:
    """Return the channels of a group; those of a row where it is one group."""
    return problem.block[1] or problem.num_channels


def refused(
    problem: QuantizeProblem, target: Target, file: Names, kernel: str, codes: tuple[str, ...]
) -> Refusal | str | None:
    """Return why a kernel of an engine cannot run, or has no words for a problem.

    Args:
        problem: the problem.
        target: the machine.
        file: the engine's file.
        kernel: the name of what it must define.
        codes: dtypes of codes that it gives.
    """
    lacks = missing_name(file, kernel) or unavailable(file, target)
    if lacks is not None:
        return lacks
    if problem.codes not in codes:
        return f"gives codes in {', '.join(codes)}"
    if not problem.saturate:
        return "what exceeds the largest number becomes it"
    return wrong_here(target, "" if problem.codes == "int8" else problem.codes)


def refused_groups(problem: QuantizeProblem) -> str | None:
    """Return why the scales of a problem are none of groups in rows; None if they are."""
    return first_reason(
        (problem.scale is not None, "computes its scales"),
        (problem.block[0] != 1, "has a scale for each row, or group of a row"),
        (problem.num_channels % group_of(problem), "a row is whole groups"),
    )  # fmt: skip


def refused_given(problem: QuantizeProblem) -> str | None:
    """Return why a scale is none of a whole tensor; None if it is."""
    if problem.scale is None:
        return "takes the scale of a whole tensor"
    small = problem.scale < LEAST_NORMAL  # it has no reciprocal in float32
    return "a GPU flushes a scale that is no normal float32" if small else None


def refused_rows(problem: QuantizeProblem) -> str | None:
    """Return why rows, or scales in float32 row by row, are not what a kernel takes."""
    return first_reason(
        (problem.spare_channels > 0, "rows lie one behind the other"),
        (problem.scale_format != "float32", "scales are no powers of two"),
        (problem.scale_layout != "rows", "scales lie row after row"),
    )  # fmt: skip


MX_FEATURES, MX_GROUP = ("e8m0_scales",), 32
"""Features of quantisers to mxfp8, and the channels of a group."""


def refused_mx(problem: QuantizeProblem, floor: float) -> str | None:
    """Return why scales are none of mxfp8, row after row; None if they are."""
    return first_reason(
        (problem.scale_format != "e8m0", "scales are e8m0 codes"),
        (group_of(problem) != MX_GROUP, f"a group has {MX_GROUP} channels"),
        (problem.floor != floor, f"the largest magnitude counts at least {floor:g}"),
    )  # fmt: skip


def int8_tokens(file: Names) -> Supports:
    """Return the claims of ``per_token_quant_int8`` of an engine's file."""

    def supports(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
        why = refused(problem, target, file, "per_token_quant_int8", INT8)
        why = why or refused_groups(problem) or refused_rows(problem)
        why = why or first_reason(
            (group_of(problem) != problem.num_channels, "has a scale for each row"),
            (problem.floor != USUAL_FLOOR, f"the largest magnitude counts at least {USUAL_FLOOR}"),
        )  # fmt: skip
        return why or True

    return supports


def int8_groups(file: Names) -> Supports:
    """Return the claims of ``per_token_group_quant_int8`` of an engine's file."""

    def supports(problem: QuantizeProblem, target: Target) -> Refusal | str | bool:
        why = refused(problem, target, file, "per_token_group_quant_int8", INT8)
        return why or refused_groups(problem) or refused_rows(problem) or True

    return supports
