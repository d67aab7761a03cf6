"""Support rules as TOML files: read, and checked field by field."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from ...fixtures import SUPPORT
from ..targets.backends import BACKENDS
from ..targets.capability import parse_capability
from .book import RuleBook
from .feature import CHOICES, INTEGERS, OPERATIONS, SWITCHES
from .rules import CALLED, EVIDENCE, PACKAGES, Rule, parse_version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FIELDS: dict[str, type] = {
    "id": str,
    "effect": str,
    "operation": list,
    "backend": list,
    "chips": list,
    "when": dict,
    "flashinfer": str,
    "cuda": str,
    "triton": str,
    "artifacts": dict,
    "reason": str,
    "source": str,
    "evidence": str,
    "advice": str,
    "issues": list,
    "called": list,
}
"""Fields of a rule in a file."""
REQUIRED = ("id", "effect", "operation", "backend", "reason", "source")
CONDITIONS = ("min", "max", "multiple_of", "not")
VERSIONS_FILE = "versions.toml"


class RulesError(ValueError):
    """Support rules that cannot be read; the message names the file, the rule and the field."""


def load_rules(folder: Path = SUPPORT) -> RuleBook:
    """Read every rules file of a folder; the shipped ones are read once.

    Raises:
        RulesError: a file cannot be read, or a rule is malformed; file, rule and field are named.
    """
    return _load(folder)


@cache
def _load(folder: Path) -> RuleBook:
    files = sorted(path for path in folder.glob("*.toml") if path.name != VERSIONS_FILE)
    if not files:
        message = f"{folder}: there are no support rules (*.toml)"
        raise RulesError(message)
    rules: dict[str, tuple[Rule, Path]] = {}
    for path in files:
        for rule in read_rules(path):
            if rule.id in rules:
                message = f"{path}: rule {rule.id}: {rules[rule.id][1].name} has the same id"
                raise RulesError(message)
            rules[rule.id] = (rule, path)
    return RuleBook(tuple(rule for rule, _ in rules.values()), read_versions(folder))


def read_rules(path: Path) -> list[Rule]:
    """Read one rules file.

    Raises:
        RulesError: see ``load_rules``.
    """
    table = _read(path)
    unknown = sorted(set(table) - {"rule"})
    if unknown or not isinstance(table.get("rule", []), list):
        message = f"{path}: {', '.join(unknown) or 'rule'} is no [[rule]]"
        raise RulesError(message)
    return [_rule(path, number, entry) for number, entry in enumerate(table.get("rule", []))]


def read_versions(folder: Path) -> dict[str, dict[str, str]]:
    """Read the FlashInfer releases that a folder's rules know, and their artifacts.

    Raises:
        RulesError: see ``load_rules``.
    """
    path = folder / VERSIONS_FILE
    if not path.exists():
        return {}
    table = _read(path)
    for version, artifacts in table.items():
        try:
            parse_version(version)
        except ValueError as error:
            message = f"{path}: {error}"
            raise RulesError(message) from None
        if not isinstance(artifacts, dict) or not all(
            isinstance(value, str) for value in artifacts.values()
        ):
            message = f"{path}: {version} must be a table of artifact hashes"
            raise RulesError(message)
    return table


def _read(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        message = f"{path}: {error}"
        raise RulesError(message) from None
    return table


def _rule(path: Path, number: int, entry: Mapping[str, Any]) -> Rule:
    name = entry.get("id") or f"number {number + 1}"

    def refuse(field_name: str, why: str) -> NoReturn:
        message = f"{path}: rule {name}: {field_name} {why}"
        raise RulesError(message) from None

    for key, value in entry.items():
        if key not in FIELDS:
            refuse(key, f"is no field; fields are {', '.join(FIELDS)}")
        if not isinstance(value, FIELDS[key]):
            refuse(key, f"must be a {FIELDS[key].__name__}, not {value!r}")
    for key in REQUIRED:
        if not entry.get(key):
            refuse(key, "is missing")
    _among(refuse, "effect", [entry["effect"]], ("allow", "refuse"))
    _among(refuse, "operation", entry["operation"], OPERATIONS)
    _among(refuse, "backend", entry["backend"], BACKENDS)
    _among(refuse, "evidence", [entry.get("evidence", "declared")], EVIDENCE)
    _among(refuse, "called", entry.get("called", ()), CALLED)
    if "called" in entry and (entry["effect"] == "allow" or not entry["called"]):
        refuse("called", "must name what becomes of a call that is refused")
    if entry["effect"] == "allow" and not entry.get("chips"):
        refuse("chips", "must list the exact chips of a permission")
    return Rule(
        id=entry["id"],
        effect=entry["effect"],
        operation=tuple(entry["operation"]),
        backend=tuple(entry["backend"]),
        reason=entry["reason"],
        source=entry["source"],
        evidence=entry.get("evidence", "declared"),
        chips=tuple(_chip(refuse, chip) for chip in entry.get("chips", ())),
        when=_conditions(refuse, entry.get("when", {})),
        versions=_versions(refuse, entry),
        artifacts=_texts(refuse, "artifacts", entry.get("artifacts", {})),
        advice=entry.get("advice", ""),
        issues=tuple(entry.get("issues", ())),
        called=tuple(entry.get("called", CALLED[:1])),
    )


Refuse = Callable[[str, str], NoReturn]


def _among(refuse: Refuse, name: str, values: Iterable[Any], choices: tuple[str, ...]) -> None:
    for value in values:
        if value not in choices:
            refuse(name, f"holds {value!r}; it may hold {', '.join(choices)}")


def _chip(refuse: Refuse, chip: Any) -> int | None:  # noqa: ANN401  a value of a TOML file
    if chip == "cpu":
        return None
    try:
        return parse_capability(chip)
    except ValueError as error:
        refuse("chips", f"holds {error}")


def _versions(refuse: Refuse, entry: Mapping[str, Any]) -> dict[str, str]:
    found = {package: entry[package] for package in PACKAGES if package in entry}
    for package, specifier in found.items():
        _check_specifier(refuse, package, specifier)
    return found


def _check_specifier(refuse: Refuse, package: str, specifier: str) -> None:
    try:
        SpecifierSet(specifier)
    except InvalidSpecifier as error:
        refuse(package, f"is no PEP 440 specifier: {error}")


def _texts(refuse: Refuse, name: str, table: Mapping[str, Any]) -> dict[str, str]:
    for key, value in table.items():
        if not isinstance(value, str) or not value:
            refuse(f"{name}.{key}", "must be a text")
    return dict(table)


def _conditions(refuse: Refuse, when: Mapping[str, Any]) -> dict[str, Any]:
    for name, wanted in when.items():
        where = f"when.{name}"
        if name in CHOICES and name not in ("operation", "backend"):
            kind: tuple[type, ...] = (str,)
        elif name in SWITCHES:
            kind = (bool,)
        elif name in (*INTEGERS, "query_rows"):
            kind = (int,)
        else:
            refuse(where, "is no field of a feature that a condition may speak of")
        for value in _values(refuse, where, wanted):
            if not isinstance(value, kind) or (kind == (int,) and isinstance(value, bool)):
                refuse(where, f"holds {value!r}, which is no {kind[0].__name__}")
            if kind == (str,):
                _among(refuse, where, [value], CHOICES[name])
    return dict(when)


def _values(refuse: Refuse, where: str, wanted: Any) -> list[Any]:  # noqa: ANN401  of a TOML file
    if isinstance(wanted, Mapping):
        for key in wanted:
            if key not in CONDITIONS:
                refuse(where, f"has {key!r}; a table may have {', '.join(CONDITIONS)}")
        found = []
        for value in wanted.values():
            found += value if isinstance(value, list) else [value]
        return found
    if isinstance(wanted, list) and not wanted:
        refuse(where, "is an empty list, which nothing meets")
    return wanted if isinstance(wanted, list) else [wanted]
