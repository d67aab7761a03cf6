"""`kernelproof support --compile`: FlashInfer's own modules built for chips that are not here.

In parallel, and objects only: nothing is linked, loaded or run. The flags are FlashInfer's own.
What came of an object is remembered under the user's cache folder, so that an interrupted run goes
on where it was.
"""

from __future__ import annotations

import datetime as dt
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from ...impl.flashinfer.modules import BROKEN, GENERATED, Unit
from ...impl.gating.knowledge import Compilation, CompiledUnit
from ...impl.gating.rules import COMPILED, FAILED, INCOMPLETE, STUB, UNJUDGED
from ...impl.targets.cache import cache_folder
from ...impl.targets.capability import parse_capability
from ...impl.targets.data_files import read_json
from ...properties.findings.files import dumps, write_text
from ...properties.isolation.machine import cores
from ..console.errors import MachineError, UsageRefusedError
from ..console.outputs import Outputs
from ..releases.sandboxes import sandbox
from ..releases.subprocess_runner import STOPPED
from .generating import Job, Plan, Release, choose_units, plan_units, release_in
from .nvcc import COMPILES, FAILS, UNDECIDED, Compiled, Nvcc, compile_object, find_nvcc

DEADLINE_SECONDS = 600.0
"""Most seconds of compiling one object."""
TICK_SECONDS = 5.0
"""Between two lines of progress."""
AT_WORK = 2
"""Most objects being compiled that a line names."""

T = TypeVar("T")


@dataclass
class Work:
    """What is known while it runs. The lock guards what the threads change."""

    tell: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    running: dict[str, float] = field(default_factory=dict)
    ended: dict[str, Compiled] = field(default_factory=dict)

    @contextmanager
    def shown(self, title: str) -> Iterator[None]:
        """Name something in the lines of progress for the length of a with block."""
        with self.lock:
            self.running[title] = time.monotonic()
        try:
            yield
        finally:
            with self.lock:
                del self.running[title]

    def say(self, what: str) -> None:
        """Print a line, with the time."""
        self.tell(f"[{time.monotonic() - self.began:5.1f} s] {what}")

    def say_progress(self, what: str) -> None:
        """Print a line, with what has been at work longest."""
        with self.lock:
            longest = sorted(self.running.items(), key=lambda entry: entry[1])
        now = time.monotonic()
        shown = [f"{title} ({now - since:.0f} s)" for title, since in longest[:AT_WORK]]
        others = f" and {len(longest) - AT_WORK} more" if len(longest) > AT_WORK else ""
        self.say(f"{what}; at work: {', '.join(shown)}{others}" if shown else what)


def compile_support(
    releases: Sequence[str],
    chips: Sequence[str],
    *,
    units: Sequence[str] = (),
    outputs: Outputs | None = None,
    jobs: int = 0,
    deadline: float = DEADLINE_SECONDS,
    tell: Callable[[str], None] = lambda _: None,
) -> Compilation:
    """Find what is asked for, compile it, and write the records.

    Args:
        releases: the releases as ``sandbox`` takes them: versions, wheels, folders.
        chips: the chips as ``parse_capability`` reads them.
        units: names of ``impl.flashinfer.modules.UNITS``; all of them if empty.
        outputs: file of the records, named by ``--json``.
        jobs: compilers at a time; one a core, if 0.
        deadline: seconds that one object may take.
        tell: called with a line of progress every few seconds.

    Raises:
        UsageRefusedError: what is asked for does not exist, or the file cannot be written.
        SandboxError: a release cannot be had.
        MachineError: there is no nvcc, or nothing at all could be compiled.
    """
    chosen = choose_units(units)
    targets = list(dict.fromkeys(_chip(text) for text in chips))
    nvcc = find_nvcc()
    found = {release.version: release for release in (_release(text, tell) for text in releases)}
    command = ["kernelproof support --compile", ",".join(map(str, targets))]
    command += [f"--flashinfer {version}" for version in found]
    command += [f"--unit {unit.name}" for unit in chosen] if units else []
    evidence = compile_modules(
        list(found.values()),
        targets,
        chosen,
        nvcc=nvcc,
        jobs=jobs,
        deadline=deadline,
        tell=tell,
        command=" ".join(command),
    )
    (outputs or Outputs()).write({"--json": evidence.to_json})
    if evidence.records and all(record.status == UNJUDGED for record in evidence.records):
        message = f"nothing could be compiled: {evidence.records[0].message}"
        raise MachineError(message)
    return evidence


