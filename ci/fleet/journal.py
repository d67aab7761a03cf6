"""The journal of a fleet's run: each unit's result as it comes, for a run that goes on from it."""

from __future__ import annotations

import collections
import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import __version__
from ...properties.findings.files import make_folder
from ...properties.search.plan import Plan
from ..console.errors import UsageRefusedError
from .units import Unit, UnitResult

NAME = Path("fleet", "journal.pickle")
"""Path of a journal below a run's folder of cases."""
SCHEMA = "kernelproof-fleet-1"
PLAIN = {("collections", "Counter"), ("builtins", "set"), ("builtins", "frozenset")}
"""Modules and names of classes, not Kernelproof's own, that a journal may hold."""


class _Reader(pickle.Unpickler):
    """Unpickles records only, so that a file from elsewhere runs no code of its choice."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  as of the base class
        if (module, name) in PLAIN:
            return vars(collections).get(name) or {"set": set, "frozenset": frozenset}[name]
        if module.startswith("pathlib"):
            return Path
        found = (
            super().find_class(module, name)
            if module.startswith(__package__.split(".")[0])
            else None
        )
        if not isinstance(found, type):
            message = f"{module}.{name} is no record"
            raise pickle.UnpicklingError(message)
        return found


class Journal:
    """Results of units in a file, one after another.

    Args:
        cases: the run's folder of cases.
        plan: the plan of the run.
        resume: whether results of an earlier run are taken.

    Raises:
        UsageRefusedError: the journal is of another run, or cannot be read or written.
    """

    def __init__(self, cases: Path, plan: Plan, *, resume: bool) -> None:
        self._path = cases / NAME
        self._results: list[tuple[Unit, UnitResult]] = []
        head = head_of(plan)
        try:
            make_folder(self._path.parent)
            whole = self._read(head) if resume and self._path.exists() else 0
            self._path.touch(0o600)
            os.truncate(self._path, whole)  # the last result of a run that was killed may be cut
        except OSError as error:
            message = f"--cases: {self._path} cannot be written: {error.strerror}"
            raise UsageRefusedError(message) from error
        if not whole:
            self._write(head)

    def result_of(self, unit: Unit) -> UnitResult | None:
        """Return the result of a unit that an earlier run has ended."""
        return next((result for known, result in self._results if known == unit), None)

    def keep(self, unit: Unit, result: UnitResult) -> None:
        """Add a result; it is on the disk when this returns."""
        self._write((unit, result))

    def _write(self, record: object) -> None:
        with self._path.open("ab") as file:
            file.write(pickle.dumps(record))
            file.flush()
            os.fsync(file.fileno())

    def _read(self, head: Mapping[str, Any]) -> int:
        """Read the results, and return the place behind the last whole one."""
        data = io.BytesIO(self._path.read_bytes())
        place = 0
        try:
            known = _Reader(data).load()
            _compare(self._path, known, head)
            while True:
                place = data.tell()
                self._results.append(_Reader(data).load())
        except EOFError:
            pass
        except (pickle.UnpicklingError, AttributeError, ImportError, TypeError) as error:
            if not place:
                message = f"--resume: {self._path} is no journal that this Kernelproof reads"
                raise UsageRefusedError(message) from error
        return place


def head_of(plan: Plan) -> dict[str, Any]:
    """Return everything that the results depend on, by names for people."""
    return {
        "schema": SCHEMA,
        "version": __version__,
        "implementations": list(plan.implementations),
        "profile": repr(plan.profile),
        "device": plan.device,
        "seed": plan.seed,
        "laws": list(plan.laws),
        "only": repr(plan.only),
        "operation": plan.operation,
        "rules left out": list(plan.without_rules),
        "ledger": [repr(entry) for entry in plan.ledger.entries],
        "corpus": [f"{case.law} {case.problem.id}" for case in plan.corpus],
        "share": plan.share,
        "costs": {name: repr(cost) for name, cost in plan.costs.items()},
        "sanitizer": plan.sanitizer,
        "distrust": plan.distrust,
    }


def _compare(path: Path, known: object, head: Mapping[str, Any]) -> None:
    if not isinstance(known, dict):
        raise pickle.UnpicklingError
    if other := [name for name in head if known.get(name) != head[name]]:
        message = f"--resume: {path} is the journal of another run; different: {', '.join(other)}"
        raise UsageRefusedError(message)
