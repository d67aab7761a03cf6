"""What must hold of every decision; a law takes a question and raises where it is broken.

What a decision is, by definition, stands below the laws: loops over the rules, without index or
cache.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from packaging.version import Version

from ...impl.gating import (
    CHIPS,
    Feature,
    Rule,
    RuleBook,
    Target,
    UnsupportedError,
    decide,
    require,
)
from ...impl.gating.decision import engine_backends
from ...impl.targets.backends import FLASHINFER_BACKENDS

Law = Callable[[Feature, Target, RuleBook], None]


class BrokenLawError(AssertionError):
    """A decision that breaks a law."""


def must(holds: object, what: str = "") -> None:
    """Raise where something does not hold."""
    if not holds:
        raise BrokenLawError(what)


def agrees_with_the_definition(feature: Feature, target: Target, book: RuleBook) -> None:
    """The index and its caches say what loops over the rules say."""
    must(decide(feature, target, book=book).status == defined_status(feature, target, book))


def total_and_deterministic(feature: Feature, target: Target, book: RuleBook) -> None:
    """Every question has one answer, with every field that an answer has."""
    decision = decide(feature, target, book=book)
    must(decision.status in ("supported", "refused", "unknown"))
    must(decision.reason)
    must(decision == decide(feature, target, book=replace(book)))
    rule = book.find(decision.rule)
    if decision.status == "unknown":
        # Where a rule is named, it refuses a release that a development release may be like.
        if rule is not None:
            must(rule.effect == "refuse" and any(_near(rule, feature, target, book)))
        must(rule is not None or not decision.rule)
    else:
        if rule is None:
            raise BrokenLawError(decision.rule)
        must(rule.effect == {"supported": "allow", "refused": "refuse"}[decision.status])
        must(holds(rule, feature, target, book))
        must(decision.source)
        must(decision.evidence)


def order_of_rules_does_not_matter(feature: Feature, target: Target, book: RuleBook) -> None:
    """Rules in another order decide the same, and quote the same rule."""
    shuffled = list(book.rules)
    random.Random(0).shuffle(shuffled)  # noqa: S311  no secret
    must(
        decide(feature, target, book=book)
        == decide(feature, target, book=RuleBook(tuple(shuffled), book.versions))
    )


def alternatives_are_supported(feature: Feature, target: Target, book: RuleBook) -> None:
    """What is offered instead works there, and is not what was refused."""
    decision = decide(feature, target, book=book)
    must(not (decision.supported and decision.alternatives))
    for other in decision.alternatives:
        must(other != feature)
        must(defined_status(other, target, book) == "supported")
        must(other.operation == feature.operation)


def refusals_say_everything(feature: Feature, target: Target, book: RuleBook) -> None:
    """The text names the chip, the version, the reason, the source and what to use instead."""
    decision = decide(feature, target, book=book)
    if decision.supported:
        return
    text = str(decision)
    must((f"SM{target.sm}" if target.sm else "CPU") in text)
    must((target.flashinfer or "no flashinfer-python") in text)
    must(decision.reason in text)
    must(decision.source in text)
    if decision.alternatives:
        differing = decision.alternatives[0].differences(feature)
        must(all(f"{name}={value!r}" in text for name, value in differing.items()))
    else:
        must(text.endswith("No alternative is supported there"))


def require_raises_just_there(feature: Feature, target: Target, book: RuleBook) -> None:
    """``require`` lets pass what is supported by what an engine has, and nothing else."""
    decision = decide(feature, target, book=book, backends=engine_backends(feature))
    try:
        require(feature, target, book=book)
    except UnsupportedError as error:
        said = str(error)
    else:
        said = ""
    must(said == ("" if decision.supported else str(decision)))


def unknown_chips_and_releases_are_not_supported(
    feature: Feature, target: Target, book: RuleBook
) -> None:
    """No rule was written for them."""
    for odd in (replace(target, sm=109), replace(target, sm=130)):
        must(not decide(feature, odd, book=book).supported)
    if feature.backend in FLASHINFER_BACKENDS:
        for version in ("0.6.5", "0.7.3", "99.0"):
            unknown = replace(target, flashinfer=version)
            must(not decide(feature, unknown, book=book).supported)


def spellings_of_a_chip_agree(feature: Feature, target: Target, book: RuleBook) -> None:
    """The pair that torch gives, a text and a number are one chip."""
    if target.sm is None:
        return
    pair = replace(target, sm=divmod(target.sm, 10))  # type: ignore[arg-type]  # as torch gives it
    text = replace(target, sm=f"sm_{target.sm}a")  # type: ignore[arg-type]
    expected = decide(feature, target, book=book)
    must(decide(feature, pair, book=book) == decide(feature, text, book=book) == expected)


def an_unrelated_rule_changes_nothing(feature: Feature, target: Target, book: RuleBook) -> None:
    """A rule about another operation, or another chip, leaves a decision as it is."""
    other_operation = "merge_state" if feature.operation != "merge_state" else "moe"
    other_chip = next(chip for chip in CHIPS if chip != target.sm)
    unrelated = [
        Rule("unrelated-1", "refuse", (other_operation,), (feature.backend,), "r", "s"),
        Rule("unrelated-2", "refuse", (feature.operation,), (feature.backend,), "r", "s",
             chips=(other_chip,)),
        Rule("unrelated-3", "allow", (feature.operation,), (feature.backend,), "r", "s",
             chips=(other_chip,)),
    ]  # fmt: skip
    more = RuleBook((*book.rules, *unrelated), book.versions)
    before, after = decide(feature, target, book=book), decide(feature, target, book=more)
    # Rules about other operations may add no alternative either: these ask for the same operation.
    must((before.status, before.rule) == (after.status, after.rule))
    must(before.alternatives == after.alternatives)


LAWS: tuple[Law, ...] = (
    agrees_with_the_definition,
    total_and_deterministic,
    order_of_rules_does_not_matter,
    alternatives_are_supported,
    refusals_say_everything,
    require_raises_just_there,
    unknown_chips_and_releases_are_not_supported,
    spellings_of_a_chip_agree,
    an_unrelated_rule_changes_nothing,
)


def defined_status(feature: Feature, target: Target, book: RuleBook) -> str:
    """Return the status of a feature with one backend and one phase."""
    holding = [rule for rule in book.rules if holds(rule, feature, target, book)]
    if any(rule.effect == "refuse" for rule in holding):
        return "refused"
    releases = _releases(target, book)
    refusals = [rule for rule in book.rules if rule.effect == "refuse"]
    # A release that decides itself was asked above.
    if len(releases) > 1 and any(any(_near(rule, feature, target, book)) for rule in refusals):
        return "unknown"
    known = feature.backend not in FLASHINFER_BACKENDS or releases
    allowed = any(all(_near(rule, feature, target, book)) for rule in holding)
    return "supported" if known and allowed else "unknown"


def _releases(target: Target, book: RuleBook) -> list[str]:
    """Return the known releases by which FlashInfer's is decided, the last one its own."""
    if target.flashinfer is None or not book.versions:
        return [] if target.flashinfer is None else [target.flashinfer]
    number, _, day = _read(target.flashinfer).public.partition(".dev")
    own = [each for each in book.versions if _read(each) == _read(number)]
    before = [each for each in book.versions if _read(each) < _read(number)]
    if not day:
        return own
    return [max(before, key=_read), *own] if own and before else []


def _near(rule: Rule, feature: Feature, target: Target, book: RuleBook) -> list[bool]:
    """Return whether a rule holds with each known release by which FlashInfer's is decided.

    A development release is decided by the release before it and by its own; by its own alone where
    it is from the day of the rule's fix on.
    """
    releases = _releases(target, book)
    if rule.is_fixed_in(target.flashinfer):
        releases = releases[-1:]
    return [holds(rule, feature, replace(target, flashinfer=each), book) for each in releases]


def holds(rule: Rule, feature: Feature, target: Target, book: RuleBook) -> bool:
    """Whether every condition of a rule holds."""
    if feature.operation not in rule.operation or feature.backend not in rule.backend:
        return False
    if rule.chips and target.sm not in rule.chips:
        return False
    for name, wanted in rule.when.items():
        if not _meets(getattr(feature, name), wanted):
            return False
    hashes: dict[str, str] = {}
    if rule.artifacts:
        known = _releases(target, book)
        hashes.update(book.artifacts_of(known[0] if len(known) == 1 else target.flashinfer))
        hashes.update(target.artifacts)
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
