"""Adapters to the Triton kernels of serving engines, whose files are loaded without the engine.

``load`` and its companions serve adapters of your own, to a file of any package.
"""

from __future__ import annotations

from .sources import known, load, missing_file, says, unavailable

__all__ = ["known", "load", "missing_file", "says", "unavailable"]
