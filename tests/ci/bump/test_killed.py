"""A comparison that is killed at any moment leaves nothing running, and goes on to the same report.

Each round is a process of its own with real workers, killed with SIGKILL. It is forked from one
that has done its imports, so that the moments fall where something happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import IO, Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
PARTS, ROUNDS = 3, 4
IN_A_ROW = 4
"""Kills, each of a run that goes on from the one before, until one is let go on to its end."""
SEED = "KERNELPROOF_KILL_SEED"
"""Variable that repeats the moments of another run, whose seed was printed."""
LEFTOVER_SECONDS = 60.0
"""What dead processes may take to be gone; a machine with too much to do takes its time."""
GATE = [
    "gate", "--baseline", "old", "--candidate", "new", "--profile", "quick",
    "--law", "parity", "--law", "merge_union", "--law", "soak", "--soak", "5",
    "--implementation", "subject.py:merge", "--part", "behaviour", "--jobs", "1", "--sm", "cpu",
]  # fmt: skip
# Slow enough for moments to fall between calls.
SUBJECT = """
import time
import torch
import flashinfer
from kernelproof.impl import implementation


@implementation("merge_state", name="subject")
def merge(inputs):
    time.sleep(0.02)
    lse = torch.logsumexp(inputs.lses.double(), dim=0)  # of no keys: NaN, with both releases
    weights = torch.exp(inputs.lses.double() - lse).unsqueeze(-1)
    out = (weights * inputs.outs.double()).sum(dim=0)
    return out.to(inputs.out_dtype), lse.float() * flashinfer.SCALE
"""
# Forks a process for each line of words; says its number, and its status once it has ended.
ZYGOTE = """
import json, os, sys
import torch
import kernelproof.ci.bump.command
from kernelproof.ci.cli import main

print("ready", flush=True)
for line in sys.stdin:
    process = os.fork()
    if not process:
        os.setpgid(0, 0)
        with open("log", "ab") as log, open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0), os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        sys.exit(main(json.loads(line)))
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


class Gates:
    """Runs comparisons, one after the other."""

    def __init__(self, zygote: subprocess.Popen[bytes], folder: Path, mark: str) -> None:
        assert zygote.stdin is not None
        assert zygote.stdout is not None
        self._words: IO[bytes] = zygote.stdin
        self._told: IO[bytes] = zygote.stdout
        self._zygote, self._mark = zygote.pid, mark.encode()
        self.folder = folder

    def run(
        self, *more: str, kill_after: float | None = None, kill_at: int | None = None
    ) -> tuple[int, float]:
        """Run one and return its status and its seconds.

        Args:
            more: options.
            kill_after: seconds after which it is killed, unless it has ended.
            kill_at: lines of the journal at which it is killed, unless it has ended.
        """
        self._words.write(f"{json.dumps([*GATE, *more])}\n".encode())
        process, started = int(self._told.readline()), time.monotonic()
        if kill_at is not None:
            while self.lines() < kill_at and not self._ended(0.002):
                pass
            kill_after = 0.0
        if kill_after is not None and not self._ended(kill_after):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
                os.killpg(process, signal.SIGKILL)
        status = int(self._told.readline())
        return status, time.monotonic() - started

    def _ended(self, seconds: float) -> bool:
        """Whether the comparison ends within these seconds."""
        return bool(select.select([self._told], [], [], seconds)[0])

    def report(self, name: str) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / name).read_text())
        return report

    @property
    def journal(self) -> Path:
        return self.folder / ".kernelproof" / "gate" / "old-new-cpu.jsonl"

    def lines(self) -> int:
        return self.journal.read_bytes().count(b"\n") if self.journal.exists() else 0

    def left(self) -> dict[int, str]:
        """Return what a run has started and is still there, once it has had time to go."""
        until = time.monotonic() + LEFTOVER_SECONDS
        while (found := self._running()) and time.monotonic() < until:
            time.sleep(0.02)
        return found

    def _running(self) -> dict[int, str]:
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            # Gone since, somebody else's, or dead and only not reaped yet: its environment is gone.
            with contextlib.suppress(OSError):
                if self._mark in (folder / "environ").read_bytes():
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    found[int(folder.name)] = b" ".join(words)[:200].decode(errors="replace")
        found.pop(self._zygote, None)
        return found


