"""Builds the plan functions of a FlashInfer release, and asks them."""

from __future__ import annotations

import hashlib
import json
import mmap
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from ..binaries.flashinfer.building import (
    DRIVER_SOURCE,
    HOST,
    BuildError,
    build_driver,
    kept_library,
    run_compiler,
)
from ..compile.compiling import Work
from ..compile.generating import Release, release_in
from ..compile.nvcc import Nvcc, find_nvcc, shortened
from ..releases.sandboxes import quietly, sandbox
from .answers import UNWRITTEN, Answer
from .problems import DECODE, FA2, FA3, FLOAT_BYTES, INT_BYTES, MLA, PlanProblem

SOURCE, PROCESS = Path(__file__).with_name("planner.cu"), Path(__file__).with_name("host.py")
SCHEDULER = Path("include", "flashinfer", "attention", "scheduler.cuh")
PLANS = "plan functions"
GUARD_BYTES = 1 << 20
"""Bytes behind a workspace that a plan must not touch."""
ANSWER_SECONDS = 60
"""Longest time that a plan function may take: a plan takes milliseconds."""
FLAGS = (
    *("-std=c++17", "-O1", "-w", "-cudart", "none", "-Xcompiler", "-fPIC"),
    *("-gencode", "arch=compute_90a,code=compute_90a"),
)
"""Flags of the planner. Code for the device never runs, and so stays PTX."""
MARKS: Mapping[str, str] = {
    "uniform_q_len": "HAS_UNIFORM_ROWS",
    "staged_int_workspace_bytes": "RETURNS_STAGED_BYTES",
}
"""Macros of the planner, by the parameter of a plan function by which a release has it."""


def build_planner(
    release: Release, nvcc: Nvcc, *, tell: Callable[[str], None] = quietly
) -> tuple[Path, Path]:
    """Return the recording driver and a release's plan functions as libraries, built if need be.

    Raises:
        BuildError: the release has no such headers, or a compiler fails.
    """
    data = release.folder / "flashinfer" / "data"
    scheduler = data / SCHEDULER
    if not scheduler.is_file():
        message = f"flashinfer {release.version} has no {SCHEDULER.name} in its data"
        raise BuildError(message)
    driver = build_driver(nvcc)
    digest = hashlib.sha256(f"{nvcc.version} {FLAGS} {HOST}".encode())
    headers = sorted((data / "include").rglob("*.*h"))
    for source in (SOURCE, DRIVER_SOURCE, *headers):
        digest.update(source.read_bytes())
    text = scheduler.read_text(encoding="utf-8")
    macros = [f"-D{macro}" for mark, macro in MARKS.items() if mark in text]

    def build(into: Path) -> None:
        work = Work(tell)
        work.say(f"building the plan functions of flashinfer {release.version} (once)")
        ccl = [f"-I{data / 'cccl' / part}" for part in ("libcudacxx/include", "cub", "thrust")]
        words = [str(nvcc.path), *FLAGS, *ccl, f"-I{data / 'include'}", *macros]
        target = str(into / "planner.o")
        run_compiler([*words, "-c", str(SOURCE), "-o", target], into, work, PLANS)
        link = [*HOST, target, str(driver), "-Wl,-z,defs", "-o", str(into / "planner.so")]
        run_compiler(link, into, work, PLANS)

    name = f"plans-{release.version}-{digest.hexdigest()[:16]}"
    return driver, kept_library(name, "planner.so", build)


