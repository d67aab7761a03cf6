"""The ledger: known failures, each with the problems that it explains and why.

An entry explains a verdict only where the implementation, the law, the status, the conditions on
versions and chip, and the predicate on the problem all hold. It speaks of a cause: most entries
name no law, since every law that compares answers shows a wrong one. Its case is replayed in every
run, and an entry whose case passes is a finding itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from ...fixtures import LEDGER
from ...fixtures.suggestions import did_you_mean
from ...impl import Target
from ...impl.gating.rules import check_specifier, provider_matches
from ...impl.protocol import OPERATIONS
from ...impl.targets.data_files import read_json, read_toml
from ...impl.targets.schemas import Provider, Table, converted, one_of
from ...reference import Problem, problem_from_json
from ...reference.operations import PROBLEM_TYPES
from ..isolation.machine import MOST_LAUNCHES
from ..isolation.outcome import is_forceful
from ..isolation.sanitizer import TOOLS
from ..laws import LAWS
from ..verdicts.verdict import BAD, FAIL_KINDS, Verdict
from .relations import RELATIONS, relation

CASE_SCHEMA = "kernelproof/case/1"
DEVICES = ("cpu", "cuda")
MOST_WORK = 2**44
"""Most multiply-adds of a stored problem, thousands of times more than of any that is drawn."""
PREDICATES = {
    name
    for cls in PROBLEM_TYPES.values()
    for name, kind in [*cls.__dataclass_fields__.items(), *vars(cls).items()]
    if name in cls.__dataclass_fields__ or isinstance(kind, property)
} | {*RELATIONS}
"""What a predicate may speak of: fields and properties of problems, and relations of lengths."""


class LedgerError(ValueError):
    """A ledger that cannot be read; the message names the file, the entry and the field."""


class Limits(Table, frozen=True):
    """Limits of a number, or one of several lengths, as a predicate gives them."""

    min: float = -math.inf
    max: float = math.inf
    has: int | None = None


ProblemJson = Annotated[dict[str, Any], msgspec.Meta(extra_json_schema={"$ref": "#/$defs/Problem"})]
"""A problem as JSON; its schema is that of the types of problems."""
LAUNCHES = msgspec.Meta(ge=0, le=MOST_LAUNCHES)
LawName = Annotated[str, one_of(law.name for law in LAWS)]


class Entry(Table, frozen=True):
    """One known failure.

    Attributes:
        id: unique, names the case file too.
        implementation: its name; its case is replayed with this one.
        siblings: further implementations that fail for the same code's sake; ``*`` stands for any
            characters.
        laws: laws under which it fails, where the predicate says less than they do: those that make
            other problems of the given one. Any law if empty.
        status: the status of the verdict.
        kinds: the kinds of the verdict; any if empty.
        where: predicate on the problem: field or property, and the value it has, a list of values,
            or a table with ``min`` or ``max``, within which one of several lengths is too, or with
            a length that a list of them ``has``. All must hold.
        versions: PEP 440 specifiers by distribution, such as ``vllm = ">=0.33"``; ``flashinfer`` is
            flashinfer-python. A distribution that is not installed meets none.
        device: ``"cpu"`` or ``"cuda"``; any if empty.
        sm: chips on which it holds; any if empty.
        reason: why it fails, and why that is known rather than fixed.
        issue: public report, where there is one.
        case: the smallest problem and the law that shows it. What hangs or crashes may have none:
            the shipped ledger keeps no input that harms the software of others.
        quarantine: crash class: replayed by the nightly profile only.
        by_chance: what it does differs from call to call, as a race's outcome does, or memory that
            nobody has written: a call that is right proves nothing.
    """

    id: str
    implementation: str
    status: Annotated[str, one_of(BAD)]
    where: dict[Annotated[str, one_of(sorted(PREDICATES))], Any]
    reason: str
    case: Path | None = None
    laws: tuple[LawName, ...] = ()
    siblings: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    versions: dict[Provider, str] = msgspec.field(default_factory=dict)
    device: Annotated[str, one_of(("", *DEVICES))] = ""
    sm: tuple[int, ...] = ()
    issue: str = ""
    quarantine: bool = False
    by_chance: bool = False

    def __post_init__(self) -> None:
        """Refuse what types cannot say: a case, kinds of failures, versions, limits of numbers."""
        if self.case is None and not self.is_forceful:
            message = "case is missing: only a HANG, or a CRASH without an exception, has none"
            raise ValueError(message)
        for number, kind in enumerate(self.kinds if self.status == "FAIL" else ()):
            if kind not in FAIL_KINDS:
                hint = did_you_mean(kind, FAIL_KINDS)
                message = f"kinds[{number}] is {kind!r}; {hint}known: {', '.join(FAIL_KINDS)}"
                raise ValueError(message)
        for package, specifier in self.versions.items():
            check_specifier(f"versions.{package}", specifier)
        for name, wanted in self.where.items():
            if isinstance(wanted, dict):
                converted(wanted, Limits, f"where.{name}", ValueError)

    @property
    def is_forceful(self) -> bool:
        """Whether it is a hang, or a crash that no code chose to raise."""
        by_kind = self.status == "CRASH" and bool(self.kinds) and all(map(is_forceful, self.kinds))
        return self.status == "HANG" or by_kind

    def applies_to(self, implementation: str, target: Target) -> bool:
        """Whether the entry is this implementation's, and holds on this machine."""
        return implementation == self.implementation and self._holds_on(target)

    def covers(self, implementation: str, target: Target) -> bool:
        """Whether the entry speaks of this implementation, or a sibling of its, on this machine."""
        names = (self.implementation, *self.siblings)
        return any(fnmatchcase(implementation, name) for name in names) and self._holds_on(target)

    def of_law(self, law: str) -> bool:
        """Whether the entry may explain what this law says."""
        return not self.laws or law in self.laws

    def _holds_on(self, target: Target) -> bool:
        return (
            (not self.device or target.device == self.device)
            and (not self.sm or target.sm in self.sm)
            and all(
                provider_matches(target, package, specifier)
                for package, specifier in self.versions.items()
            )
        )

    def explains(self, law: str, verdict: Verdict, problem: Problem) -> bool:
        """Whether this verdict is the known failure, on this problem or the one made of it."""
        wrong = [problem, *([problem_from_json(verdict.about)] if verdict.about else [])]
        return (
            self.of_law(law)
            and verdict.status == self.status
            and (not self.kinds or verdict.kind in self.kinds)
            and any(holds(each, self.where) for each in wrong)
        )

    def retired(self, law: str, verdict: Verdict) -> Verdict:
        """Return the verdict on this entry where its case no longer fails as it says."""
        given = f"{verdict.status} {verdict.kind}".strip()
        message = (
            f"the ledger entry {self.id} expects {self.status} under {law}, but its case "
            f"gives {given}: narrow the entry's versions or retire it"
        )
        return Verdict("FAIL", "unexpected_pass", message)

    def load_case(self) -> tuple[str, Problem] | None:
        """Read the law and the problem of the smallest case; None where none is kept."""
        return read_case(self.case)[:2] if self.case else None

    def owns(self, path: Path) -> bool:
        """Whether a case file is this entry's."""
        return self.case is not None and self.case.resolve() == path.resolve()


