"""The book of support rules, indexed by machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from ..targets.backends import FLASHINFER_BACKENDS
from ..targets.target import Target
from .feature import Feature
from .rules import Rule, compiled, parse_version, version_matches

Tests = tuple[tuple[Rule, Callable[[Feature], bool]], ...]


@dataclass(frozen=True)
class Index:
    """The rules that speak of one machine, by operation and backend: refusals and permissions."""

    refusals: Mapping[tuple[str, str], Tests]
    permissions: Mapping[tuple[str, str], Tests]


@dataclass(frozen=True, eq=False)
class RuleBook:
    """All rules.

    Attributes:
        rules: in the order of their ids.
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
        if version is None or not self.versions:
            return version is not None
        return version_matches(version, f">={self.oldest},<={self.newest}")

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
    refusals: dict[tuple[str, str], list[Rule]] = {}
    permissions: dict[tuple[str, str], list[Rule]] = {}
    artifacts = book.artifacts_of(target.flashinfer)
    known = book.knows(target.flashinfer)
    for rule in book.rules:
        if not rule.applies_to(target, artifacts):
            continue
        for operation in rule.operation:
            for backend in rule.backend:
                if rule.effect == "refuse":
                    refusals.setdefault((operation, backend), []).append(rule)
                # Permissions of what is in FlashInfer hold for releases that the rules know.
                elif known or backend not in FLASHINFER_BACKENDS:
                    permissions.setdefault((operation, backend), []).append(rule)
    return Index(_ordered(refusals), _ordered(permissions))


def _ordered(found: Mapping[tuple[str, str], list[Rule]]) -> dict[tuple[str, str], Tests]:
    """Put the narrowest rule first; the id decides between equals, never the order in a file."""
    return {
        key: tuple(
            (rule, compiled(rule))
            for rule in sorted(rules, key=lambda rule: (-rule.weight, rule.id))
        )
        for key, rules in found.items()
    }