def _chip(text: str) -> int:
    try:
        return parse_capability(text)
    except ValueError as error:
        message = f"--compile: {error}"
        raise UsageRefusedError(message) from error


def _release(text: str, tell: Callable[[str], None]) -> Release:
    return release_in(sandbox(text, tell=tell))


def compile_modules(
    releases: Sequence[Release],
    chips: Sequence[int],
    units: Sequence[Unit],
    *,
    nvcc: Nvcc,
    jobs: int = 0,
    deadline: float = DEADLINE_SECONDS,
    tell: Callable[[str], None] = lambda _: None,
    command: str = "",
) -> Compilation:
    """Compile units of releases for chips; Ctrl-C ends it, and what is done is kept.

    Args:
        releases: FlashInfer in side folders.
        chips: compute capabilities times ten.
        units: what to compile.
        nvcc: the compiler.
        jobs: compilers at a time; one a core, if 0.
        deadline: seconds that one object may take.
        tell: called with a line of progress every few seconds.
        command: the command for the record.
    """
    work, plans, interrupted = Work(tell), list[Plan](), False
    with tempfile.TemporaryDirectory(prefix="kernelproof-sources-") as sources:
        pool = ThreadPoolExecutor(jobs or cores())
        try:
            plans += _generate(pool, work, releases, chips, units, nvcc, Path(sources))
            _compile(pool, work, plans, nvcc, deadline)
        except KeyboardInterrupt:
            interrupted = True
            work.say("interrupted: what is done is kept")
        finally:
            work.stop.set()
            pool.shutdown(cancel_futures=True)
    records = [record for plan in plans if (record := record_of(plan, work.ended)) is not None]
    return Compilation(
        nvcc=nvcc.version,
        date=dt.datetime.now(dt.timezone.utc).date().isoformat(),
        command=command,
        records=tuple(sorted(records, key=lambda record: record.order)),
        interrupted=interrupted,
    )


def _generate(
    pool: ThreadPoolExecutor,
    work: Work,
    releases: Sequence[Release],
    chips: Sequence[int],
    units: Sequence[Unit],
    nvcc: Nvcc,
    sources: Path,
) -> list[Plan]:
    def generate(release: Release, sm: int) -> list[Plan]:
        workspace = sources / release.version / str(sm)
        with work.shown(f"FlashInfer {release.version} SM{sm}"):
            return plan_units(release, sm, units, nvcc=nvcc, workspace=workspace, stop=work.stop)

    futures = [pool.submit(generate, release, sm) for release in releases for sm in chips]
    plans: list[Plan] = []
    for done in as_they_end(futures, lambda: work.say_progress("generating sources")):
        plans += done
    for message in dict.fromkeys(plan.message for plan in plans if plan.state == BROKEN):
        work.say(message)
    return plans


