"""What became of the cells of the support table that were tried, and what it says of the rules."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ...impl.gating import Feature
from ...impl.gating.rules import CALLED
from ..isolation.workers import Outcome
from ..verdicts.verdict import Verdict
from ..worker.requests import HarnessError
from .cells import SUPPORTED, Cell

RAISES, WRONG, CRASHES, HANGS, RIGHT = CALLED
OK, KNOWN, FINDING, NOT_RUN = "ok", "known", "finding", "not run"
UNBUILT = re.compile("ninja build failed|error building extension", re.IGNORECASE)
"""Text of an exception whose cause is a module that does not compile."""
CUDA_FAILED = re.compile(
    r"cuda ?(driver |runtime )?error|cudaError|CUDA_ERROR|illegal memory access|misaligned address"
    r"|device-side assert|unspecified launch failure|illegal instruction",
    re.IGNORECASE,
)
"""Text of an exception that is no refusal: something was launched, or was to be, and failed."""


@dataclass(frozen=True)
class Trial:
    """One cell of one implementation, tried or not.

    Attributes:
        implementation: its name.
        cell: what was called.
        law: the law that judged it.
        outcome: the outcome of ``CALLED``; empty where it was not run.
        status: ``ok``, ``known`` (a rule documents it, or the ledger explains it), ``finding`` or
            ``not run``.
        verdict: the verdict of the law; of a cell that was not run, why not is its message.
        entry: id of the ledger entry that explains it, if one does.
        replay: the command that reproduces it, of a finding.
    """

    implementation: str
    cell: Cell
    law: str
    outcome: str
    status: str
    verdict: Verdict
    entry: str = ""
    replay: str = ""

    @property
    def happened(self) -> str:
        """Return what became of the call, in words."""
        verdict = self.verdict
        words = {
            RIGHT: "right answer",
            WRONG: f"wrong answer ({verdict.kind}): {verdict.message}",
            RAISES: f"refused cleanly: {verdict.message}",
            CRASHES: f"crashed: {verdict.message}",
            HANGS: f"hung: {verdict.message}",
        }
        return words.get(self.outcome, f"not run: {verdict.message}")

    @property
    def meaning(self) -> str:
        """Return what a finding says of the rules."""
        rules = ", ".join(self.cell.rules)
        if self.status != FINDING:
            return ""
        if self.cell.side == SUPPORTED:
            return f"{rules} allows what does not work"
        if self.outcome == RIGHT:
            return f"{rules} refuses what works: it may be too strict"
        return f"{rules} does not say that the call {self.outcome} (its `called`)"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        cell = self.cell
        return {
            "implementation": self.implementation,
            "cell": cell.title,
            "side": cell.side,
            "rules": list(cell.rules),
            "called": list(cell.called),
            "outcome": self.outcome or NOT_RUN,
            "status": self.status,
            "entry": self.entry or None,
            "law": self.law,
            "kind": self.verdict.kind,
            "message": self.verdict.message,
            "meaning": self.meaning,
            "seconds": round(self.verdict.seconds, 6),
            "feature": _short(cell.feature),
            "problem_id": cell.problem.id,
            "problem": cell.problem.to_json(),
            "replay": self.replay,
        }


@dataclass(frozen=True)
class Build:
    """One module that was built.

    Attributes:
        implementation: the implementation for which it is built.
        key: what ``Implementation.module_of`` gives.
        seconds: the seconds of its first call, in a process of its own.
        message: why it could not be built; empty if it was.
    """

    implementation: str
    key: str
    seconds: float
    message: str = ""


@dataclass
class Tried:
    """All cells of one implementation.

    Attributes:
        name, reference: name and reference of the implementation.
        operation, backend: operation and backend that it declares.
        reason: why nothing of it was tried, where nothing was.
        error: why it could not even be asked.
        trials: the trials in the order of its cells.
        builds: the builds of its modules.
    """

    name: str
    reference: str
    operation: str = ""
    backend: str = ""
    reason: str = ""
    error: str = ""
    trials: list[Trial] = field(default_factory=list)
    builds: list[Build] = field(default_factory=list)

    def fail(self, error: object) -> None:
        """Record why it could not be asked, or a failure of the suite itself; the first stays."""
        said = str(error).strip() if isinstance(error, (str, HarnessError)) else repr(error)
        self.error = self.error or (said or repr(error)).splitlines()[0]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {
            "name": self.name,
            "operation": self.operation,
            "backend": self.backend,
            "reason": self.reason,
            "error": self.error,
            **counts(self.trials),
            "modules": len(self.builds),
            "build_seconds": round(sum(build.seconds for build in self.builds), 3),
            "run_seconds": round(sum(trial.verdict.seconds for trial in self.trials), 3),
            "builds": [
                {"key": build.key, "seconds": round(build.seconds, 3), "message": build.message}
                for build in self.builds
            ],
        }


def _short(feature: Feature) -> dict[str, Any]:
    """Return what makes the feature, without what is the default."""
    kept = {
        name: getattr(feature, name)
        for name in ("operation", "backend", "phase", "head_dim_qk", "q_dtype")
    }
    return {**kept, **feature.differences(Feature(**kept))}


def counts(trials: list[Trial]) -> dict[str, int]:
    """Count cells by what became of them."""
    by_status = Counter(trial.status for trial in trials)
    return {
        "cells": len(trials),
        "tried": len(trials) - by_status[NOT_RUN],
        "findings": by_status[FINDING],
        "known": by_status[KNOWN],
    }


def outcome_of(outcome: Outcome, verdict: Verdict) -> str:
    """Return in a word what became of a call; empty where there was none."""
    if outcome.status == "hang":
        return HANGS
    if outcome.status == "crash":
        return CRASHES
    if verdict.status == "CRASH" and CUDA_FAILED.search(
        f"{verdict.message}\n{verdict.trace}\n{verdict.printed}"
    ):
        return CRASHES
    words = {"PASS": RIGHT, "FAIL": WRONG, "REJECTED": RAISES, "CRASH": RAISES}
    return words.get(verdict.status, "")


def status_of(cell: Cell, outcome: str) -> str:
    """Judge an outcome: is it what the rules say?

    A supported call must be right. A refused one must be refused by FlashInfer itself, or do
    what one of the rules documents.
    """
    if not outcome:
        return NOT_RUN
    if outcome == (RIGHT if cell.side == SUPPORTED else RAISES):
        return OK
    return KNOWN if cell.side != SUPPORTED and outcome in cell.called else FINDING
