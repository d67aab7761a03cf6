"""Where the support rules disagree with what a FlashInfer release declares about itself.

Neither side is right by itself. A rule may be too generous, or ignorant of a release; a
declaration may be wrong too, which is what rules with evidence ``reported`` are for: they refuse
what FlashInfer admits and somebody has seen fail, and such a disagreement is explained.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...impl.gating import (
    Decision,
    Feature,
    RuleBook,
    Target,
    capability_name,
    decide,
    load_rules,
)
from .claims import Claim, claims
from .facts import Declarations

ALLOWED, REFUSED, UNKNOWN, DATA = "allowed", "refused", "unknown", "data"
"""Kinds: the rules allow what the release refuses; refuse what it admits; do not speak of what it
admits; hold other data than it does."""
SEEN = ("reported", "compiled", "run")
"""Evidence of a rule that outweighs a declaration."""


@dataclass(frozen=True)
class Disagreement:
    """One difference between a release and the rules, with both sides' evidence.

    Attributes:
        id: unique among those of one release, and stable.
        topic: of the comparison.
        kind: ``"allowed"``, ``"refused"``, ``"unknown"`` or ``"data"``, see above.
        version: of FlashInfer.
        chip: compute capability times ten; None where it is not about one.
        declared, declared_in: what the release says, and where in it.
        status, rule, rule_source, evidence: what the rules say, by which rule; on what evidence.
        explained: whether the rule knows better by evidence of its own.
        sentence: all of it.
        feature: the call that was compared; None for data.
    """

    id: str
    topic: str
    kind: str
    version: str
    chip: int | None
    declared: str
    declared_in: str
    status: str
    rule: str
    rule_source: str
    evidence: str
    explained: bool
    sentence: str
    feature: Feature | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return asdict(self)


def disagreements(declared: Declarations, book: RuleBook | None = None) -> list[Disagreement]:
    """Compare what a release declares with the rules.

    Args:
        declared: by ``kernelproof.impl.flashinfer_declarations.declarations``.
        book: of rules; the shipped ones if None.

    Returns:
        The disagreements, those that nothing explains first.

    Raises:
        RulesError: the shipped rules cannot be read.
    """
    found = [*_artifacts(declared, book or load_rules())]
    for claim in claims(declared):
        target = Target(sm=claim.chip, flashinfer=declared["flashinfer"])
        decision = decide(claim.feature, target, book=book)
        kind = _kind(claim, decision)
        if kind:
            found.append(_disagreement(kind, claim, decision, declared["flashinfer"]))
    return sorted(found, key=lambda each: each.explained)


def _kind(claim: Claim, decision: Decision) -> str:
    """Return the kind of a disagreement; empty where there is none."""
    if not claim.admits:
        return ALLOWED if decision.supported else ""
    if decision.supported or not claim.firm:
        return ""
    return REFUSED if decision.status == "refused" else UNKNOWN


def _disagreement(kind: str, claim: Claim, decision: Decision, version: str) -> Disagreement:
    said = "; ".join(fact.says for fact in claim.facts)
    verb = {
        ALLOWED: "supported by the rules",
        REFUSED: "refused by the rules",
        UNKNOWN: "unknown to the rules",
    }[kind]
    rule = f" ({decision.rule}, {decision.evidence})" if decision.rule else ""
    against = "but" if kind == ALLOWED else "although"
    where = f"{claim.feature.backend} on {capability_name(claim.chip)}"
    sentence = (
        f"{claim.topic}: {claim.feature} with {where} is {verb}{rule}, {against} "
        f"flashinfer {version} says: {said}"
    )
    return Disagreement(
        id=f"{claim.topic}/{claim.chip}/{_detail(claim.feature)}".replace(" ", "-"),
        topic=claim.topic,
        kind=kind,
        version=version,
        chip=claim.chip,
        declared=said,
        declared_in="; ".join(dict.fromkeys(fact.source for fact in claim.facts if fact.source)),
        status=decision.status,
        rule=decision.rule,
        rule_source=decision.source,
        evidence=decision.evidence,
        explained=kind != UNKNOWN and decision.evidence in SEEN,
        sentence=sentence,
        feature=claim.feature,
    )


def _detail(feature: Feature) -> str:
    """Name what of a feature is not the default."""
    plain = Feature(feature.operation, feature.backend)
    return ",".join(f"{k}={v}" for k, v in feature.differences(plain).items()) or "plain"


def _artifacts(declared: Declarations, book: RuleBook) -> Iterator[Disagreement]:
    """Compare the hashes of the precompiled kernels with those that the rules know."""
    version, place = declared["flashinfer"], declared["artifacts"]["source"]
    known: Mapping[str, str] = book.versions.get(version, {})
    if version not in book.versions:
        yield _data(version, "version", f"this is flashinfer {version}", place, "do not know it")
    for name, path in declared["artifacts"]["paths"].items():
        ours, theirs = known.get(name), path.partition("/")[0]
        if ours is not None and not _same_hash(ours, theirs):
            says, rules = f"{name} is {theirs}", f"hold {ours}"
            yield _data(version, f"artifact/{name}", says, place, rules)
    for name in sorted(set(known) - set(declared["artifacts"]["paths"])):
        says, rules = f"there is no artifact {name}", f"hold {known[name]}"
        yield _data(version, f"artifact/{name}", says, place, rules)


def _data(version: str, name: str, says: str, place: str, rules: str) -> Disagreement:
    return Disagreement(
        id=name,
        topic=name,
        kind=DATA,
        version=version,
        chip=None,
        declared=says,
        declared_in=place,
        status=rules,
        rule="",
        rule_source="",
        evidence="",
        explained=False,
        sentence=f"{name}: the rules {rules}, but flashinfer {version} says: {says}",
    )


def _same_hash(one: str, other: str) -> bool:
    """Compare two hashes of which either may be shortened."""
    length = min(len(one), len(other))
    return length > 0 and one[:length] == other[:length]
