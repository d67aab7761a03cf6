"""The commands expectations and corpus: what is known is kept where runs look for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..console.errors import CONFORMING, UsageRefusedError

FILE = click.Path(dir_okay=False, path_type=Path)
SCHEMAS = ("kernelproof/report/1", "kernelproof/bump/1")
LEDGER = click.option("--ledger", type=FILE, help="Instead of the shipped one.")


@click.group("expectations")
def expectations() -> None:
    """Keep the ledger of known failures."""


@expectations.command("update")
@click.argument("report", type=FILE, metavar="REPORT.json")
@click.option("--reason", help="Why these fail, and why that is known rather than fixed.")
@click.option("--issue", default="", metavar="URL", help="Public report of them.")
@click.option("--dry-run", is_flag=True, help="Say what would change, and change nothing.")
@LEDGER
def update(
    report: Path, reason: str | None, issue: str, ledger: Path | None, *, dry_run: bool
) -> int:
    """Add what fails and is not explained; narrow or retire what passes and should fail.

    REPORT.json is of check, of gate, or of a comparison. Look at each predicate before you commit:
    it is what the failing problems of that run share and no passing one has.
    """
    from ...fixtures import LEDGER as SHIPPED
    from ...properties.findings.ledger import LedgerError, load_ledger
    from .editing import add_entry, failures_in, narrow_entry, passes_in, replace_ledger

    path, data = ledger or SHIPPED, _read(report)
    try:
        new = ledger is not None and not path.exists()
        entries = () if new else load_ledger(str(path)).entries
        text = "" if new else path.read_text(encoding="utf-8")
        failures, passes = failures_in(data), passes_in(data, entries)
        if failures and not (reason and reason.strip()):
            message = f"--reason is missing: {len(failures)} failures are to become known"
            raise UsageRefusedError(message)
        for entry, version in passes:
            what = "no longer speaks of" if entry.versions.get("flashinfer") else "is retired by"
            click.echo(f"PASSES {entry.id}: its case is right; it {what} {version or 'this run'}")
            text = narrow_entry(text, entry, version or None)
        for failure in failures:
            click.echo(f"KNOWN {failure.id}: {failure.status} {failure.kind} under "
                       f"{', '.join(failure.laws)}")  # fmt: skip
            if not failure.where:
                click.echo("  it explains every problem: nothing tells those that fail")
            if not dry_run:
                text = add_entry(path, text, failure, str(reason).strip(), issue, entries=entries)
        if not dry_run and (failures or passes):
            replace_ledger(path, text)
    except (LedgerError, KeyError, TypeError, AttributeError) as error:
        message = f"{report}: {error}" if isinstance(error, LedgerError) else (
            f"{report}: is no whole report ({type(error).__name__}: {error})"
        )  # fmt: skip
        raise UsageRefusedError(message) from error
    if not failures and not passes:
        click.echo("nothing to add, to narrow or to retire")
    return CONFORMING


@click.group("corpus")
def corpus() -> None:
    """Keep the cases that are replayed first."""


@corpus.command("add")
@click.argument("case", type=FILE, metavar="CASE.json")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Another corpus.")
def add(case: Path, folder: Path | None) -> int:
    """Put a case into the corpus: checked, without what one run found of it, and only once."""
    from ...fixtures import CORPUS
    from .editing import add_to_corpus

    click.echo(add_to_corpus(case, folder or CORPUS))
    return CONFORMING


def _read(path: Path) -> dict[str, Any]:
    from ...impl.targets.data_files import read_json

    data = read_json(path, UsageRefusedError)
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema not in SCHEMAS:
        message = f"{path}: its schema is {schema!r}, none of {', '.join(SCHEMAS)}"
        raise UsageRefusedError(message)
    found: dict[str, Any] = data
    return found
