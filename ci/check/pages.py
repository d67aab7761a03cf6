"""The pages of the documentation that are generated and not kept, by the names of their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import click

from ..support.rendering import support_matrix
from .command_book import command_book
from .field_book import field_book
from .law_book import law_book
from .ledger_book import ledger_book

PAGES: Mapping[str, Callable[[], str]] = {
    "law-book.md": law_book,
    "fields.md": field_book,
    "commands.md": command_book,
    "known-findings.md": ledger_book,
    "support-matrix.md": support_matrix,
}
"""What makes each page."""


def page_writer(path: Path) -> Callable[[], str]:
    """Return what makes the page of this name.

    Raises:
        UsageError: no page has this name.
    """
    if path.name not in PAGES:
        message = f"--markdown {path}: no page has this name; there are {', '.join(PAGES)}"
        raise click.UsageError(message)
    return PAGES[path.name]
