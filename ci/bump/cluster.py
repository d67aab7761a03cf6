"""The comparison on a Ray cluster: both releases on one machine of each chip, and one report."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...impl.targets.unpacked import folders
from ...properties.findings.cases import from_here
from ...properties.findings.files import dumps
from ...properties.search.ending import Ending
from ..answers.journal import Journal, JournalError
from ..console.errors import MACHINE, MachineError, UsageRefusedError
from ..console.lines import tell as tell_line
from ..console.outputs import Outputs
from ..console.signals import SIGNALLED, ended_by_signals
from ..fleet.ray_machines import RayMachines, connected
from ..fleet.ray_tasks import ANSWER_SECONDS, SEND_SECONDS
from ..fleet.shipping import unpack
from ..fleet.units import Event, Unit
from .command import Request, compare, seconds_of, tell
from .report.contents import refused
from .report.merging import join
from .sides.plan import signalled
from .verdicts.policy import load_policy

JOURNAL = "journal"
"""Name of the events that carry a part of a machine's journal: its offset and its bytes."""


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


class _Signals:
    """The first signal: it interrupts what comes before the comparisons, and is asked for later."""

    def __init__(self) -> None:
        self.why = ""
        self.comparing = False

    def __call__(self, why: str) -> None:
        self.why = why
        if not self.comparing:
            raise KeyboardInterrupt


def bump_on(address: str, request: Request) -> int:
    """Compare two releases on a cluster, print and write the report, and return the exit code.

    What some chips have to say is printed and written before what went wrong on others is raised.
    A signal ends the comparisons; the report is of what they have learned.

    Raises:
        UsageRefusedError: something that was asked for does not exist or cannot be read.
        MachineError: no cluster answers, or a chip has no machine that can compare.
    """
    request.outputs.check()
    signals = _Signals()
    with ended_by_signals(signals):  # the report, too, is not for a signal to end
        given: Mapping[str, Answer | MachineError] = {}
        try:
            given = _compared(address, request, signals)
        except KeyboardInterrupt:
            if not signals.why:
                raise
        failed = [error for chip in given if (error := _failure(chip, given[chip])) is not None]
        answers = {
            chip: each
            for chip, each in given.items()
            if isinstance(each, Answer) and not each.refused
        }
        if signals.why and (failed or not answers):
            return _told_of_end(answers, request, signals.why, failed)
        code = _told(answers, request) if answers else 0
        if failed:
            kind = type(failed[0])
            raise kind("; ".join(error.message for error in failed))
        return code


def _compared(
    address: str, request: Request, signals: _Signals
) -> Mapping[str, Answer | MachineError]:
    """Have a machine of each chip compare the releases, and keep a copy of its journal here."""
    with connected(address), ExitStack() as stack:
        machines = RayMachines(request.device)
        journals, known = {}, {}
        for chip in machines.chips:
            path = request.journal_path
            journal = Journal(path.with_name(f"{path.stem}-{chip}{path.suffix}"))
            journals[chip] = stack.enter_context(journal)
            known[chip] = journal.follow(resume=request.resume, tell=_note)

        def heard(event: Event) -> None:
            chip = event.unit.chip
            try:
                if chip in journals:
                    journals[chip].copy(*event.arguments)
            except JournalError as error:  # the machine has its own, and goes on
                del journals[chip]
                _note(f"{error.message}; from here on no answer of {chip} is kept")

        sent = replace(
            request,
            outputs=Outputs(),
            cases_as=Path(from_here(request.cases)),
            sources=tuple(folders()),
        )
        arguments = {chip: (sent, str(Path.cwd()), known[chip]) for chip in machines.chips}
        signals.comparing = True
        return machines.once_a_chip(compare_here, arguments, heard, lambda: signals.why)


def _note(line: str) -> None:
    tell_line(f"kernelproof: {line}", err=True)


def _failure(chip: str, answer: Answer | MachineError) -> MachineError | UsageRefusedError | None:
    """Return why a chip has no report; None where it has one."""
    if isinstance(answer, MachineError):
        return answer
    if not answer.refused:
        return None
    kind = MachineError if answer.code == MACHINE else UsageRefusedError
    return kind(f"{chip}: {answer.refused}")


