"""What a gating decision is, by definition: loops over the rules, without index or cache."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from packaging.version import Version

from ...impl.gating import Feature, Rule, RuleBook, Target
from ...impl.targets.backends import FLASHINFER_BACKENDS


def status(feature: Feature, target: Target, book: RuleBook) -> str:
    """Return the status of a feature with one backend and one phase."""
    holding = [rule for rule in book.rules if holds(rule, feature, target, book)]
    if any(rule.effect == "refuse" for rule in holding):
        return "refused"
    known = feature.backend not in FLASHINFER_BACKENDS or within_book(target, book)
    return "supported" if known and holding else "unknown"


def within_book(target: Target, book: RuleBook) -> bool:
    """Whether FlashInfer is there, in a version between the first and the last known."""
    if target.flashinfer is None:
        return False
    versions = [_read(each) for each in book.versions]
    return not versions or min(versions) <= _read(target.flashinfer) <= max(versions)


def holds(rule: Rule, feature: Feature, target: Target, book: RuleBook) -> bool:
    """Whether every condition of a rule holds."""
    if feature.operation not in rule.operation or feature.backend not in rule.backend:
        return False
    if rule.chips and target.sm not in rule.chips:
        return False
    for name, wanted in rule.when.items():
        if not _meets(getattr(feature, name), wanted):
            return False
    hashes = dict(book.versions.get(target.flashinfer or "", {}))
    hashes.update(dict(target.artifacts))
    by_hash = bool(rule.artifacts) and all(name in hashes for name in rule.artifacts)
    if by_hash and not all(hashes[n].startswith(start) for n, start in rule.artifacts.items()):
        return False
    for package, specifier in rule.versions.items():
        if package == "flashinfer" and by_hash:
            continue
        version = target.version_of(package)
        if version is None or not all(
            in_clause(_read(version), clause.strip()) for clause in specifier.split(",")
        ):
            return False
    return True


def _meets(value: Any, wanted: Any) -> bool:  # noqa: ANN401  a value of a TOML file
    if isinstance(wanted, dict):
        for key, limit in wanted.items():
            if key == "min" and value < limit:
                return False
            if key == "max" and value > limit:
                return False
            if key == "multiple_of" and value % limit:
                return False
            if key == "not" and value in (limit if isinstance(limit, list) else [limit]):
                return False
        return True
    return value in wanted if isinstance(wanted, list) else bool(value == wanted)


def in_clause(version: Version, clause: str) -> bool:
    """Compare as PEP 440 does, with its exceptions for post and development releases."""
    found = re.fullmatch(r"(>=|<=|==|!=|<|>)\s*(\S+)", clause)
    if found is None:
        message = f"the definition does not know the clause {clause!r}"
        raise ValueError(message)
    operator, limit = found[1], _read(found[2])
    public = Version(version.public)
    if operator in ("==", "!="):
        return (public == limit) == (operator == "==")
    if operator == ">=":
        return public >= limit
    if operator == "<=":
        return public <= limit
    if operator == "<":
        # A pre-release of the very limit is not below it; one of an earlier post release is.
        of_limit = (public.release, public.post) == (limit.release, limit.post)
        early = public.is_prerelease and not limit.is_prerelease
        return public < limit and not (of_limit and early)
    of_limit = public.base_version == limit.base_version and not limit.is_prerelease
    late = public.is_postrelease and not limit.is_postrelease
    return public > limit and not (of_limit and late)


@cache
def _read(version: str) -> Version:
    return Version(version)
