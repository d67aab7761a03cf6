"""The ledger: known failures, each with the problems that it explains and why.

An entry explains a verdict only where the implementation, one of its laws, the status, the
conditions on versions and chip, and the predicate on the problem all hold. Its case is replayed
in every run, and an entry whose case passes is a finding itself.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from ...fixtures import LEDGER
from ...impl import Target
from ...reference import (
    AttentionProblem,
    MergeProblem,
    MetadataProblem,
    MoEProblem,
    Problem,
    RouteProblem,
    problem_from_json,
)
from ..laws import LAWS
from ..verdicts.verdict import BAD, FAIL_KINDS, Verdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TYPES: dict[str, type] = {
    "id": str,
    "implementation": str,
    "laws": list,
    "status": str,
    "kinds": list,
    "where": dict,
    "versions": dict,
    "device": str,
    "sm": list,
    "reason": str,
    "issue": str,
    "case": str,
    "quarantine": bool,
}
"""Fields of an entry."""
CASE_SCHEMA = "kernelproof/case/1"
PACKAGES = ("flashinfer", "triton", "torch")
PREDICATES = {
    name
    for cls in (AttentionProblem, MergeProblem, MetadataProblem, MoEProblem, RouteProblem)
    for name, kind in [*cls.__dataclass_fields__.items(), *vars(cls).items()]
    if name in cls.__dataclass_fields__ or isinstance(kind, property)
}
"""What a predicate may speak of: fields and properties of problems."""
REQUIRED = {"id", "implementation", "laws", "status", "where", "reason", "case"}


class LedgerError(ValueError):
    """A ledger that cannot be read; the message names the file, the entry and the field."""


@dataclass(frozen=True)
class Entry:
    """One known failure.

    Attributes:
        id: unique, names the case file too.
        implementation: its name.
        laws: laws that fail.
        status: of the verdict.
        kinds: of the verdict; any if empty.
        where: predicate on the problem: field or property, and the value it has, a list of values,
            or a table with ``min`` or ``max``. All must hold.
        versions: PEP 440 specifiers by package, such as ``flashinfer = ">=0.7,<=0.7.2.post1"``.
        device: ``"cpu"`` or ``"cuda"``; any if empty.
        sm: chips on which it holds; any if empty.
        reason: why it fails, and why that is known rather than fixed.
        issue: public report, where there is one.
        case: the smallest problem and the law that shows it.
        quarantine: crash class: replayed by the nightly profile only.
    """

    id: str
    implementation: str
    laws: tuple[str, ...]
    status: str
    where: Mapping[str, Any]
    reason: str
    case: Path
    kinds: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    sm: tuple[int, ...] = ()
    issue: str = ""
    quarantine: bool = False

    def applies_to(self, implementation: str, target: Target) -> bool:
        """Tell whether the entry speaks of this implementation on this machine."""
        return (
            implementation == self.implementation
            and (not self.device or target.device == self.device)
            and (not self.sm or target.sm in self.sm)
            and all(
                _version_matches(getattr(target, package), specifier)
                for package, specifier in self.versions.items()
            )
        )

    def explains(self, law: str, verdict: Verdict, problem: Problem) -> bool:
        """Tell whether this verdict is the known failure, on this problem or the one made of it."""
        wrong = [problem, *([problem_from_json(verdict.about)] if verdict.about else [])]
        return (
            law in self.laws
            and verdict.status == self.status
            and (not self.kinds or verdict.kind in self.kinds)
            and any(
                all(_holds(each, name, wanted) for name, wanted in self.where.items())
                for each in wrong
            )
        )

    def retired(self, law: str, verdict: Verdict) -> Verdict:
        """Give the verdict on this entry where its case no longer fails as it says."""
        given = f"{verdict.status} {verdict.kind}".strip()
        message = (
            f"the ledger entry {self.id} expects {self.status} under {law}, but its case "
            f"gives {given}: narrow the entry's versions or retire it"
        )
        return Verdict("FAIL", "unexpected_pass", message)

    def load_case(self) -> tuple[str, Problem]:
        """Read the law and the problem of the smallest case."""
        return read_case(self.case)[:2]


@dataclass(frozen=True)
class Ledger:
    """All entries of a file."""

    entries: tuple[Entry, ...] = ()

    def explanation(
        self, implementation: str, law: str, verdict: Verdict, problem: Problem, target: Target
    ) -> Entry | None:
        """Give the entry that explains a verdict, if one does."""
        for entry in self.entries:
            if entry.applies_to(implementation, target) and entry.explains(law, verdict, problem):
                return entry
        return None


def read_case(path: Path) -> tuple[str, Problem, dict[str, Any]]:
    """Read a case file: its law, its problem, and all of it.

    Raises:
        LedgerError: no such file, no JSON, a missing or wrong field; the file is named.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror})"
        raise LedgerError(message) from error
    except (ValueError, UnicodeDecodeError) as error:
        message = f"{path}: not JSON ({error})"
        raise LedgerError(message) from error
    if not isinstance(data, dict):
        message = f"{path}: a case is a JSON object, not a {type(data).__name__}"
        raise LedgerError(message)
    if data.get("schema", CASE_SCHEMA) != CASE_SCHEMA:
        message = (
            f"{path}: its schema is {data['schema']!r}; this Kernelproof reads {CASE_SCHEMA!r}"
        )
        raise LedgerError(message)
    for name in ("law", "implementation", "problem"):
        if name not in data:
            message = f"{path}: the field {name!r} is missing"
            raise LedgerError(message)
        wanted = dict if name == "problem" else str
        if not isinstance(data[name], wanted):
            message = f"{path}: the field {name!r} is not a {wanted.__name__}"
            raise LedgerError(message)
    rules = data.get("without_rules", [])
    if not (isinstance(rules, list) and all(isinstance(rule, str) for rule in rules)):
        message = f"{path}: the field 'without_rules' is not a list of names of support rules"
        raise LedgerError(message)
    try:
        problem = problem_from_json(data["problem"])
    except ValueError as error:
        message = f"{path}: {error}"
        raise LedgerError(message) from error
    return data["law"], problem, data


