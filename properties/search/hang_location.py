"""Where a call that never ends is stuck."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from ...reference import Problem
from ..isolation.workers import Deadlines
from ..laws import Law
from ..verdicts.verdict import Verdict
from ..worker.pools import open_pool
from .candidate import Candidate, warm_up
from .case_runner import CaseRunner

BLOCKING = "CUDA_LAUNCH_BLOCKING"
"""Variable with which a launch returns once its kernel has ended: the launcher of one that never
ends is still on the stack."""
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
THREAD = re.compile(r"^(Current thread|Thread) 0x")
PACKAGE = Path(__file__).parents[2]
NOT_THE_CODE_UNDER_TEST = ("torch", "triton", "tvm_ffi")
"""Top-level packages whose frames are skipped: they launch what others have written."""
LOAD_SECONDS = 30.0
Frame = tuple[str, str, str]
"""File, line and function."""


def where_stuck(runner: CaseRunner, problem: Problem, trace: str) -> str:
    """Return where a HANG is stuck; on a GPU, another run tells which launch never ends.

    What was learned is kept for other laws. After that run, the device is probed.
    """
    candidate = runner.candidate
    known, device = candidate.stuck, candidate.address.device
    if device == "cpu":
        if where := stuck_in(trace):  # in a fork there is no trace
            known[problem.id] = f"stuck in {where}"
    elif problem.id not in known:
        known[problem.id] = stuck_in_launch(candidate, runner.law, problem)
        runner.probe_device()
    return known.get(problem.id, "")


def place_of(candidate: Candidate, verdict: Verdict) -> str:
    """Return the function of the code under test in which a HANG is stuck; empty on a GPU.

    There the host waits in the same place whatever it waits for. The line in a loop is chance.
    """
    if candidate.address.device != "cpu" or verdict.status != "HANG":
        return ""
    frame = _innermost(verdict.trace)
    return f"{frame[2]} ({frame[0]})" if frame else ""


def stuck_in(trace: str) -> str:
    """Name the innermost frame of the code under test in a dump of stacks; empty if there is none.

    Args:
        trace: faulthandler's, innermost frames first, of one thread after another.

    Returns:
        For example ``_paged_run (prefill.py:2127)``.
    """
    if (frame := _innermost(trace)) is None:
        return ""
    file, line, name = frame
    return f"{name} ({Path(file).name}:{line})"


def _innermost(trace: str) -> Frame | None:
    """Return the file, line and function of the innermost frame of the code under test."""
    for thread in _threads(trace):
        # The suite called the implementation: frames above the suite's first are what it does.
        inside = next((i for i, (file, _, _) in enumerate(thread) if _is_suite(file)), 0)
        for frame in thread[:inside]:
            if not _is_machinery(frame[0]):
                return frame
    return None


def stuck_in_launch(candidate: Candidate, law: Law, problem: Problem) -> str:
    """Run a HANG once more in a process in which launches block, and say where that is stuck.

    Returns:
        A sentence for the finding; empty where nothing was learned.
    """
    environment = {**candidate.address.environment, BLOCKING: "1"}
    device = candidate.address.device
    with open_pool(device, standby=False, environment=environment) as pool, pool.lease() as worker:
        warm_up(worker, candidate)
        run = candidate.deadlines.of(problem).run
        first = run + LOAD_SECONDS
        deadlines = Deadlines(run=run, compile=first, specialise=first)
        outcome = worker.run(candidate.address.case(law.name, problem), deadlines)
    if outcome.status == "done":
        return f"it ends with {BLOCKING}=1"
    where = stuck_in(outcome.stack) if outcome.status == "hang" else ""
    return f"stuck in {where} with {BLOCKING}=1" if where else ""


def _threads(trace: str) -> list[list[Frame]]:
    """Return the frames of each thread, the one that got the signal first."""
    found: list[tuple[bool, list[Frame]]] = []
    for text in trace.splitlines():
        if started := THREAD.match(text):
            found.append((started[1] != "Thread", []))
        elif found and (frame := FRAME.match(text)):
            found[-1][1].append((frame["file"], frame["line"], frame["name"]))
    return [frames for current, frames in sorted(found, key=lambda each: not each[0])]


def _is_suite(file: str) -> bool:
    path = Path(file)
    return PACKAGE / "properties" in path.parents or path == PACKAGE / "impl" / "protocol.py"


def _is_machinery(file: str) -> bool:
    """Whether a file is of such a package, which others' folders may be named after."""
    parts = Path(file).parts
    return any(
        site in ("site-packages", "dist-packages") and package in NOT_THE_CODE_UNDER_TEST
        for site, package in itertools.pairwise(parts)
    )
