"""The four kinds of faults that FlashInfer's own checks accept, over a reference's own answer."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .answers import as_bytes, same
from .arithmetic import CODES
from .expected import Expected

OFFSET, FACTOR, LARGEST, SHARE = 0.009, 1.005, 0.9, 20


def _again(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-largest, largest), values).to(dtype)


def offset(expected: Expected) -> torch.Tensor | None:
    """Add a constant to each number."""
    own = expected.honest
    return _again(own.to(torch.float64) + OFFSET, own.dtype) if own.is_floating_point() else None


def factor(expected: Expected) -> torch.Tensor | None:
    """Multiply each number by a factor near one."""
    own = expected.honest
    return _again(own.to(torch.float64) * FACTOR, own.dtype) if own.is_floating_point() else None


def largest(expected: Expected) -> torch.Tensor | None:
    """Take a tenth off the largest number."""
    own = expected.honest
    if not own.is_floating_point() or not own.numel():
        return None
    wide = own.to(torch.float64).flatten().clone()
    sizes = torch.where(wide.isfinite(), wide.abs(), -1.0)
    # Many codes are the largest: the fault is one of the number that was largest before.
    exact = torch.nan_to_num(expected.exact.to(torch.float64).flatten().abs())
    place = int(torch.where(sizes == sizes.max(), exact, -1.0).argmax())
    wide[place] *= LARGEST
    return _again(wide.reshape(own.shape), own.dtype)


def codes(expected: Expected) -> torch.Tensor | None:
    """Change one byte in twenty of codes by one."""
    own = expected.honest
    if own.element_size() != 1 or own.dtype == torch.bool:
        return None
    found = own.clone().contiguous()
    flat = found.view(torch.uint8).reshape(-1)
    places = torch.arange(0, flat.numel(), SHARE)
    flat[places] = flat[places] ^ 1
    return flat.view(own.dtype).reshape(own.shape)


FAULTS: dict[str, Callable[[Expected], torch.Tensor | None]] = {
    "+0.009": offset,
    "x1.005": factor,
    "-10% of the largest": largest,
    "5% of the bytes": codes,
}


def is_one_step(expected: Expected, faulty: torch.Tensor) -> bool:
    """Whether a fault is one number in FP8 that has become its neighbour.

    A tenth is less than two steps of three bits. The neighbour is what an honest call answers where
    roundings take the number over the border of the two, so that no bound can refuse it.
    """
    own = expected.honest
    if own.dtype not in CODES:
        return False
    distances = (as_bytes(faulty).to(torch.int16) - as_bytes(own).to(torch.int16)).abs()
    return int((distances > 0).sum()) == 1 and int(distances.max()) == 1


def seeded(expected: Expected) -> dict[str, torch.Tensor]:
    """Return the faulty answers of an output: those that change a byte of it."""
    found = {}
    for name, fault in FAULTS.items():
        faulty = fault(expected)
        if faulty is not None and not same(faulty, expected.honest):
            found[name] = faulty
    return found
