"""Optional dependencies: imported when needed, and one clear sentence where they are missing."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from importlib.machinery import PathFinder
from types import ModuleType

from ...fixtures.suggestions import how_to_install
from .refusal import Refusal
from .target import UnsupportedError


@functools.cache
def missing(module: str, extra: str) -> Refusal | None:
    """Return in one sentence why a module cannot be used; None if it can."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        absent = getattr(error, "name", None) or module
        how = how_to_install(extra)
        reason = f"{module} cannot be imported ({absent} is missing): {how} brings it"
    except Exception as error:  # noqa: BLE001  a broken wheel must not end the run
        reason = f"{module} fails on import: {type(error).__name__}: {error}"
    else:
        return None
    return Refusal(reason, "package", module)


@functools.cache
def absent(module: str, distribution: str) -> Refusal | None:
    """Return in one sentence that a module is not installed; None if it is. Nothing is imported."""
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    path = top
    for part in inner:  # find_spec of a dotted name would import its packages
        if spec is None or spec.submodule_search_locations is None:
            break
        path = f"{path}.{part}"
        spec = PathFinder.find_spec(path, spec.submodule_search_locations)
    if spec is not None and path == module:
        return None
    reason = f"{module} is not installed: it comes with the optional package {distribution}"
    return Refusal(reason, "package", distribution)


def require(module: str, extra: str) -> ModuleType:
    """Import a module.

    Raises:
        UnsupportedError: it cannot be imported.
    """
    reason = missing(module, extra)
    if reason is not None:
        raise UnsupportedError(reason)
    return importlib.import_module(module)
