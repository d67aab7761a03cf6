"""Whether an answer is as near to a reference's as roundings allow: each element, and all together.

An element's bound is half a step of its format, and ``SPREAD`` times what the disturbed answers
spread there. Roundings have no side: the sum of an answer's errors, and their share of the answer
itself, have bounds of their own, in which a constant or a factor shows that no element does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .answers import FAR, as_bytes
from .arithmetic import CODES, UNITS, WIDE
from .expected import Expected
from .scales import block_size, given

SPREAD = 6.0
"""Ratio of an honest error to the largest of six disturbances, at most.

The largest of six is 1.3 deviations in the middle, and is never taken as less than one (``FLOOR``):
an honest error beyond the bound is beyond 6 deviations, one in 10^9 of Gaussian ones.
"""
SIDE = 4.0
"""Ratio of an honest sum of errors to the largest of six, at most: an output has two sums."""
FLOOR = 0.6
"""Share of a row's mean disturbance below which no element's counts, as six may all be small."""
LEAN = 2.0
"""Factor on errors of approximate functions: a call may have more of these than its reference."""
MANY = 16
"""Numbers of a binade from which on their mean disturbance is known."""
FLIPS = 2
"""Numbers of an output that may be rounded to the other side by chance, beyond those sampled."""
QUARTER = 4
"""Share of the codes that far disturbances change which an answer may change and none of these."""
HALVES = (torch.float16, torch.bfloat16)
CHANCE = 1e-6
"""Probability below which roundings change no block: that as many codes of any one do."""
LEAST_SHARE = 2.0**-8
"""Share of codes that roundings may change in any block: some have more numbers near a tie."""
TINY = {torch.float16: 2.0**-25, torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17}
"""Half of the smallest subnormal number of the formats that have few."""


@dataclass(frozen=True)
class Difference:
    """How an answer differs.

    Attributes:
        law: "shape", "nan", "elements", "offset", "factor", "codes" or "integers".
        why: a sentence.
    """

    law: str
    why: str


def compare(
    expected: Expected, answer: torch.Tensor, scales: torch.Tensor | None = None
) -> Difference | None:
    """Return how an answer differs by more than roundings, or None.

    Args:
        expected: an output of a reference.
        answer: what a call answers for it.
        scales: what it answers for the scales of the output's codes, if these are an output.
    """
    if answer.shape != expected.exact.shape:
        why = f"{expected.name}: {tuple(answer.shape)}, and {tuple(expected.exact.shape)} asked"
        return Difference("shape", why)
    if not answer.numel():
        return None
    size = block_size(expected, scales)
    expected = given(expected, scales)
    if expected.kind in ("floats", "codes"):
        if not answer.is_floating_point() or _is_coarser(answer.dtype, expected.honest.dtype):
            why = f"{expected.name}: {answer.dtype} instead of {expected.honest.dtype}"
            return Difference("shape", why)
        return _numbers(expected, answer)
    if answer.is_floating_point() and answer.element_size() > 1:
        why = f"{expected.name}: {answer.dtype} instead of {expected.honest.dtype}"
        return Difference("shape", why)
    return _codes(expected, answer, size)


def _is_coarser(dtype: torch.dtype, asked: torch.dtype) -> bool:
    """Whether a format is coarser than the one asked for; 16 bits are for all but codes."""
    if dtype in HALVES and asked not in CODES:
        return False
    return UNITS.get(dtype, 1.0) > UNITS.get(asked, 0.0)


def _numbers(expected: Expected, answer: torch.Tensor) -> Difference | None:
    name, dtype = expected.name, answer.dtype
    exact = expected.exact.to(WIDE)
    values = answer.to(WIDE)
    largest = torch.finfo(dtype).max
    finite = exact.isfinite() & (exact.abs() <= largest * (1 + UNITS[dtype]))
    wrong = finite & (exact.abs() <= largest) & ~values.isfinite()
    # What a format cannot hold is its largest number or infinity, or NaN where it has none.
    held = values * exact.sign() >= largest
    if dtype == torch.float8_e4m3fn:
        held |= values.isnan()
    wrong |= ~finite & ~exact.isnan() & ~held
    wrong |= exact.isnan() & expected.honest.to(WIDE).isnan() & ~values.isnan()
    if bool(wrong.any()):
        why = (
            f"{name}: {int(wrong.sum())} elements are NaN or infinite where none should be, or not"
        )
        return Difference("nan", why)
    finite &= values.isfinite()
    exact = torch.where(finite, exact.clamp(-largest, largest), 0.0)
    values = torch.where(finite, values, 0.0)
    spread = _largest(
        [torch.where(finite, each - expected.exact, 0.0) for each in expected.samples]
    )
    lean = _largest([torch.where(finite, each - expected.exact, 0.0) for each in expected.leaning])
    least = FLOOR * spread.square().mean(-1, keepdim=True).sqrt() if spread.dim() else spread
    if expected.kind == "codes":
        # Small numbers have small errors, beside which a row's mean error may hide many codes.
        further = [torch.where(finite, each - expected.exact, 0.0) / FAR for each in expected.far]
        spread = torch.maximum(spread, _largest(further))
        least = torch.minimum(least, FLOOR * _of_like_size(spread, exact))
    internal = SPREAD * torch.maximum(spread, least) + LEAN * lean
    half = _half_steps(exact.abs() + internal, dtype)
    error = values - exact
    outside = error.abs() > internal + half
    if bool(outside.any()):
        excess = (error.abs() / (internal + half).clamp_min(1e-300)).flatten()
        worst = int(excess.argmax())
        got, asked = float(values.flatten()[worst]), float(exact.flatten()[worst])
        count, total = int(outside.sum()), outside.numel()
        why = f"{name}: {count} of {total} elements; worst at {worst}: {got!r}, and {asked!r} asked"
        return Difference("elements", f"{why}, {float(excess[worst]):.3g} times the bound")
    return _sides(expected, values, exact, finite, dtype)


def _of_like_size(spread: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the mean disturbance of the numbers of each one's binade; infinity for few numbers."""
    binades = torch.frexp(exact).exponent
    _, groups, counts = binades.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=WIDE).index_add_(
        0, groups.flatten(), spread.square().flatten()
    )
    means = torch.where(counts < MANY, torch.inf, (sums / counts).sqrt())
    return means[groups]


