"""Asks workers that have a release of FlashInfer what they find of its published calls."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ...fixtures.suggestions import did_you_mean
from ...properties.isolation.outcome import Outcome
from ...properties.isolation.stages import Deadlines
from ...properties.isolation.workers import Worker, WorkerPool
from ...properties.search.ending import Ending
from ..console.errors import MachineError, UsageRefusedError
from .known import On, known_text

START = 240.0
"""Seconds in which a worker has read its release."""
COMPILE = 900.0
"""Seconds in which a call has compiled."""
NO_MEMORY = "OutOfMemoryError"
"""What is raised where others hold the memory of a device."""
PARTS = ("empty", "graph", "far")
"""Laws that are asked apart once a call is judged: what they end is no loss for others."""
ACCUSING: Mapping[str, tuple[str, Sequence[str]]] = {
    "hang": ("hangs", ("run", "compile", "specialise")),
    "crash": ("crashes", ("run", "compile")),
}
"""Laws that the end of a process breaks, and the stages in which the call is its cause; what
crashes as it specialises is a compiler."""
Open = Callable[[int], AbstractContextManager[WorkerPool]]
"""Opens a number of workers that have a release on their path, and ``host.HANDLER``."""


class UnpublishedError(MachineError):
    """A release that publishes nothing, or that is not there."""


class NoTimeError(MachineError):
    """A release that was not read before the end of the run."""

    def __init__(self) -> None:
        super().__init__("no time was left for them")


@dataclass(frozen=True)
class Asked:
    """How a release is asked.

    Attributes:
        device: "cpu" or "cuda".
        seed: seed of inputs.
        problems: problems of each call; 0: as many as its seeded faults need.
        seconds: limit of one call and its reference, compilation not included.
        ending: the end of the run, at which what runs is cut short.
        known: whether settled findings are known.
    """

    device: str
    seed: int
    problems: int
    seconds: float
    ending: Ending
    known: bool = True

    def deadlines(self) -> Deadlines:
        """Return the deadlines of a question that is asked now."""
        left = max(1.0, self.ending.seconds_until(1.0))
        one = min(self.seconds, left)
        compiling = min(COMPILE, left)
        return Deadlines(
            load=min(START, left), run=one, judge=one, compile=compiling, specialise=compiling
        )

    def found_of(
        self, pool: WorkerPool, number: int, call: Mapping[str, Any], *, compiles: bool
    ) -> dict[str, Any]:
        """Return what is found of a call; a part of it that ends its process is a finding."""
        question = {
            "compile": compiles,
            "device": self.device,
            "call": number,
            "seed": self.seed,
            "problems": self.problems,
        }
        with pool.lease(call["name"]) as worker:
            outcome = self._asked(worker, question)
            found = self._said(outcome, call)
            if found.get("lost"):
                worker.renew()
            parts = PARTS if found["state"] == "judged" and not found.get("lost") else ()
            for part in parts if self.device == "cuda" else parts[:1]:
                if self.ending.over:
                    break
                outcome = self._asked(worker, {**question, "part": part})
                said = self._said(outcome, call)
                if said.get("lost"):
                    worker.renew()
                found["problems"] += said["problems"]
                if "module" in said:
                    found["module"] = said["module"]
                if "why" in said:
                    found["parts"] = {**found.get("parts", {}), part: said["why"]}
                found["findings"] += [
                    {"law": each["law"], "why": f"asked for {part}: {each['why']}"}
                    for each in said.get("findings", ())
                ]
        return found

    def _asked(self, worker: Worker, question: Mapping[str, object]) -> Outcome:
        """Ask a worker, which the end of the run may take away meanwhile."""
        try:
            return worker.run(question, self.deadlines())
        except RuntimeError:
            if not self.ending.over:
                raise
            return Outcome("error", kind="closed", stage="run")

    def _said(self, outcome: Outcome, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a worker has answered, or how it ended."""
        if outcome.status == "done" and outcome.result is not None:
            found: dict[str, Any] = {"findings": [], **outcome.result}
            return {**found, "state": "ended"} if found["lost"] and not found["problems"] else found
        ended = {**call, "problems": [], "state": "ended", "findings": []}
        if self.ending.over:
            doing = "as it compiled" if outcome.stage == "specialise" else f"in {outcome.stage}"
            return {**ended, "why": f"cut short by the end of the run, {doing}", "cut": True}
        why = f"{outcome.kind} in stage {outcome.stage} after {outcome.seconds:.0f} s"
        if outcome.starved:
            return {**ended, "why": f"{NO_MEMORY} of the host: {why}"}
        if outcome.kind == "overrun" and outcome.stage == "judge":
            return {**ended, "why": f"{why}: its reference may need more (--seconds)"}
        law, stages = ACCUSING.get(outcome.status, ("", ()))
        if outcome.stage in stages:
            ended["findings"] = [{"law": law, "why": why}]
        return {**ended, "why": why}


