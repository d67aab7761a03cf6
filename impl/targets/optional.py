"""Optional dependencies: imported when needed, and one clear sentence where they are missing."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from .target import UnsupportedError


@functools.cache
def missing(module: str, extra: str) -> str | None:
    """Say in one sentence why a module cannot be used; None if it can."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        absent = getattr(error, "name", None) or module
        return f"{module} cannot be imported ({absent} is missing): install kernelproof[{extra}]"
    except Exception as error:  # noqa: BLE001  a broken wheel must not end the run
        return f"{module} fails on import: {type(error).__name__}: {error}"
    return None


def require(module: str, extra: str) -> ModuleType:
    """Import a module.

    Raises:
        UnsupportedError: it cannot be imported.
    """
    reason = missing(module, extra)
    if reason is not None:
        raise UnsupportedError(reason)
    return importlib.import_module(module)