def load_ledger(choice: str | None = None) -> Ledger:
    """Read a ledger: the shipped one if None, none at all for ``"none"``, else this file.

    Raises:
        LedgerError: the file is missing or malformed; the entry and field are named.
    """
    if choice == "none":
        return Ledger()
    path = Path(choice) if choice else LEDGER
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror})"
        raise LedgerError(message) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        message = f"{path}: not TOML ({error})"
        raise LedgerError(message) from error
    tables = data.pop("finding", [])
    if data or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        message = f"{path}: a ledger holds [[finding]] tables only"
        raise LedgerError(message)
    entries = tuple(_entry(path, position, table) for position, table in enumerate(tables))
    for entry_id, count in Counter(entry.id for entry in entries).items():
        if count > 1:
            message = f"{path}: the id {entry_id!r} is given {count} times"
            raise LedgerError(message)
    return Ledger(entries)


def _entry(path: Path, position: int, table: dict[str, Any]) -> Entry:
    name = table.get("id", f"number {position + 1}")
    problem = _defect(table)
    if problem:
        message = f"{path}: finding {name!r}: {problem}"
        raise LedgerError(message)
    fields = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
    }
    return Entry(**{**fields, "case": path.parent / table["case"]})


def _defect(table: dict[str, Any]) -> str | None:
    """Say what is wrong with an entry; None if nothing is."""
    for key in sorted(set(table) - set(TYPES)):
        return f"unknown field {key!r}"
    for key in sorted(REQUIRED - set(table)):
        return f"the field {key!r} is missing"
    for key, value in table.items():
        if not isinstance(value, TYPES[key]):
            return f"{key} must be a {TYPES[key].__name__}, not {value!r}"
    allowed: dict[str, Collection[object]] = {
        "laws": {law.name for law in LAWS},
        "kinds": FAIL_KINDS if table["status"] == "FAIL" else table.get("kinds", ()),
        "device": ("", "cpu", "cuda"),
        "versions": PACKAGES,
        "where": PREDICATES,
        "status": BAD,
    }
    for key, known in allowed.items():
        value = table.get(key, ())
        for item in [value] if isinstance(value, str) else value:
            if item not in list(known):  # the file's items need not be hashable
                return f"{key} names {item!r}; known: {', '.join(sorted(map(str, known)))}"
    return _bad_condition(table)


def _bad_condition(table: dict[str, Any]) -> str | None:
    for package, specifier in table.get("versions", {}).items():
        if not _is_specifier(specifier):
            return f"versions.{package} is {specifier!r}, no PEP 440 specifier"
    for chip in table.get("sm", []):
        if not isinstance(chip, int):
            return f"sm names {chip!r}; chips are integers, ten times the compute capability"
    for field_name, wanted in table["where"].items():
        if isinstance(wanted, dict) and not (
            set(wanted) <= {"min", "max"}
            and all(isinstance(limit, (int, float)) for limit in wanted.values())
        ):
            return f"where.{field_name} must be a value, a list, or numbers min and max"
    return None


def _is_specifier(specifier: object) -> bool:
    try:
        SpecifierSet(specifier if isinstance(specifier, str) else "?")
    except InvalidSpecifier:
        return False
    return True


def _version_matches(version: str | None, specifier: str) -> bool:
    return version is not None and SpecifierSet(specifier).contains(version, prereleases=True)


def _holds(problem: Problem, name: str, wanted: object) -> bool:
    if not hasattr(problem, name):
        return False
    value = getattr(problem, name)
    if isinstance(wanted, dict):
        if not isinstance(value, (int, float)):
            return False
        low, high = wanted.get("min", value), wanted.get("max", value)
        return bool(low <= value <= high)
    if isinstance(wanted, list):
        return value in wanted
    return bool(value == wanted)