def _told(
    answers: Mapping[str, Answer], request: Request, failures: Sequence[str] = (), code: int = 0
) -> int:
    """Join the reports, print and write them, and return the exit code."""
    unwritten = [sentence for answer in answers.values() for sentence in answer.unwritten]
    for answer in answers.values():
        unwritten += _write(request.cases, answer.cases)
    reports: list[dict[str, Any]] = [json.loads(answer.report) for answer in answers.values()]
    ended = [each["exit_code"] for each in reports if each["exit_code"] > SIGNALLED]
    code = max([code, *ended])
    report = join(reports, list(answers), None, request.command, failures=failures, code=code)
    return tell(report, request.outputs, unwritten, verbose=request.verbose)


def _told_of_end(
    answers: Mapping[str, Answer],
    request: Request,
    why: str,
    failed: Sequence[MachineError | UsageRefusedError],
) -> int:
    """Report what was learned before a signal, and what was not; return the exit code."""
    sentence, code = signalled(why)
    failures = [sentence, *(error.message for error in failed)]
    if answers:
        return _told(answers, request, failures, code)
    why_none = MachineError("; ".join(failures))
    policy = load_policy(None)
    report = refused(request.sides, policy, why_none, request.command, request.compared)
    return tell({**report, "exit_code": code}, request.outputs, verbose=request.verbose)


def compare_here(
    bus: Any,  # noqa: ANN401  Ray's handle
    chip: str,
    request: Request,
    folder: str,
    known: bytes,
) -> Answer:
    """Compare two releases on this machine of a cluster.

    Args:
        bus: the bus to which the journal is sent, and which says when to end.
        chip: the chip of this machine.
        request: what was asked for, with the folders of ``--cases`` and ``--from`` as named there.
        folder: where the command runs; paths are relative to it where this machine has it, too.
        known: the journal to go on from.
    """
    unpack()
    with TemporaryDirectory(prefix="kernelproof-") as own, _working_in(folder, own):
        journal, cases = Path(own, "journal.jsonl"), Path(own, "cases")
        if known:
            journal.write_bytes(known)
        here = replace(request, journal=journal, cases=cases)
        ending = Ending(seconds_of(request))
        try:
            with _told_to(bus, chip, journal, len(known), ending):
                report, unwritten = compare(here, ending)
        except (UsageRefusedError, MachineError) as error:
            why = error.message.replace(str(journal), "its journal")
            return Answer(refused=why, code=error.exit_code)
        texts = {path.name: path.read_text() for path in sorted(cases.glob("*.json"))}
        return Answer(dumps(report), texts, tuple(unwritten))


@contextmanager
def _told_to(
    bus: Any,  # noqa: ANN401  Ray's handle
    chip: str,
    journal: Path,
    sent: int,
    ending: Ending,
) -> Iterator[None]:
    """Send a journal to the bus as it grows, and end the comparison when the bus says so.

    Args:
        bus: Ray's handle of the actor.
        chip: the chip of this machine.
        journal: a file.
        sent: bytes of it that the driver has.
        ending: the ending of the comparison.
    """
    import ray

    done = threading.Event()

    def send() -> None:
        offset, last = sent, False
        while True:
            data = _rest(journal, offset)
            event = Event(Unit(chip, ""), JOURNAL, (offset, data))
            with suppress(ray.exceptions.RayError):  # without the bus it goes on all the same
                why = ray.get(bus.tell.remote([event]), timeout=ANSWER_SECONDS)
                offset += len(data)
                if why:
                    ending.end(why)
            if last:
                return
            last = done.wait(SEND_SECONDS)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        yield
    finally:
        done.set()
        sender.join()


def _rest(path: Path, offset: int) -> bytes:
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(offset)
        return file.read()
    return b""


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
def _working_in(folder: str, instead: str) -> Iterator[None]:
    """Work in a folder, or in another one where it is not there; modules are found in it."""
    before, path = Path.cwd(), [*sys.path]
    try:
        os.chdir(folder)
    except OSError:
        os.chdir(instead)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
