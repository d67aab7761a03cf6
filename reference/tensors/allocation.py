"""Fenced storages: whatever lies around a tensor is a canary that must keep its bits."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence

import torch

FENCE = 64
"""Canary elements before and after each tensor in its storage."""
CANARY = 11.0
"""What canaries and unused cache slots hold: finite, and large enough to show if it is read."""
SLACK_ROWS, MOST_SLACK = 16, 2**14
"""Rows behind a tensor that an engine padded, those of a tile, and their most elements."""
BYTE_OF_NAN = 0xFF
"""What bytes hold that are no numbers of their own, where they are garbage."""
FAR = 2**32
"""Elements: offsets beyond it fit neither into an int32 nor into a uint32."""
LEAST_ROWS = 4
"""Rows over which an offset grows to that with a stride that an int32 still holds."""
ALIGNED = 64
"""Rows of whose size a stride of rows that lie far apart is a multiple."""
SHARED, NO_RESERVE = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, 0x4000
"""Linux's flags for memory that is there when it is touched; Python 3.10 has no name for one."""


def unreserved(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return a tensor of this shape that takes no memory of a CPU before it is written to."""
    if torch.device(device).type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    size = torch.Size(shape).numel() * dtype.itemsize
    # Shared with nobody: private memory would count against the worker's limit unused.
    room = mmap.mmap(-1, size, flags=SHARED | NO_RESERVE)
    as_bytes = torch.frombuffer(room, dtype=torch.uint8, count=size)
    return as_bytes.view(dtype).view(tuple(shape))


def rows_apart(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", *, axis: int = 0
) -> torch.Tensor:
    """Return a tensor whose last row along an axis begins beyond ``FAR`` elements.

    Args:
        shape: its shape, with at least ``LEAST_ROWS`` rows along the axis; no size is 0.
        dtype: its dtype.
        device: where it lies.
        axis: the axis whose rows lie apart; each row is contiguous.
    """
    row = math.prod(shape) // shape[axis]
    step = ALIGNED * row  # a kernel may take other strides for multiples of a row's size
    stride = (FAR // (shape[axis] - 1) // step + 1) * step
    within = [*shape[:axis], *shape[axis + 1 :]]
    strides = [math.prod(within[place + 1 :]) for place in range(len(within))]
    strides.insert(axis, stride)
    room = unreserved(((shape[axis] - 1) * stride + row,), dtype, device)
    return room.as_strided(tuple(shape), tuple(strides))


class Allocator:
    """Places tensors into fenced storages and remembers these.

    Args:
        device: where.
        unused: fills whatever must not be read.
        garbage: where an engine has padded tensors, what integers hold there; None where it has
            not. Tensors then have ``SLACK_ROWS`` rows more behind them in their storages.
        tight: let each storage end where its tensor, or its rows of slack, end: a tool that watches
            allocations then sees whatever is read behind them.
        apart: names of tensors whose rows lie more than 2^32 elements apart, and the axes that
            count their rows: the first of these that is long enough is taken. Such a tensor has no
            fence.
    """

    def __init__(
        self,
        device: torch.device,
        unused: float,
        garbage: int | None = None,
        *,
        tight: bool = False,
        apart: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.device = device
        self.tight = tight
        self.apart = apart or {}
        self.unused = unused
        self.garbage = garbage
        self.storages: dict[str, torch.Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor full of ``unused`` inside a storage with fences."""
        axis = self._axis_apart(name, shape)
        if axis is not None:
            return rows_apart(shape, dtype, self.device, axis=axis).fill_(self.fill(dtype))
        count = 1
        for size in shape:
            count *= size
        size = FENCE + count + (0 if self.tight else FENCE) + self._slack(shape)
        storage = torch.full((size,), self.fill(dtype), dtype=dtype, device=self.device)
        self.storages[name] = storage
        return storage[FENCE : FENCE + count].view(shape)

    def _axis_apart(self, name: str, shape: tuple[int, ...]) -> int | None:
        """Return the axis along which a tensor's rows lie apart; None: it is contiguous."""
        if not math.prod(shape):
            return None
        axes = self.apart.get(name.partition("[")[0], ())
        return next((axis for axis in axes if shape[axis] >= LEAST_ROWS), None)

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

        Storages that are tight, or far apart, have allocations of their own.
        """
        if self.tight or self.apart:
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
