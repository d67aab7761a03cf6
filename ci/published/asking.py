"""Asks processes that have a release of FlashInfer what they find of its published calls."""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any

from ..console.errors import MachineError

START = 240.0
"""Seconds in which a process has read its release."""


class Host:
    """One process with a release on its path.

    Raises:
        MachineError: if it cannot read the release.
    """

    def __init__(self, folder: str, device: str, seed: int) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by close
        asked, self._in = os.pipe()
        self._out, answered = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kernelproof.ci.published.host", device, str(seed)],
            stdin=asked,
            stdout=answered,
            stderr=self._errors,
            env=_environment(folder, device),
            start_new_session=True,
        )
        os.close(asked)
        os.close(answered)
        self._partial = b""
        said = self.read(START)
        if said is None:
            why = self.why()
            self.close()
            message = f"flashinfer cannot be read: {why}"
            raise MachineError(message)
        self.release: Mapping[str, Any] = said

    def ask(self, number: int, seconds: float) -> dict[str, Any] | None:
        """Return what is found of a call; None if the process ended or took longer."""
        with suppress(BrokenPipeError):
            os.write(self._in, f"{number}\n".encode())
        return self.read(seconds)

    def read(self, seconds: float) -> dict[str, Any] | None:
        """Return the next answer."""
        file, end = self._out, time.monotonic() + seconds
        while b"\n" not in self._partial:
            ready, _, _ = select.select([file], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            read = os.read(file, 1 << 20)
            if not read:
                return None
            self._partial += read
        line, _, self._partial = self._partial.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def why(self) -> str:
        """Return how the process ended, or that it goes on."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=1)
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            said = lines[-1][:160] if lines else ""
            return f"signal {-code}" if code < 0 else f"exit code {code}: {said}"
        return "no answer in time"

    def close(self) -> None:
        """End the process and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._errors.close()


def _environment(folder: str, device: str) -> dict[str, str]:
    found = dict(os.environ)
    path = [each for each in (folder, *sys.path[1:]) if each]
    found["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    if device == "cpu":
        found["TRITON_INTERPRET"] = "1"
    return found


def _next(waiting: queue.SimpleQueue[int]) -> int | None:
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None


def _ask(host: Host, number: int, call: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return what is found of a call, or that the process ended or took too long."""
    said = host.ask(number, max(1.0, seconds))
    return said or {**call, "problems": [], "state": "ended", "why": host.why()}


def _by_turns(chosen: Sequence[int], calls: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return calls so that neighbours are of different modules: those of one compile as one."""
    groups: dict[str, list[int]] = defaultdict(list)
    for number in chosen:
        groups[calls[number]["api"].rpartition(".")[0]].append(number)
    turns = [(place, number) for group in groups.values() for place, number in enumerate(group)]
    return [number for _, number in sorted(turns, key=lambda turn: turn[0])]


def judge_release(
    folder: str,
    device: str,
    *,
    seed: int = 0,
    names: Sequence[str] = (),
    jobs: int = 1,
    seconds: float = 60.0,
    end: float = float("inf"),
    tell: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Judge what a release publishes, several calls at a time.

    Args:
        folder: what to put first on the path; "": what is installed.
        names: parts of names; none: all.
        seconds: limit of one call.
        end: time of ``time.monotonic`` after which no call is begun.
        tell: called with each call that is judged.
    """
    with ThreadPoolExecutor(jobs) as starting:
        hosts = list(starting.map(lambda _: Host(folder, device, seed), range(jobs)))
    first = hosts[0]
    calls = first.release["calls"]
    chosen = [
        number
        for number, each in enumerate(calls)
        if not names or any(part in each["name"] or part in each["api"] for part in names)
    ]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in _by_turns([each for each in chosen if not calls[each]["lacks"]], calls):
        waiting.put(number)
    found: list[dict[str, Any]] = [
        {
            **calls[number],
            "problems": [],
            "state": "unasked",
            "why": f"no {calls[number]['lacks']} is published",
        }
        for number in chosen
        if calls[number]["lacks"]
    ]
    lock = threading.Lock()

    def work(host: Host | None) -> None:
        while time.monotonic() < end and (number := _next(waiting)) is not None:
            host = host or Host(folder, device, seed)
            said = _ask(host, number, calls[number], min(seconds, end - time.monotonic()))
            if said["state"] == "ended":
                host.close()
                host = None
            with lock:
                found.append(said)
                tell(said)
        if host is not None:
            host.close()

    threads = [threading.Thread(target=work, args=(each,)) for each in hosts]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    left = [calls[number]["name"] for number in iter(lambda: _next(waiting), None)]
    order = {each["name"]: place for place, each in enumerate(calls)}
    found.sort(key=lambda each: order[each["name"]])
    return {
        "flashinfer": first.release["version"],
        "device": device,
        "chip": first.release["chip"],
        "calls": found,
        "not begun": left,
    }
