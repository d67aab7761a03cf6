"""Judging mutants: first the kernel as it is, then each mutant in a process group of its own."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ..answers.journal import Journal
from ..console.errors import MachineError, UsageRefusedError
from .mutants import Mutant, marked
from .stand_ins import Kernels, StandIn
from .trials import TrialError, Trials, ended, kill

PROBE = "quick"
"""The profile at which the laws say whether Triton refuses a mutant that tests have killed."""
LEAST_SECONDS, TIMES_CLEAN = 120.0, 5.0
"""Fewest seconds of one mutant, and its multiple of what the kernel as it is took of one worker."""
LONGEST_CLEAN = 3600.0
"""Most seconds of the kernel as it is."""
GRACE_SECONDS = 60.0
"""Seconds that a process has beyond those of its run, to start and to end."""
BROKEN = 'raise ImportError("this file was broken on purpose")\n'
"""A file that no test can load, by which it shows whether tests load the copy."""
LINES = 12
"""Most lines of a command's output that an error shows."""


@dataclass(frozen=True)
class Answer:
    """What became of one mutant at one profile.

    Attributes:
        id: the mutant's.
        stage: the profile, or ``tests``.
        status: ``refused``, ``unreached``, ``killed``, ``survived`` or ``error``.
        law: the law that killed it.
        verdict: status and kind of the finding.
        message: what was wrong.
        seconds: the seconds from the mutant's being in place until the answer, in a process that
            has started: where it was killed, those to its first finding.
    """

    id: str
    stage: str
    status: str
    law: str = ""
    verdict: str = ""
    message: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        """What became of it, in a line."""
        law = f" by {self.law}" if self.status == "killed" else ""
        return f"{self.id} {self.status}{law}" + f" in {self.seconds:.1f} s" * bool(self.seconds)


@dataclass
class Clean:
    """What the kernel as it is did at one profile.

    Attributes:
        lines: the lines of each file that ran; None where that is not known.
        without: laws that accuse it, under which no mutant is judged.
        costs: cost classes, see ``Plan``.
        seconds: the seconds that it took.
        probe: the fields of what it did under the laws at ``PROBE``, where tests judge; None where
            the laws cannot judge it.
        preload: installed modules that workers have imported for it.
    """

    lines: dict[str, list[int]] | None
    without: list[str] = field(default_factory=list)
    costs: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    probe: dict[str, Any] | None = None
    preload: list[str] = field(default_factory=list)

    def ran(self, mutant: Mutant) -> bool:
        """Whether the line of a mutant ran, as far as that is known."""
        return self.lines is None or mutant.line in self.lines.get(mutant.file, ())


