"""Comparing tensors element by element against bounds, and saying where they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...reference import AttentionOutput
from ...reference.attention.bounds import Bounded
from .asked import CALLS
from .verdict import EXACTLY, Verdict

Result = tuple[torch.Tensor, "torch.Tensor | None"]
"""What an attention or merge implementation gave: out, and lse or None."""

INTEGERS = frozenset({
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
})  # fmt: skip
"""Dtypes of integers that torch can compare."""
MOST_LISTED = 10
"""Most wrong elements that a FAIL lists."""


Listed = dict[str, Any]
"""A wrong element: its tensor's ``name`` and ``shape``, its ``index``, and what ``element`` has."""


def fail(kind: str, message: str, ratio: float | None = None) -> Verdict:
    """Return a FAIL."""
    return Verdict("FAIL", kind, message, ratio, at_call=CALLS.count)


def off(
    kind: str,
    where: str,
    got: str,
    expected: str,
    *,
    bound: str = "",
    more: str = "",
    ratio: float | None = None,
    worst: Sequence[Listed] = (),
) -> Verdict:
    """Return a FAIL that names an element that is wrong, see ``Verdict.element``."""
    element = {"where": where, "got": got, "expected": expected}
    exactly = "exactly " if bound == EXACTLY else ""
    message = f"{where} is {got}, expected {exactly}{expected}{more}"
    return Verdict(
        "FAIL",
        kind,
        message,
        ratio,
        element={**element, "bound": bound},
        worst=worst,
        at_call=CALLS.count,
    )


def unusable(name: str, tensor: torch.Tensor, device: str) -> Verdict | None:
    """Return a FAIL for a tensor whose elements cannot be compared; None for any other.

    Args:
        name: the name of the tensor, for the message.
        tensor: the tensor that an implementation gave.
        device: type of the device that its inputs are on.
    """
    # A subclass may answer every question as it likes.
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return fail("shape", f"{name} is a {type(tensor).__name__}, no plain torch.Tensor")
    if tensor.device.type != device:
        return fail("device", f"{name} is on {tensor.device}, its inputs are on {device}")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        return fail("shape", f"{name} is a {kind} tensor, a dense one was asked for")
    if not (tensor.dtype in INTEGERS or _is_plain_float(tensor.dtype)):
        return fail("dtype", f"{name} is {tensor.dtype}, whose elements are no plain numbers")
    if _end_of(tensor) > tensor.untyped_storage().nbytes():
        return fail("shape", f"{name} has no memory behind its {tensor.numel()} elements")
    return None


def _is_plain_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and not str(dtype).endswith("_x2")


def _end_of(tensor: torch.Tensor) -> int:
    """Return the byte of its storage that a tensor ends at."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())


class Check(NamedTuple):
    """A tensor, and where each of its elements must be."""

    name: str
    actual: torch.Tensor
    expected: torch.Tensor
    bound: torch.Tensor


def within(name: str, actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> Verdict:
    """Check |actual - expected| <= bound; infinities and NaNs must stand in the same places."""
    return all_within([Check(name, actual, expected, bound)])


def all_within(checks: Sequence[Check]) -> Verdict:
    """Check several tensors as ``within`` does: the first failure, or else the largest ratio."""
    looks = [look for check in checks if _comparable(check) for look in _glance(check)]
    # All at once: reading from a GPU waits for it.
    read = iter(torch.stack(looks).tolist() if looks else ())
    worst = 0.0
    for check in checks:
        if check.actual.shape != check.expected.shape:
            shapes = f"{_shape(check.actual)}, not {_shape(check.expected)}"
            return fail("shape", f"{check.name} has shape {shapes}")
        fine, ratio = (next(read), next(read)) if _comparable(check) else (True, 0.0)
        if not fine:
            verdict = _closely(check)
            if verdict.bad:
                return replace(verdict, error_map=error_map(check.name, _ratios(check)))
            ratio = verdict.ratio or 0.0
        worst = max(worst, ratio)
    return Verdict("PASS", ratio=worst)


def _comparable(check: Check) -> bool:
    return check.actual.shape == check.expected.shape and check.actual.numel() > 0


def _glance(check: Check) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether all elements are within their bounds, and the worst ratio; no NaN is."""
    got = check.actual.to(check.expected.dtype)
    same = got == check.expected
    difference = (got - check.expected).abs_().masked_fill_(same, 0.0)
    fine = difference <= check.bound  # a bound that is NaN allows nothing
    return fine.all(), (difference / check.bound).masked_fill_(same, 0.0).amax()


