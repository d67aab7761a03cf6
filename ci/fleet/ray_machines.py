"""The machines of a Ray cluster: which there are, and units as tasks that find them by labels."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ...fixtures.suggestions import how_to_install
from ..console.errors import MachineError, UsageRefusedError
from ..console.signals import ENDINGS
from .ray_tasks import Bus, carry_out
from .shipping import Facts, look, packed
from .units import GRACE_SECONDS, Event, Job, Unit, UnitResult

CONNECT_SECONDS, JOIN_SECONDS = 5.0, 60.0
"""Seconds within which the address must answer, and Ray must have connected."""
LOOK_SECONDS = 120.0
"""Seconds within which a machine must say what it can run; its first import of torch takes some."""
RETRIES = 3
"""Times that Ray runs a unit again whose machine or process died."""
FRESH_SECONDS = 1.0
"""Seconds for which a list of machines from Ray is used again."""
ANSWER_SECONDS = 10.0
"""Seconds within which the bus must answer."""
NODE_ID = "ray.io/node-id"
"""The label by which Ray knows each machine."""
SEE_GPUS = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
"""Ray's variable without which older versions hide GPUs from tasks that need none, as `look`."""
CHIP = re.compile(r"sm\d+")
"""Custom resources that name the chip of a machine."""


@dataclass(frozen=True)
class Node:
    """A machine that can be used.

    Attributes:
        id: Ray's.
        chip: its kind.
        units: how many run on it at a time.
        share: the share of a GPU, for each.
        cores: the cores that those which run share.
        identity: what results depend on of it, as JSON.
    """

    id: str
    chip: str
    units: int
    share: float
    cores: int
    identity: str = ""


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a cluster for the length of a with block.

    Raises:
        UsageRefusedError: Ray is not installed, or the address is none.
        MachineError: no cluster answers there, or one of other versions.
    """
    try:
        import ray
    except ImportError as error:
        message = f"--ray needs Ray: {how_to_install('ray')} brings it"
        raise UsageRefusedError(message) from error
    _check(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with TemporaryDirectory(prefix="kernelproof-") as folder:
        environment = {"py_modules": packed(Path(folder)), "env_vars": {SEE_GPUS: "0"}}
        options = {"runtime_env": environment, "log_to_driver": False}
        failed: list[BaseException] = []

        def join() -> None:
            try:
                ray.init(address, logging_level="ERROR", **options)
            except BaseException as error:  # noqa: BLE001  the other thread reports it
                failed.append(error)

        # Something else that listens there would be waited for without end.
        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        thread.join(JOIN_SECONDS)
        if thread.is_alive() or failed:
            why = _sentence(failed[0]) if failed else f"Ray did not connect in {JOIN_SECONDS:.0f} s"
            message = f"--ray {address}: {why}"
            raise MachineError(message) from (failed[0] if failed else None)
        if threading.current_thread() is threading.main_thread():
            # In front of Python's handlers Ray puts one that prints where each signal came.
            for number in ENDINGS:
                signal.signal(number, signal.getsignal(number))
        try:
            yield
        finally:
            ray.shutdown()


def _check(address: str) -> None:
    """Refuse an address at which nothing answers, which Ray would wait for."""
    if address == "auto":
        return
    found = re.fullmatch(r"(?:ray://)?([\w.-]+|\[[\da-fA-F:]+\]):(\d{1,5})", address)
    if found is None or int(found[2]) >= 1 << 16:
        message = f"--ray {address}: must be auto, HOST:PORT or ray://HOST:PORT"
        raise UsageRefusedError(message)
    try:
        place = found[1].strip("[]"), int(found[2])
        socket.create_connection(place, timeout=CONNECT_SECONDS).close()
    except OSError as error:
        message = f"--ray {address}: nothing answers there ({error.strerror or error})"
        raise MachineError(message) from error


def _sentence(error: BaseException) -> str:
    """Return an error of Ray as one line, with the versions where they differ."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and "ersion mismatch" in str(error):
        return " ".join(lines[:8])
    return lines[0] if lines else type(error).__name__


