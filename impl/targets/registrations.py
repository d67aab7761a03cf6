"""Implementations that installed distributions register by entry points, without importing any."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata

ENTRY_POINTS = "kernelproof.implementations"
MODULE_NAME = re.compile(r"[\w.]+:[\w.]+")


@dataclass(frozen=True)
class Registration:
    """An entry point of the group ``kernelproof.implementations``.

    Attributes:
        distribution, version: the distribution and its version that it belongs to.
        name: the name that is registered.
        reference: MODULE:NAME.
        reason: why it is left out; empty where it is not.
    """

    distribution: str
    version: str
    name: str
    reference: str
    reason: str = ""

    @property
    def text(self) -> str:
        """The distribution, the name and the reason in one line."""
        return f"{self.distribution} {self.version} registers {self.name!r}: {self.reason}"


def registrations(taken: Collection[str] = ()) -> list[Registration]:
    """Return what installed distributions register, sorted by their names.

    Args:
        taken: names that no distribution can register.
    """
    owners = dict.fromkeys(taken, "Kernelproof")
    found: list[Registration] = []
    for point in sorted(metadata.entry_points(group=ENTRY_POINTS), key=_order):
        distribution, version = _owner(point)
        reason = ""
        if point.name in owners:
            reason = f"{owners[point.name]} has an implementation of this name"
        elif not MODULE_NAME.fullmatch(point.value):
            reason = f"{point.value!r} is no MODULE:NAME"
        else:
            owners[point.name] = distribution
        found.append(Registration(distribution, version, point.name, point.value, reason))
    return found


def _order(point: metadata.EntryPoint) -> tuple[str, str]:
    return canonical_name(_owner(point)[0]), point.name


def _owner(point: metadata.EntryPoint) -> tuple[str, str]:
    """Return name and version of an entry point's distribution, whose metadata may be missing."""
    known = point.dist.metadata.json if point.dist else {}
    return str(known.get("name") or "?"), str(known.get("version") or "?")


def canonical_name(distribution: str) -> str:
    """Return the name of a distribution as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
