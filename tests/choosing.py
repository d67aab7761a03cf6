"""Choosing the modules of one implementation, as a run on a GPU does for all together."""

from __future__ import annotations

from collections.abc import Sequence

from kernelproof.properties.space.axes import Axes
from kernelproof.properties.space.module_selection import (
    Keys,
    Module,
    Selection,
    find_modules,
)
from kernelproof.reference import Problem


def choose(
    axes: Axes, keys: Keys, most: int, *, stored: Sequence[Problem] = (), companions: bool = False
) -> list[Module]:
    """Take the best module until there are as many as are asked for."""
    modules = find_modules(axes, keys, stored=stored, companions=companions)
    selection = Selection(modules, axes.simplest, most)
    while found := selection.next():
        selection.take(found)
    return selection.chosen
