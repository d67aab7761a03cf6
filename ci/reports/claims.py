"""The claimed space in words, and what was claimed once and is refused now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...impl.targets.refusal import Refusal
from ...properties.findings.claimed_space import AxisClaims
from ...properties.findings.report import ImplementationReport
from ...properties.verdicts.text import count_of

MOST_VALUES = 6
"""Values of one list that a line names, where not all are asked for; it counts the others."""
MOST_LOST = 40
"""Values that the line on lost claims names; it counts the others, and the JSON has all."""


@dataclass(frozen=True)
class LostClaim:
    """A value that an implementation once claimed and now refuses.

    Attributes:
        implementation: its name.
        axis, value: what is refused; empty where the implementation was not judged at all.
        reason: why it is refused.
    """

    implementation: str
    axis: str
    value: str
    reason: str

    def to_json(self) -> dict[str, str]:
        """Return a JSON-able dictionary."""
        return asdict(self)


def lost_lines(lost: Sequence[LostClaim]) -> list[str]:
    """Return a line for each implementation and reason, with the values."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for each in lost:
        values = grouped.setdefault((each.implementation, each.reason), [])
        values += [f"{each.axis}={_shown(each.value)}"] if each.axis else []
    return [
        f"{name}: once claimed, now refused: {_listed(values, MOST_LOST)}: {reason}"
        if values
        else f"{name}: {reason}"
        for (name, reason), values in grouped.items()
    ]


def claims_text(report: ImplementationReport, *, whole: bool = False) -> str:
    """Return the claimed space of an implementation in one line; empty where it is not known.

    Args:
        report: the report of the implementation.
        whole: name every value, and the features that are not named.
    """
    if report.claimed_space is None:
        return ""
    most = None if whole else MOST_VALUES
    parts = {axis: each for axis, each in report.claimed_space.items() if each.refused}
    full = [axis for axis in report.claimed_space if axis not in parts]
    claimed = [f"{axis}={_listed(each.claimed, most)}" for axis, each in parts.items()]
    if full:
        others = f"{len(full)} other {'axis' if len(full) == 1 else 'axes'}"
        claimed.append(f"every value of {', '.join(full) if whole or not parts else others}")
    told = [f"claimed {'; '.join(claimed)}"]
    if reasons := _by_reason(parts, most, whole=whole):
        told.append(f"refused {'; '.join(reasons)}")
    missing = {
        axis: each.not_drawn for axis, each in report.claimed_space.items() if each.not_drawn
    }
    if missing:
        values = [f"{axis}={_listed(each, most)}" for axis, each in missing.items()]
        count = sum(map(len, missing.values()))
        told.append(f"not drawn {'; '.join(values) if whole else count_of(count, 'value')}")
    return "; ".join(told)


def _by_reason(space: Mapping[str, AxisClaims], most: int | None, *, whole: bool) -> list[str]:
    """Return refused values with their reasons, those with one reason together.

    Features that an implementation does not name are its own choice: they are counted.
    """
    reasons: dict[Refusal, dict[str, list[str]]] = {}
    for axis, each in space.items():
        for value, why in each.refused.items():
            reasons.setdefault(why, {}).setdefault(axis, []).append(value)
    own = {why: axes for why, axes in reasons.items() if whole or why.code != "feature"}
    told = [
        f"{', '.join(f'{axis}={_listed(values, most)}' for axis, values in axes.items())} ({why})"
        for why, axes in own.items()
    ]
    if unnamed := {why.about: None for why in reasons if why not in own}:
        told.append(f"{count_of(len(unnamed), 'feature')} not named")
    return told


def _listed(values: Sequence[str], most: int | None) -> str:
    """Return values in a list, cut where there are more than the most."""
    shown = values if most is None or len(values) <= most + 1 else values[:most]
    more = f" and {len(values) - len(shown):,} more" if len(shown) < len(values) else ""
    return f"{', '.join(map(_shown, shown))}{more}" if values else "no value"


def _shown(value: str) -> str:
    return value or "''"


def claims_rows(report: ImplementationReport) -> list[tuple[str, str, str, str]]:
    """Return a row for each axis: its name, the values claimed, refused, and not drawn."""
    return [
        (
            axis,
            ", ".join(map(_shown, each.claimed)),
            "; ".join(_by_reason({axis: each}, None, whole=True)).replace(f"{axis}=", ""),
            ", ".join(map(_shown, each.not_drawn)),
        )
        for axis, each in (report.claimed_space or {}).items()
    ]


def claims_count(reports: Sequence[ImplementationReport]) -> str:
    """Return how many values are refused, and by how many implementations, in one line."""
    spaces: list[Mapping[str, Any]] = [each.claimed_space or {} for each in reports]
    refusing = [sum(len(axis.refused) for axis in space.values()) for space in spaces]
    values = f"{sum(refusing):,} values" if sum(refusing) != 1 else "1 value"
    told = f"{sum(map(bool, refusing))} of {len(reports)} implementations support only a part of"
    return f"{told} what a call may ask for: {values} (dtypes, sizes, options) were not judged"