def _ratios(check: Check) -> torch.Tensor:
    """Return error over bound of each element, infinite where NaN or an infinity is misplaced."""
    _, actual, expected, bound = check
    got = actual.to(expected.dtype)
    same = (got == expected) | (got.isnan() & expected.isnan())
    ratio = (got - expected).abs() / bound.clamp(min=torch.finfo(bound.dtype).tiny)
    return ratio.masked_fill_(same, 0.0).nan_to_num_(nan=torch.inf, posinf=torch.inf)


def _closely(check: Check) -> Verdict:
    """Return what is wrong with a tensor that failed the quick test; NaNs may be expected."""
    name, actual, expected, bound = check
    got = actual.to(expected.dtype)
    misplaced_nan = got.isnan() != expected.isnan()
    if misplaced_nan.any():
        where = _position(misplaced_nan)
        worst = listed(check, misplaced_nan, misplaced_nan.double())
        wanted = expected[where].item()
        if expected[where].isnan():
            number = f"{got[where].item():.6g}"
            return off("nan", f"{name}{list(where)}", number, "NaN", worst=worst)
        more = f" ({int(misplaced_nan.sum())} of {got.numel()} are)"
        return off("nan", f"{name}{list(where)}", "NaN", f"{wanted:.6g}", more=more, worst=worst)
    difference = (got - expected).abs().masked_fill_((got == expected) | got.isnan(), 0.0)
    excess = ~(difference <= bound)
    if not excess.any():
        ratio = (difference / bound).masked_fill_(difference == 0, 0.0)
        return Verdict("PASS", ratio=float(ratio.max()))
    # Far outside comes first: the worst ratio, with a floor where the bound is zero.
    ratio = difference / bound.clamp(min=torch.finfo(bound.dtype).tiny)
    ratio = torch.where(excess, ratio, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    # torch.unravel_index would import sympy: seconds in each process that finds something.
    where = _position(ratio == ratio.max())
    allowed = f"{bound[where].item():.3g}"
    return off(
        "numeric",
        f"{name}{list(where)}",
        f"{got[where].item():.9g}",
        f"{expected[where].item():.9g}",
        bound=allowed,
        more=f", off by {difference[where].item():.3g}, bound {allowed} "
        f"({int(excess.sum())} of {got.numel()} elements outside)",
        ratio=float(ratio[where]),
        worst=listed(check, excess, ratio),
    )


def listed(check: Check, wrong: torch.Tensor, size: torch.Tensor) -> list[Listed]:
    """Return the wrong elements of the largest ``size``; of equal ones, the first."""
    flat = wrong.flatten().nonzero().flatten()
    order = size.flatten()[flat].argsort(descending=True, stable=True)[:MOST_LISTED]
    places = flat[order]
    got, expected, bound = (
        each.flatten()[places].tolist() for each in (check.actual, check.expected, check.bound)
    )
    columns = [each.tolist() for each in unravelled(places, wrong.shape)]
    indices = list(zip(*columns, strict=True)) if columns else [()] * len(places)
    return [
        {
            "name": check.name,
            "shape": list(wrong.shape),
            "index": list(index),
            "got": _number(a),
            "expected": _number(b),
            "bound": f"{c:.3g}",
        }
        for index, a, b, c in zip(indices, got, expected, bound, strict=True)
    ]


def _number(value: float) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def unravelled(places: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
    """Return the index along each axis of positions in a flattened tensor."""
    # torch.unravel_index would import sympy: seconds in each process that finds something.
    found: list[torch.Tensor] = []
    for size in reversed(shape):
        found.insert(0, places % size)
        places = places // size
    return found


def bitwise(name: str, actual: torch.Tensor, expected: torch.Tensor) -> Verdict:
    """Check that two tensors hold the same values in every bit that counts (0 equals -0)."""
    if actual.shape != expected.shape:
        return fail("shape", f"{name} has shape {_shape(actual)}, not {_shape(expected)}")
    different = (actual != expected) & ~(actual.isnan() & expected.isnan())
    if not different.any():
        return Verdict("PASS", ratio=0.0)
    where = _position(different)
    apart = (actual.double() - expected.double()).abs().nan_to_num(nan=torch.inf)
    worst = listed(Check(name, actual, expected, torch.zeros_like(apart)), different, apart)
    kind = "nan" if bool(actual[where].isnan() | expected[where].isnan()) else "numeric"
    verdict = off(
        kind,
        f"{name}{list(where)}",
        f"{actual[where].item():.9g}",
        f"{expected[where].item():.9g}",
        bound=EXACTLY,
        more=f" ({int(different.sum())} of {actual.numel()} differ)",
        worst=[{**each, "bound": EXACTLY} for each in worst],
    )
    ratio = torch.zeros_like(apart).masked_fill_(different, torch.inf)  # of a bound of zero
    return replace(verdict, error_map=error_map(name, ratio))


def against_oracle(result: Result, bounded: Bounded, *, exact: bool) -> Verdict:
    """Check out and lse against the oracle; out bitwise where the problem is exact."""
    out, lse = result
    expected, bound = bounded
    looks = [] if lse is None else [Check("lse", lse, expected.lse, bound.lse)]
    if not exact:
        return all_within([Check("out", out, expected.out, bound.out), *looks])
    verdict = bitwise("out", out, expected.out.to(out.dtype))
    return verdict if verdict.bad else worse(verdict, all_within(looks))


def within_bounds_of_zero(bounded: Bounded) -> bool:
    """Whether an out of zeros would be called right though the oracle's is not zero."""
    expected, bound = bounded.expected.out, bounded.bound.out
    return bool(expected.any()) and bool((expected.abs() <= bound).all())


def agree(
    first: Result, second: Result, bounds: tuple[AttentionOutput, AttentionOutput], *, exact: bool
) -> Verdict:
    """Check that two runs agree within the sum of their bounds; out bitwise where exact."""
    names = ("out", "lse")
    verdict = Verdict("PASS", ratio=0.0)
    for name, a, b in zip(names, first, second, strict=True):
        if a is None or b is None:
            continue
        if exact and name == "out":
            found = bitwise(name, b, a)
        else:
            bound = getattr(bounds[0], name) + getattr(bounds[1], name)
            found = within(name, b, a.to(bound.dtype), bound)
        if found.bad:
            return found
        verdict = worse(verdict, found)
    return verdict


def worse(first: Verdict, second: Verdict) -> Verdict:
    """Return the worse of two verdicts: a finding, or else the larger ratio."""
    if first.bad or second.bad:
        return first if first.bad else second
    return first if (first.ratio or 0.0) >= (second.ratio or 0.0) else second


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bytes."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    as_integers = widths[first.element_size()]
    if first.dtype == torch.bool:
        return torch.equal(first, second)
    return torch.equal(first.contiguous().view(as_integers), second.contiguous().view(as_integers))


def same_result_bits(first: Result, second: Result) -> bool:
    """Whether two answers have the same tensors, bit by bit."""
    return all(
        a is b
        if a is None or b is None
        else a.dtype == b.dtype and a.shape == b.shape and same_bits(a, b)
        for a, b in zip(first, second, strict=True)
    )


def _position(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def _shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


MOST_ROWS, MOST_COLUMNS = 64, 32
"""Most rows and columns of a map; of a larger tensor, neighbours share a cell."""


def error_map(name: str, ratio: torch.Tensor) -> dict[str, Any] | None:
    """Return the worst error over its bound by the first two axes, tokens and heads of ``out``.

    Args:
        name: the name of the tensor.
        ratio: error over bound of each element, infinite where no number is right.

    Returns:
        ``tensor``, ``shape``, ``step`` (rows and columns of the tensor in one cell) and ``worst``,
        a list of rows; None for a scalar.
    """
    if ratio.dim() == 0 or not ratio.numel():
        return None
    rows = ratio.shape[0]
    columns = ratio.shape[1] if ratio.dim() > 1 else 1
    worst = ratio.reshape(rows, columns, -1).amax(-1)
    down, across = math.ceil(rows / MOST_ROWS), math.ceil(columns / MOST_COLUMNS)
    padded = torch.nn.functional.pad(worst, (0, -columns % across, 0, -rows % down))
    cells = padded.unflatten(1, (-1, across)).unflatten(0, (-1, down)).amax((1, 3))
    return {
        "tensor": name,
        "shape": list(ratio.shape),
        "step": [down, across],
        "worst": [[_rounded(each) for each in row] for row in cells.tolist()],
    }


def _rounded(ratio: float) -> float:
    """Return a ratio to three digits, on its side of 1."""
    rounded = float(f"{ratio:.3g}")
    return 1.01 if ratio > 1 >= rounded else rounded
