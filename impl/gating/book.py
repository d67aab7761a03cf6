"""The book of support rules: read from TOML files, checked against their shape, and indexed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from ...fixtures import SUPPORT
from ..targets.backends import FLASHINFER_BACKENDS
from ..targets.capability import parse_capability
from ..targets.data_files import read_toml
from ..targets.registrations import canonical_name
from ..targets.shape_checks import checked
from ..targets.target import FIELDS, Target
from .feature import Feature
from .rules import PACKAGES, Rule, compiled, parse_version

VERSIONS_FILE = "versions.toml"
Tests = tuple[tuple[Rule, Callable[[Feature], bool]], ...]


class Index(NamedTuple):
    """The rules that speak of one machine, by operation and backend.

    Attributes:
        refusals: what is refused there.
        doubts: refusals of the release before a development release, or of its own: nobody knows
            whether it has what ends them.
        permissions: what is allowed there.
    """

    refusals: Mapping[tuple[str, str], Tests]
    doubts: Mapping[tuple[str, str], Tests]
    permissions: Mapping[tuple[str, str], Tests]


@dataclass(frozen=True, eq=False)
class RuleBook:
    """All rules.

    Attributes:
        rules: the rules in the order of their ids.
        versions: FlashInfer releases that the rules were written for, with the hashes of their
            artifacts. Permissions hold between the first and the last of them only.
    """

    rules: tuple[Rule, ...]
    versions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Put the rules in the order of their ids, whatever the order of the files."""
        object.__setattr__(self, "rules", tuple(sorted(self.rules, key=lambda rule: rule.id)))

    @property
    def oldest(self) -> str:
        """The first FlashInfer release that the rules know."""
        return min(self.versions, key=parse_version)

    @property
    def newest(self) -> str:
        """The last FlashInfer release that the rules know."""
        return max(self.versions, key=parse_version)

    def knows(self, version: str | None) -> bool:
        """Whether permissions hold for a FlashInfer version."""
        return bool(self.releases_of(version))

    def releases_of(self, version: str | None) -> tuple[str, ...]:
        """Return the known releases by which a FlashInfer version is decided.

        A release is decided by itself, and none that the rules do not name is known: a number
        between two of them says nothing. A development release is decided by the release before it
        and by its own, as nobody knows which changes it has: what both may do, it may.

        Raises:
            ValueError: the version is none by PEP 440.
        """
        if version is None or not self.versions:
            return () if version is None else (version,)
        asked = parse_version(version)
        known = {parse_version(each): each for each in self.versions}
        own = parse_version(asked.public)
        if not own.is_devrelease:
            return (known[own],) if own in known else ()
        own = parse_version(asked.public.rpartition(".dev")[0])
        before = max((each for each in known if each < own), default=None)
        return (known[before], known[own]) if own in known and before is not None else ()

    def artifacts_of(self, version: str | None) -> Mapping[str, str]:
        """Return names and hashes of the artifacts of a release, nothing of an unknown one."""
        return self.versions.get(version or "", {})

    @lru_cache(maxsize=8)  # noqa: B019  the shipped book lives as long as the process
    def without(self, rule_ids: frozenset[str]) -> RuleBook:
        """Return a book that lacks some rules: what they refuse can then be seen."""
        return RuleBook(
            tuple(rule for rule in self.rules if rule.id not in rule_ids), self.versions
        )

    def find(self, rule_id: str) -> Rule | None:
        """Find a rule."""
        return next((rule for rule in self.rules if rule.id == rule_id), None)


@lru_cache(maxsize=1024)
def index_of(book: RuleBook, target: Target) -> Index:
    """Return the rules of a book that speak of a machine.

    Raises:
        ValueError: a version of the target is none by PEP 440.
    """
    found: dict[str, dict[tuple[str, str], list[Rule]]] = {each: {} for each in Index._fields}
    known = book.releases_of(target.flashinfer)
    artifacts = book.artifacts_of(known[0] if len(known) == 1 else target.flashinfer)
    around = [(replace(target, flashinfer=each), book.artifacts_of(each)) for each in known]
    for rule in book.rules:
        decide = around[-1:] if rule.is_fixed_in(target.flashinfer) else around
        here, near = rule.applies_to(target, artifacts), [rule.applies_to(*each) for each in decide]
        if rule.effect == "refuse":
            kind = "refusals" if here else "doubts" if any(near) else ""
        else:
            kind = "permissions" if here and all(near) else ""
        for operation, backend in product(rule.operation, rule.backend) if kind else ():
            # Permissions of what is in FlashInfer hold for releases that the rules know.
            if kind != "permissions" or known or backend not in FLASHINFER_BACKENDS:
                found[kind].setdefault((operation, backend), []).append(rule)
    return Index(*map(_ordered, found.values()))


def _ordered(found: Mapping[tuple[str, str], list[Rule]]) -> dict[tuple[str, str], Tests]:
    """Put the narrowest rule first; the id decides between equals, never the order in a file."""
    return {
        key: tuple(
            (rule, compiled(rule))
            for rule in sorted(rules, key=lambda rule: (-rule.weight, rule.id))
        )
        for key, rules in found.items()
    }


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
