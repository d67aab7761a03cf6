"""What code under test may replace in its process, so that the suite itself stops working there."""

from __future__ import annotations

import builtins
import json
import math
import os
import socket
import sys
import time
import warnings
from types import ModuleType

import torch

MODULES: tuple[ModuleType, ...] = (builtins, json, math, os, socket, time, torch)
"""Modules whose functions the suite calls."""
MOST_NAMED = 3
"""Names in a sentence at most."""


def snapshot() -> dict[str, object]:
    """Return what the suite relies on, by name."""
    tensor = {name: getattr(torch.Tensor, name) for name in dir(torch.Tensor)}
    return {
        "the working directory": _working_directory(),
        "the default dtype of torch": torch.get_default_dtype(),
        "the modes of torch": (
            torch._C._len_torch_function_stack(),  # noqa: SLF001  there is no public name
            torch._C._len_torch_dispatch_stack(),  # noqa: SLF001
        ),
        "the filters of warnings": any(action == "error" for action, *_ in warnings.filters),
        "the limit of recursion": sys.getrecursionlimit(),
        **{f"sys.modules[{name!r}]": module for name, module in list(sys.modules.items())},
        **{f"torch.Tensor.{name}": value for name, value in tensor.items() if callable(value)},
        **{
            f"{module.__name__}.{name}": value
            for module in MODULES
            for name, value in list(vars(module).items())
            if callable(value)
        },
    }


def replaced(before: dict[str, object]) -> str:
    """Name what is no longer what it was; empty where all is."""
    try:
        now = snapshot()
    except Exception as error:  # noqa: BLE001  something that a snapshot needs was replaced
        return f"something without which it cannot be checked ({type(error).__name__})"
    missing = object()
    names = [name for name, value in before.items() if now.get(name, missing) != value]
    # torch replaces some of its functions itself, as when what compiles is imported.
    names = [name for name in names if not _of_torch(name, now.get(name))]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _of_torch(name: str, value: object) -> bool:
    made_in = str(getattr(value, "__module__", ""))
    return name.startswith("torch.") and made_in.partition(".")[0] == "torch"


def _working_directory() -> str | None:
    """Return the working directory; None where it was removed."""
    try:
        return os.getcwd()  # noqa: PTH109  pathlib asks it too
    except OSError:
        return None
