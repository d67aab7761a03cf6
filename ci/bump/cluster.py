"""The comparison on a Ray cluster: both releases on one machine of each chip, and one report."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...properties.findings.files import dumps
from ..console.errors import MACHINE, MachineError, UsageRefusedError
from ..console.outputs import Outputs
from ..fleet.ray_machines import RayMachines, connected
from ..fleet.shipping import unpack
from .command import Request, compare, minutes_of, tell
from .report.merging import join
from .sides.ending import Ending


@dataclass(frozen=True)
class Answer:
    """What a machine has to say.

    Attributes:
        report: its text; empty where there is none.
        cases: texts of the cases of its findings, by their names.
        unwritten: sentences on cases that could not be written.
        refused: why there is no report.
        code: exit code then.
    """

    report: str = ""
    cases: dict[str, str] = field(default_factory=dict)
    unwritten: tuple[str, ...] = ()
    refused: str = ""
    code: int = 0


def bump_on(address: str, request: Request) -> int:
    """Compare two releases on a cluster, print and write the report, and return the exit code.

    What some chips have to say is printed and written before what went wrong on others is raised.

    Raises:
        UsageRefusedError: something that was asked for does not exist or cannot be read.
        MachineError: no cluster answers, or a chip has no machine that can compare.
    """
    request.outputs.check()
    with connected(address):
        sent = replace(request, outputs=Outputs())
        given = RayMachines(request.device).once_a_chip(compare_here, sent)
    failed = [error for chip in given if (error := _failure(chip, given[chip])) is not None]
    answers = {chip: each for chip, each in given.items() if _failure(chip, each) is None}
    code = _told(answers, request) if answers else 0
    if failed:
        kind = type(failed[0])
        raise kind("; ".join(error.message for error in failed))
    return code


def _failure(chip: str, answer: Answer | MachineError) -> MachineError | UsageRefusedError | None:
    """Return why a chip has no report; None where it has one."""
    if isinstance(answer, MachineError):
        return answer
    if not answer.refused:
        return None
    kind = MachineError if answer.code == MACHINE else UsageRefusedError
    return kind(f"{chip}: {answer.refused}")


def _told(answers: dict[str, Answer], request: Request) -> int:
    """Join the reports, print and write them, and return the exit code."""
    unwritten = [sentence for answer in answers.values() for sentence in answer.unwritten]
    for answer in answers.values():
        unwritten += _write(request.cases, answer.cases)
    reports: list[dict[str, Any]] = [json.loads(answer.report) for answer in answers.values()]
    report = join(reports, list(answers), None, request.command)
    return tell(report, request.outputs, unwritten, verbose=request.verbose)


def compare_here(request: Request) -> Answer:
    """Compare two releases on this machine of a cluster."""
    unpack()
    with TemporaryDirectory(prefix="kernelproof-") as folder, _working_in(folder):
        # Cases are written below this folder: commands that replay them name the driver's.
        here = replace(request, journal=Path(folder, "journal.jsonl"))
        try:
            report, unwritten = compare(here, Ending(minutes_of(request)))
        except (UsageRefusedError, MachineError) as error:
            return Answer(refused=error.message, code=error.exit_code)
        cases = {path.name: path.read_text() for path in sorted(request.cases.glob("*.json"))}
        return Answer(dumps(report), cases, tuple(unwritten))


def _write(folder: Path, cases: dict[str, str]) -> list[str]:
    """Write cases; return a sentence where they cannot be written."""
    try:
        for name, text in cases.items():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    except OSError as error:
        return [f"--cases: {folder} cannot be written: {error.strerror}"]
    return []


@contextmanager
def _working_in(folder: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
