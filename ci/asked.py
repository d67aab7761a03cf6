"""What is asked for by name on the command line, and must exist."""

from __future__ import annotations

from collections.abc import Sequence

from ..impl import ImplementationNotFoundError
from ..impl.registry import resolve_name
from ..properties.laws import find_law
from ..properties.only import Only, OnlyError, read_only
from .errors import UsageRefusedError


def check_laws(names: Sequence[str]) -> None:
    """Refuse a name that no law has.

    Raises:
        UsageRefusedError: names it.
    """
    try:
        for name in names:
            find_law(name)
    except LookupError as error:
        message = f"--law: {error.args[0]}"
        raise UsageRefusedError(message) from error


def check_implementations(names: Sequence[str], option: str = "") -> None:
    """Refuse a name that leads to no implementation.

    Args:
        names: MODULE:NAME, or registered ones.
        option: by which they are given; empty for arguments.

    Raises:
        UsageRefusedError: names it.
    """
    try:
        for name in names:
            resolve_name(name)
    except ImplementationNotFoundError as error:
        message = f"{option}: {error}" if option else str(error)
        raise UsageRefusedError(message) from error


def only_of(texts: Sequence[str]) -> Only:
    """Read the restrictions of ``--only``.

    Raises:
        UsageRefusedError: one cannot be read.
    """
    try:
        return read_only(texts)
    except OnlyError as error:
        message = f"--only: {error}"
        raise UsageRefusedError(message) from error