class LedgerFile(Table, frozen=True):
    """A ledger as it is written: ``[[finding]]`` tables."""

    finding: tuple[Entry, ...] = ()


class Case(msgspec.Struct):
    """What a case file holds that is read again; a run adds what it found."""

    law: str
    implementation: str
    problem: ProblemJson
    device: Annotated[str, one_of(DEVICES)] | None = None
    operation: Annotated[str, one_of(OPERATIONS)] | None = None
    sanitizer: Annotated[str, one_of(("", *TOOLS))] | None = None
    soak: Annotated[int, LAUNCHES] = 0
    distrust: bool = False
    without_rules: list[str] = []


@dataclass(frozen=True)
class Ledger:
    """All entries of a file."""

    entries: tuple[Entry, ...] = ()

    def explanation(
        self, implementation: str, law: str, verdict: Verdict, problem: Problem, target: Target
    ) -> Entry | None:
        """Return the entry that explains a verdict, if one does."""
        for entry in self.entries:
            if entry.covers(implementation, target) and entry.explains(law, verdict, problem):
                return entry
        return None

    def knows(self, implementation: str, law: str, problem: Problem, target: Target) -> bool:
        """Whether an entry explains a failure of a problem under a law, whatever its kind."""
        return any(
            entry.covers(implementation, target)
            and entry.of_law(law)
            and holds(problem, entry.where)
            for entry in self.entries
        )

    def is_deadly(self, implementation: str, law: str, target: Target) -> bool:
        """Whether an implementation is known to hang or fault under a law on a machine.

        Not what only some problems do, under any law: see ``Candidate.alone``.
        """
        return any(
            entry.is_forceful
            and (law in entry.laws or not entry.where)
            and entry.of_law(law)
            and entry.covers(implementation, target)
            for entry in self.entries
        )


