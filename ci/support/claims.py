"""What can be compared: declared facts, and the calls that they speak of, chip by chip.

A claim is firm where the facts together are all that decides and one of them names the chip, so
that the rules should allow what they admit. Of one that is not, only a refusal can be compared: a
call whose dtypes are accepted one by one may still lack a kernel for the pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...impl.gating import Feature
from .attention_claims import attention
from .facts import Declarations, Fact, Row, named_chips
from .moe_claims import experts


@dataclass(frozen=True)
class Claim:
    """What a release declares about one call on one chip.

    Attributes:
        topic: of the comparison.
        feature: the call.
        chip: compute capability times ten.
        admits: whether every fact admits it.
        firm: whether the rules should allow it if so.
        facts: those that refuse it, or else all of them.
    """

    topic: str
    feature: Feature
    chip: int
    admits: bool
    firm: bool
    facts: tuple[Fact, ...]


def claims(declared: Declarations) -> Iterator[Claim]:
    """Return everything that a release declares and the rules can be asked about."""
    named_somewhere = named_chips(declared)
    for feature, row in _by_feature(declared).items():
        named = frozenset().union(*(fact.named for fact in row.facts)) or named_somewhere
        for chip in declared["chips"]:
            refusing = tuple(fact for fact in row.facts if chip not in fact.chips)
            yield Claim(
                row.topic,
                feature,
                chip,
                admits=not refusing,
                firm=row.firm and chip in named,
                facts=refusing or row.facts,
            )


def _by_feature(declared: Declarations) -> dict[Feature, Row]:
    """Join the rows about one call; those without facts say nothing."""
    joined: dict[Feature, Row] = {}
    for each in (*attention(declared), *experts(declared)):
        before = joined.get(each.feature, each)
        facts = tuple(dict.fromkeys((*before.facts, *each.facts)))
        if facts:
            joined[each.feature] = replace(before, facts=facts, firm=before.firm or each.firm)
    return joined
