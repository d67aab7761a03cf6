"""The commands expectations and corpus: what is known is kept where runs look for it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from ...impl.targets.optional import missing
from ..console.errors import CONFORMING, UsageRefusedError
from ..console.help import CheckedGroup
from ..console.lines import tell

FILE = click.Path(dir_okay=False, path_type=Path)
LEDGER = click.option("--ledger", type=FILE, help="Instead of the shipped one.")


@click.group("expectations", cls=CheckedGroup)
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
    it is what the failing problems of that run share and no passing one has. A law stops at its
    first failure: where a kernel has several faults, run and update again until nothing is new.
    """
    from ...fixtures import LEDGER as SHIPPED
    from ...properties.findings.ledger import LedgerError, load_ledger

    _need_tomlkit()
    from .editing import (
        ReportError,
        add_entry,
        case_of_entry,
        failures_in,
        narrow_entry,
        passes_in,
        read_document,
        replace_ledger,
    )

    path, data = ledger or SHIPPED, _read(report)
    try:
        new = ledger is not None and not path.exists()
        entries = () if new else load_ledger(str(path)).entries
        document = read_document(path)
        known = [entry.id for entry in entries]
        failures, passes = failures_in(data), passes_in(data, entries)
        if failures and not (reason and reason.strip()):
            message = f"--reason is missing: {len(failures)} failures are to become known"
            raise UsageRefusedError(message)
        for entry, provider, version in passes:
            what = "no longer speaks of" if entry.versions.get(provider) else "is retired by"
            tell(f"PASSES {entry.id}: its case is right; it {what} {version or 'this run'}")
            narrow_entry(document, entry, provider, version or None)
        with ExitStack() as undo:  # an entry that is not kept leaves no case behind
            for failure in failures:
                name = failure.id
                if not dry_run:
                    why = str(reason).strip()
                    name = add_entry(path, document, failure, why, issue, known=known)
                    if name not in known:
                        case = path.parent / case_of_entry(name)
                        undo.callback(case.unlink, missing_ok=True)
                verdict = f"{failure.status} {failure.kind} under {', '.join(failure.laws)}"
                tell(f"KNOWN {name}: {verdict}")
                of = ", ".join(f"{name} = {wanted}" for name, wanted in failure.where.items())
                tell(f"  it explains {f'problems with {of}' if of else 'every problem'}")
            if not dry_run and (failures or passes):
                replace_ledger(path, document)
            undo.pop_all()
    except ReportError as error:
        message = f"{report}: {error}"
        raise UsageRefusedError(message) from error
    except LedgerError as error:
        raise UsageRefusedError(str(error)) from error
    if not failures and not passes:
        tell("nothing to add, to narrow or to retire")
    return CONFORMING


@click.group("corpus", cls=CheckedGroup)
def corpus() -> None:
    """Keep the cases that are replayed first."""


@corpus.command("add")
@click.argument("case", type=FILE, metavar="CASE.json")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Another corpus.")
def add(case: Path, folder: Path | None) -> int:
    """Put a case into the corpus: checked, without what one run found of it, and only once."""
    from ...fixtures import CORPUS

    _need_tomlkit()
    from .editing import add_to_corpus

    tell(str(add_to_corpus(case, folder or CORPUS)))
    return CONFORMING


def _need_tomlkit() -> None:
    if reason := missing("tomlkit", "suite"):
        raise UsageRefusedError(reason)


def _read(path: Path) -> dict[str, Any]:
    from ...impl.targets.data_files import read_json
    from ...impl.targets.schemas import converted
    from .shape import SHAPES

    data = read_json(path, UsageRefusedError)
    schema = data.get("schema") if isinstance(data, dict) else None
    shape = SHAPES.get(str(schema))
    if shape is None:
        message = f"{path}: its schema is {schema!r}, none of {', '.join(SHAPES)}"
        raise UsageRefusedError(message)
    converted(data, shape, path, UsageRefusedError)
    found: dict[str, Any] = data
    return found
