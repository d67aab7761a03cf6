"""Explanations of decisions: what a permission lacks, and each rule with its result."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from ..targets.backends import FLASHINFER_BACKENDS
from ..targets.capability import CHIPS, capability_name
from ..targets.target import Target
from .book import RuleBook, load_rules
from .feature import AUTO, Feature
from .rules import Rule, parse_version, unmet_in_words, version_matches

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
    near = _nearest(feature, target, book)
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
    bounds = [each.version for each in SpecifierSet(rule.versions["flashinfer"])
              if each.operator == ">="]  # fmt: skip
    return parse_version(max(bounds, key=parse_version)).base_version if bounds else None


def _permissions(
    feature: Feature, target: Target, book: RuleBook
) -> list[tuple[Rule, list[str], list[str]]]:
    """Return the permissions of this operation and backend, each with what it finds unmet."""
    artifacts = book.artifacts_of(target.flashinfer)
    return [
        (rule, rule.unmet_by(target, artifacts), rule.unmet(feature))
        for rule in book.rules
        if rule.effect == "allow"
        and feature.operation in rule.operation
        and feature.backend in rule.backend
    ]


def _nearest(
    feature: Feature, target: Target, book: RuleBook
) -> tuple[Rule, list[str], list[str]] | None:
    """Find the permission of this operation and backend with the fewest unmet conditions."""
    candidates = _permissions(feature, target, book)
    return min(
        candidates, key=lambda found: (len(found[1]) + len(found[2]), found[0].id), default=None
    )


def explain(
    feature: Feature, target: Target, *, book: RuleBook | None = None
) -> list[tuple[Rule, list[str], list[str]]]:
    """Walk the rules about an operation and backend.

    Returns:
        Each rule, what of its conditions on the machine is unmet, and which of its conditions on
        the feature; a rule with neither holds. Those that hold first, refusals before permissions.

    Raises:
        ValueError, RulesError: see ``decide``.
    """
    book = book or load_rules()
    artifacts = book.artifacts_of(target.flashinfer)
    walked = [
        (rule, rule.unmet_by(target, artifacts), rule.unmet(feature))
        for rule in book.rules
        if feature.operation in rule.operation and feature.backend in (*rule.backend, AUTO)
    ]
    return sorted(
        walked,
        key=lambda found: (
            len(found[1]) + len(found[2]),
            found[0].effect == "allow",
            -found[0].weight,
            found[0].id,
        ),
    )
