"""Which GPUs there are, without asking CUDA: the process that runs pytest must not touch it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
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


def share_of(worker: int) -> dict[str, str]:
    """Give the environment that shows one device, in turn, to the isolated workers of a process.

    Args:
        worker: number of the pytest process.
    """
    devices = visible_devices()
    return {VISIBLE: devices[worker % len(devices)]} if len(devices) > 1 else {}
