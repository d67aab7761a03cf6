"""What a report says of implementations in numbers: what was judged, and what was left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ....impl.gpu.interpreted import CLAIM
from ....properties.search.building import compilers
from ....properties.search.ending import Ending
from ....properties.verdicts.text import count_of
from ...console.errors import MACHINE
from ..sides.plan import end_of, minutes_of, over
from ..sides.releases import BASELINE, CANDIDATE, SIDES
from .outcomes import change_of
from .records import DEAR, DEVICE_LOST, SIGNAL, TIME, UNREACHED, Compared, Cut, Tried

MOST_NAMED = 3
"""Most implementations that a verdict names which had too little time; it counts the others."""


def build_cost(minutes: float, most: int) -> str:
    """Return a clause: what compiling a module costs.

    Args:
        minutes: the minutes of one core.
        most: cores that it keeps busy.
    """
    busy = min(most, compilers())
    each = math.ceil(minutes / busy)
    return f"one module takes about {count_of(each, 'minute')} of {count_of(busy, 'compiler')}"


def last_line(text: str) -> str:
    """Return the last line of a text, which in a traceback is the error."""
    return (text.strip().splitlines() or [""])[-1]


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
        "pass": sum(each.both_pass for each in members),
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


def build_seconds(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return what compiling modules took, by implementation and side."""
    return [{"name": each.name, "seconds": each.builds} for each in compared if each.builds]


def nothing_judged(compared: Sequence[Compared]) -> str:
    """Return why no problem was judged with the candidate; empty where one was."""
    if any(tried.judged(CANDIDATE) for each in compared for tried in each.tried):
        return ""
    reasons = (
        each.errors.get(CANDIDATE) or each.reasons.get(CANDIDATE) or _of_problems(each)
        for each in compared
    )
    reason = next(filter(None, reasons), "there was none to judge")
    return f"no problem was judged with the candidate: {last_line(reason)}"


def _of_problems(found: Compared) -> str:
    """Return what the candidate said instead, of the first problem that was tried."""
    for tried in found.tried:
        verdict = tried.verdicts.get(CANDIDATE)
        if verdict is not None:
            return verdict.message or "no law had anything to judge"
    return ""


def cuts_of(compared: Sequence[Compared], ending: Ending) -> list[Cut]:
    """Return what was left out, by implementation."""
    ended = {0: TIME, MACHINE: DEVICE_LOST}.get(end_of(ending)[1], SIGNAL)
    found = []
    for each in compared:
        code = each.left_out or ended
        seen = {tried.law for tried in each.tried if tried.case is None}
        built = min((len(each.builds.get(side, ())) for side in each.runs), default=0)
        problems = sum(each.planned.values())
        if problems > len(each.tried) or each.left_out:
            laws = [law for law, count in each.planned.items() if law and count and law not in seen]
            judged = len(each.tried)
            found.append(
                Cut(
                    each.name,
                    code,
                    problems,
                    judged,
                    each.modules,
                    built,
                    tuple(laws),
                    each.build_minutes,
                    each.build_compilers,
                )
            )
    return found


def matters(cut: Cut) -> bool:
    """Whether a verdict needs what was left out: something of which nothing is known."""
    return cut.code != DEAR and (cut.code == UNREACHED or bool(cut.laws))


def rows_of(cuts: Sequence[Cut], ending: Ending) -> Iterator[dict[str, Any]]:
    """Return rows of what was not tested: what was left out, with names and counts, and why."""
    for each in cuts:
        if each.code == DEAR:
            cost = build_cost(each.minutes, each.compilers)
            limited = ending.seconds < math.inf
            within = minutes_of(ending) if limited else "the time of a run"
            why = f"{cost}, and both releases' must be compiled within {within}"
            yield {"what": f"{each.name}: its modules", "why": why}
    others = [each for each in cuts if each.code != DEAR]
    unasked = [each.name for each in others if each.code == UNREACHED]
    short = [each for each in others if each.code != UNREACHED and each.problems > each.judged]
    unbuilt = [each for each in others if each.modules > each.built]
    why = end_of(ending)[0] or over(ending)
    if unasked:
        yield {
            "what": f"{count_of(len(unasked), 'implementation')}: {', '.join(unasked)}",
            "why": why,
            "implementations": unasked,
        }
    for what, found in (
        ("problem", [(each.name, each.problems - each.judged, each.problems) for each in short]),
        ("module", [(each.name, each.modules - each.built, each.modules) for each in unbuilt]),
    ):
        if found:
            parts = ", ".join(f"{name} ({cut} of {of})" for name, cut, of in found)
            total = sum(cut for _, cut, _ in found)
            of_all = sum(of for _, _, of in found)
            yield {"what": f"{total:,} of about {of_all:,} {what}s: {parts}", "why": why}


def gap(cuts: Sequence[Cut], ending: Ending) -> str:
    """Return what a verdict lacks because the time was over; empty where it lacks nothing."""
    lacking = [each.name for each in cuts if matters(each)]
    if not lacking:
        return ""
    # It stands in the first line of a report, and rows of what was not tested name them all.
    more = f" and {len(lacking) - MOST_NAMED} more" if len(lacking) > MOST_NAMED else ""
    return (
        f"the time was over ({minutes_of(ending)}) before every law had judged a problem of "
        f"{count_of(len(lacking), 'implementation')}: {', '.join(lacking[:MOST_NAMED])}{more}; "
        "--resume goes on from here"
    )