def _half_steps(sizes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return half the distance of two numbers of a format, at each size."""
    binade = torch.frexp(sizes).exponent - 1
    return UNITS[dtype] * torch.exp2(binade.to(WIDE)) + TINY.get(dtype, 0.0)


def _largest(deviations: list[torch.Tensor]) -> torch.Tensor:
    found = deviations[0].abs()
    for each in deviations[1:]:
        found = torch.maximum(found, each.abs())
    return torch.nan_to_num(found, nan=0.0, posinf=0.0)


def _sides(
    expected: Expected,
    values: torch.Tensor,
    exact: torch.Tensor,
    finite: torch.Tensor,
    dtype: torch.dtype,
) -> Difference | None:
    """Return whether the errors of an answer have a side.

    What is compared is rounded, as the answer is: an answer of one number has the same rounding in
    each element.
    """
    rounded = _rounded(exact, dtype)
    error = values - rounded
    samples = [
        _rounded(torch.where(finite, each, 0.0), dtype) - rounded for each in expected.samples
    ]
    lean = [torch.where(finite, each, 0.0) - exact for each in expected.leaning]
    steps = UNITS[dtype] * 2 * exact.abs() + TINY.get(dtype, 0.0)
    for law, weight in (("offset", torch.ones_like(exact)), ("factor", exact)):
        scale = float(weight.square().sum())
        if not scale:
            continue
        found = float((error * weight).sum()) / scale
        flips = FLIPS * float((steps * weight.abs()).max()) / scale
        allowed = SIDE * max(abs(float((each * weight).sum())) for each in samples) / scale
        # The samples' sums may all be near zero: their elements' sum in quadrature is not.
        quadrature = max(float((each * weight).square().sum()) for each in samples) ** 0.5 / scale
        sided = LEAN * max(abs(float((each * weight).sum())) for each in lean) / scale
        bound = max(allowed, SPREAD * FLOOR * quadrature) + sided + flips
        if abs(found) > bound:
            why = f"{expected.name}: errors have a side: {found:.3g}, and {bound:.3g} allowed"
            return Difference(law, why)
    return None


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype).to(WIDE)


def _codes(expected: Expected, answer: torch.Tensor, size: int) -> Difference | None:
    """Compare codes and integers: equal, or where a disturbance changes them too.

    Args:
        expected: an output of a reference.
        answer: what a call answers for it.
        size: codes of one scale that is answered too; 0 if there is none.
    """
    exact = expected.exact
    if answer.dtype != exact.dtype and {answer.element_size(), exact.element_size()} != {1}:
        answer = answer.to(exact.dtype)
    one, other = _as_integers(answer), _as_integers(exact)
    different = one != other
    if not bool(different.any()):
        return None
    near = [_as_integers(each) != other for each in (*expected.samples, *expected.leaning)]
    far = [_as_integers(each) != other for each in expected.far]
    changed = torch.stack([*near, *far]).sum(0)
    most = max(int(each.sum()) for each in (*near, *far))
    # Where one sample differs and none of the others: as many as an honest answer may have.
    lonely = max(int((each & (changed == 1)).sum()) for each in near)
    count, outside = int(different.sum()), int((different & (changed == 0)).sum())
    if count > 2 * most or outside > 2 * lonely + most // QUARTER:
        law = "codes" if expected.kind == "bytes" else "integers"
        why = f"{count} of {different.numel()} differ, {outside} of them where no rounding matters"
        return Difference(law, f"{expected.name}: {why}; roundings change {most}")
    if not size:
        return None
    return _whole_block(expected.name, different & (changed == 0), size, most)


def _whole_block(name: str, outside: torch.Tensor, size: int, most: int) -> Difference | None:
    """Return whether more codes of one block differ than may by chance, as by another scale."""
    counts = outside.reshape(-1, size).sum(-1)
    worst = int(counts.max())
    share = max(most / outside.numel(), LEAST_SHARE)
    if len(counts) * math.comb(size, worst) * share**worst > CHANCE:
        return None
    why = f"{worst} of {size} codes of one scale differ, block {int(counts.argmax())}"
    return Difference("codes", f"{name}: {why}; roundings change {most} of {outside.numel()}")


def _as_integers(value: torch.Tensor) -> torch.Tensor:
    if value.dtype in (*CODES, torch.float8_e8m0fnu, torch.uint8, torch.int8):
        return as_bytes(value).to(torch.int16).reshape(value.shape)
    return value.to(torch.int64)
