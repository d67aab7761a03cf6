"""Support rules as TOML files: read, and checked against their shape."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ...fixtures import SUPPORT
from ..targets.capability import parse_capability
from ..targets.data_files import read_toml
from ..targets.registrations import canonical_name
from ..targets.shape_checks import checked
from ..targets.target import FIELDS
from .book import RuleBook
from .rules import PACKAGES, Rule, parse_version

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
    table = read_toml(path, RulesError)
    _check(table, "RulesFile", path)
    return [_rule(entry) for entry in table.get("rule", [])]


def read_versions(folder: Path) -> dict[str, dict[str, str]]:
    """Read the FlashInfer releases that a folder's rules know, and their artifacts.

    Raises:
        RulesError: see ``load_rules``.
    """
    path = folder / VERSIONS_FILE
    if not path.exists():
        return {}
    table = read_toml(path, RulesError)
    _check(table, "Versions", path)
    try:
        sorted(table, key=parse_version)
    except ValueError as error:
        message = f"{path}: {error}"
        raise RulesError(message) from None
    return table


def _check(table: Mapping[str, Any], kind: str, path: Path) -> None:
    """Refuse what has not the shape of a file of this kind."""

    def schema() -> Any:  # noqa: ANN401  a type
        from . import schema

        return getattr(schema, kind)

    checked(table, schema, path, RulesError)


def _rule(entry: Mapping[str, Any]) -> Rule:
    """Make a rule of its table, which has been checked."""
    plain = {key: value for key, value in entry.items() if key not in (*PACKAGES, "versions")}
    lists = ("operation", "backend", "issues", "called")
    made = plain | {key: tuple(plain[key]) for key in lists if key in plain}
    chips = (None if chip == "cpu" else parse_capability(chip) for chip in entry.get("chips", ()))
    versions = {package: entry[package] for package in PACKAGES if package in entry}
    for provider, specifier in entry.get("versions", {}).items():
        name = FIELDS.get(canonical_name(provider), provider)
        versions[name] = ",".join(filter(None, (versions.get(name), specifier)))
    return Rule(**{**made, "chips": tuple(chips), "versions": versions})
