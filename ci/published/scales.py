"""Codes of blocks whose scale is an output too: what they are by the scale that was answered.

A scale is a number of few values, as a power of two. Where the largest number of a block lies next
to the border of two scales, a rounding decides between them, and all codes of the block with it.
Both are right, and a code is right by its own scale only. So a reference is evaluated in float64
twice more, with the largest numbers raised and lowered by what roundings may do to them: these
evaluations have the codes of the other scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from .arithmetic import CODES, FUNCTION_ERROR
from .expected import Expected

TIMES = 6.0
"""Ratio of an honest error of a largest number to the largest of the disturbances, at most."""
MOST = 2.0**-5
"""Largest relative change of a largest number: below the distance of any two scales."""


def pairs_of(outputs: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the output that has the scales of each output that has codes, by shape and format."""
    found = {}
    for name, codes in outputs.items():
        beside = [other for other, scales in outputs.items() if _are_scales(scales, codes)]
        if len(beside) == 1:
            found[name] = beside[0]
    return found


def _are_scales(scales: torch.Tensor, codes: torch.Tensor) -> bool:
    """Whether one tensor may have a scale for each block of the other."""
    coded = (torch.uint8, torch.int8, *CODES)
    if codes.dtype not in coded or scales.dtype not in (*coded, torch.float8_e8m0fnu):
        return False
    if not codes.dim() or scales.dim() != codes.dim() or scales.shape[:-1] != codes.shape[:-1]:
        return False
    one, several = scales.shape[-1], codes.shape[-1]
    return bool(one) and several > one and several % one == 0


def changes(
    exact: Sequence[torch.Tensor], disturbed: Sequence[Sequence[torch.Tensor]], unit: float
) -> list[torch.Tensor] | None:
    """Return how far roundings may move the largest numbers of blocks, relative to them.

    Args:
        exact: the results of each maximum in float64.
        disturbed: the same of each disturbed evaluation.
        unit: the largest unit roundoff of a step.

    Returns:
        None if the evaluations have other maxima.
    """
    shapes = [each.shape for each in exact]
    if any([each.shape for each in group] != shapes for group in disturbed):
        return None
    found = []
    for place, each in enumerate(exact):
        spread = torch.zeros_like(each)
        for group in disturbed:
            relative = (group[place] - each).abs() / each.abs()
            spread = torch.maximum(spread, torch.nan_to_num(relative, nan=0.0, posinf=0.0))
        # What follows on the maximum, as a division or a logarithm, has roundings of its own.
        after = max(unit, FUNCTION_ERROR)
        found.append((TIMES * (spread + after)).clamp_max(MOST))
    return found


def block_size(expected: Expected, answered: torch.Tensor | None) -> int:
    """Return the codes of one scale, as they lie in memory; 0 if no such scales are answered."""
    if expected.scales is None or answered is None:
        return 0
    scales = expected.scales.bases[0][0]
    return expected.exact.shape[-1] // scales.shape[-1] if answered.shape == scales.shape else 0


def given(expected: Expected, answered: torch.Tensor | None) -> Expected:
    """Return what codes should be by the scales that were answered beside them.

    A block whose answered scale no evaluation has stays as it is: its scale is wrong.
    """
    scales = expected.scales
    size = block_size(expected, answered)
    if scales is None or answered is None or not size:
        return expected

    def wide(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (as_codes(one) == as_codes(other)).repeat_interleave(size, -1)

    def base_of(own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the exact codes by a scale, and where there are some."""
        base, has = expected.exact, wide(own, scales.bases[0][0])
        for other, codes in scales.bases[1:]:
            here = wide(own, other) & ~has
            base, has = torch.where(here, codes, base), has | here
        return base, has

    exact, _ = base_of(answered)
    move = _moved_numbers if expected.kind == "codes" else _moved_bytes

    def moved(groups: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [move(each, *base_of(one), exact) for each, one in zip(groups, own, strict=True)]

    return replace(
        expected,
        exact=exact,
        samples=moved(expected.samples, scales.samples),
        leaning=moved(expected.leaning, scales.leaning),
        far=moved(expected.far, scales.far),
    )


def _moved_numbers(
    each: torch.Tensor, base: torch.Tensor, has: torch.Tensor, exact: torch.Tensor
) -> torch.Tensor:
    """Return disturbed numbers by another scale: their relative errors are the same."""
    ratio = torch.where(base == 0, 1.0, exact / torch.where(base == 0, 1.0, base))
    return torch.where(has, exact + (each - base) * ratio, exact)


def _moved_bytes(
    each: torch.Tensor, base: torch.Tensor, has: torch.Tensor, exact: torch.Tensor
) -> torch.Tensor:
    """Return bytes that differ from the exact ones where disturbed ones differ by their scale."""
    changed = has & (as_codes(each) != as_codes(base))
    same_scale = as_codes(base) == as_codes(exact)
    other = torch.where(same_scale, as_codes(each), as_codes(exact) ^ 1)
    return torch.where(changed, other, as_codes(exact)).view(exact.dtype)


def as_codes(value: torch.Tensor) -> torch.Tensor:
    """Return the bytes of codes, in their shape."""
    return value.contiguous().view(torch.uint8)
