"""What of an implementation is tried, grouped by the modules that must be built for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...impl import Target
from ...impl.gating import RuleBook
from ...impl.targets.refusal import Refusal, most_telling
from ...reference import Problem
from ..isolation.workers import Deadlines, Worker
from ..space.restrictions import WHOLE_SPACE, Only
from ..worker.requests import Address, HarnessError, refusals_of, verdict_of
from .cells import SUPPORTED, Cell, cells_of
from .operations import OPERATIONS
from .trials import RAISES, RIGHT, Tried

ASKING = Deadlines(run=60.0)


@dataclass(frozen=True)
class Group:
    """Cells that need the same module."""

    tried: Tried
    address: Address
    key: str
    cells: tuple[Cell, ...]
    first: Problem | None


@dataclass(frozen=True)
class Choice:
    """Which cells are tried.

    Attributes:
        book: the book of rules.
        modules: most that may be built of an implementation; all if 0.
        only: values that a cell's problem must have.
    """

    book: RuleBook
    modules: int = 0
    only: Only = WHOLE_SPACE


def groups_of(
    worker: Worker, tried: Tried, address: Address, target: Target, choice: Choice
) -> tuple[list[Group], list[Cell]]:
    """Ask an implementation what it can express, and group that by module.

    Args:
        worker: the worker that asks.
        tried: the implementation; what it declares is filled in, or why nothing can be tried.
        address: the address of the implementation, with every rule left out.
        target: the machine.
        choice: the choice of cells.

    Returns:
        What is tried, and the cells of other modules.

    Raises:
        HarnessError: it cannot be imported or asked.
    """
    declared = _ask(worker, address, "describe")
    tried.operation, tried.backend = str(declared["operation"]), str(declared["backend"])
    if not tried.backend:
        tried.reason = "it names no backend, so that no support rule is about it"
        return [], []
    refused: list[Refusal] = []

    def probe(problems: Sequence[Problem]) -> list[Refusal | None]:
        asked = [problem.to_json() for problem in problems]
        found = refusals_of(_ask(worker, address, "probe", problems=asked))
        refused.extend(filter(None, found))
        return found

    cells = cells_of(
        tried.operation,
        tried.backend,
        target,
        choice.book,
        probe,
        decodes=bool(declared["decodes"]),
        ruled_as=declared["ruled_as"],
    )
    if not cells:
        tried.reason = most_telling(refused) or "no rule speaks of any of its simple calls"
        return [], []
    count = len(cells)
    cells = [each for each in cells if choice.only.meets(each.problem)]
    if not cells:
        tried.reason = f"none of its {count} cells has {choice.only}"
        return [], []
    problems = [cell.problem.to_json() for cell in cells]
    keys = _ask(worker, address, "modules", problems=problems)["keys"]
    by_key: dict[str, list[Cell]] = {}
    for cell, key in zip(cells, keys, strict=True):
        by_key.setdefault(key or "", []).append(cell)
    ahead = bool(declared["build_ahead"])
    chosen = chosen_modules(by_key, choice.modules) if ahead else list(by_key)
    left_out = [cell for key in by_key.keys() - set(chosen) for cell in by_key[key]]
    groups = [
        Group(tried, address, key, _dirty_last(by_key[key]), _first(by_key[key], ahead=ahead))
        for key in chosen
    ]
    return groups, left_out


def chosen_modules(by_key: Mapping[str, Sequence[Cell]], most: int) -> list[str]:
    """Choose the modules that show most: the simplest first, then rules not seen yet, then cells.

    A supported cell counts as two: of refused ones, the rules that they show are what matters.

    Args:
        by_key: cells by the key of their module.
        most: modules; all if 0.
    """
    left = dict(by_key)
    chosen: list[str] = []
    shown: set[str] = set()

    def worth(key: str) -> tuple[bool, int, int]:
        simplest = not chosen and min(cell.number for cell in left[key]) == 0
        count = sum(1 + (cell.side == SUPPORTED) for cell in left[key])
        return simplest, len(_rules_of(left[key]) - shown), count

    while left and (not most or len(chosen) < most):
        chosen.append(max(left, key=worth))
        shown.update(_rules_of(left.pop(chosen[-1])))
    return chosen


def _rules_of(cells: Sequence[Cell]) -> set[str]:
    return {rule for cell in cells for rule in cell.rules}


def _dirty_last(cells: Sequence[Cell]) -> tuple[Cell, ...]:
    """Put calls that may end their process after those that must not."""
    clean = (RIGHT,), (RAISES,)
    return tuple(sorted(cells, key=lambda each: (each.side != SUPPORTED, each.called not in clean)))


def _first(cells: Sequence[Cell], *, ahead: bool) -> Problem | None:
    """Return the smallest call that builds the module of some cells, where that takes long."""
    if not ahead:
        return None
    cell = max(cells, key=lambda each: each.feature.phase == "mixed")
    return OPERATIONS[cell.problem.operation].smallest(cell.problem, cell.feature.phase)


def _ask(worker: Worker, address: Address, task: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401  JSON
    """Ask about an implementation.

    Raises:
        HarnessError: it cannot be imported or asked.
    """
    outcome = worker.run(address.request(task, **more), ASKING)
    if outcome.status != "done":
        raise HarnessError(verdict_of(outcome).message)
    result = outcome.result or {}
    if "error" in result:
        raise HarnessError(str(result["error"]))
    return result
