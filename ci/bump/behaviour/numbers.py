"""The numbers of a comparison that a report has of each implementation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ....impl.gpu.interpreted import CLAIM
from ....properties.verdicts.text import count_of
from ..sides.releases import BASELINE, CANDIDATE, SIDES
from .comparison import Compared, Tried
from .outcomes import both_pass, change_of


def implementation_json(found: Compared) -> dict[str, Any]:
    """Return the numbers of one implementation; nothing in it depends on a clock."""
    by_law: dict[str, list[Tried]] = {}
    for each in found.tried:
        by_law.setdefault(each.law, []).append(each)
    bits = [each for each in found.tried if each.same_bits is not None]
    return {
        "name": found.name,
        "reference": found.reference,
        "operation": found.operation,
        "backend": found.backend,
        "runs": list(found.runs),
        "reasons": {**found.reasons, **found.errors},
        "judged": sum(_any_judged(each) for each in found.tried),
        "claims": [*found.claims, *([CLAIM] if _interpreted(found) else [])],
        "laws": [_law_json(law, members, found) for law, members in by_law.items()],
        "ratios": {side: _ratios(found, side) for side in found.runs},
        "bits": {
            "compared": len(bits),
            "changed": sum(not each.same_bits for each in bits),
            "other_inputs": sum(each.same_inputs is False for each in bits),
        },
        "modules": max(map(len, found.builds.values()), default=0),
    }


def _interpreted(found: Compared) -> bool:
    return any(each.interpreted for tried in found.tried for each in tried.verdicts.values())


def replayed(compared: Sequence[Compared]) -> dict[str, int]:
    """Count the stored cases that were judged first, and those of them that the ledger knows."""
    stored = [tried for each in compared for tried in each.tried if tried.case is not None]
    of_ledger = sum(tried.entry is not None for tried in stored)
    return {"replayed": len(stored), "of_ledger": of_ledger}


def _law_json(law: str, members: Sequence[Tried], found: Compared) -> dict[str, Any]:
    changes = Counter(change_of(each, found) or "none" for each in members)
    return {
        "law": law,
        "judged": sum(_any_judged(each) for each in members),
        "pass": sum(both_pass(each) for each in members),
        "changes": {name: count for name, count in sorted(changes.items()) if name != "none"},
        "worst_ratio": {
            side: max((_ratio(each, side) for each in members), default=0.0) for side in found.runs
        },
    }


def _ratios(found: Compared, side: str) -> list[float]:
    """Return error over bound of each drawn problem that passed, sorted, for a distribution."""
    return sorted(
        round(verdict.ratio, 5)
        for each in found.tried
        if each.same_bits is not None
        and (verdict := each.verdicts[side]).ratio is not None
        and not verdict.bad
    )


def _ratio(tried: Tried, side: str) -> float:
    verdict = tried.verdicts.get(side)
    return (
        0.0 if verdict is None or verdict.bad or verdict.ratio is None else round(verdict.ratio, 5)
    )


def _any_judged(tried: Tried) -> bool:
    return any(tried.judged(side) for side in SIDES)


def not_run(compared: Iterable[Compared]) -> list[dict[str, Any]]:
    """Return rows of implementations that were not tried, those with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for each in compared:
        if not each.runs:
            why = {**each.reasons, **each.errors}
            reason = why.get(CANDIDATE) or why.get(BASELINE) or "it supports nothing here"
            reasons.setdefault(reason, []).append(each.name)
    return [
        {
            "what": f"{count_of(len(names), 'implementation')}: {', '.join(names)}",
            "why": why,
            "implementations": names,
        }
        for why, names in reasons.items()
    ]
