"""The folder in which downloads and builds are kept."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "KERNELPROOF_CACHE"


def cache_folder() -> Path:
    """Return the folder in which downloads and builds are kept: see `CACHE_VARIABLE`."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kernelproof"
