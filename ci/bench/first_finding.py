"""How long a whole check takes until it judges its first problem, and from there to a finding."""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...fixtures.suggestions import did_you_mean
from ...properties.seeded import BUGS
from ...properties.seeded.triton_bugs import BUGS as TRITON_BUGS
from ..console.errors import CONFORMING, INCOMPLETE, NONCONFORMING, UsageRefusedError
from .results import Cell, Results, Table

HALVES = ("even", "odd")
"""The two halves of the subjects, by the parity of their hashed names: what a search is tuned on
takes one of them only."""
LONGEST_SECONDS = 900.0
"""Seconds after which a check is ended, as by Ctrl-C, and counts as one without a finding."""
GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class Timed:
    """One check.

    Attributes:
        subject: the name of what was checked.
        startup: seconds from the command to the first judged problem; None where none was judged.
        search: seconds from there to the first printed failure; None where nothing was found.
        law: the law of the finding; empty where nothing was found.
        problems: problems that were judged until then, or in all.
    """

    subject: str
    startup: float | None
    search: float | None
    law: str = ""
    problems: int = 0

    @property
    def half(self) -> str:
        """The half that the subject belongs to."""
        return half_of(self.subject)


def half_of(subject: str) -> str:
    """Return the half that a name belongs to."""
    return HALVES[hashlib.sha256(subject.encode()).digest()[-1] % 2]


def subjects(names: Sequence[str], sample: int | None, seed: int) -> dict[str, str]:
    """Return the MODULE:NAME of each subject by its name.

    Args:
        names: names of seeded bugs, or MODULE:NAME; all seeded bugs that give a finding if empty.
        sample: number of subjects that are drawn from them; all if None.
        seed: the seed of this draw.

    Raises:
        UsageRefusedError: there is no such bug.
    """
    bugs = {bug.name: bug.reference for bug in (*BUGS, *TRITON_BUGS)}
    chosen = {}
    for name in names or bugs:
        if name not in bugs and ":" not in name:
            meant = did_you_mean(name, bugs)
            message = f"{name}: {meant}it must be a seeded bug (see `score`) or MODULE:NAME"
            raise UsageRefusedError(message)
        chosen[name] = bugs.get(name, name)
    if sample is not None and sample < len(chosen):
        drawn = random.Random(seed).sample(sorted(chosen), sample)  # noqa: S311  no secret
        chosen = {name: chosen[name] for name in drawn}
    return chosen


def time_check(subject: str, reference: str, profile: str, seed: int, *, deck: bool) -> Timed:
    """Run ``kernelproof check REFERENCE -x`` as a user does, and read its milestones.

    Raises:
        RuntimeError: the check itself failed; its last line says how.
    """
    with tempfile.TemporaryDirectory(prefix="kernelproof-bench-") as folder:
        report = Path(folder, "report.json")
        options = ["--profile", profile, "--seed", str(seed), "--expectations", "none"]
        options += [] if deck else ["--no-deck"]
        files = ("--json", str(report), "--cases", str(Path(folder, "cases")))
        command = (sys.executable, "-m", "kernelproof", "check", reference, "-x", *options, *files)
        begun = time.time()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
            try:
                _, errors = run.communicate(timeout=LONGEST_SECONDS)
            except subprocess.TimeoutExpired:
                run.terminate()
                _, errors = run.communicate(timeout=GRACE_SECONDS)
        if run.returncode not in (CONFORMING, NONCONFORMING, INCOMPLETE, -15, 143):
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            message = f"check {reference} ended with {run.returncode}: {''.join(last)}"
            raise RuntimeError(message)
        return timed(subject, json.loads(report.read_text(encoding="utf-8")), begun)


def timed(subject: str, report: Mapping[str, object], begun: float) -> Timed:
    """Return the times of a check.

    Args:
        subject: the name of what was checked.
        report: the JSON report of the check.
        begun: the time when its command was started, in seconds since the epoch.
    """
    reached = report["milestones"]
    assert isinstance(reached, dict)  # noqa: S101  by its schema
    judged, failing = reached["judged"], reached["failing"]
    findings = report["findings"]
    assert isinstance(findings, list)  # noqa: S101  by its schema
    startup = None if judged is None else reached["started"] + judged - begun
    # A stored case may fail before any problem was drawn.
    search = None if failing is None else max(0.0, failing - (judged or 0.0))
    law = findings[0]["law"] if findings else ""
    return Timed(subject, startup, search, law, reached.get("problems", 0))


def measure(
    chosen: Mapping[str, str], profile: str, seed: int, *, deck: bool = True
) -> Iterator[Timed]:
    """Yield the times of each subject, one check after another."""
    for subject, reference in chosen.items():
        yield time_check(subject, reference, profile, seed, deck=deck)


def results(times: Sequence[Timed]) -> Results:
    """Return the tables: each subject, and medians and 90th percentiles of both halves."""
    slowest = sorted(times, key=lambda each: -(each.search or 0.0))
    each_one = Table(
        "each check: seconds",
        ("subject", "half", "start-up", "search", "law", "problems"),
        tuple(
            (
                each.subject,
                each.half,
                _cell(each.startup),
                _cell(each.search),
                each.law,
                each.problems,
            )
            for each in slowest
        ),
    )
    halves = Table(
        "whole: seconds",
        (
            "half",
            "checks",
            "without a finding",
            "start-up, median",
            "search, median",
            "search, 90 %",
            "problems, median",
            "problems, 90 %",
        ),
        tuple(_row(half, times) for half in ("all", *HALVES)),
    )
    return Results("first-finding", (each_one, halves), ())


def _row(half: str, times: Sequence[Timed]) -> tuple[Cell, ...]:
    those = [each for each in times if half in ("all", each.half)]
    found = [each for each in those if each.search is not None]
    starts = [each.startup for each in those if each.startup is not None]
    searches = [each.search for each in found if each.search is not None]
    return (
        half,
        len(those),
        len(those) - len(found),
        _cell(statistics.median(starts) if starts else None),
        *_middle_and_ninth(searches),
        *_middle_and_ninth([each.problems for each in found]),
    )


def _middle_and_ninth(numbers: Sequence[float]) -> tuple[Cell, Cell]:
    """Return the median and the 90th percentile."""
    if not numbers:
        return _cell(None), _cell(None)
    ninth = sorted(numbers)[min(len(numbers) - 1, int(0.9 * len(numbers)))]
    return statistics.median(numbers), ninth


def _cell(seconds: float | None) -> Cell:
    return "-" if seconds is None else seconds
