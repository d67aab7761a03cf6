"""Calls whose kernels are others with the candidate, by the names that a GPU's profiler gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....impl.targets.kernel_names import short_name
from ....properties.verdicts.text import compact, count_of
from ..sides.releases import BASELINE, CANDIDATE, SIDES
from ..verdicts.findings import Chip, Finding, finding
from .records import Compared, Tried

Call = tuple[Any, ...]
"""What a call is: the step, the module, the optional features and the size."""
Names = dict[Call, dict[str, None]]


def launched_findings(compared: Sequence[Compared], chips: tuple[Chip, ...]) -> Iterator[Finding]:
    """Return implementations of which the same calls launch other kernels than before."""
    for each in compared:
        names, shown = _names(each)
        both = [call for call in names[BASELINE] if call in names[CANDIDATE]]
        changed = [
            call for call in both if names[BASELINE][call].keys() != names[CANDIDATE][call].keys()
        ]
        if not changed:
            continue
        first = changed[0]
        old, new = ([*names[side][first]] for side in SIDES)
        problem = shown[first].problem
        where = f"{len(changed)} of {count_of(len(both), 'specialisation')}"
        yield finding(
            "kernels-changed",
            each.name,
            f"{each.name}: other kernels in {where}: {_only(new, old)} in the place of "
            f"{_only(old, new)}",
            chips=chips,
            problem={**problem.to_json(), "id": problem.id, "told": compact(problem)},
            baseline={"kernels": [_told(call, names[BASELINE][call]) for call in changed]},
            candidate={"kernels": [_told(call, names[CANDIDATE][call]) for call in changed]},
            count=len(changed),
        )


def _names(found: Compared) -> tuple[Mapping[str, Names], Mapping[Call, Tried]]:
    """Return short names of kernels by side and call, and a problem of each call."""
    names: dict[str, Names] = {side: {} for side in SIDES}
    shown: dict[Call, Tried] = {}
    for tried in found.tried:
        for side, verdict in tried.verdicts.items():
            for each in verdict.launched.get("calls", ()):
                call = (each["step"], each["module"], *each["features"], each["size"])
                shown.setdefault(call, tried)
                names[side].setdefault(call, {}).update(
                    dict.fromkeys(map(short_name, each["kernels"]))
                )
    return names, shown


def _only(some: Sequence[str], others: Sequence[str]) -> str:
    return ", ".join(name for name in some if name not in others) or "none"


def _told(call: Call, names: Mapping[str, None]) -> str:
    return f"{' '.join(str(part) for part in call if part != '')}: {', '.join(names) or 'none'}"
