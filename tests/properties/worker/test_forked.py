"""A task in a fork of a worker: what becomes of it, and that the worker stays."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kernelproof.properties.isolation.outcome import ABORTED_FOR_MEMORY, KILLED_FOR_MEMORY, Outcome
from kernelproof.properties.verdicts.specialising import Stages
from kernelproof.properties.worker import forked
from kernelproof.properties.worker.distrust import GARBLED
from kernelproof.properties.worker.forked import in_fork
from kernelproof.properties.worker.requests import verdict_of


class NoStages:
    """Stands for the stages of the worker, which a fork does not enter."""

    def stage(self, name: str) -> Any:  # noqa: ANN401  none is returned
        raise AssertionError(name)


def task(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
    """Do in the stage "run" what a test asks for."""
    with stages.stage("run"):
        if payload["do"] == "hang":
            time.sleep(600)
        elif payload["do"] == "abort":
            faulthandler.disable()  # pytest's
            os.abort()
        elif payload["do"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif payload["do"] == "become":
            os.execlp("sleep", "sleep", "600")  # noqa: S606, S607
        elif payload["do"] == "leave":
            os._exit(3)
        elif payload["do"] == "start":  # what is started holds the pipe of the answer open
            subprocess.Popen([sys.executable, "-c", ""], close_fds=False)
            return {"long": "x" * 200_000}
    return {"process": os.getpid()}


LIMITS = {"run": 60.0, "compile": 60.0}


def ended(do: str) -> dict[str, Any]:
    limits = {**LIMITS, "run": 0.3} if do == "hang" else LIMITS
    return in_fork(task, {"do": do, "limits": limits}, NoStages())


def test_another_process_answers() -> None:
    assert ended("answer")["process"] != os.getpid()
    assert len(ended("start")["long"]) == 200_000


@pytest.mark.parametrize(
    ("do", "outcome"),
    [
        ("hang", {"status": "hang", "kind": "run", "stage": "run", "limit": 0.3}),
        ("abort", {"status": "crash", "kind": "SIGABRT", "stage": "run"}),
        ("become", {"status": "crash", "kind": "closed its connection", "stage": "run"}),
        ("leave", {"status": "crash", "kind": "exit 3", "stage": "run"}),
    ],
)
def test_what_ends_or_never_does_is_an_outcome(
    do: str, outcome: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "CLOSING_SECONDS", 0.2)
    found = ended(do)["ended"]
    assert {name: found[name] for name in outcome} == outcome
    assert not found.get("starved")


def test_a_fork_that_the_kernel_ends_for_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "kills", itertools.count().__next__)
    found = ended("kill")["ended"]
    assert (found["kind"], found["starved"]) == (KILLED_FOR_MEMORY, True)
    assert found["memory"]["peak"] > 1 << 20
    verdict = verdict_of(Outcome("done", {"ended": found}))
    assert (verdict.status, verdict.kind) == ("UNSUPPORTED", "memory")


PRINTED = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_a"


def test_what_a_fork_has_printed_says_that_an_allocation_failed() -> None:
    outcome = Outcome("done", {"ended": {**ended("abort")["ended"]}}, stderr=PRINTED)
    assert verdict_of(outcome).kind == ABORTED_FOR_MEMORY  # without a limit
    assert verdict_of(replace(outcome, stderr="")).kind == "SIGABRT"


CRASHED = {"status": "crash", "kind": "SIGABRT", "stage": "run"}


@pytest.mark.parametrize(
    "forged",
    [
        {**CRASHED, "starved": True},
        {**CRASHED, "kind": "no such kind", "starved": True},
        {**CRASHED, "memory": {"limit": 10**9, "room": 10**400}},
        {**CRASHED, "memory": {"limit": 10**9, "need": -1}},
        {**CRASHED, "memory": {"limit": 1e9}},
        {**CRASHED, "stage": "no such stage"},
        {**CRASHED, "limit": -1.0},
        {**CRASHED, "status": "done"},
        {**CRASHED, "status": "error", "detail": "MemoryError"},
        {"status": "crash"},
    ],
    ids=str,
)
def test_what_no_fork_can_come_to_is_no_verdict(forged: dict[str, Any]) -> None:
    verdict = verdict_of(Outcome("done", {"ended": forged}, stderr=PRINTED))
    assert (verdict.status, verdict.kind) == ("CRASH", GARBLED)


@pytest.mark.parametrize("digits", [19, 20, 400, 5000])
def test_any_size_that_is_printed_can_be_read(digits: int) -> None:
    printed = f"memory allocation of {'9' * digits} bytes failed\n"
    assert verdict_of(Outcome("crash", kind="SIGABRT", stage="run", stderr=printed)).bad


def test_what_raises_does_so_in_the_worker() -> None:
    def raises(payload: Mapping[str, Any], stages: Stages) -> dict[str, Any]:
        del payload, stages
        raise MemoryError

    with pytest.raises(MemoryError):
        in_fork(raises, {"limits": LIMITS}, NoStages())
