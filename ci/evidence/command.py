"""The command evidence: a page of kept results of real GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..console.errors import CONFORMING, UsageRefusedError
from ..console.outputs import Outputs, output_option

KINDS = ("h100", "h200", "gating", "bump")
"""Beginnings of the names of files with runs that the page sums up."""


@click.command("evidence", short_help="Sum up kept results of real GPUs.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[FILE.json...]")
@output_option("--markdown", "Write the page to this file instead of printing it.")
def evidence(files: tuple[Path, ...], outputs: Outputs) -> int:
    """Sum up files that runs wrote with --evidence; the shipped ones by default."""
    from .page import EvidenceFileError, page

    try:
        text = "\n".join(page(files or kept()))
    except EvidenceFileError as error:
        raise UsageRefusedError(str(error)) from error
    outputs.write({"--markdown": lambda: text})
    if not outputs.paths:
        sys.stdout.write(text)
    return CONFORMING


def kept() -> list[Path]:
    """Return the files of runs that are shipped: on GPUs, and of two releases."""
    from ...fixtures import EVIDENCE, files_of

    return sorted(path for kind in KINDS for path in files_of(EVIDENCE, f"{kind}-*.json"))