def _compile(
    pool: ThreadPoolExecutor, work: Work, plans: Sequence[Plan], nvcc: Nvcc, deadline: float
) -> None:
    # The longest first, so that none is left over at the end. Two chips may share an object.
    order = sorted(
        (job for plan in plans for job in plan.jobs),
        key=lambda job: (-job.unit.seconds, job.title, job.source),
    )
    distinct = {job.key: job for job in order}
    remembered = 0

    def compile_one(job: Job) -> tuple[Job, Compiled, bool]:
        known = recall(job.key)
        if known is not None:
            return job, known, True
        with work.shown(f"{job.title} {job.source}"):
            compiled = compile_object(
                nvcc,
                job.command,
                kernel=job.unit.kernel,
                deadline=deadline,
                stop=work.stop,
            )
        return job, compiled, False

    def progress() -> None:
        others = sum(each.state != COMPILES for each in work.ended.values())
        told = f"{len(work.ended)} of {len(distinct)} objects"
        told += f", {remembered} known from before" if remembered else ""
        work.say_progress(told + (f", {others} do not compile" if others else ""))

    futures = [pool.submit(compile_one, job) for job in distinct.values()]
    warned = ""
    for job, compiled, known in as_they_end(futures, progress):
        if compiled.message == STOPPED:
            continue
        work.ended[job.key] = compiled
        remembered += known
        if not known and (warning := remember(job.key, compiled)) != warned:
            warned = warning
            work.say(warning)
        if compiled.state != COMPILES:
            work.say(f"{job.title} {job.source}: {compiled.state}: {compiled.message}")
    progress()


def as_they_end(futures: Sequence[Future[T]], tick: Callable[[], None]) -> Iterator[T]:
    """Return results as they come, with a tick every few seconds."""
    pending, told = set(futures), time.monotonic()
    while pending:
        left = max(0.0, told + TICK_SECONDS - time.monotonic())
        done, pending = wait(pending, timeout=left, return_when=FIRST_COMPLETED)
        for each in done:
            yield each.result()
        if time.monotonic() >= told + TICK_SECONDS:
            tick()
            told = time.monotonic()


def record_of(plan: Plan, ended: Mapping[str, Compiled]) -> CompiledUnit | None:
    """Sum a unit's objects up; None where the run ended before all of them."""
    record = CompiledUnit(
        plan.release,
        plan.sm,
        plan.unit.name,
        UNJUDGED if plan.state == BROKEN else plan.state,
        plan.unit.feature,
        plan.architectures,
        message=plan.message,
    )
    if plan.state != GENERATED:
        return record
    found = [(job, ended[job.key]) for job in plan.jobs if job.key in ended]
    fails = [f"{job.source}: {each.message}" for job, each in found if each.state == FAILS]
    open_ = [f"{job.source}: {each.message}" for job, each in found if each.state == UNDECIDED]
    if len(found) < len(plan.jobs) and not fails:
        return None
    kernels = sum(each.kernels for _, each in found)
    stubs = sum(each.stubs for _, each in found)
    status, message = COMPILED, ""
    if fails:
        status, message = FAILED, fails[0]
    elif open_:
        status, message = UNJUDGED, open_[0]
    elif kernels == 0 and stubs:
        status = STUB
        message = f"it compiles, but each kernel that matches {plan.unit.kernel} only returns"
    elif kernels == 0:
        status = INCOMPLETE
        message = f"it compiles, but no kernel in it matches {plan.unit.kernel}"
    return replace(
        record,
        status=status,
        objects=len(found),
        kernels=kernels,
        seconds=round(sum(each.seconds for _, each in found), 1),
        message=message,
    )


def recall(key: str) -> Compiled | None:
    """Return what is remembered; None where there is nothing, or nothing that can be read."""
    try:
        return Compiled(**read_json(_file(key), ValueError))
    except (ValueError, TypeError):
        return None


def remember(key: str, compiled: Compiled) -> str:
    """Keep a result, unless it is the machine's fault; say why it could not be kept."""
    if compiled.state == UNDECIDED:
        return ""
    try:
        write_text(_file(key), dumps(asdict(compiled)))
    except OSError as error:
        return f"{cache_folder()}: nothing can be kept there ({error.strerror})"
    return ""


def _file(key: str) -> Path:
    return cache_folder() / "compile" / key[:2] / f"{key}.json"
