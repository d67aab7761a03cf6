"""What may run where, known before anything is launched.

``decide(feature, target)`` says whether a kind of call is supported on a machine, why, on what
evidence and what to use instead; ``require`` raises where it is not. The rules are data, in
``fixtures/support``. Nothing here touches CUDA or imports flashinfer.
"""

from __future__ import annotations

from ..targets.backends import BACKENDS
from ..targets.capability import CHIPS, capability_name, parse_capability
from ..targets.target import Target, UnsupportedError
from .book import RuleBook, RulesError, load_rules
from .decision import Decision, decide, require
from .explanation import explain
from .feature import OPERATIONS, Feature
from .rules import Rule

__all__ = [
    "BACKENDS",
    "CHIPS",
    "OPERATIONS",
    "Decision",
    "Feature",
    "Rule",
    "RuleBook",
    "RulesError",
    "Target",
    "UnsupportedError",
    "capability_name",
    "decide",
    "explain",
    "load_rules",
    "parse_capability",
    "require",
]
