"""How long the same calls take with both releases, in rounds of each in turn, and what memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.filesize import decimal

from ..sides.plan import DEADLINES
from ..sides.releases import BASELINE, CANDIDATE, SIDES
from ..verdicts.findings import Chip, Finding, finding
from .asking import Bench
from .records import Compared, Tried

PROBLEMS, ROUNDS, CALLS = 2, 3, 5
"""Problems of an implementation, those that took longest; rounds; calls of each in a round."""
SLOW_SECONDS = 0.1
"""Seconds of a problem that is timed only where few are faster: Triton's interpreter takes more."""
LEAST_SECONDS = 2e-5
"""A call that takes less than this is all measuring: no ratio is made of it."""
MORE_MEMORY, LEAST_BYTES = 1.1, 64 << 10
"""A ratio of bytes, and how many more, from which a call needs more memory."""
MEMORY = {"peak_bytes": "allocates", "workspace_bytes": "needs of its workspace"}


def measure(found: Compared, bench: Bench) -> Iterator[dict[str, Any]]:
    """Time an implementation that runs with both: yield what each problem takes, in rounds."""
    for tried in to_be_timed(found):
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        first: dict[str, float] = {}
        for number in range(ROUNDS):
            # The other one begins every second round: a machine that slows down favours neither.
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                result = _ask(found, bench, side, tried, "time", number, calls=CALLS)
                if result is None:
                    return
                seconds[side].append(float(result["median"]))
                first.setdefault(side, float(result["first"]))
        if min(map(min, seconds.values())) < LEAST_SECONDS:
            continue
        yield _numbers(tried, seconds, first) | _memory(found, bench, tried)


def _ask(
    found: Compared,
    bench: Bench,
    side: str,
    tried: Tried,
    task: str,
    number: int = 0,
    **options: int,
) -> dict[str, Any] | None:
    """Have a side measure calls on one problem; None where they do not go well."""
    request = found.addresses[side].request(task, problem=tried.problem.to_json(), **options)
    outcome = bench.sides[side].ask(request, DEADLINES, note=f"round {number}")
    result: dict[str, Any] = outcome.result or {}
    return None if outcome.status != "done" or "stopped" in result else result


def _memory(found: Compared, bench: Bench, tried: Tried) -> dict[str, dict[str, int | None]]:
    """Return what calls on a problem need with each side; None of what is not known."""
    needs = {side: _ask(found, bench, side, tried, "weigh") or {} for side in SIDES}
    return {field: {side: needs[side].get(field) for side in SIDES} for field in MEMORY}


def to_be_timed(found: Compared) -> list[Tried]:
    """Return the problems of an implementation that are timed: the longest of the quick ones."""
    if found.runs != SIDES:
        return []
    right = [each for each in found.tried if each.same_bits is not None and each.both_pass]
    by_id = {each.problem.id: each for each in right}

    def order(tried: Tried) -> tuple[float, str]:
        """Put what took longest first: a merge of no tokens may be large by its work alone."""
        seconds = tried.verdicts[BASELINE].seconds
        return (seconds if seconds > SLOW_SECONDS else -seconds, tried.problem.id)

    return sorted(by_id.values(), key=order)[:PROBLEMS]


def _numbers(
    tried: Tried,
    seconds: dict[str, list[float]],
    first: dict[str, float],
) -> dict[str, Any]:
    ratios = [new / old for old, new in zip(seconds[BASELINE], seconds[CANDIDATE], strict=True)]
    return {
        "problem": tried.problem.id,
        "work": tried.problem.work,
        "seconds": {side: statistics.median(seconds[side]) for side in SIDES},
        "rounds": seconds,
        "first_seconds": first,
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
    }


def speed_findings(
    compared: Sequence[Compared], limit: float, chips: tuple[Chip, ...]
) -> Iterator[Finding]:
    """Return implementations that take longer, or less, by more than a limit, in every round."""
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


def memory_findings(compared: Sequence[Compared], chips: tuple[Chip, ...]) -> Iterator[Finding]:
    """Return implementations that need more memory for a call, or more of their workspace."""
    for each in compared:
        for field, verb in MEMORY.items():
            more = [speed[field] for speed in each.speeds if _needs_more(speed[field])]
            if more:
                most = max(more, key=lambda found: found[CANDIDATE] - found[BASELINE])
                old, new = most[BASELINE], most[CANDIDATE]
                yield finding(
                    "more-memory",
                    each.name,
                    f"{each.name} {verb} {decimal(old)} with the baseline, {decimal(new)} with "
                    "the candidate",
                    detail=field,
                    chips=chips,
                    rule=f"see that {each.name} has the memory",
                    baseline={field: old},
                    candidate={field: new},
                    count=len(more),
                )


def _needs_more(found: Mapping[str, int | None]) -> bool:
    old, new = found[BASELINE], found[CANDIDATE]
    return old is not None and new is not None and new > max(MORE_MEMORY * old, old + LEAST_BYTES)


def memory_sentences(measured: Mapping[str, Any]) -> list[str]:
    """Return what calls on one problem need of memory with either side, as far as it is known."""
    return [
        f"{verb} " + " and ".join(decimal(measured[field][side]) for side in SIDES)
        for field, verb in MEMORY.items()
        if all(isinstance(measured.get(field, {}).get(side), int) for side in SIDES)
    ]
