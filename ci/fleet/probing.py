"""What a machine of a cluster can run, found out there; imports nothing that it may lack."""

from __future__ import annotations

import platform
from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """A machine.

    Attributes:
        refusal: why it cannot be used; empty where it can.
        sm: compute capability of its GPU, such as 90; None without one.
        jobs: units that share one GPU.
        python: its version.
    """

    refusal: str = ""
    sm: int | None = None
    jobs: int = 1
    python: str = ""


def look(device: str) -> Facts:
    """Return what this machine can run on a device."""
    python = platform.python_version()
    try:
        from ...impl import Target, UnsupportedError
        from ...properties.search.engine import usual_jobs  # and with it all that a unit needs
    except ImportError as error:
        return Facts(f"it has no {error.name or error}", python=python)
    try:
        return Facts("", Target.here(device).sm, usual_jobs(device), python)
    except UnsupportedError as error:
        return Facts(str(error), python=python)
