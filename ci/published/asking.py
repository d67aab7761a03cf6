"""Asks workers that have a release of FlashInfer what they find of its published calls."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...properties.isolation.outcome import Outcome
from ...properties.isolation.stages import Deadlines
from ...properties.isolation.workers import WorkerPool
from ...properties.worker.pools import open_pool
from ..console.errors import MachineError
from .host import HANDLER
from .known import known_text

START = 240.0
"""Seconds in which a worker has read its release."""
COMPILE = 900.0
"""Seconds in which a call has compiled."""
NO_MEMORY = "OutOfMemoryError"
"""What is raised where others hold the memory of a device."""
PARTS = ("empty", "graph")
"""Laws that are asked apart once a call is judged: what they end is no loss for others."""


@dataclass(frozen=True)
class Asked:
    """How a release is asked.

    Attributes:
        device: "cpu" or "cuda".
        seed: seed of inputs.
        problems: problems of each call; 0: as many as its seeded faults need.
        seconds: limit of one call and its reference, compilation not included.
        end: time of ``time.monotonic`` at which what runs is cut short.
    """

    device: str
    seed: int
    problems: int
    seconds: float
    end: float

    def deadlines(self) -> Deadlines:
        """Return the deadlines of a question that is asked now."""
        left = max(1.0, self.end - time.monotonic())
        one = min(self.seconds, left)
        compiling = min(COMPILE, left)
        return Deadlines(
            load=min(START, left), run=one, judge=one, compile=compiling, specialise=compiling
        )

    def found_of(self, pool: WorkerPool, number: int, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is found of a call; a part of it that ends its process is a finding."""
        question = {
            "device": self.device,
            "call": number,
            "seed": self.seed,
            "problems": self.problems,
        }
        with pool.lease(call["name"]) as worker:
            outcome = worker.run(question, self.deadlines())
            found = self._said(outcome, call)
            if found.get("lost"):
                worker.renew()
            parts = PARTS if found["state"] == "judged" and not found.get("lost") else ()
            for part in parts if self.device == "cuda" else parts[:1]:
                if time.monotonic() >= self.end:
                    break
                outcome = worker.run({**question, "part": part}, self.deadlines())
                said = self._said(outcome, call)
                if said.get("lost"):
                    worker.renew()
                found["problems"] += said["problems"]
                if "why" in said:
                    found["parts"] = {**found.get("parts", {}), part: said["why"]}
                found["findings"] += [
                    {"law": part, "why": each["why"]} for each in said.get("findings", ())
                ]
        return found

    def _said(self, outcome: Outcome, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a worker has answered, or how it ended."""
        if outcome.status == "done" and outcome.result is not None:
            found: dict[str, Any] = {"findings": [], **outcome.result}
            return {**found, "state": "ended"} if found["lost"] and not found["problems"] else found
        ended = {**call, "problems": [], "state": "ended", "findings": []}
        if time.monotonic() >= self.end:
            doing = "as it compiled" if outcome.stage == "specialise" else f"in {outcome.stage}"
            return {**ended, "why": f"cut short by the end of the run, {doing}"}
        why = f"{outcome.kind} in stage {outcome.stage} after {outcome.seconds:.0f} s"
        law = {"hang": "hangs", "crash": "crashes"}.get(outcome.status, "")
        if law and outcome.stage in ("run", "compile", "specialise"):
            ended["findings"] = [{"law": law, "why": why}]
        return {**ended, "why": why}


def _by_turns(chosen: Sequence[int], calls: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return calls so that neighbours are of different modules: those of one compile as one."""
    groups: dict[str, list[int]] = defaultdict(list)
    for number in chosen:
        groups[calls[number]["api"].rpartition(".")[0]].append(number)
    turns = [(place, number) for group in groups.values() for place, number in enumerate(group)]
    return [number for _, number in sorted(turns, key=lambda turn: turn[0])]


def _lacks_memory(said: Mapping[str, Any]) -> bool:
    whys = (said.get("why", ""), *(each["answer"].get("why", "") for each in said["problems"]))
    return any(NO_MEMORY in each for each in whys)


def _with_known(said: dict[str, Any], chip: int) -> dict[str, Any]:
    """Return a call with the text of each finding that is known."""
    answers = [each["answer"].get("findings", ()) for each in said["problems"]]
    for finding in (*said.get("findings", ()), *(each for group in answers for each in group)):
        if text := known_text(said["name"], finding["law"], finding["why"], chip):
            finding["known"] = text
    return said


def judge_release(
    folder: str,
    device: str,
    *,
    seed: int = 0,
    names: Sequence[str] = (),
    problems: int = 0,
    jobs: int = 1,
    seconds: float = 60.0,
    end: float = float("inf"),
    tell: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Judge what a release publishes, several calls at a time.

    Args:
        folder: what to put first on the path; "": what is installed.
        names: parts of names; none: all.
        problems: problems of each call; 0: as many as its seeded faults need.
        jobs: calls at a time.
        seconds: limit of one call.
        end: time of ``time.monotonic`` after which no call is begun.
        tell: called with each call that is judged.

    Raises:
        MachineError: if the release cannot be read.
    """
    asked = Asked(device, seed, problems, seconds, end)
    path = [folder, *sys.path] if folder else None
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    later: queue.SimpleQueue[int] = queue.SimpleQueue()
    lock = threading.Lock()
    with open_pool(device, size=jobs, handler=HANDLER, sys_path=path) as pool:
        release = _read(pool, asked)
        calls, chip = release["calls"], release["chip"]
        chosen = [
            number
            for number, each in enumerate(calls)
            if not names or any(part in each["name"] or part in each["api"] for part in names)
        ]
        found = [_lacking(calls[number]) for number in chosen if calls[number]["lacks"]]
        for number in _by_turns([each for each in chosen if not calls[each]["lacks"]], calls):
            waiting.put(number)

        def work(pool: WorkerPool, numbers: queue.SimpleQueue[int], *, alone: bool) -> None:
            while time.monotonic() < end and (number := _next(numbers)) is not None:
                try:
                    said = _with_known(asked.found_of(pool, number, calls[number]), chip)
                except Exception as error:  # noqa: BLE001  no call may be lost
                    why = f"the harness raises {type(error).__name__}: {error}"
                    said = {**_lacking(calls[number]), "state": "ended", "why": why}
                with lock:
                    if _lacks_memory(said) and not alone:
                        later.put(number)
                        continue
                    found.append(said)
                    tell(said)

        threads = [
            threading.Thread(target=work, args=(pool, waiting), kwargs={"alone": jobs == 1})
            for _ in range(jobs)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    if not later.empty() and time.monotonic() < end:
        with open_pool(device, handler=HANDLER, sys_path=path) as pool:
            work(pool, later, alone=True)
    left = [*iter(lambda: _next(waiting), None), *iter(lambda: _next(later), None)]
    order = {each["name"]: place for place, each in enumerate(calls)}
    found.sort(key=lambda each: order[each["name"]])
    return {
        "flashinfer": release["version"],
        "device": device,
        "chip": chip,
        "calls": found,
        "not begun": [calls[number]["name"] for number in left],
    }


def _lacking(call: Mapping[str, Any]) -> dict[str, Any]:
    why = f"no {call['lacks']} is published"
    return {**call, "problems": [], "findings": [], "state": "unasked", "why": why}


def _next(waiting: queue.SimpleQueue[int]) -> int | None:
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None


def _read(pool: WorkerPool, asked: Asked) -> dict[str, Any]:
    """Return what a release publishes.

    Raises:
        MachineError: if it cannot be read.
    """
    with pool.lease() as worker:
        outcome = worker.run({"device": asked.device}, asked.deadlines())
    if outcome.status == "done" and outcome.result is not None:
        return outcome.result
    lines = (outcome.detail or outcome.stderr or outcome.kind).strip().splitlines()
    message = f"flashinfer cannot be read: {lines[-1][:160] if lines else 'no answer'}"
    raise MachineError(message)
