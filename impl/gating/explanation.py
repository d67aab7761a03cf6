"""Explanations of decisions: what a permission lacks, and each rule with its result."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from ..targets.backends import FLASHINFER_BACKENDS
from ..targets.capability import CHIPS, capability_name
from ..targets.target import Target
from .book import RuleBook, load_rules
from .feature import AUTO, Feature
from .rules import Rule, parse_version, unmet_in_words, version_matches

Walked = tuple[Rule, list[str], list[str]]
"""A rule, the conditions on the machine that it finds unmet, and those on the feature."""
MACHINE_CONDITIONS = {
    "chips": "the chip",
    "flashinfer": "the version of FlashInfer",
    "cuda": "the version of CUDA",
    "triton": "the version of Triton",
}


def why_unknown(feature: Feature, target: Target, book: RuleBook) -> str:
    """Return what is missing for a permission: of the machine, or of the nearest rule."""
    needs_flashinfer = feature.backend in FLASHINFER_BACKENDS
    if target.sm is not None and target.sm not in CHIPS:
        known = ", ".join(map(str, CHIPS))
        return f"{capability_name(target.sm)} is a chip that the rules do not know ({known})"
    if needs_flashinfer and target.flashinfer is None:
        return f"{feature.backend} is in flashinfer-python, which is not installed there"
    if needs_flashinfer and not book.knows(target.flashinfer):
        between = target.flashinfer and version_matches(
            target.flashinfer, f">={book.oldest},<={book.newest}"
        )
        said = f"the rules know flashinfer-python {book.oldest} to {book.newest}, "
        return f"{said}not {target.flashinfer}{', which is none of them' if between else ''}"
    later = _came_later(feature, target, book)
    if later is not None:
        rule, release = later
        return f"it came with flashinfer-python {release}, not {target.flashinfer}: {rule.reason}"
    permissions = _permissions(feature, target, book)
    near = min(permissions, key=lambda found: (_unmet(found), found[0].id), default=None)
    if near is None:
        return f"no rule allows {feature.operation} with backend {feature.backend}"
    missing = "; ".join(lacking(*near, feature))
    return f"no rule allows it; the nearest, {near[0].id}, differs in {missing}"


def lacking(rule: Rule, machine: list[str], fields: list[str], feature: Feature) -> list[str]:
    """Return in words what a rule finds unmet of a machine and of a feature."""
    kinds = {**{name: f"the version of {name}" for name in rule.versions}, **MACHINE_CONDITIONS}
    return [
        *(kinds.get(name, f"the artifact {name}") for name in machine),
        *(unmet_in_words(name, rule.when[name], getattr(feature, name)) for name in fields),
    ]


def _came_later(feature: Feature, target: Target, book: RuleBook) -> tuple[Rule, str] | None:
    """Return the permission that lacks only a later release, and the first such release."""
    found = []
    for rule, machine, fields in _permissions(feature, target, book):
        if target.flashinfer and machine == ["flashinfer"] and not fields:
            first = _first_release(rule)
            if first is not None and parse_version(first) > parse_version(target.flashinfer):
                found.append((rule, first))
    return min(found, key=lambda pair: (parse_version(pair[1]), pair[0].id), default=None)


def _first_release(rule: Rule) -> str | None:
    """Return the release from which on a rule holds; None if it has no such bound."""
    bounds = [
        each.version for each in SpecifierSet(rule.versions["flashinfer"]) if each.operator == ">="
    ]
    return parse_version(max(bounds, key=parse_version)).base_version if bounds else None


def _permissions(feature: Feature, target: Target, book: RuleBook) -> list[Walked]:
    """Return the permissions of this operation and backend, each with what it finds unmet."""
    walked = () if feature.backend == AUTO else _walk(feature, target, book)
    return [found for found in walked if found[0].effect == "allow"]


def _walk(feature: Feature, target: Target, book: RuleBook) -> list[Walked]:
    """Return the rules of this operation and backend, each with what it finds unmet."""
    artifacts = book.artifacts_of(target.flashinfer)
    return [
        (rule, rule.unmet_by(target, artifacts), rule.unmet(feature))
        for rule in book.rules
        if feature.operation in rule.operation and feature.backend in (*rule.backend, AUTO)
    ]


def _unmet(found: Walked) -> int:
    """Return how many conditions of a rule are unmet."""
    return len(found[1]) + len(found[2])


def explain(feature: Feature, target: Target, *, book: RuleBook | None = None) -> list[Walked]:
    """Walk the rules about an operation and backend.

    Returns:
        Each rule, what of its conditions on the machine is unmet, and which of its conditions on
        the feature; a rule with neither holds. Those that hold first, refusals before permissions.

    Raises:
        ValueError, RulesError: see ``decide``.
    """
    return sorted(
        _walk(feature, target, book or load_rules()),
        key=lambda found: (
            _unmet(found),
            found[0].effect == "allow",
            -found[0].weight,
            found[0].id,
        ),
    )