class ReleasedPlanner:
    """A release's plan functions, in a process of their own that is started again when it ends."""

    def __init__(self, version: str, driver: Path, planner: Path) -> None:
        self.version = version
        self._libraries = (str(driver), str(planner))
        self._scratch = tempfile.TemporaryDirectory(prefix="kernelproof-plans-")
        names = [Path(self._scratch.name, name) for name in ("integers", "staged")]
        self._files = [str(name) for name in names]
        self._fresh = bytes([UNWRITTEN]) * (INT_BYTES + GUARD_BYTES)
        self._memories = []
        for name in names:
            name.write_bytes(self._fresh)
            with name.open("r+b") as file:
                self._memories.append(mmap.mmap(file.fileno(), 0))
        self._process: subprocess.Popen[str] | None = None
        self._late = threading.Event()

    def close(self) -> None:
        """End the process, and remove the workspaces."""
        self._end()
        for memory in self._memories:
            memory.close()
        self._scratch.cleanup()

    def plan(self, problem: PlanProblem, *, after: PlanProblem | None = None) -> Answer:
        """Plan a problem into fresh workspaces, or into those that another was planned into."""
        for memory in self._memories:
            memory[:] = self._fresh
        if after is not None:
            self._ask(after)
            for memory in self._memories:  # what lies behind them is judged of the last plan only
                memory[INT_BYTES:] = self._fresh[INT_BYTES:]
        found = self._ask(problem)
        if found is None:
            late = f"it did not answer within {ANSWER_SECONDS} s" if self._late.is_set() else ""
            return Answer(died=True, error=late)
        if "error" in found:
            return Answer(error=shortened(found["error"]))
        spilled = any(memory[INT_BYTES:] != self._fresh[INT_BYTES:] for memory in self._memories)
        return Answer(tuple(found["info"]), self._memories[0][:INT_BYTES], spilled)

    def _ask(self, problem: PlanProblem) -> dict[str, Any] | None:
        """Return what the process answers; None where it ends."""
        process = self._process or self._start()
        asks, answers = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)
        watch = threading.Timer(ANSWER_SECONDS, self._end_late, (process,))
        watch.start()
        try:
            asks.write(json.dumps(question_of(problem)) + "\n")
            asks.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        finally:
            watch.cancel()
        if not line:
            told = self._end()
            if process.returncode > 0:  # our own code: a fault of the release is a signal
                raise self._error(told)
            return None
        found: dict[str, Any] = json.loads(line)
        return found

    def _end_late(self, process: subprocess.Popen[str]) -> None:
        self._late.set()
        process.kill()

    def _start(self) -> subprocess.Popen[str]:
        self._late.clear()
        self._process = process = subprocess.Popen(
            [sys.executable, "-I", str(PROCESS), *self._libraries, *self._files],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if not cast("IO[str]", process.stdout).readline():
            raise self._error(self._end())
        return process

    def _error(self, told: str) -> BuildError:
        lines = told.strip().splitlines() or ["its process ends silently"]
        message = f"the plan functions of flashinfer {self.version} do not load: {lines[-1]}"
        return BuildError(shortened(message))

    def _end(self) -> str:
        """End the process, which may have ended, and return what it wrote of errors."""
        process, self._process = self._process, None
        if process is None:
            return ""
        with suppress(BrokenPipeError):
            cast("IO[str]", process.stdin).close()
        process.stdin = None
        _, told = process.communicate()
        return told


def open_planner(given: str, *, tell: Callable[[str], None] = quietly) -> ReleasedPlanner:
    """Return the plan functions of a release.

    Args:
        given: a version, a wheel or a folder, see ``sandbox``.
        tell: function that is called with a line of progress now and then.

    Raises:
        MachineError: there is no nvcc, or it fails.
        SandboxError: the release cannot be had.
    """
    nvcc = find_nvcc()
    release = release_in(sandbox(given, tell=tell))
    return ReleasedPlanner(release.version, *build_planner(release, nvcc, tell=tell))


def question_of(problem: PlanProblem) -> dict[str, Any]:
    """Return the call of a problem, as the planner's functions take it."""
    queries, pages, kv_lens = problem.query_starts, problem.page_starts, problem.kv_lens
    shape = [len(kv_lens), problem.num_qo_heads, problem.num_kv_heads, problem.page_size]
    shape += [int(problem.graph)]
    wide = [*shape, problem.head_dim_qk or problem.head_dim, problem.head_dim]
    wide += [problem.kv_bytes, problem.graph_rows]
    calls = {
        DECODE: ([pages], [*shape, problem.head_dim, problem.kv_bytes]),
        FA2: (
            [queries, pages],
            [
                *wide, problem.window_left, problem.fixed_split or -1, int(not problem.split),
                problem.promised_rows,
            ],
        ),
        FA3: ([queries, pages, kv_lens], [*wide, int(problem.causal)]),
        MLA: (
            [queries, pages, kv_lens],
            [len(kv_lens), problem.num_qo_heads, int(problem.causal), problem.head_dim],
        ),
    }  # fmt: skip
    arrays, numbers = calls[problem.kind]
    return {
        "function": f"plan_{problem.kind}",
        "arrays": [list(each) for each in arrays],
        "numbers": numbers,
        "integer_bytes": INT_BYTES,
        "float_bytes": FLOAT_BYTES,
        "multiprocessors": problem.multiprocessors,
        "blocks": problem.blocks,
    }
