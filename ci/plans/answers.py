"""What a plan function returned, and who can be asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .problems import PlanProblem

UNWRITTEN = 0xA5
"""The byte of which a workspace consists before the first plan. Four of it are a negative index."""


@dataclass(frozen=True)
class Answer:
    """The plan of one problem as the release left it.

    Attributes:
        info: the plan's vector: sizes, and offsets into the two workspaces.
        integers: the workspace of integers on the device.
        spilled: whether a byte behind one of the workspaces was written.
        error: what the release raised, or that it never answered; then there is nothing else.
        died: whether its process ended.
    """

    info: tuple[int, ...] = ()
    integers: bytes = b""
    spilled: bool = False
    error: str = ""
    died: bool = False


class Planner(Protocol):
    """A release's plan functions, or what stands in for them."""

    def plan(self, problem: PlanProblem, *, after: PlanProblem | None = None) -> Answer:
        """Plan a problem into fresh workspaces, or into those that another was planned into."""
