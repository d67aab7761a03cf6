"""Optional dependencies: imported when needed, and one clear sentence where they are missing."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from .refusal import Refusal
from .target import UnsupportedError


@functools.cache
def missing(module: str, extra: str) -> Refusal | None:
    """Return in one sentence why a module cannot be used; None if it can."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        absent = getattr(error, "name", None) or module
        reason = f"{module} cannot be imported ({absent} is missing): install kernelproof[{extra}]"
    except Exception as error:  # noqa: BLE001  a broken wheel must not end the run
        reason = f"{module} fails on import: {type(error).__name__}: {error}"
    else:
        return None
    return Refusal(reason, "package", module)


def require(module: str, extra: str) -> ModuleType:
    """Import a module.

    Raises:
        UnsupportedError: it cannot be imported.
    """
    reason = missing(module, extra)
    if reason is not None:
        raise UnsupportedError(reason)
    return importlib.import_module(module)