def read_case(path: Path) -> tuple[str, Problem, dict[str, Any]]:
    """Read a case file: its law, its problem, and all of it.

    Raises:
        LedgerError: no such file, no JSON, a missing or wrong field; the file is named.
    """
    data = read_json(path, LedgerError)
    schema = data.get("schema", CASE_SCHEMA) if isinstance(data, dict) else CASE_SCHEMA
    if schema != CASE_SCHEMA:
        message = f"{path}: its schema is {schema!r}; this Kernelproof reads {CASE_SCHEMA!r}"
        raise LedgerError(message)
    case = converted(data, Case, path, LedgerError)
    try:
        problem = problem_from_json(case.problem)
    except ValueError as error:
        message = f"{path}: {error}"
        raise LedgerError(message) from error
    if problem.work > MOST_WORK:
        message = f"{path}: problem has a work of {problem.work:.1e}; the most is {MOST_WORK:.1e}"
        raise LedgerError(message)
    return case.law, problem, data


def load_ledger(choice: str | None = None) -> Ledger:
    """Read a ledger: the shipped one if None, none at all for ``"none"``, else this file.

    Raises:
        LedgerError: the file is missing or malformed; the entry and field are named.
    """
    if choice == "none":
        return Ledger()
    path = Path(choice) if choice else LEDGER
    entries = converted(read_toml(path, LedgerError), LedgerFile, path, LedgerError).finding
    for entry_id, count in Counter(entry.id for entry in entries).items():
        if count > 1:
            message = f"{path}: the id {entry_id!r} is given {count} times"
            raise LedgerError(message)
    return Ledger(
        tuple(
            replace(entry, case=path.parent / entry.case) if entry.case else entry
            for entry in entries
        )
    )


def holds(problem: Problem, where: Mapping[str, Any]) -> bool:
    """Whether a problem has all the values of a predicate, see ``Entry.where``."""
    return all(_holds(problem, name, wanted) for name, wanted in where.items())


def _holds(problem: Problem, name: str, wanted: object) -> bool:
    value = relation(problem, name) if name in RELATIONS else getattr(problem, name, None)
    if value is None and not hasattr(problem, name):
        return False
    if isinstance(wanted, dict):
        if "has" in wanted:
            return isinstance(value, tuple) and wanted["has"] in value
        numbers = value if isinstance(value, tuple) else (value,)
        low, high = wanted.get("min", -math.inf), wanted.get("max", math.inf)
        return any(isinstance(each, (int, float)) and low <= each <= high for each in numbers)
    if isinstance(wanted, list):
        return value in wanted
    return bool(value == wanted)
