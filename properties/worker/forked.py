"""Judging in a fork of a worker: what never ends there costs its deadline, but no new process.

A new worker takes seconds of a processor to import torch. Shrinking a hang, and trying it under
each law, would end dozens; a fork has everything imported. Only on a CPU: CUDA does not work in a
fork.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..isolation.kernel_kills import kills
from ..isolation.memory_use import peak_of
from ..isolation.outcome import CLOSED, KILLED_FOR_MEMORY, describe_exit
from ..isolation.stage_clock import StageClock
from ..isolation.stages import BOARD_BYTES, Board
from ..isolation.worker_main import Monitor
from ..verdicts.specialising import Stages

Task = Callable[[Mapping[str, Any], Stages], dict[str, Any]]
TICK_SECONDS = 0.02
"""Seconds between two checks of a fork that has not answered."""
CLOSING_SECONDS = 5.0
"""Most seconds from the end of a fork's answer to its own end."""
FAILED = b"null"
"""Answer of a fork whose task has raised an exception."""


def in_fork(task: Task, payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Return the result of a task that is done in a fork of this process.

    A task that raises there is done again in this process: the exception is the suite's.

    Args:
        task: what is done.
        payload: its argument; ``limits`` are the seconds of the stages that have a deadline.
        stages: the stages of this process, which stands still meanwhile.

    Returns:
        The result; where the fork was killed or died, fields of an ``Outcome`` as ``ended``.
    """
    with tempfile.TemporaryFile() as memory:
        memory.truncate(BOARD_BYTES)
        board = Board(memory.fileno())  # both processes have it mapped
    monitor = Monitor(board)
    answers, ours = os.pipe()
    child = os.fork()
    if child == 0:
        _do(task, payload, monitor, ours)
    os.close(ours)
    try:
        answer, ended = _followed(child, answers, board, payload["limits"])
    finally:
        os.close(answers)
        board.close()
    if answer == FAILED:
        return task(payload, stages)
    found: dict[str, Any] = {"ended": ended} if ended else json.loads(answer)
    return found


def _do(task: Task, payload: Mapping[str, Any], stages: Stages, answers: int) -> None:
    """Do a task, send its result and leave without the exit handlers of the code under test."""
    try:
        answer = json.dumps(task(payload, stages)).encode()
    except BaseException:  # noqa: BLE001  raised again in the parent
        answer = FAILED
    while answer:
        answer = answer[os.write(answers, answer) :]
    os._exit(0)


def _followed(
    child: int, answers: int, board: Board, limits: Mapping[str, float]
) -> tuple[bytes, dict[str, Any]]:
    """Return what a fork has sent, and fields of an ``Outcome`` where it did not send all."""
    answer, status, clock, peak, before = b"", None, StageClock(), 0, kills()
    while status is None or select.select([answers], [], [], 0)[0]:
        if select.select([answers], [], [], TICK_SECONDS)[0]:
            if not (read := os.read(answers, 1 << 16)):
                break
            answer += read
            continue
        # A process that the fork has started may hold the pipe open.
        ended, code, usage = os.wait4(child, os.WNOHANG)
        if ended:
            status, peak = code, peak_of(usage.ru_maxrss)
            continue
        stage, started = board.read()
        limit = limits.get(stage, math.inf)
        waited = clock.waited(child, stage, started, limit)
        if time.monotonic() - started / 1e9 - waited > limit:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return b"", {"status": "hang", "kind": stage, "stage": stage, "limit": limit}
    until = time.monotonic() + CLOSING_SECONDS
    while status is None:
        ended, code, usage = os.wait4(child, os.WNOHANG)
        if ended:
            status, peak = code, peak_of(usage.ru_maxrss)
        elif time.monotonic() > until:  # it became another program, which has no pipe
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return b"", {"status": "crash", "kind": CLOSED, "stage": board.read()[0]}
        else:
            time.sleep(TICK_SECONDS)
    if os.waitstatus_to_exitcode(status) == 0 and answer:
        return answer, {}
    kind = describe_exit(os.waitstatus_to_exitcode(status), for_memory=before != kills())
    died = {"status": "crash", "kind": kind, "stage": board.read()[0]}
    memory = {**vars(board.memory()), "peak": peak}
    return b"", {**died, "starved": kind == KILLED_FOR_MEMORY, "memory": memory}
