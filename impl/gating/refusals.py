"""All rules that refuse a call: ``decide`` quotes one of them."""

from __future__ import annotations

from ..targets.target import Target
from .book import RuleBook, index_of
from .feature import Feature, with_fields
from .reading import load_rules
from .rules import Rule


def refusing(feature: Feature, target: Target, *, book: RuleBook | None = None) -> tuple[Rule, ...]:
    """Return every rule that refuses a call, of a mixed batch in either of its phases.

    Args:
        feature: what is asked, of a backend.
        target: the machine.
        book: of rules; the shipped ones if None.

    Raises:
        ValueError: a version of the target is none by PEP 440.
        RulesError: the shipped rules cannot be read.
    """
    tests = index_of(book or load_rules(), target).refusals
    phases = ("decode", "prefill") if feature.phase == "mixed" else (feature.phase,)
    found = {
        rule: None
        for phase in phases
        for rule, holds in tests.get((feature.operation, feature.backend), ())
        if holds(with_fields(feature, phase=phase))
    }
    return tuple(found)
