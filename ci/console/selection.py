"""What is asked for by name on the command line, and must exist."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...impl import ImplementationNotFoundError
from ...impl.registry import resolve_name
from ...properties.findings.corpus import Case, open_corpus
from ...properties.findings.ledger import Ledger, LedgerError
from ...properties.laws import find_law
from ...properties.space.profiles import Profile
from ...properties.space.restrictions import Only, OnlyError
from .errors import UsageRefusedError


def check_laws(names: Sequence[str], option: str = "--law") -> None:
    """Refuse a name that no law has.

    Args:
        names: names of laws.
        option: the option by which they are given.

    Raises:
        UsageRefusedError: names it.
    """
    try:
        for name in names:
            find_law(name)
    except LookupError as error:
        message = f"{option}: {error.args[0]}"
        raise UsageRefusedError(message) from error


def check_implementations(names: Sequence[str], option: str = "") -> None:
    """Refuse a name that is neither registered nor a MODULE:NAME.

    Args:
        names: MODULE:NAME, or registered ones.
        option: the option by which they are given; empty for arguments.

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
    """Read ``--only``.

    Raises:
        UsageRefusedError: one cannot be read.
    """
    try:
        return Only.read(texts)
    except OnlyError as error:
        raise UsageRefusedError(str(error)) from error


def corpus_of(
    folder: Path | None, ledger: Ledger, expectations: str | None, profile: Profile
) -> tuple[Case, ...]:
    """Read the stored cases that a run replays first.

    Args:
        folder: given by ``--corpus``.
        ledger: the ledger of the run.
        expectations: the value that it was asked for by: ``"none"`` forgets its cases too.
        profile: the profile of the run.

    Raises:
        UsageRefusedError: the folder is not there, or a case cannot be read.
    """
    forget = expectations == "none"
    try:
        return open_corpus(ledger, folder=folder, forget=forget, explore=profile.explore)
    except LedgerError as error:
        message = f"--corpus: {error}" if folder else str(error)
        raise UsageRefusedError(message) from error