def _has(call: Mapping[str, Any], part: str) -> bool:
    """Whether a part of a name is one of a call's."""
    return part in call["name"] or part in call["api"]


def _by_turns(chosen: Sequence[int], groups: Mapping[int, str]) -> list[int]:
    """Return calls so that neighbours are of different groups: those of a module wait for one."""
    members: dict[str, list[int]] = defaultdict(list)
    for number in chosen:
        members[groups[number]].append(number)
    turns = [(place, number) for group in members.values() for place, number in enumerate(group)]
    return [number for _, number in sorted(turns, key=lambda turn: turn[0])]


def _lacks_memory(said: Mapping[str, Any]) -> bool:
    whys = [said.get("why", ""), *said.get("parts", {}).values()]
    whys += [each["answer"].get("why", "") for each in said["problems"]]
    return any(NO_MEMORY in each for each in whys)


def _with_known(said: dict[str, Any], on: On) -> dict[str, Any]:
    """Return a call with the text of each finding that is known."""
    answers = [each["answer"].get("findings", ()) for each in said["problems"]]
    for finding in (*said.get("findings", ()), *(each for group in answers for each in group)):
        if text := known_text(said["name"], finding["law"], finding["why"], on):
            finding["known"] = text
    return said


class Calls:
    """The calls of a release, and what is found of them.

    Args:
        asked: how they are asked.
        release: what the release publishes.
        names: parts of names; none: all.
        tell: called with each call that is judged, once.

    Raises:
        UsageRefusedError: a part is one of no call.
    """

    def __init__(
        self,
        asked: Asked,
        release: Mapping[str, Any],
        names: Sequence[str],
        tell: Callable[[dict[str, Any]], None],
    ) -> None:
        self.asked, self.tell = asked, tell
        self.release: Mapping[str, Any] = release
        self.calls: Sequence[Mapping[str, Any]] = release["calls"]
        for part in names:
            if not any(_has(each, part) for each in self.calls):
                meant = did_you_mean(part, [each["name"] for each in self.calls])
                message = f"{part}: {meant}no published call has that in its name"
                raise UsageRefusedError(message)
        self.chosen = [
            number
            for number, each in enumerate(self.calls)
            if not names or any(_has(each, part) for part in names)
        ]
        self.found = {n: _lacking(self.calls[n]) for n in self.chosen if self.calls[n]["lacks"]}
        self._told = set(self.found)
        self._lock = threading.Lock()

    def ask(self, pool: WorkerPool, jobs: int, numbers: Sequence[int], *, last: bool) -> None:
        """Ask calls, several at a time, until the end of the run.

        Args:
            pool: the workers.
            jobs: calls at a time.
            numbers: the calls, in turn.
            last: whether they are not asked again: modules are compiled.
        """

        def ask(number: int) -> None:
            if not self.asked.ending.over:
                self._keep(number, self._said(pool, number, compiles=last), last=last)

        with ThreadPoolExecutor(jobs) as threads:
            for _ in threads.map(ask, numbers):
                pass

    def _said(self, pool: WorkerPool, number: int, *, compiles: bool) -> dict[str, Any]:
        call = self.calls[number]
        try:
            said = self.asked.found_of(pool, number, call, compiles=compiles)
        except Exception as error:  # noqa: BLE001  no call may be lost
            why = f"the harness raises {type(error).__name__}: {error}"
            said = {**_lacking(call), "state": "ended", "why": why}
            if self.asked.ending.over:  # the pool was closed before it was asked
                said |= {"why": "cut short by the end of the run", "cut": True}
        on = On(self.release["chip"], self.release["version"])
        return _with_known(said, on) if self.asked.known else said

    def _keep(self, number: int, said: dict[str, Any], *, last: bool) -> None:
        with self._lock:
            before = self.found.get(number)
            if said.pop("cut", False) and before is not None:
                return
            if before is not None and before["problems"] and not said["problems"]:
                said = _beside(before, said)
            self.found[number] = said
            if not _lacks_memory(said) and (last or "module" not in said):
                self._tell(number)

    def _tell(self, number: int) -> None:
        self._told.add(number)
        self.tell(self.found[number])

    def tell_others(self) -> None:
        """Report the calls that waited to be asked again: they were not, or had no memory again."""
        for number in self.chosen:
            if number in self.found and number not in self._told:
                self._tell(number)

    def uncompiled(self) -> list[int]:
        """Return the calls that wait for a module, those of one module far apart."""
        modules = {n: each["module"] for n, each in self.found.items() if "module" in each}
        return _by_turns(sorted(modules), modules)

    def crowded(self) -> list[int]:
        """Return the calls for which there was no memory beside others."""
        return [number for number, each in self.found.items() if _lacks_memory(each)]

    def to_json(self) -> dict[str, Any]:
        """Return what is found of the calls."""
        missing: dict[str, list[str]] = defaultdict(list)
        for number in self.uncompiled():
            missing[self.found[number]["module"]].append(self.calls[number]["name"])
        return {
            "flashinfer": self.release["version"],
            "device": self.asked.device,
            "chip": self.release["chip"],
            "calls": [self.found[number] for number in self.chosen if number in self.found],
            "not compiled": {name: sorted(missing[name]) for name in sorted(missing)},
            "not begun": [self.calls[n]["name"] for n in self.chosen if n not in self.found],
        }


