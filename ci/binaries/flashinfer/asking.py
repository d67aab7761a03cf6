"""Asks a FlashInfer release, on chips that need not be here, which kernels it would launch."""

from __future__ import annotations

import json
import os
import re
import signal as signals
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ....impl.gating import Feature
from ....impl.gating.selections import RAISES, RAISES_FOR_SOME, RUNS
from ....properties.isolation.machine import cores
from ...compile.compiling import Work, as_they_end
from ...compile.generating import Release
from ...compile.nvcc import shortened
from ...console.errors import MachineError
from ...releases.sandboxes import quietly
from ...releases.subprocess_runner import run_to_end
from .building import Build
from .kernels import KernelList
from .questions import AnyCall, calls_of

CHIPS: Mapping[int, int] = {100: 148, 103: 148}
"""Multiprocessors by chip. The selection counts how many clusters fit into them."""
SHARED_MEMORY = 232448
"""Most bytes of shared memory that a block may have on each of ``CHIPS``."""
DIES, NOT_ASKED = "host dies", "not asked"
OUTCOMES = (RUNS, RAISES, RAISES_FOR_SOME, DIES, NOT_ASKED)
"""What becomes of a kind of call: all of its calls launch a kernel; none does; some do not; the
process ends in the selection; this machine lacks a module, or the GPU whose tensors it wants."""
LACKS = re.compile(r"(ModuleNotFound|Import)Error: |.* must be a CUDA tensor")
"""Errors that say what the machine lacks, and nothing of the release."""
DEADLINE_SECONDS = 1200.0
"""Most seconds of one process, over all kinds that it is asked about."""
LAUNCHER_ERROR = re.compile(r"Error in function '(\w+)' at [^:]*:\d+: ")
HOST = f"{__package__}.host"


class HostError(MachineError):
    """A release that cannot be asked; the message says why in one sentence."""


@dataclass(frozen=True)
class Answer:
    """What one call launches, or why it does not.

    Attributes:
        call: the call.
        kernel: name of the precompiled kernel; empty where none is launched.
        grid, cluster, block: the launch: blocks in x, y and z, blocks a cluster, threads a block.
        shared: dynamic shared memory in bytes.
        reduces: whether a second kernel merges the parts of split keys.
        error: the release's own error, or what the chip's limits refuse; empty where it runs.
        before: what the call launches before it: the first GEMM of a MoE.
    """

    call: AnyCall
    kernel: str = ""
    grid: tuple[int, ...] = ()
    cluster: int = 0
    block: int = 0
    shared: int = 0
    reduces: bool = False
    error: str = ""
    before: tuple[Answer, ...] = ()

    @property
    def launches(self) -> tuple[Answer, ...]:
        """All precompiled kernels that the call launches, in their order."""
        return (*self.before, self)


