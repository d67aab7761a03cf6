"""Workspaces of rows that an adapter allocates for an engine's kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...reference.tensors.allocation import LEAST_ROWS, rows_apart, unreserved

_apart: list[list[torch.Tensor]] = []


def workspace(like: torch.Tensor, shape: Sequence[int], fill: float) -> torch.Tensor:
    """Return a float32 workspace whose rows the kernel finds by their stride.

    Args:
        like: a tensor on its device.
        shape: [rows, ...]; a row is contiguous.
        fill: what it holds: what a kernel reads without having written it must show.
    """
    if not _apart or shape[0] < LEAST_ROWS:
        return like.new_full(tuple(shape), fill, dtype=torch.float32)
    found = rows_apart(shape, torch.float32, like.device).fill_(fill)
    _apart[-1].append(found)
    return found


def one_each(parts: torch.Tensor, fill: float) -> torch.Tensor:
    """Return a workspace of one float32 number for each row of a workspace's last axis.

    Its offsets are those of ``parts`` divided by the size of that axis, as kernels take them.
    """
    *shape, channels = parts.shape
    strides = [stride // channels for stride in parts.stride()[:-1]]
    room = unreserved((strides[0] * shape[0],), torch.float32, parts.device)
    return room.as_strided(shape, strides).fill_(fill)


@contextmanager
def workspaces_apart() -> Iterator[list[torch.Tensor]]:
    """Within a with block, lay rows of workspaces far apart; yields those that were."""
    _apart.append([])
    try:
        yield _apart[-1]
    finally:
        _apart.pop()