def _beside(before: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was found of a call, and how it ended when it was asked again."""
    kept = {key: each for key, each in before.items() if key != "module"}
    return {**kept, "why": said["why"], "findings": [*before["findings"], *said["findings"]]}


def judge_release(
    asked: Asked,
    opened: Open,
    *,
    names: Sequence[str] = (),
    jobs: int = 1,
    tell: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Judge what a release publishes, several calls at a time.

    Calls whose modules are compiled come first; then those that compile some; then, by themselves,
    those that lacked memory.

    Args:
        asked: how it is asked.
        opened: opens workers that have it.
        names: parts of names; none: all.
        jobs: calls at a time.
        tell: called with each call that is judged.

    Raises:
        UnpublishedError: it publishes nothing.
        NoTimeError: the run ends before it is read.
        MachineError: it cannot be read.
        UsageRefusedError: a part is one of no call.
    """
    with opened(jobs) as pool, asked.ending.closing(pool.close):
        calls = Calls(asked, read(pool, asked), names, tell)
        modules = {
            number: each["api"].rpartition(".")[0] for number, each in enumerate(calls.calls)
        }
        waiting = [number for number in calls.chosen if number not in calls.found]
        calls.ask(pool, jobs, _by_turns(waiting, modules), last=asked.device == "cpu")
        calls.ask(pool, jobs, calls.uncompiled(), last=True)
    if (crowded := calls.crowded()) and jobs > 1 and not asked.ending.over:
        with opened(1) as pool, asked.ending.closing(pool.close):
            calls.ask(pool, 1, crowded, last=True)
    calls.tell_others()
    return calls.to_json()


def _lacking(call: Mapping[str, Any]) -> dict[str, Any]:
    why = f"no {call['lacks']} is published"
    return {**call, "problems": [], "findings": [], "state": "unasked", "why": why}


def read(pool: WorkerPool, asked: Asked) -> dict[str, Any]:
    """Return what a release publishes.

    Raises:
        UnpublishedError: it publishes nothing.
        NoTimeError: the run ends before it is read.
        MachineError: it cannot be read.
    """
    try:
        with pool.lease() as worker:
            outcome = worker.run({"device": asked.device}, asked.deadlines())
    except RuntimeError as error:  # a pool that is closed at the end
        if not asked.ending.over:
            raise
        raise NoTimeError from error
    if outcome.status == "done" and outcome.result is not None:
        if why := outcome.result.get("unpublished"):
            raise UnpublishedError(str(why))
        return outcome.result
    if asked.ending.over:
        raise NoTimeError
    lines = (outcome.detail or outcome.stderr or outcome.kind).strip().splitlines()
    message = f"flashinfer cannot be read: {lines[-1][:160] if lines else 'no answer'}"
    raise MachineError(message)