@dataclass(frozen=True)
class Selection:
    """The answers to the calls of one kind on one chip.

    Attributes:
        feature: the kind of call.
        sm: the chip.
        answers: an answer a call; none where the host died.
        signal: the signal that ended the host; 0 where it lived.
    """

    feature: Feature
    sm: int
    answers: tuple[Answer, ...]
    signal: int = 0

    @cached_property
    def raised(self) -> tuple[Answer, ...]:
        """The calls that launch nothing."""
        return tuple(each for each in self.answers if each.error)

    @property
    def outcome(self) -> str:
        """What becomes of the kind, of ``OUTCOMES``."""
        if not self.answers:
            return NOT_ASKED if self.signal == signals.SIGALRM else DIES
        if any(LACKS.match(each.error) for each in self.answers):
            return NOT_ASKED
        if not self.raised:
            return RUNS
        return RAISES if len(self.raised) == len(self.answers) else RAISES_FOR_SOME

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the kernels that are launched."""
        launches = (each for answer in self.answers for each in answer.launches)
        return tuple(dict.fromkeys(each.kernel for each in launches if each.kernel))

    @property
    def error(self) -> str:
        """The error of the first call that raises; empty where none does."""
        return self.raised[0].error if self.raised else ""


def ask_release(
    release: Release,
    build: Build,
    kernels: KernelList,
    features: Sequence[Feature],
    chips: Sequence[int],
    *,
    tell: Callable[[str], None] = quietly,
) -> list[Selection]:
    """Ask a release about kinds of calls, all of attention or all of MoE, on chips.

    Each chip is asked about in processes of its own.

    Raises:
        HostError: the release cannot be imported, or its launcher cannot be loaded.
    """
    shares = max(1, min(cores() // len(chips), len(features)))
    work, found = Work(tell), list[Selection]()
    parts = [(sm, features[part::shares]) for sm in chips for part in range(shares)]
    total = len(features) * len(chips)
    with tempfile.TemporaryDirectory(prefix="kernelproof-host-") as scratch:
        folders = [Path(scratch, str(number)) for number in range(len(parts))]

        def answered() -> int:
            files = (folder / "answers" for folder in folders)
            return sum(file.read_bytes().count(b"\n") for file in files if file.is_file())

        def progress() -> None:
            work.say(f"{answered():,} of {total:,} kinds of call asked")

        pool = ThreadPoolExecutor(len(parts))
        try:
            futures = [
                pool.submit(_ask, release, build, kernels, part, sm, folder, work)
                for (sm, part), folder in zip(parts, folders, strict=True)
            ]
            for selections in as_they_end(futures, progress):
                found += selections
        finally:
            work.stop.set()
            pool.shutdown(cancel_futures=True)
    work.say(f"{len(found):,} of {total:,} kinds of call asked")
    # As they were asked, whichever process ended first.
    order = {feature: number for number, feature in enumerate(features)}
    return sorted(found, key=lambda each: (each.sm, order[each.feature]))


def _ask(
    release: Release,
    build: Build,
    kernels: KernelList,
    features: Sequence[Feature],
    sm: int,
    folder: Path,
    work: Work,
) -> list[Selection]:
    """Ask one process about kinds of calls on one chip."""
    folder.mkdir()
    calls = [calls_of(feature) for feature in features]
    request = {
        "operation": features[0].operation,
        "sm": sm,
        "multiprocessors": CHIPS[sm],
        "shared_memory": SHARED_MEMORY,
        "driver": str(build.driver),
        "launcher": str(build.launcher),
        "shipped": sorted(kernels.shipped),
    }
    cells = (
        (feature.to_json(), [asdict(call) for call in each])
        for feature, each in zip(features, calls, strict=True)
    )
    lines = "".join(f"{json.dumps(each)}\n" for each in (request, *cells))
    (folder / "request").write_text(lines, encoding="utf-8")
    ended = run_to_end(
        [sys.executable, "-m", HOST, str(folder / "request"), str(folder / "answers")],
        folder=folder,
        deadline=DEADLINE_SECONDS,
        environment=_environment(release, folder),
        stop=work.stop,
    )
    answers = []
    if (folder / "answers").is_file():
        answers = (folder / "answers").read_text(encoding="utf-8").splitlines()
    if len(answers) < len(features):
        told = ended.told.strip().splitlines()
        reason = ended.cut_short or (told[-1] if told else f"exit status {ended.status}")
        message = shortened(f"flashinfer {release.version} cannot be asked on SM{sm}: {reason}")
        raise HostError(message)
    return [
        _selection(feature, sm, each, json.loads(line), kernels)
        for feature, each, line in zip(features, calls, answers, strict=True)
    ]


def _selection(
    feature: Feature,
    sm: int,
    calls: Sequence[AnyCall],
    found: Sequence[Mapping[str, Any]],
    kernels: KernelList,
) -> Selection:
    if "died" in found[0]:
        return Selection(feature, sm, (), found[0]["died"])
    answers = []
    for call, each in zip(calls, found, strict=True):
        if "error" in each:
            answers.append(Answer(call, error=plain_error(each["error"])))
        else:
            before = tuple(_launched(call, one) for one in each.get("before", ()))
            answers.append(held(replace(_launched(call, each), before=before), sm, kernels))
    return Selection(feature, sm, tuple(answers))


def held(answer: Answer, sm: int, kernels: KernelList) -> Answer:
    """Return an answer as the chip would give it, which loads no kernel of another chip."""
    for launch in answer.launches:
        kernel = kernels.by_name.get(launch.kernel)
        if kernel is not None and not kernel.runs_on(sm):
            error = f"the launcher takes {kernel.name}, which is built for sm_{kernel.build}"
            return Answer(answer.call, error=error)
    return answer


def _launched(call: AnyCall, found: Mapping[str, Any]) -> Answer:
    fields = {name: value for name, value in found.items() if name != "before"}
    return Answer(call, **{**fields, "grid": tuple(found["grid"])})


def plain_error(error: str) -> str:
    """Return an error on one line, without places in sources: who raises it, and what it says."""
    return shortened(LAUNCHER_ERROR.sub(r"\1: ", " ".join(error.split())))


def _environment(release: Release, folder: Path) -> dict[str, str]:
    """Return the variables of a process that imports the release, and sees no GPU."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASHINFER_")}
    kept.pop("TRITON_INTERPRET", None)
    path = [str(release.folder), *(entry for entry in sys.path if entry)]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(path),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",  # a process forks, and only counts
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "FLASHINFER_CUDA_ARCH_LIST": "10.0a",
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    }
