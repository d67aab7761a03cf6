"""Compile evidence: FlashInfer's own modules built for chips that are not here, in parallel.

Objects only: nothing is linked, loaded or run. The flags are FlashInfer's own. What came of an
object is remembered in a cache, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import datetime as dt
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from ...impl.flashinfer.modules import BROKEN, GENERATED, Unit
from ...impl.gating.compile_evidence import (
    COMPILED,
    FAILED,
    INCOMPLETE,
    UNJUDGED,
    Evidence,
    Record,
)
from ...properties.isolation.machine import cores
from ..releases.subprocess_runner import STOPPED
from .cache import recall, remember
from .generating import Job, Plan, Release, plan_units
from .nvcc import COMPILES, FAILS, UNDECIDED, Compiled, Nvcc, compile_object

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
) -> Evidence:
    """Compile units of releases for chips; Ctrl-C ends it, and what is done is kept.

    Args:
        releases: FlashInfer in side folders.
        chips: compute capabilities times ten.
        units: what to compile.
        nvcc: the compiler.
        jobs: compilers at a time; one a core, if 0.
        deadline: seconds that one object may take.
        tell: called with a line of progress every few seconds.
        command: for the record.
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
    return Evidence(
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
    for done in _as_they_end(futures, lambda: work.say_progress("generating sources")):
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
    for job, compiled, known in _as_they_end(futures, progress):
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


def _as_they_end(futures: Sequence[Future[T]], tick: Callable[[], None]) -> Iterator[T]:
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


def record_of(plan: Plan, ended: Mapping[str, Compiled]) -> Record | None:
    """Sum a unit's objects up; None where the run ended before all of them."""
    record = Record(
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
    status, message = COMPILED, ""
    if fails:
        status, message = FAILED, fails[0]
    elif open_:
        status, message = UNJUDGED, open_[0]
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
