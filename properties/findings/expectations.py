"""Reading a ledger before a run, in full: its errors are reported before anything starts."""

from __future__ import annotations

from ..laws import find_law
from ..verdicts.verdict import Verdict
from .ledger import Entry, Ledger, LedgerError, load_ledger


def read_expectations(choice: str | None) -> Ledger:
    """Read a ledger (see ``load_ledger``) and all its cases.

    Raises:
        LedgerError: it or a case of it cannot be read, or an entry does not cover its own case.
    """
    flag = "" if choice is None else "--expectations: "
    name = choice or "the shipped ledger"
    try:
        ledger = load_ledger(choice)
        for entry in ledger.entries:
            name = f"{entry.case or name}"
            _check(entry, choice)
    except LookupError as error:
        message = f"{flag}{name}: {error.args[0]}"
        raise LedgerError(message) from error
    except LedgerError as error:
        message = f"{flag}{error}"
        raise LedgerError(message) from error
    except (AttributeError, TypeError, ValueError) as error:
        message = f"{flag}{name}: a value of the wrong type: {error}"
        raise LedgerError(message) from error
    return ledger


def _check(entry: Entry, choice: str | None) -> None:
    """Raise where an entry does not cover its case: a misspelt law would explain nothing."""
    ledger = choice or "the shipped ledger"
    try:
        stored = entry.load_case()
    except LedgerError as error:
        message = f"{ledger}: finding {entry.id!r}: case: {error}"
        raise LedgerError(message) from error
    if stored is None:
        return
    law, problem = stored
    find_law(law)
    kind = entry.kinds[0] if entry.kinds else ""
    if not entry.explains(law, Verdict(entry.status, kind), problem):  # type: ignore[arg-type]
        message = f"{ledger}: finding {entry.id!r} does not cover its own case {entry.case}"
        raise LedgerError(message)