class Judge:
    """Asks about the mutants of one implementation.

    Args:
        kernels: its kernels.
        jobs: processes at a time.
        seed: the seed of the problems.
        tests: the command that judges instead of the laws; none if empty.
        laws: the laws that judge; all if empty.
        only: restricts problems, see ``Only.read``.
        journal: what is kept.
    """

    def __init__(
        self,
        kernels: Kernels,
        *,
        jobs: int,
        seed: int,
        tests: str,
        laws: Sequence[str],
        only: Sequence[str] = (),
        journal: Journal,
    ) -> None:
        self.kernels, self.ended = kernels, ""
        self._jobs, self.seed, self.tests, self.laws = jobs, seed, tests, laws
        self._only = only
        self.journal = journal
        self._running: set[subprocess.Popen[Any]] = set()
        self._trials: dict[StandIn, Trials] = {}

    def end(self, why: str) -> None:
        """End what runs, and begin nothing more; may be called by a handler of signals."""
        self.ended = why
        for process in list(self._running):
            kill(process)

    def clean(self, stage: str) -> Clean:
        """Return what the kernel as it is does, by an earlier run where that is kept.

        Raises:
            MachineError: it cannot be judged here.
            UsageRefusedError: the tests fail, or do not load the copy.
        """

        def found() -> dict[str, Any]:
            with self._stand_in() as stand_in:
                tests = self.tests
                return vars(self._clean_tests(stand_in) if tests else self._clean(stand_in, stage))

        return Clean(**self.journal.ask({"clean": stage}, found))

    def _clean(self, stand_in: StandIn, stage: str) -> Clean:
        ran = stand_in.place / "ran"
        stand_in.put(self._marked(ran))
        answer = self._ask(stand_in, stage, Clean({}), first_only=False, jobs=self._jobs)
        if answer.get("error") or not answer.get("judged"):
            message = f"{self.kernels.reference} cannot be judged: {answer.get('error') or answer}"
            raise MachineError(message)
        without = sorted({each["law"] for each in answer["findings"]})
        seconds, preload = self._jobs * answer["seconds"], answer["preload"]
        return Clean(_lines(ran), without, answer["costs"], seconds, preload=preload)

    def _clean_tests(self, stand_in: StandIn) -> Clean:
        began = time.monotonic()
        stand_in.put({})
        code, output = self._run(stand_in, None)
        seconds = time.monotonic() - began
        if code != 0:
            message = f"--tests: exits with {code} though nothing is changed:\n{output}"
            raise UsageRefusedError(message)
        stand_in.put(dict.fromkeys(self.kernels.files, BROKEN))
        if self._run(stand_in, None)[0] == 0:
            message = (
                f"--tests: exits with 0 though {', '.join(self.kernels.files)} cannot be loaded: "
                f"it must import the copy, which PYTHONPATH and the current folder have"
            )
            raise UsageRefusedError(message)
        ran = stand_in.place / "ran"
        stand_in.put(self._marked(ran))
        # Compiled kernels cannot write lines: then all of them count as reached.
        lines = _lines(ran) if self._run(stand_in, None)[0] == 0 else None
        probe = None
        with suppress(MachineError):
            probe = vars(self._clean(stand_in, PROBE))
        if self.ended:  # then it is not known whether the laws can judge the kernel
            raise MachineError(self.ended)
        return Clean(lines or None, seconds=seconds, probe=probe)

    def _marked(self, ran: Path) -> dict[str, str]:
        ran.write_text("", encoding="utf-8")
        return {each: marked(each, self.kernels.text(each), ran) for each in self.kernels.files}

    def judge(
        self, mutants: Sequence[Mutant], stage: str, clean: Clean, tell: Callable[[str], None]
    ) -> dict[str, Answer]:
        """Judge mutants at one profile; those of an earlier run are not judged again.

        Args:
            mutants: the mutants.
            stage: the profile, or ``tests``.
            clean: what the kernel as it is did.
            tell: receives a line for each answer, in this thread.
        """

        def question(mutant: str) -> dict[str, str]:
            return {"mutant": mutant, "stage": stage}

        known = [self.journal.recall(question(each.id), _read) for each in mutants]
        answers = {each.id: each for each in known if each is not None}
        waiting = [each for each in mutants if each.id not in answers]
        with ExitStack() as opened:
            free: SimpleQueue[StandIn] = SimpleQueue()
            for _ in range(min(self._jobs, len(waiting))):
                free.put(opened.enter_context(self._stand_in(clean.preload)))

            def ask(mutant: Mutant) -> Answer:
                stand_in = free.get()
                try:
                    return self._answer(mutant, stage, clean, stand_in)
                finally:
                    free.put(stand_in)

            pool = opened.enter_context(ThreadPoolExecutor(self._jobs))
            asked = [pool.submit(ask, each) for each in waiting]
            for number, done in enumerate(as_completed(asked), 1):
                answer = done.result()
                if not self.ended:
                    if answer.status != "error":  # which a later run asks again
                        self.journal.keep(question(answer.id), vars(answer))
                    answers[answer.id] = answer
                    tell(f"{stage}: {number} of {len(waiting)}: {answer}")
        return answers

    def _answer(self, mutant: Mutant, stage: str, clean: Clean, stand_in: StandIn) -> Answer:
        if self.ended:
            return Answer(mutant.id, stage, "error")
        if not clean.ran(mutant):
            return Answer(mutant.id, stage, "unreached")
        try:
            compile(mutant.text, mutant.file, "exec")
        except SyntaxError as error:
            return Answer(mutant.id, stage, "refused", message=str(error))
        stand_in.put({mutant.file: mutant.text})
        if not self.tests:
            with suppress(TrialError):  # the question starts another, or says why
                self._trials[stand_in].wait()
        began = time.monotonic()
        if self.tests:
            found = self._by_tests(stand_in, clean)
        else:
            found = self._by_laws(stand_in, stage, clean)
        seconds = round(time.monotonic() - began, 1)
        return Answer(mutant.id, stage, **found, seconds=seconds)

    def _by_tests(self, stand_in: StandIn, clean: Clean) -> dict[str, str]:
        code, output = self._run(stand_in, max(LEAST_SECONDS, TIMES_CLEAN * clean.seconds))
        if code == 0:
            return {"status": "survived"}
        # Tests fail too where Triton raises an error, which only the laws can tell from an answer.
        if code is not None and clean.probe is not None and not self.ended:
            probed = self._by_laws(stand_in, PROBE, Clean(**clean.probe))
            if probed["status"] == "refused" and "law" in probed:
                return probed
        verdict = "timeout" if code is None else f"exit code {code}"
        last = output.splitlines()[-1:] or [""]
        return {"status": "killed", "law": "tests", "verdict": verdict, "message": last[0][:300]}

    def _by_laws(self, stand_in: StandIn, stage: str, clean: Clean) -> dict[str, str]:
        answer = self._ask(stand_in, stage, clean, first_only=True, jobs=1)
        for finding in answer.get("findings", ()):
            about = {key: finding[key] for key in ("law", "message")}
            verdict = f"{finding['status']} {finding['kind']}".strip()
            # What Triton or Python raises in a kernel is no wrong answer: nobody could ship it.
            refused = finding["raised"] and "triton" in finding["trace"]
            return {"status": "refused" if refused else "killed", "verdict": verdict, **about}
        if answer.get("error"):
            return {"status": "error", "message": str(answer["error"])[:300]}
        if not answer["judged"]:
            return {"status": "refused", "message": "no problem could be judged"}
        cut = ", ".join(answer["cut"])
        return {"status": "survived", "message": cut and f"ended early: {cut}"}

    def _ask(
        self, stand_in: StandIn, stage: str, clean: Clean, *, first_only: bool, jobs: int
    ) -> dict[str, Any]:
        deadline = max(LEAST_SECONDS, TIMES_CLEAN * clean.seconds) if first_only else LONGEST_CLEAN
        request = {
            "reference": self.kernels.reference,
            "profile": stage,
            "seed": self.seed,
            "laws": list(self.laws),
            "only": list(self._only),
            "without": clean.without,
            "costs": clean.costs,
            "first_only": first_only,
            "seconds": deadline,
            "jobs": jobs,
            "files": stand_in.files,
        }
        return self._trials[stand_in].ask(request, deadline + GRACE_SECONDS)

    def _run(self, stand_in: StandIn, seconds: float | None) -> tuple[int | None, str]:
        """Run the tests; return their exit code, None after the deadline, and their last lines."""
        process = subprocess.Popen(  # noqa: S602  the user's own command line
            self.tests,
            shell=True,
            cwd=stand_in.working_folder,
            env=stand_in.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with self._started(process):
            said = _said(process, seconds)
        if said is None:
            return None, ""
        return process.returncode, "\n".join(said[0].splitlines()[-LINES:])

    @contextmanager
    def _started(self, process: subprocess.Popen[Any]) -> Iterator[None]:
        """Have a process end with this block, or with the run."""
        self._running.add(process)
        try:
            with ended(process):
                if self.ended:
                    kill(process)
                yield
        finally:
            self._running.discard(process)

    @contextmanager
    def _stand_in(self, preload: Sequence[str] = ()) -> Iterator[StandIn]:
        with tempfile.TemporaryDirectory(prefix="kernelproof-mutant-") as place:
            stand_in = StandIn(self.kernels, Path(place))
            with Trials(stand_in, self._started, preload) as trials:
                if not self.tests:  # which seldom need one
                    trials.begin()
                self._trials[stand_in] = trials
                yield stand_in
                del self._trials[stand_in]


def _read(answer: dict[str, Any]) -> Answer:
    return Answer(**answer)


def _lines(ran: Path) -> dict[str, list[int]]:
    """Return the lines of each file that a marked copy has written down."""
    found: dict[str, set[int]] = {}
    for each in ran.read_text(encoding="utf-8").split():
        file, _, line = each.rpartition(":")
        found.setdefault(file, set()).add(int(line))
    return {file: sorted(lines) for file, lines in found.items()}


def _said(process: subprocess.Popen[str], seconds: float | None) -> tuple[str, str] | None:
    """Return what a process wrote until its end; None where a deadline has ended it."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        process.communicate()
        return None
