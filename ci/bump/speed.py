"""How long the same calls take with both releases: rounds of each in turn, one at a time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from .behaviour import Compared, Sides, Tried
from .findings import Chip, Finding, finding
from .plan import DEADLINES
from .releases import BASELINE, CANDIDATE, SIDES

PROBLEMS, ROUNDS, CALLS = 2, 3, 5
"""Problems of an implementation, those that took longest; rounds; calls of each in a round."""
LEAST_SECONDS = 2e-5
"""A call that takes less than this is all measuring: no ratio is made of it."""


def measure(found: Compared, sides: Sides) -> None:
    """Time an implementation that runs with both; fills ``found.speeds``."""
    for tried in _chosen(found):
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        first: dict[str, float] = {}
        peak: dict[str, int | None] = {}
        for number in range(ROUNDS):
            # The other one begins every second round: a machine that slows down favours neither.
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                request = found.addresses[side].request(
                    "time", problem=tried.problem.to_json(), calls=CALLS
                )
                outcome = sides[side].ask(request, DEADLINES, note=f"round {number}")
                result: dict[str, Any] = outcome.result or {}
                if outcome.status != "done" or "stopped" in result:
                    return
                seconds[side].append(float(result["median"]))
                first.setdefault(side, float(result["first"]))
                peak[side] = result["peak_bytes"]
        if min(map(min, seconds.values())) < LEAST_SECONDS:
            continue
        found.speeds.append(_numbers(tried, seconds, first, peak))


def _chosen(found: Compared) -> list[Tried]:
    if found.runs != SIDES:
        return []
    right = [
        each
        for each in found.tried
        if each.same_bits is not None and all(_passes(each, side) for side in SIDES)
    ]
    by_id = {each.problem.id: each for each in right}
    # What took longest: a merge of no tokens may be large by its work, and takes no time.
    longest = sorted(
        by_id.values(), key=lambda each: (-each.verdicts[BASELINE].seconds, each.problem.id)
    )
    return longest[:PROBLEMS]


def _passes(tried: Tried, side: str) -> bool:
    return tried.judged(side) and not tried.verdicts[side].bad


def _numbers(
    tried: Tried,
    seconds: dict[str, list[float]],
    first: dict[str, float],
    peak: dict[str, int | None],
) -> dict[str, Any]:
    ratios = [new / old for old, new in zip(seconds[BASELINE], seconds[CANDIDATE], strict=True)]
    return {
        "problem": tried.problem.id,
        "work": tried.problem.work,
        "seconds": {side: statistics.median(seconds[side]) for side in SIDES},
        "rounds": seconds,
        "first_seconds": first,
        "peak_bytes": peak,
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
    }


def speed_findings(
    compared: Sequence[Compared], limit: float, chips: tuple[Chip, ...]
) -> Iterator[Finding]:
    """Give implementations that take longer, or less, by more than a limit, in every round."""
    for each in compared:
        slow = [speed for speed in each.speeds if speed["low"] > limit]
        fast = [speed for speed in each.speeds if speed["high"] < 1 / limit]
        for change, found, word in (("slower", slow, "slower"), ("faster", fast, "faster")):
            if found:
                most = max(found, key=lambda speed: abs(speed["ratio"] - 1))
                old, new = (most["seconds"][side] for side in SIDES)
                yield finding(
                    change,
                    each.name,
                    f"{each.name} is {word}: {1e6 * old:.0f} us with the baseline, "
                    f"{1e6 * new:.0f} us with the candidate, a ratio of {most['ratio']:.2f} "
                    f"({most['low']:.2f} to {most['high']:.2f})",
                    chips=chips,
                    rule=f"measure {each.name} in your own service" if change == "slower" else "",
                    baseline={"seconds": old},
                    candidate={"seconds": new},
                    count=len(found),
                )


def build_seconds(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Give what compiling modules took, by implementation and side."""
    return [{"name": each.name, "seconds": each.builds} for each in compared if each.builds]
