"""Fenced storages: whatever lies around a tensor is a canary that must keep its bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch

FENCE = 64
"""Canary elements before and after each tensor in its storage."""
CANARY = 11.0
"""What canaries and unused cache slots hold: finite, and large enough to show if it is read."""


class Allocator:
    """Places tensors into fenced storages and remembers these."""

    def __init__(self, device: torch.device, unused: float) -> None:
        self.device = device
        self.unused = unused
        self.storages: dict[str, torch.Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor full of ``unused`` inside a fenced storage."""
        count = 1
        for size in shape:
            count *= size
        storage = torch.full(
            (count + 2 * FENCE,), self.fill(dtype), dtype=dtype, device=self.device
        )
        self.storages[name] = storage
        return storage[FENCE : FENCE + count].view(shape)

    def fill(self, dtype: torch.dtype) -> float:
        """Return what fills a storage of this dtype: integers and packed codes have no NaN."""
        return self.unused if dtype.is_floating_point else int(CANARY)

    def place(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Copy values into a fenced storage."""
        home = self.empty(name, tuple(values.shape), values.dtype)
        home.copy_(values)
        return home

    def place_integers(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy int32 tensors of the host into fenced storages side by side, in one transfer."""
        sizes = [-(-tensor.numel() // FENCE) * FENCE + 2 * FENCE for tensor in tensors.values()]
        canaries = torch.full((2 * FENCE,), int(CANARY), dtype=torch.int32)
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
