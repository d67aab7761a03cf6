"""What blocks a bump: the written rules, and the file that changes them for one team."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ....impl.targets.data_files import read_toml
from ....impl.targets.schemas import Table, Text, converted, one_of, parse_chips
from .findings import ACTIONS, BLOCK, CHANGES, CONDITION, REPORT, Chip, Finding


class PolicyError(ValueError):
    """A policy that cannot be read; the message names the file and the key."""


@dataclass(frozen=True)
class Accepted:
    """Findings that a team has judged.

    Attributes:
        finding: id, with ``*`` for any text.
        reason: why they do not count.
        chips: the chips on which it is accepted; on all if empty.
    """

    finding: str
    reason: str
    chips: tuple[Chip, ...] = ()

    def covers(self, found: Finding) -> bool:
        """Whether a finding is among them, on every chip that it holds on."""
        if not fnmatchcase(found.id, self.finding):
            return False
        return not self.chips or bool(found.chips and set(found.chips) <= set(self.chips))

    def covers_on(self, found: Finding, chip: Chip) -> bool:
        """Whether a finding is among them on one chip, whatever others it holds on."""
        return fnmatchcase(found.id, self.finding) and (not self.chips or chip in self.chips)


@dataclass(frozen=True)
class Policy:
    """What findings do.

    Attributes:
        actions: the actions by change, where they are not the defaults of ``CHANGES``.
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

    def apply(self, found: Finding) -> Finding:
        """Return a finding with its action, and the reason where it is accepted."""
        action = self.actions.get(found.change, CHANGES[found.change].action)
        reason = next((each.reason for each in self.accepted if each.covers(found)), "")
        if found.doubted and action == BLOCK:
            action = CONDITION
        nothing = bool(reason) or found.unused
        return replace(found, action=REPORT if nothing else action, accepted=reason)

    def accepts_on(self, found: Finding, chip: Chip) -> bool:
        """Whether a finding does not count on a chip."""
        return any(each.covers_on(found, chip) for each in self.accepted)

    def unused(self, findings: Sequence[Finding]) -> list[str]:
        """Name what is accepted and was not found: it may be deleted from the file."""
        return [
            each.finding
            for each in self.accepted
            if not any(fnmatchcase(found.id, each.finding) for found in findings)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return all of it, defaults included."""
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
    "one that it accepts on some chips counts on the others;",
    "one that the engine's source (`--uses`) does not use is only reported, and one of which it",
    "has only calls on objects of unknown class sets a condition and does not block.",
    "A chip's verdict is `do not bump` where a finding that blocks holds on it,",
    "`bump with conditions` where one with a condition does, and `bump` otherwise.",
    "The verdict is that of the chips where they agree, and `bump with conditions` where they do",
    "not: the conditions then name the chips that stay with the baseline.",
    "Where one side could not be had, or nothing was judged, the verdict is `undecided`.",
)
"""The verdict in words; ``verdict.py`` is the same in code."""


class Limits(Table, frozen=True):
    """The table ``limits``."""

    slower: Annotated[float, msgspec.Meta(gt=1)] = DEFAULT.slower


class Chips(Table, frozen=True):
    """The table ``chips``."""

    required: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what is no chip."""
        parse_chips("required", self.required)


class Accept(Table, frozen=True):
    """A table ``accept``."""

    finding: Text
    reason: Text
    chips: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what is no chip."""
        parse_chips("chips", self.chips)


class PolicyFile(Table, frozen=True):
    """A policy as it is written."""

    actions: dict[Annotated[str, one_of(CHANGES)], Annotated[str, one_of(ACTIONS)]] = msgspec.field(
        default_factory=dict
    )
    limits: Limits = Limits()
    chips: Chips = Chips()
    accept: tuple[Accept, ...] = ()


def load_policy(path: Path | None) -> Policy:
    """Read a policy; the default one if None.

    Raises:
        PolicyError: the file cannot be read, or something in it means nothing.
    """
    if path is None:
        return DEFAULT
    read = converted(read_toml(path, PolicyError), PolicyFile, path, PolicyError)
    return Policy(
        read.actions,
        read.limits.slower,
        _chips(read.chips.required),
        tuple(
            Accepted(each.finding, each.reason.strip(), _chips(each.chips)) for each in read.accept
        ),
        str(path),
    )


def _chips(given: Iterable[object]) -> tuple[Chip, ...]:
    return tuple("cpu" if chip is None else chip for chip in parse_chips("chips", given))


__all__ = ["CONDITION", "DEFAULT", "RULES", "Accepted", "Policy", "PolicyError", "load_policy"]
