"""Pools of isolated workers that judge."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from ..isolation import sanitizer
from ..isolation.mps import SharedGpu
from ..isolation.workers import DEFAULT_MEMORY_LIMIT, WorkerPool
from ..verdicts.memory_need import worker_limit

TASKS = "kernelproof.properties.worker.tasks"
"""The module of what workers do."""
HANDLER = f"{TASKS}:handle"
"""The address by which a worker finds the handler of its requests."""
PRELOAD = ("torch", TASKS)


def open_pool(
    device: str,
    *,
    size: int = 1,
    standby: bool = True,
    environment: Mapping[str, str] | None = None,
    handler: str = HANDLER,
    tool: str = "",
    sys_path: Sequence[str] | None = None,
    executable: str = sys.executable,
    started: bool = True,
    preload: Sequence[str] = (),
    gpu: SharedGpu | None = None,
) -> WorkerPool:
    """Start workers for a device.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        size: workers at a time.
        standby: keep one more ready once one has ended; a few questions need none.
        environment: further variables for them.
        handler: what they call for each request, ``"module:function"``.
        tool: the tool of compute-sanitizer that they run under, one of ``sanitizer.TOOLS``; none if
            empty.
        sys_path: where they find modules; as this process does if None.
        executable: their interpreter, this process's unless there is another, with a ``sys_path``.
        started: whether they start before they are asked.
        preload: further modules that each has at its start.
        gpu: what they share a GPU through, see ``share_gpu``; they have it in turns if None.

    Raises:
        SanitizerMissingError: it is not installed.
    """
    interpreter = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    return WorkerPool(
        handler,
        size=size,
        standby=standby,
        preload=(*PRELOAD, *preload),
        environment={
            **interpreter,
            **(sanitizer.ENVIRONMENT if tool else {}),
            **(environment or {}),
        },
        under=sanitizer.command(tool) if tool else (),
        sys_path=sys_path,
        executable=executable,
        started=started,
        gpu=gpu,
        # CUDA reserves address space by the terabyte.
        memory_limit=worker_limit(DEFAULT_MEMORY_LIMIT) if device == "cpu" else None,
    )


def preload(device: str) -> None:
    """Begin to import what the workers of a device need, before they are known to be needed.

    Whoever calls this imports at the same time what it needs itself.
    """
    with open_pool(device, started=False) as pool:
        pool.preload()
