"""Stored cases: problems that failed once, replayed before a run draws any.

The corpus is a folder of case files. Those that belong to entries of the ledger must still fail as
the ledger says; all others must pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...fixtures import CORPUS, files_of
from ...impl.registry import ImplementationNotFoundError, resolve_name
from ...reference import Problem
from ..laws import Law, find_law
from ..worker.requests import Address
from .ledger import Entry, Ledger, LedgerError, load_ledger, read_case


@dataclass(frozen=True)
class Case:
    """A stored case.

    Attributes:
        path: its file.
        law: its name.
        problem: a problem on which the law failed once.
        reference: MODULE:NAME of its implementation; empty where that is not installed here.
        operation: the operation of a plain function.
        without_rules: support rules that are not asked.
        soak: launches under the law of that name; the run's own number if 0.
        distrust: whether another process judges even where the run asks for none.
    """

    path: Path
    law: str
    problem: Problem
    reference: str = ""
    operation: str | None = None
    without_rules: tuple[str, ...] = ()
    soak: int = 0
    distrust: bool = False

    def is_of(self, reference: str) -> bool:
        """Whether it is a case of an implementation, given as MODULE:NAME."""
        return bool(self.reference) and _place(self.reference) == _place(reference)

    @property
    def content(self) -> tuple[str, str, str | None, tuple[str, ...], int]:
        """What is judged: a copy in another file has the same."""
        return (self.law, self.problem.id, self.operation, self.without_rules, self.soak)

    def request(self, address: Address) -> dict[str, Any]:
        """Return what a worker needs to judge it: by itself, whatever modules a run has chosen."""
        alone = replace(
            address,
            operation=self.operation or address.operation,
            modules=(),
            without_rules=(*address.without_rules, *self.without_rules),
            soak=self.soak or address.soak,
            distrust=self.distrust or address.distrust,
        )
        return alone.case(self.law, self.problem)


def checked_case(path: Path) -> tuple[Law, Problem, dict[str, Any]]:
    """Read a case that can be judged: its law, its problem, and all of it.

    Raises:
        LedgerError: it cannot be read, its law is unknown or does not speak of its problem, or a
            field names what there is not; the file and the field are named.
    """
    name, problem, data = read_case(path)
    try:
        law = find_law(name)
    except LookupError as error:
        message = f"{path}: the field 'law': {error.args[0]}"
        raise LedgerError(message) from error
    if problem.operation not in law.operations:
        message = f"{path}: the law {name} does not speak of {problem.operation}"
        raise LedgerError(message)
    return law, problem, data


def load_case(path: Path) -> Case:
    """Read a stored case.

    Raises:
        LedgerError: as of ``checked_case``.
    """
    law, problem, data = checked_case(path)
    try:
        reference = resolve_name(data["implementation"])
    except ImplementationNotFoundError:
        reference = ""
    return Case(
        path,
        law.name,
        problem,
        reference,
        data.get("operation"),
        tuple(data.get("without_rules", ())),
        data.get("soak", 0),
        data.get("distrust", False),
    )


def read_corpus(folder: Path) -> tuple[Case, ...]:
    """Read all cases of a folder, in the order of their names; none of a folder that is not there.

    Raises:
        LedgerError: the folder or one of them cannot be read.
    """
    try:
        files = files_of(folder)
    except OSError as error:
        message = f"{folder}: cannot be read ({error.strerror})"
        raise LedgerError(message) from error
    return tuple(map(load_case, files))


def failed_before(folder: Path, references: Sequence[str]) -> tuple[Case, ...]:
    """Return the newest case of each law and implementation in the folder of a run's cases.

    Args:
        folder: the folder, which need not exist.
        references: implementations as MODULE:NAME.

    Raises:
        LedgerError: the folder or a case cannot be read.
    """
    cases = [case for case in read_corpus(folder) if any(map(case.is_of, references))]
    newest = sorted(cases, key=lambda case: case.path.stat().st_mtime)
    return tuple({(case.law, case.reference): case for case in newest}.values())


def open_corpus(
    ledger: Ledger,
    *,
    folder: Path | None = None,
    forget: bool = False,
    explore: bool = False,
) -> tuple[Case, ...]:
    """Read the cases that a run replays.

    Args:
        ledger: the ledger of the run. What it keeps in quarantine, or what the shipped one does, is
            left out.
        folder: the folder of the corpus; the shipped one if None.
        forget: leave out the cases of the shipped ledger's entries, so that all is found afresh.
        explore: take what is in quarantine too, as the nightly profile does.

    Raises:
        LedgerError: the folder is not there, or a case cannot be read.
    """
    if folder is not None and not folder.is_dir():
        message = f"{folder}: there is no such folder"
        raise LedgerError(message)
    shipped = load_ledger().entries
    left_out = {
        entry.case.resolve()
        for entry in (*shipped, *ledger.entries)
        if entry.case and entry.quarantine and not explore
    }
    if forget:
        left_out |= {entry.case.resolve() for entry in shipped if entry.case}
    cases = read_corpus(folder or CORPUS)
    return tuple(case for case in cases if case.path.resolve() not in left_out)


def cases_of(reference: str, corpus: Sequence[Case], entries: Iterable[Entry]) -> list[Case]:
    """Return the cases of an implementation that are no case of these entries, each once.

    A folder may hold copies, also of the cases of entries: a case is known by its content.
    """
    known = {load_case(entry.case).content for entry in entries if entry.case}
    own = {case.content: case for case in reversed(corpus) if case.is_of(reference)}
    return [case for case in reversed(own.values()) if case.content not in known]


def _place(reference: str) -> str:
    """Return a reference whose file, if it names one, is the same however it was written."""
    module, _, name = reference.rpartition(":")
    return f"{Path(module).resolve()}:{name}" if module.endswith(".py") else reference
