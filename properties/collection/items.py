"""What a pytest run consists of: an item for each implementation, law and configuration.

All of it is JSON-able: under xdist one process asks about the implementations, and the others must
come to the same items in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..findings.not_run import Reason
from ..laws import laws_of


@dataclass(frozen=True)
class Configuration:
    """Values of axes that make a kernel compile anew: fixed in one item, all others are drawn.

    Attributes:
        fixed: value by axis; nothing for an implementation that declares no ``compile_key``.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Return the end of an item's id, such as ``bfloat16-192x128``."""
        return "-".join(_word(value) for value in self.fixed.values())


EVERYTHING = Configuration()


@dataclass(frozen=True)
class Surveyed:
    """What is known of an implementation before it is judged.

    Attributes:
        name: as it was asked for; ids begin with it.
        reference: MODULE:NAME.
        label: its own name.
        operation: what it implements; empty if that could not be found out.
        error: why it cannot be imported or asked.
        left_out: whether that is said, and costs the run nothing: a distribution registers it.
        unsupported: why the rules refuse it where it supports nothing here.
        reason: code of that refusal, and what is needed.
        configurations: that its items are restricted to, one by one.
        stored: case files that are replayed first.
    """

    name: str
    reference: str
    label: str = ""
    operation: str = ""
    error: str = ""
    left_out: bool = False
    unsupported: str = ""
    reason: Reason = ("", "")
    configurations: tuple[Configuration, ...] = (EVERYTHING,)
    stored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Survey:
    """What is known of all implementations of a run.

    Attributes:
        target: where they are to run, see ``Target``.
        seed: of every search.
        implementations: in the order of their items.
    """

    target: Mapping[str, Any]
    seed: int
    implementations: tuple[Surveyed, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Survey:
        """Read back what ``to_json`` wrote."""
        implementations = [
            Surveyed(
                **{
                    **each,
                    "stored": tuple(each["stored"]),
                    "reason": tuple(each["reason"]),
                    "configurations": tuple(
                        Configuration({axis: _value(v) for axis, v in one["fixed"].items()})
                        for one in each["configurations"]
                    ),
                }
            )
            for each in data["implementations"]
        ]
        return cls(data["target"], data["seed"], tuple(implementations))


@dataclass(frozen=True)
class Item:
    """One test: a law's search within a configuration, or the replay of a stored case.

    Attributes:
        implementation: whose.
        law: to be judged; empty where the implementation could not even be asked.
        configuration: within which problems are drawn.
        case: the file to replay instead of a search.
    """

    implementation: Surveyed
    law: str = ""
    configuration: Configuration = EVERYTHING
    case: str = ""

    @property
    def id(self) -> str:
        """Return what selects this item on pytest's command line."""
        words = [self.law, self.configuration.id]
        if self.case:
            stem = Path(self.case).stem
            words = ["corpus", stem.removeprefix(f"{self.implementation.label}-")]
        return "-".join(filter(None, [self.implementation.name, *words]))


def items_of(survey: Survey) -> list[Item]:
    """Return all items of a run: stored cases first, for they once failed."""
    found = [Item(each, case=case) for each in survey.implementations for case in each.stored]
    for each in survey.implementations:
        found += _searches(each)
    return found


def _searches(surveyed: Surveyed) -> Iterable[Item]:
    if surveyed.error:
        return [Item(surveyed)]
    return [
        Item(surveyed, law.name, configuration)
        for law in laws_of(surveyed.operation)
        for configuration in surveyed.configurations
    ]


def _word(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return str(value[0]) if len(set(value)) == 1 else "x".join(map(str, value))


def _value(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
