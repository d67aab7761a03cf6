"""Which GPUs there are, without asking CUDA: the process that runs pytest must not touch it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
PROCESSES_A_GPU = 14
"""Processes that share a GPU, where memory and cores allow. On an H200 with 16 cores each keeps a
core busy: of one check, 14 judged 1.32 times as many problems as 8. The others draw and build."""
GPU_MEMORY, HOST_MEMORY = 6 << 10, 4 << 10
"""MiB that a process may need with its isolated worker: workspaces, caches and the oracle's float64
there (twelve of a gate held 57 GiB of an H200 at its end, 40 in the median; one with less room
waits for it); an import of torch, a CUDA context and a compiler here."""
_MEMORY = Path("/proc/meminfo")
_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_devices() -> list[str]:
    """Name the devices that CUDA would see, as ``CUDA_VISIBLE_DEVICES`` names them."""
    chosen = os.environ.get(VISIBLE)
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    count = len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        listed = subprocess.run([tool, "-L"], check=False, capture_output=True, text=True)
        # A container may see fewer devices than the driver's folder lists.
        count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) or count
    return [str(number) for number in range(count)]


def free_memory(devices: Sequence[str]) -> list[int]:
    """Return the free memory in MiB of those devices that ``nvidia-smi`` knows by name."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    asked = [tool, "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    answer = subprocess.run(asked, check=False, capture_output=True, text=True)
    found: dict[str, int] = {}
    for line in answer.stdout.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 3 and words[2].isdigit():  # noqa: PLR2004  the three that were asked for
            found[words[0]] = found[words[1]] = int(words[2])
    # CUDA takes the beginning of an identifier for the whole, where it is the only such.
    by_prefix = [
        next((free for name, free in found.items() if name == device), None)
        or next((free for name, free in found.items() if name.startswith(device)), None)
        for device in devices
    ]
    return [free for free in by_prefix if free is not None]


def free_host_memory() -> int | None:
    """Return the memory in MiB that new processes can have; None where nothing tells."""
    if not _MEMORY.exists():
        return None
    for line in _MEMORY.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) >> 10
    return None


def processes_for(devices: Sequence[str], cores: int) -> int:
    """Count the processes for some devices, the same for each: by memory and cores; 0 for none.

    Small problems leave a GPU idle, and compiling is the processor's work: a few processes share
    one, as long as there is memory for them.
    """
    each = min([PROCESSES_A_GPU, *(free // GPU_MEMORY for free in free_memory(devices))])
    most = [max(each, 1) * len(devices), cores]
    host = free_host_memory()
    if host is not None:
        most.append(max(host // HOST_MEMORY, 1))
    return min(most)


def share_of(worker: int) -> dict[str, str]:
    """Return the environment that shows one device, in turn, to the isolated workers of a process.

    Args:
        worker: number of the pytest process.
    """
    devices = visible_devices()
    return {VISIBLE: devices[worker % len(devices)]} if len(devices) > 1 else {}