@pytest.fixture(scope="module")
def gates(
    tmp_path_factory: pytest.TempPathFactory, made_up_release: Callable[[Path, str, str], None]
) -> Iterator[Gates]:
    """Two made-up releases, what both run, and the process that compares them."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "subject.py").write_text(SUBJECT)
    for name, version, scale in (("old", "9.9.1", "1"), ("new", "9.9.2", "1 + 2.0**-23")):
        code = f"__version__, SCALE = {version!r}, {scale}\n"
        made_up_release(folder / name, version, code)
    mark = f"KERNELPROOF_TEST_MARK={secrets.token_hex(8)}"
    zygote = subprocess.Popen(
        [sys.executable, "-c", ZYGOTE],
        cwd=folder,
        env=dict(pair.split("=", 1) for pair in [*map("=".join, os.environ.items()), mark]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    with zygote:
        assert zygote.stdout is not None
        assert zygote.stdout.readline() == b"ready\n"
        yield Gates(zygote, folder, mark)


class Undisturbed:
    """A run that nobody kills."""

    def __init__(self, gates: Gates) -> None:
        self.status, self.seconds = gates.run("--json", "whole.json")
        self.report, self.lines = gates.report("whole.json"), gates.lines()


@pytest.fixture(scope="module")
def undisturbed(gates: Gates) -> Undisturbed:
    return Undisturbed(gates)


def test_nothing_runs_on_when_a_gate_has_ended_or_was_killed(
    gates: Gates, undisturbed: Undisturbed
) -> None:
    assert undisturbed.lines > 10
    assert gates.left() == {}
    status, _ = gates.run(kill_after=undisturbed.seconds / 2)
    assert status == -signal.SIGKILL
    assert gates.left() == {}


@pytest.mark.parametrize("part", range(PARTS))
def test_a_gate_killed_at_any_moment_comes_to_the_same_report(
    part: int,
    gates: Gates,
    undisturbed: Undisturbed,
    settled: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    seed = int(os.environ.get(SEED, "0")) or secrets.randbelow(2**31)
    draw = Random(seed + part)  # noqa: S311  moments
    assert undisturbed.status == undisturbed.report["exit_code"] == 0
    found = [each["change"] for each in undisturbed.report["findings"]]
    assert found == ["still-failing", "bits-changed"]
    told = [f"{SEED}={seed}", f"{undisturbed.seconds:.2f} s, {undisturbed.lines} lines"]
    killed = in_a_row = partial = 0
    while killed < ROUNDS:
        when: dict[str, Any] = {"kill_after": draw.uniform(0.0, undisturbed.seconds)}
        if not killed:  # somewhere between two lines, however fast the machine is
            gates.journal.unlink(missing_ok=True)
            when = {"kill_at": draw.randrange(2, undisturbed.lines // 2)}
        status, _ = gates.run("--json", "r.json", *resumed(in_a_row), **when)
        assert gates.left() == {}, told
        kept = gates.lines()
        ended = status != -signal.SIGKILL
        if not ended:
            killed, in_a_row = killed + 1, in_a_row + 1
            partial += 1 < kept < undisturbed.lines
            told.append(f"{when}: {kept} lines")
            if in_a_row < IN_A_ROW and killed < ROUNDS and kept < undisturbed.lines:
                continue
            status, _ = gates.run("--json", "r.json", "--resume")
            assert gates.left() == {}, told
        again = gates.report("r.json")
        assert settled(again) == settled(undisturbed.report), told
        assert status == undisturbed.status, told
        if not ended:
            assert again["machines"][0]["timings"]["remembered"] >= kept - 1, told
        (gates.folder / "r.json").unlink()
        in_a_row = 0
    print("; ".join(told))  # noqa: T201  the seed repeats it
    assert partial > 0, told


def resumed(in_a_row: int) -> list[str]:
    """Return the option of a run that goes on from one that was killed."""
    return ["--resume"] if in_a_row else []
