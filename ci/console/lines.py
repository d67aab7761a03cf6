"""Lines that commands print without rich."""

from __future__ import annotations

import click

from ...properties.verdicts.text import one_line


def tell(text: str, *, err: bool = False) -> None:
    """Print text as one line that steers no terminal and no log."""
    click.echo(one_line(text), err=err)


def note(text: str) -> None:
    """Print what a command has to say beside its report."""
    tell(f"kernelproof: {text}", err=True)
