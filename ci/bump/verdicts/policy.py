"""What blocks a bump: the written rules, and the file that changes them for one team."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ....impl.targets.capability import parse_capability
from .findings import ACTIONS, CHANGES, CONDITION, REPORT, Chip, Finding

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLES = ("actions", "limits", "chips", "accept")
ACCEPT_FIELDS = ("finding", "reason", "chips")


class PolicyError(ValueError):
    """A policy that cannot be read; the message names the file and the key."""


@dataclass(frozen=True)
class Accepted:
    """Findings that a team has looked at.

    Attributes:
        finding: id, with ``*`` for any text.
        reason: why they do not count.
        chips: on which; on all if empty.
    """

    finding: str
    reason: str
    chips: tuple[Chip, ...] = ()

    def covers(self, found: Finding) -> bool:
        """Tell whether a finding is among them, on every chip that it holds on."""
        if not fnmatchcase(found.id, self.finding):
            return False
        return not self.chips or bool(found.chips and set(found.chips) <= set(self.chips))

    def covers_on(self, found: Finding, chip: Chip) -> bool:
        """Tell whether a finding is among them on one chip, whatever others it holds on."""
        return fnmatchcase(found.id, self.finding) and (not self.chips or chip in self.chips)


@dataclass(frozen=True)
class Policy:
    """What findings do.

    Attributes:
        actions: by change, where it is not the default of ``CHANGES``.
        slower: ratio of the candidate's seconds to the baseline's from which it is ``slower``.
        required: chips that the overall verdict is about; all that are in the report if empty.
        accepted: findings that do not count.
        source: file that it was read from; empty for the default.
    """

    actions: Mapping[str, str] = field(default_factory=dict)
    slower: float = 1.25
    required: tuple[Chip, ...] = ()
    accepted: tuple[Accepted, ...] = ()
    source: str = ""

    def judge(self, found: Finding) -> Finding:
        """Give a finding with its action, and the reason where it is accepted."""
        action = self.actions.get(found.change, CHANGES[found.change].action)
        reason = next((each.reason for each in self.accepted if each.covers(found)), "")
        return replace(found, action=REPORT if reason else action, accepted=reason)

    def accepts_on(self, found: Finding, chip: Chip) -> bool:
        """Tell whether a finding does not count on a chip."""
        return any(each.covers_on(found, chip) for each in self.accepted)

    def unused(self, findings: Sequence[Finding]) -> list[str]:
        """Name what is accepted and was not found: it may be deleted from the file."""
        return [
            each.finding
            for each in self.accepted
            if not any(fnmatchcase(found.id, each.finding) for found in findings)
        ]

    def to_json(self) -> dict[str, Any]:
        """Give all of it, defaults included."""
        return {
            "source": self.source,
            "actions": {
                name: self.actions.get(name, each.action) for name, each in CHANGES.items()
            },
            "slower": self.slower,
            "required": list(self.required),
            "accepted": [
                {"finding": each.finding, "reason": each.reason, "chips": list(each.chips)}
                for each in self.accepted
            ],
        }


DEFAULT = Policy()
RULES = (
    "A finding's action is its change's, unless the policy names another or accepts the finding;",
    "one that it accepts on some chips counts on the others.",
    "A chip's verdict is `do not bump` where a finding that blocks holds on it,",
    "`bump with conditions` where one with a condition does, and `bump` otherwise.",
    "The verdict is that of the chips where they agree, and `bump with conditions` where they do",
    "not: the conditions then name the chips that stay with the baseline.",
    "Where one side could not be had, or nothing was judged, the verdict is `undecided`.",
)
"""The verdict in words; ``verdict.py`` is the same in code."""


def load_policy(path: Path | None) -> Policy:
    """Read a policy; the default one if None.

    Raises:
        PolicyError: the file cannot be read, or something in it means nothing.
    """
    if path is None:
        return DEFAULT
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror})"
        raise PolicyError(message) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        message = f"{path}: not TOML ({error})"
        raise PolicyError(message) from error
    try:
        return _policy(data, str(path))
    except ValueError as error:
        message = f"{path}: {error}"
        raise PolicyError(message) from error


def _policy(data: Mapping[str, Any], source: str) -> Policy:
    _only(data, TABLES, "")
    actions = _table(data, "actions")
    _only(actions, tuple(CHANGES), "actions.")
    for name, action in actions.items():
        if action not in ACTIONS:
            message = f"actions.{name} is {action!r}, none of {', '.join(ACTIONS)}"
            raise ValueError(message)
    limits = _table(data, "limits")
    _only(limits, ("slower",), "limits.")
    slower = limits.get("slower", DEFAULT.slower)
    if isinstance(slower, bool) or not isinstance(slower, int | float) or slower <= 1:
        message = f"limits.slower is {slower!r}, no number above 1"
        raise ValueError(message)
    chips = _table(data, "chips")
    _only(chips, ("required",), "chips.")
    accepted = data.get("accept", [])
    if not isinstance(accepted, list) or not all(isinstance(each, dict) for each in accepted):
        message = "accept is no list of tables ([[accept]])"
        raise ValueError(message)
    return Policy(
        actions,
        float(slower),
        _chips(chips.get("required", []), "chips.required"),
        tuple(_accepted(each, number) for number, each in enumerate(accepted, 1)),
        source,
    )


def _accepted(table: Mapping[str, Any], number: int) -> Accepted:
    where = f"accept number {number}"
    _only(table, ACCEPT_FIELDS, f"{where}: ")
    for name in ("finding", "reason"):
        if not isinstance(table.get(name), str) or not table[name].strip():
            message = f"{where}: the field {name!r} is missing or no text"
            raise ValueError(message)
    chips = _chips(table.get("chips", []), f"{where}: chips")
    return Accepted(table["finding"], table["reason"].strip(), chips)


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = data.get(name, {})
    if not isinstance(table, dict):
        message = f"{name} is no table ([{name}])"
        raise ValueError(message)
    return table


def _chips(given: object, where: str) -> tuple[Chip, ...]:
    if not isinstance(given, list):
        message = f"{where} is {given!r}, no list of chips"
        raise ValueError(message)
    try:
        return tuple("cpu" if each == "cpu" else parse_capability(each) for each in given)
    except ValueError as error:
        message = f"{where}: {error}"
        raise ValueError(message) from error


def _only(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in table:
        if name not in known:
            message = f"unknown key {where}{name}; known: {', '.join(known)}"
            raise ValueError(message)


__all__ = ["CONDITION", "DEFAULT", "RULES", "Accepted", "Policy", "PolicyError", "load_policy"]
