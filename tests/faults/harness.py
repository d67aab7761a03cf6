"""Runs misbehaving kernels, each beside an honest bystander, and says which are answered wrongly.

    python tests/faults/harness.py                        every row of kernels.py
    python tests/faults/harness.py --only NAME ...        some of them
    python tests/faults/harness.py --sample 0 1           one of each sort, for `make test`
    python tests/faults/harness.py --runs 1000 --seed 7   combinations drawn at random

A run is the command `kernelproof check`, from its arguments to its exit code, in a process of its
own below one that adopts whatever the run leaves behind. Starting an interpreter with torch takes
seconds: runs, and the workers of a run, are forks of this process, which has imported everything.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import gc
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unicodedata
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn, TextIO

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a fork has no threads but its own

import kernelproof.ci.check.checking
import kernelproof.properties.worker.tasks  # noqa: F401  what a worker imports first
from kernelproof.ci.cli import main
from kernelproof.ci.console.rendering import environment
from kernelproof.impl.gating import load_rules
from kernelproof.properties.isolation import process, spawning, supervisor, worker_main
from kernelproof.properties.isolation.stages import Deadlines
from kernelproof.properties.laws import laws_of
from kernelproof.properties.search import deadlines, preparation
from kernelproof.properties.space import profiles
from kernelproof.properties.verdicts.operations import OPERATIONS as ANSWERS
from kernelproof.properties.worker import requests
from kernelproof.tests.faults import kernels

TINY = profiles.Profile("quick", problems=5, max_work=2_000, shrink_seconds=0.2, seconds=20.0)
CALL_SECONDS: Final = 2.0
"""What a call, a first call and an import may take: on a busy machine an honest one must end."""
STAGE_SECONDS: Final = 20.0
"""What another stage may take, which is nobody's fault unless a kernel acts in it."""
RUN_SECONDS: Final = 150.0
"""Seconds after which a run counts as one that never ends."""
SETTLING_SECONDS: Final = 3.0
"""Seconds in which what a run leaves may still end by itself."""
PR_SET_CHILD_SUBREAPER: Final = 36
EXITS: Final = {"PASS": {0}, "ERROR": {2}, "NONE": {3}, "ANY": {0, 1, 4}}
"""Exit codes by what must come of a fault; 1 of any finding."""
CACHES: Final = ("tmp/torchinductor_", "tmp/triton")
"""Compilers' caches, which stay for later runs on purpose."""
FILES: Final = {"out", "err", "report.json", "report.xml", "report.html", "subject.py",
                "bystander.py", "cases", "tmp", "here", "hypothesis", "__pycache__"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One run: a fault, where and of what, and who stands by.

    Attributes:
        name: of a row of ``kernels.FAULTS``, or of two, joined by ``+``.
        at, operation: instead of the row's; the row's own if empty.
        laws: under which both are judged.
        bystander: operation of the honest kernel.
        first: whether the bystander is named first.
        seed: of the search.
    """

    name: str
    at: str = ""
    operation: str = ""
    laws: tuple[str, ...] = ()
    bystander: str = "merge_state"
    first: bool = False
    seed: int = 0


@dataclass
class Answer:
    """What came of a run.

    Attributes:
        case: that was run.
        wrong: sentences on what is wrong with it.
        code, verdict, finding: the exit code, the verdict, and what was found of the fault.
        known: what is wrong with it where the table says so, which is not counted.
        seconds, cpu: that it took, by the clock and of processors.
    """

    case: Case
    wrong: list[str] = field(default_factory=list)
    code: int | None = None
    verdict: str = ""
    finding: str = ""
    known: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary."""
        return {**asdict(self), "case": {k: v for k, v in asdict(self.case).items() if v}}


# Workers that are forks


class Forked:
    """Stands in for ``subprocess.Popen`` of a worker: a fork that does what the command would.

    The command is the supervisor's, which starts the worker.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:  # noqa: ANN401
        self.args = command
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become_supervisor(command, **options)
                supervisor.main()
                os._exit(0)
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        """As of Popen."""
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                if ended:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """As of Popen."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.001)
        assert self.returncode is not None
        return self.returncode


def _become_supervisor(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    pass_fds: Sequence[int],
    stdin: int,
    stdout: int,
    stderr: int,
    start_new_session: bool,
) -> None:
    """Make a fork what ``python supervisor.py FOLDER COMMAND...`` would be."""
    assert start_new_session
    os.setsid()
    for fd, there in enumerate((stdin, stdout, stderr)):
        os.dup2(there, fd)
    for fd in _open_descriptors():
        if fd in pass_fds:
            os.set_inheritable(fd, True)  # noqa: FBT003
        elif fd > 2:
            os.close(fd)
    _like_a_new_interpreter(env)
    sys.argv[:] = command[command.index(supervisor.__file__) :]
    vars(os)["execvpe"] = _become_worker


def _become_worker(_: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Do what ``os.execvpe`` of a worker's command would."""
    os.execvpe = EXECVPE
    for fd in _open_descriptors():
        if fd > 2 and not os.get_inheritable(fd):
            os.close(fd)
    path, module, given = command[command.index("-c") + 2 :]
    assert module == worker_main.__name__
    _like_a_new_interpreter(environment)
    sys.path[:], sys.argv[:] = json.loads(path), [""]
    worker_main.main(given)


EXECVPE = os.execvpe


def _open_descriptors() -> list[int]:
    fds = [int(path.name) for path in Path("/proc/self/fd").iterdir()]
    return [fd for fd in fds if Path(f"/proc/self/fd/{fd}").exists()]


def _like_a_new_interpreter(environment: Mapping[str, str]) -> None:
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin, sys.stdout, sys.stderr = map(_stream, (0, 1, 2))
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None


def _stream(fd: int) -> TextIO:
    """Return a new stream on one of the three: the old one may hold what another process wrote."""
    return open(fd, "w" if fd else "r", closefd=False)


def _popen(command: Sequence[str], **options: Any) -> Any:  # noqa: ANN401  a Popen or its kin
    if worker_main.__name__ in command:
        return Forked(command, **options)
    return subprocess.Popen(command, **options)


def hasten() -> None:
    """Make runs small, and their processes forks of this one."""
    profiles.PROFILES["quick"] = TINY
    deadlines.DEADLINE_FLOOR = CALL_SECONDS
    preparation.IMPORT_SECONDS = CALL_SECONDS
    of_the_kernel = ("run", "supports")
    Deadlines.__init__.__defaults__ = tuple(
        CALL_SECONDS if each.name in of_the_kernel else STAGE_SECONDS for each in fields(Deadlines)
    )
    requests.WARM_UP_DEADLINES = Deadlines()
    names = {name: getattr(subprocess, name) for name in subprocess.__all__}
    process.FORKS = False
    vars(spawning)["subprocess"] = SimpleNamespace(**{**names, "Popen": _popen})


def read_ahead() -> None:
    """Read once what each run would read again: the rules, and the templates of its page."""
    load_rules()
    for template in environment().list_templates(extensions=["jinja"]):
        environment().get_template(template)


# One run


def run_case(case: Case, folder: Path) -> Answer:
    """Run a case in a process below this one, which adopts what is left, and judge it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    tag = folder.name
    words = _prepare(case, folder)
    began, before = time.monotonic(), os.times()
    pid = os.fork()
    if pid == 0:
        _command(words, folder, tag)
    answer = Answer(case)
    status = _wait(pid)
    left = list(_settled())
    answer.seconds = round(time.monotonic() - began, 2)
    after = os.times()
    answer.cpu = round(
        after.children_user + after.children_system - before.children_user - before.children_system,
        2,
    )
    if status is None:
        answer.wrong.append(f"no report: the run did not end within {RUN_SECONDS:g} s")
    else:
        answer.code = os.waitstatus_to_exitcode(status)
        _judge(answer, folder, tag)
    for sort, found in (("process left", left), ("left behind", list(_remains(folder, tag)))):
        if found:
            answer.wrong.append(f"{sort}: {found[0]}, {len(found)} in all")
    known = kernels.KNOWN.get(case.name)
    if known and answer.wrong:
        answer.known, answer.wrong = answer.wrong, []
    elif (
        known and not DISTRUST and case.name in kernels.BY_NAME and not (case.at or case.operation)
    ):
        answer.wrong = [f"answered rightly, though the table says: {known}"]
    return answer


SUBJECT = """\
from kernelproof.tests.faults import kernels
kernel = kernels.{call}
"""


def _prepare(case: Case, folder: Path) -> list[str]:
    """Write the kernels of a case, and return the words of the command."""
    for name in ("tmp", "here"):
        (folder / name).mkdir(parents=True)
    call = f"make({case.name!r}, {case.at!r}, {case.operation!r})"
    (folder / "subject.py").write_text(SUBJECT.format(call=call))
    call = f"honest({case.bystander!r})"
    (folder / "bystander.py").write_text(SUBJECT.format(call=call))
    both = [f"{folder}/subject.py:kernel", f"{folder}/bystander.py:kernel"]
    fault = kernels.find(case.name, case.at, case.operation)
    names = {ANSWERS[each].law for each in (fault.operation, case.bystander)}
    laws = sorted({*names, *fault.laws, *case.laws})
    return [
        *("check", *(reversed(both) if case.first else both)),
        *(("--distrust",) if DISTRUST or fault.distrust else ()),
        *("--profile", "quick", "--jobs", "1", "--seed", str(case.seed)),
        *(word for law in laws for word in ("--law", law)),
        *("--json", f"{folder}/report.json", "--junit", f"{folder}/report.xml"),
        *("--html", f"{folder}/report.html", "--expectations", "none"),
        *("--cases", f"{folder}/cases"),
    ]


def _command(words: list[str], folder: Path, tag: str) -> NoReturn:
    """Be the command: its output goes to files of the folder."""
    code = 99
    try:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND), fd)
        os.environ.update(
            KERNELPROOF_FAULT_RUN=tag,
            TMPDIR=str(folder / "tmp"),
            HYPOTHESIS_STORAGE_DIRECTORY=str(folder / "hypothesis"),
            COLUMNS="200",
        )
        tempfile.tempdir = None
        os.chdir(folder / "here")
        sys.stdout, sys.stderr = _stream(1), _stream(2)
        sys.argv[:] = ["kernelproof", *words]
        code = main(words)
    except BaseException:  # noqa: BLE001  its traceback is printed
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
            atexit._run_exitfuncs()
        os._exit(code)


def _wait(pid: int) -> int | None:
    """Return the status of a process's end; None if it had to be killed."""
    until = time.monotonic() + RUN_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _children() -> list[int]:
    me = os.getpid()
    return [int(pid) for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split()]


def _settled() -> Iterator[str]:
    """Wait for what a run has left to end, and kill and name what does not."""
    until = time.monotonic() + SETTLING_SECONDS
    while _reap() and time.monotonic() < until:
        time.sleep(0.01)
    named = set()
    while children := _reap():
        for pid in children:
            if pid not in named:
                named.add(pid)
                with contextlib.suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                    yield words.decode(errors="replace").strip()[:60]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _reap() -> list[int]:
    """Take the status of children that have ended; return those that have not."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return _children()


def _remains(folder: Path, tag: str) -> Iterator[str]:
    for place in (folder / "tmp", folder / "here"):
        for path in sorted(place.rglob("*")):
            found = str(path.relative_to(folder))
            if not found.startswith(CACHES):
                yield found
    yield from sorted(path.name for path in folder.iterdir() if path.name not in FILES)
    for place in (Path("/dev/shm"), Path("/tmp")):  # noqa: S108
        for path in place.glob(f"{tag}*"):
            if path != folder:
                path.unlink() if path.is_file() else shutil.rmtree(path)
                if path.name != f"{tag}-file":  # its place is its own choice: see `says`
                    yield str(path)


# The judgement


def _judge(answer: Answer, folder: Path, tag: str) -> None:
    """Compare what a run said with what it must say."""
    case, wrong = answer.case, answer.wrong
    fault = kernels.find(case.name, case.at, case.operation)
    screen = "".join(
        (folder / name).read_bytes().decode(errors="replace") if (folder / name).exists() else ""
        for name in ("out", "err")
    )
    try:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        ET.parse(folder / "report.xml")  # noqa: S314  our own
        assert "</html>" in (folder / "report.html").read_text(encoding="utf-8")
    except (OSError, ValueError, AssertionError, ET.ParseError) as error:
        last = (screen.strip().splitlines() or [""])[-1]
        wrong.append(f"no report: {type(error).__name__}, exit {answer.code}: {last[:200]}")
        return
    answer.verdict = report["verdict"]
    if code_of(report) != answer.code:
        wrong.append(f"the report says exit {report['exit_code']}, the command gave {answer.code}")
    if "the suite failed" in screen or "the suite itself failed" in screen:
        line = next(line for line in screen.splitlines() if "the suite" in line)
        wrong.append(f"the suite failed: {line[:200]}")
    if "Traceback (most recent call last)" in (folder / "err").read_text(errors="replace"):
        wrong.append("a traceback on the screen")
    if bad := {character for character in screen if forged(character)}:
        wrong.append(f"unprintable on the screen: {sorted(map(repr, bad))}")
    if re.search("^CONFORMING: no new", screen, re.MULTILINE) and answer.code != 0:
        wrong.append("a verdict line was forged")
    of = {
        each["reference"].rpartition("/")[2].partition(".")[0]: each
        for each in report["implementations"]
    }
    if set(of) != {"subject", "bystander"}:
        wrong.append(f"the report has {sorted(of)}")
        return
    wrong += accusations(of["bystander"], report)
    wrong += misjudged(fault, answer, of["subject"], report, screen.replace(tag, "{TAG}"))


def code_of(report: Mapping[str, Any]) -> int:
    """Return the exit code that a report names."""
    return int(report["exit_code"])


def forged(character: str) -> bool:
    """Whether a character could change what a terminal shows of other lines."""
    return unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp", "Cs") and character != "\n"


def accusations(bystander: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the honest kernel is accused of, or not asked."""
    name = bystander["name"]
    if bystander["error"]:
        yield f"bystander accused: {bystander['error'][:200]}"
    for finding in report["findings"]:
        if finding["implementation"] == name and bystander["status"] == "FINDINGS":
            yield f"bystander accused: {finding['status']} {finding['message'][:200]}"
    if not bystander["judged"] and not bystander["error"]:
        yield f"bystander not judged: {bystander['unsupported_reason'][:100]}"
    for law in bystander["laws"]:
        if law["verdict"] not in ("PASS", "UNSUPPORTED") or (
            law["verdict"] == "PASS" and not law["judged"]
        ):
            yield f"bystander's {law['law']}: {law['verdict']}, judged {law['judged']}"


def misjudged(
    fault: kernels.Fault,
    answer: Answer,
    subject: Mapping[str, Any],
    report: Mapping[str, Any],
    screen: str,
) -> Iterator[str]:
    """Yield how the answer to a fault differs from what must come of it."""
    must = set(fault.must.split("|"))
    codes = set().union(*(EXITS.get(each, {1}) for each in must))
    if answer.code not in codes:
        false = "false pass: " if answer.code == 0 else ""
        yield f"{false}exit {answer.code}, not {sorted(codes)}: {report['message'][:200]}"
    if subject["status"] == "FINDINGS":
        found = [each for each in report["findings"] if each["implementation"] == subject["name"]]
        answer.finding = ", ".join(f"{each['status']} {each['kind'][:40]}" for each in found)
        statuses = {each["status"] for each in found}
        if not (statuses & must or "ANY" in must):
            yield f"found {answer.finding}, not {fault.must}"
        elif fault.kind and not any(re.match(fault.kind, each["kind"]) for each in found):
            yield f"kind is {answer.finding}, not {fault.kind}"
    elif not must & {"PASS", "ERROR", "NONE", "ANY"} and answer.code == 1:
        yield f"no finding: {subject['status']}"
    if subject["error"] and "ERROR" not in must:
        yield f"error: {subject['error'][:200]}"
    text = json.dumps(report, ensure_ascii=False) + screen
    if fault.says and fault.says not in text:
        yield f"nothing says {fault.says!r}"


# Many runs


def every(cases: Sequence[Case], base: Path, jobs: int) -> Iterator[Answer]:
    """Run cases, some at a time, each below a process of its own."""
    waiting = list(enumerate(cases))[::-1]
    running: dict[int, tuple[Case, Path]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            number, case = waiting.pop()
            folder = base / f"kpfault-{os.getpid()}-{number}"
            folder.mkdir()
            pid = os.fork()
            if pid == 0:
                _cell(case, folder)
            running[pid] = (case, folder)
        pid, _ = os.wait()
        if pid not in running:
            continue
        case, folder = running.pop(pid)
        try:
            given = json.loads((folder / "answer").read_text())
            answer = Answer(
                case, **{name: value for name, value in given.items() if name != "case"}
            )
        except (OSError, ValueError):
            answer = Answer(case, ["no report: the process above the run ended"])
        if not (answer.wrong and KEEP):
            shutil.rmtree(folder, ignore_errors=True)
        yield answer


DISTRUST = False
"""Whether all runs are with that option."""
KEEP = False
"""Whether the folders of wrong answers stay."""


def _cell(case: Case, folder: Path) -> NoReturn:
    try:
        answer = run_case(case, folder)
    except BaseException:  # noqa: BLE001  it is the harness's own
        answer = Answer(case, [f"the harness failed: {traceback.format_exc()}"])
    (folder / "answer").write_text(json.dumps(answer.to_json()))
    os._exit(0)


# Random combinations

FATAL = (*kernels.EXCEPTIONS, *kernels.DEATHS, *kernels.MEMORY)
SLOW = {"use up its processor time", "a message of 10 MB", "allocate without end"}
OPERATIONS = ("paged_attention", "merge_state", "route", "moe", "build_metadata")
ALSO = ("route", "moe", "append_paged_kv", "build_metadata")
"""Operations of which the harness knows the laws' names."""


def at_random(count: int, seed: int) -> list[Case]:
    """Draw combinations of a fault, a point, a law and a bystander."""
    dice = random.Random(seed)  # noqa: S311  it draws tests
    return [_draw(dice, number) for number in range(count)]


def _draw(dice: random.Random, number: int) -> Case:
    operation = dice.choice(OPERATIONS)
    sort = dice.random()
    at = ""
    if sort < 0.45:  # something that ends a call, or hangs, at some point
        table = kernels.HANGS if dice.random() < 0.12 else FATAL
        name = dice.choice([row.name for row in table if row.name not in SLOW])
        at = dice.choice(("call", "call", "third", "supports", "import"))
    elif sort < 0.85:  # a wrong result beside something else that is odd
        odd = dice.choice(
            [row.name for row in (*kernels.LEFT, *kernels.PATCHES) if "100 MB" not in row.name]
        )
        name = f"{odd}+return wrong numbers"
        at = dice.choice(("call", "call", "third", "after", "import"))
    else:
        name = dice.choice([row.name for row in kernels.RESULTS])
        operation = "paged_attention"
    law = dice.choice([law.name for law in laws_of(operation) if not law.needs])
    return Case(
        name,
        at,
        operation,
        (law,),
        dice.choice(("merge_state", "paged_attention", "route", "build_metadata")),
        dice.random() < 0.5,
        number,
    )


def counts(answers: Sequence[Answer]) -> dict[str, int]:
    """Count the wrong answers by sort."""
    sorts = {"false pass": 0, "bystander": 0, "process left": 0, "left behind": 0, "no report": 0}
    for answer in answers:
        for sort in sorts:
            sorts[sort] += any(each.startswith(sort) for each in answer.wrong)
    return {**sorts, "wrong": sum(bool(answer.wrong) for answer in answers),
            "known": sum(bool(answer.known) for answer in answers)}  # fmt: skip


def main_of_harness() -> int:
    """Run what the command line asks for; 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--sample", type=int, nargs=2, metavar=("PART", "OF"))
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="keep every answer here")
    parser.add_argument("--keep", action="store_true", help="keep the folders of wrong answers")
    parser.add_argument("--distrust", action="store_true", help="with this option in every run")
    given = parser.parse_args()
    if given.runs:
        cases = at_random(given.runs, given.seed)
    else:
        cases = [Case(row.name) for row in kernels.FAULTS if row.sample or not given.sample]
    if given.sample:
        cases = cases[given.sample[0] :: given.sample[1]]
    if given.only:
        cases = [case for case in cases if any(re.search(each, case.name) for each in given.only)]
    globals().update(KEEP=given.keep, DISTRUST=given.distrust)
    hasten()
    read_ahead()
    gc.collect()
    gc.freeze()
    base = Path(tempfile.mkdtemp(prefix="kernelproof-faults-"))
    answers, began = [], time.monotonic()
    try:
        for answer in every(cases, base, given.jobs):
            answers.append(answer)
            _show(answer, len(answers), len(cases))
    except KeyboardInterrupt:
        _say("interrupted")
    finally:
        if not given.keep:
            shutil.rmtree(base, ignore_errors=True)
    return _summary(answers, given, time.monotonic() - began)


def _show(answer: Answer, number: int, total: int) -> None:
    case = answer.case
    where = ", ".join(filter(None, (case.at, case.operation, *case.laws)))
    word = "WRONG" if answer.wrong else "known" if answer.known else "right"
    came = f"exit {answer.code} {answer.finding}"[:60]
    name = f"{case.name} ({where})" if where else case.name
    took = f"{answer.seconds:.1f} s, cpu {answer.cpu:.1f}"
    _say(f"[{number}/{total}] {word} {name}: {came} ({took})")
    for each in answer.wrong:
        _say(f"    {each}")


def _say(line: str) -> None:
    sys.stdout.write(line.encode("ascii", "backslashreplace").decode() + "\n")
    sys.stdout.flush()


def _summary(answers: Sequence[Answer], given: argparse.Namespace, seconds: float) -> int:
    found: Counter[str] = Counter(counts(answers))
    cpu = sum(answer.cpu for answer in answers)
    told = ", ".join(f"{count} {sort}" for sort, count in found.items())
    _say(f"{len(answers)} runs in {seconds:.0f} s, {cpu:.0f} s of processor time: {told}")
    if given.json:
        kept = {
            "schema": "kernelproof/faults/1",
            "runs": len(answers),
            "seed": given.seed if given.runs else None,
            "seconds": round(seconds),
            "counts": dict(found),
            "answers": [answer.to_json() for answer in answers],
        }
        given.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    sys.exit(main_of_harness())
