"""What rearrange is given, and making it from a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..formats.rearrange import rearrange
from ..problems.rearrange import RearrangeProblem
from .allocation import Allocator
from .values import bits, stream


@dataclass(frozen=True, eq=False)
class RearrangeInputs:
    """Arguments of ``rearrange``.

    Attributes:
        x: [rows, columns] or [experts, rows, columns] of ``uint8`` or ``bfloat16``: any bits, those
            of NaN too.
        arrangement: the order, see ``rearrange``.
        tile: rows of a tile of the kernel that reads shuffled rows.
        group: weights that share a scale.
        storages: flat buffers by field name, of which the tensors are views.
    """

    x: torch.Tensor
    arrangement: str
    tile: int = 128
    group: int = 32
    storages: Mapping[str, torch.Tensor] = field(default_factory=dict)


def rearrange_inputs(problem: RearrangeProblem, home: Allocator) -> RearrangeInputs:
    """Make the tensors of a call of ``rearrange``."""
    rows = torch.arange(max(problem.matrices, 1) * problem.rows, device=home.device)
    hashes = bits(stream(problem.seed, "x"), rows, problem.columns).reshape(problem.shape)
    if problem.dtype == "uint8":
        made = (hashes % 256).to(torch.uint8)
    else:
        made = (hashes % 2**16 - 2**15).to(torch.int16).view(torch.bfloat16)
    return RearrangeInputs(
        x=home.place("x", made),
        arrangement=problem.arrangement,
        tile=problem.tile,
        group=problem.group,
        storages=home.storages,
    )


def rearranged(inputs: RearrangeInputs) -> torch.Tensor:
    """Rearrange the record's matrices, by definition."""
    return rearrange(inputs.x, inputs.arrangement, tile=inputs.tile, group=inputs.group)
