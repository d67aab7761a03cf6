"""Fenced storages: whatever lies around a tensor is a canary that must keep its bits."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

FENCE = 64
"""Canary elements before and after each tensor in its storage."""
CANARY = 11.0
"""What canaries and unused cache slots hold: finite, and large enough to show if it is read."""
SLACK_ROWS, MOST_SLACK = 16, 2**14
"""Rows behind a tensor that an engine padded, those of a tile, and their most elements."""
BYTE_OF_NAN = 0xFF
"""What bytes hold that are no numbers of their own, where they are garbage."""


class Allocator:
    """Places tensors into fenced storages and remembers these.

    Args:
        device: where.
        unused: fills whatever must not be read.
        garbage: where an engine has padded tensors, what integers hold there; None where it has
            not. Tensors then have ``SLACK_ROWS`` rows more behind them in their storages.
        tight: let each storage end where its tensor, or its rows of slack, end: a tool that watches
            allocations then sees whatever is read behind them.
    """

    def __init__(
        self,
        device: torch.device,
        unused: float,
        garbage: int | None = None,
        *,
        tight: bool = False,
    ) -> None:
        self.device = device
        self.tight = tight
        self.unused = unused
        self.garbage = garbage
        self.storages: dict[str, torch.Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor full of ``unused`` inside a storage with fences."""
        count = 1
        for size in shape:
            count *= size
        size = FENCE + count + (0 if self.tight else FENCE) + self._slack(shape)
        storage = torch.full((size,), self.fill(dtype), dtype=dtype, device=self.device)
        self.storages[name] = storage
        return storage[FENCE : FENCE + count].view(shape)

    def fill(self, dtype: torch.dtype) -> float:
        """Return what fills a storage of this dtype: integers and packed codes have no NaN."""
        if dtype.is_floating_point:
            return self.unused
        if self.garbage is None:
            return int(CANARY)
        if dtype in (torch.bool, torch.uint8):
            return BYTE_OF_NAN
        numbers = torch.iinfo(dtype)
        return min(max(self.garbage, numbers.min), numbers.max)

    def _slack(self, shape: tuple[int, ...]) -> int:
        """Return the elements of the rows behind a tensor of this shape."""
        if self.garbage is None or not shape:
            return 0
        return min(SLACK_ROWS * math.prod(shape[1:]), MOST_SLACK)

    def place(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Copy values into a fenced storage."""
        home = self.empty(name, tuple(values.shape), values.dtype)
        home.copy_(values)
        return home

    def place_integers(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy int32 tensors of the host into fenced storages side by side, in one transfer.

        Storages that are tight have allocations of their own.
        """
        if self.tight:
            return {
                name: self.place(name, tensor.to(torch.int32)) for name, tensor in tensors.items()
            }
        sizes = [-(-tensor.numel() // FENCE) * FENCE + 2 * FENCE for tensor in tensors.values()]
        canaries = torch.full((2 * FENCE,), int(self.fill(torch.int32)), dtype=torch.int32)
        parts: list[torch.Tensor] = []
        for size, tensor in zip(sizes, tensors.values(), strict=True):
            behind = size - FENCE - tensor.numel()
            parts += [canaries[:FENCE], tensor.flatten(), canaries[:behind]]
        rooms = torch.cat(parts).to(self.device, non_blocking=True).split(sizes)
        found = {}
        for room, (name, tensor) in zip(rooms, tensors.items(), strict=True):
            self.storages[name] = room[: tensor.numel() + 2 * FENCE]
            found[name] = room[FENCE : FENCE + tensor.numel()].view(tensor.shape)
        return found