def compilers_each(nodes: Sequence[Node], running: int) -> int:
    """Return the compilers that each of these running units may start, spread over the nodes."""
    each = math.ceil(running / len(nodes))
    return min(node.cores // min(each, node.units) for node in nodes)


def _among(nodes: Sequence[Node]) -> dict[str, str]:
    """Return what Ray is to look for in the labels of a machine, which must be one of these."""
    return {NODE_ID: f"in({','.join(node.id for node in nodes)})"}


class RayMachines:
    """The machines of the cluster that this process is connected to: a scheduler's pool.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        jobs: units at a time, on a GPU or on a machine without; as usual if 0.

    Raises:
        MachineError: there is none that can be used.
    """

    def __init__(self, device: str, jobs: int = 0) -> None:
        import ray

        self._ray, self._device, self._jobs = ray, device, jobs
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        self._nodes = list(self._find(here))
        if not self._nodes:
            message = f"no machine of the cluster can be used with --device {device}"
            raise MachineError(message)
        self.chips: Sequence[str] = sorted({node.chip for node in self._nodes})
        own = [each for each in self._nodes if each.id == ray.get_runtime_context().get_node_id()]
        # The driver's machine may lack what units need, and so what they say.
        self._bus = (
            ray.remote(Bus)
            .options(num_cpus=0, max_restarts=-1, label_selector=_among(own or self._nodes))
            .remote()
        )
        self._task, self._told = ray.remote(carry_out), None
        self._closed = False
        self._looked, self._alive = 0.0, {node.id for node in self._nodes}

    def _find(self, strategy: Any) -> Iterator[Node]:  # noqa: ANN401  a class of Ray's
        """Ask all machines at once; say on stderr which are left out, and why."""
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        task = self._ray.remote(num_cpus=0, max_retries=0)(look)
        asked = [
            task.options(scheduling_strategy=strategy(node["NodeID"], soft=False)).remote(
                self._device
            )
            for node in nodes
        ]
        self._ray.wait(asked, num_returns=len(asked), timeout=LOOK_SECONDS)
        for node, answer in zip(nodes, asked, strict=True):
            resources = node["Resources"]
            cores, gpus = (int(resources.get(name, 0)) for name in ("CPU", "GPU"))
            count = gpus if self._device == "cuda" else cores
            facts = self._facts(answer, "CPU" if not cores else "GPU" if not count else "")
            if facts.refusal:
                place = node["NodeManagerAddress"]
                sys.stderr.write(f"kernelproof: machine {place} is left out: {facts.refusal}\n")
                continue
            named = next(filter(CHIP.fullmatch, resources), None)
            chip = named or (f"sm{facts.sm}" if facts.sm else "cpu")
            if self._device == "cuda":
                jobs = self._jobs or facts.jobs
                units, share = min(count * jobs, cores), int(1e4 / jobs) / 1e4
            else:
                units, share = min(self._jobs or cores, cores), 0.0
            identity = json.dumps(facts.identity, sort_keys=True)
            yield Node(node["NodeID"], chip, units, share, cores, identity)

    def _facts(self, answer: Any, lacking: str) -> Facts:  # noqa: ANN401  Ray's reference
        if lacking:
            return Facts(f"it offers Ray no {lacking}")
        try:
            facts: Facts = self._ray.get(answer, timeout=0)
        except self._ray.exceptions.GetTimeoutError:
            return Facts(f"it did not say in {LOOK_SECONDS:.0f} s what it can run")
        except self._ray.exceptions.RayError as error:
            return Facts(_sentence(error))
        ours = platform.python_version_tuple()[:2]
        if not facts.refusal and tuple(facts.python.split("."))[:2] != ours:
            return Facts(f"it has Python {facts.python}, this command {platform.python_version()}")
        return facts

    def identities(self, chip: str) -> list[Any]:
        """Return what results depend on of a chip's machines, once where they do not differ."""
        every = {each.identity for each in self._nodes if each.chip == chip}
        return [json.loads(each) for each in sorted(every)]

    def start(self, job: Job) -> None:
        """Send the job, which all units share, once."""
        self._job = self._ray.put(job)

    def _usable(self, chip: str, node: str = "") -> list[Node]:
        """Return the machines of a chip; only the named one where it is alive."""
        every = [each for each in self._nodes if each.chip == chip and each.id in self._alive]
        return [each for each in every if each.id == node] or every

    def _look(self) -> None:
        """Ask Ray which machines are alive."""
        now = time.monotonic()
        if now - self._looked > FRESH_SECONDS:
            self._looked = now
            self._alive = {each["NodeID"] for each in self._ray.nodes() if each["Alive"]}

    def places(self, chip: str, node: str = "") -> int:
        """Count the units that a chip's machines carry out at a time; 0 where none is left.

        Where a machine is named, those of that one; where it is gone, those of the others.
        """
        return sum(each.units for each in self._usable(chip, node))

    def carry_out(self, unit: Unit, beside: int) -> UnitResult | None:
        """Return what a unit has learned, from any thread; None where its machine is gone.

        A chip's machines share its units evenly, as far as Ray can.

        Args:
            unit: the unit.
            beside: units of its chip that share the cores of its machines, this one included.

        Raises:
            CancelledError: the machines were closed.
            MachineError: the unit failed.
        """
        every = self._usable(unit.chip)
        if not every:
            return None
        nodes = [each for each in every if each.id == unit.node] or every
        task = self._task.options(
            num_cpus=1,
            num_gpus=min(node.share for node in nodes),
            max_retries=RETRIES,
            label_selector=_among(nodes),
            scheduling_strategy="SPREAD",
        ).remote(self._job, unit, self._bus, compilers_each(every, beside))
        while not self._ray.wait([task], timeout=FRESH_SECONDS)[0]:
            self._look()
            gone = not any(each in nodes for each in self._usable(unit.chip))
            if self._closed or gone:  # a task without a machine waits for ever
                self._ray.cancel(task, force=True)
                if self._closed:
                    raise CancelledError
                return None
        try:
            result: UnitResult = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            raise MachineError(_sentence(getattr(error, "cause", error))) from error
        return result

    def lease(self, owner: str) -> AbstractContextManager[RayMachines]:
        """Return the machines: a unit has waited in the queue until there was a place for it."""
        del owner
        return nullcontext(self)

    def close(self) -> None:
        """End the units under way."""
        self._closed = True

    def once_a_chip(
        self,
        work: Callable[..., Any],
        given: Mapping[str, Sequence[object]],
        heard: Callable[[Event], object],
        ended: Callable[[], str],
    ) -> dict[str, Any]:
        """Carry out work on a machine of each chip, which it has to itself.

        Args:
            work: function that is called with the bus, by which it reports what it does, the chip,
                and what is given.
            given: its further arguments by chip.
            heard: function that is called with whatever work reports; work does so when it begins.
            ended: why work is to end soon, one of ``ENDINGS``; empty before.

        Returns:
            By chip, the answer; a ``MachineError`` where there is no machine left, the work failed,
            or it had to end before it answered.
        """
        begun = {}
        for chip in self.chips:
            nodes = self._usable(chip)
            task = self._ray.remote(work).options(
                num_cpus=min(node.cores for node in nodes),
                num_gpus=int(self._device == "cuda"),
                max_retries=RETRIES,
                label_selector=_among(nodes),
            )
            begun[task.remote(self._bus, chip, *given[chip])] = chip
        answers: dict[str, Any] = {}
        at_work: set[str] = set()
        until = math.inf
        while begun:
            self._look()
            done, _ = self._ray.wait(list(begun), timeout=FRESH_SECONDS)
            for task in done:
                chip = begun.pop(task)
                answers[chip] = self._answer(chip, task)
            for event in self.events():
                at_work.add(event.unit.chip)
                heard(event)
            if ended() and until == math.inf:
                until = time.monotonic() + GRACE_SECONDS
                self.end(ended())
            for task in list(begun):
                chip, late = begun[task], time.monotonic() > until
                idle = until < math.inf and chip not in at_work
                if why := self._why_none(chip, idle=idle, late=late):
                    self._ray.cancel(task, force=True)
                    del begun[task]
                    answers[chip] = MachineError(f"{chip}: {why}")
        return {chip: answers[chip] for chip in self.chips}

    def _why_none(self, chip: str, *, idle: bool, late: bool) -> str:
        """Return why no answer of a chip is waited for any more; empty while one is."""
        reasons = {
            "its last machine is gone": not self._usable(chip),
            "it had not begun": idle,
            f"it did not report in {GRACE_SECONDS:.0f} s": late,
        }
        return next((why for why, holds in reasons.items() if holds), "")

    def _answer(self, chip: str, answer: Any) -> Any:  # noqa: ANN401  Ray's reference, the work's
        try:
            return self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            return MachineError(f"{chip}: {_sentence(getattr(error, 'cause', error))}")

    def events(self) -> list[Event]:
        """Return what units have said since the last call."""
        # An answer that is late is waited for again: the bus no longer has what it holds.
        self._told = self._told or self._bus.take.remote()
        try:
            told: list[Event] = self._ray.get(self._told, timeout=ANSWER_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            return []
        except self._ray.exceptions.RayError:  # what is shown is no result
            told = []
        self._told = None
        return told

    def end(self, why: str) -> None:
        """Have units under way end soon; ``why`` is one of ``ENDINGS``."""
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(self._bus.end.remote(why), timeout=ANSWER_SECONDS)

    def leave(self, node: str) -> None:
        """Stop using a machine that has lost its device."""
        self._nodes = [each for each in self._nodes if each.id != node]
