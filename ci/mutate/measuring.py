"""A measurement: the kernels of an implementation, a sample of their mutants, and all answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ... import __version__
from ...properties.isolation.machine import cores
from ..answers.identity import digest_of, machine_identity
from ..answers.journal import Journal
from ..console.errors import MachineError, UsageRefusedError
from ..options import FOLDER
from .judging import Clean, Judge
from .mutants import Mutant, mutants_of, sample
from .report import Measurement
from .stand_ins import Kernels, modules_in
from .trials import Trials

JOURNALS = FOLDER.parent / "mutants"
"""Folder of the answers that a later run goes on from."""


def find(name: str, file: str | None) -> Kernels:
    """Return the kernels of an implementation.

    Raises:
        UsageRefusedError: there is no such implementation, or it has no kernels in the file.
        MachineError: it cannot be imported.
    """
    with Trials() as trials:
        found = trials.ask({"find": name, "file": file})
    if "refused" in found:
        raise UsageRefusedError(found["refused"])
    if "error" in found:
        message = f"the kernels of {name} cannot be found: {found['error']}"
        raise MachineError(message)
    kernels = Kernels(**{**found, "name": name, "files": tuple(found["files"])})
    if not kernels.files:
        inside = f" in {file}" if file else "; --file names a file of its kernels"
        message = f"{name}: there is no function under triton.jit{inside}"
        raise UsageRefusedError(message)
    return kernels


def judge_of(
    kernels: Kernels,
    *,
    seed: int,
    tests: str,
    laws: Sequence[str],
    only: Sequence[str] = (),
    jobs: int | None,
    resume: bool,
    tell: Callable[[str], None],
) -> Judge:
    """Return what judges mutants of kernels; its journal belongs to these options and texts.

    Raises:
        JournalError: the journal cannot be read or written, or another run uses it.
    """
    told = [
        kernels.name,
        str(seed),
        tests,
        *sorted(laws),
        *only,
        __version__,
        *map(kernels.text, kernels.files),
        *(_texts_behind(kernels) if tests else ()),
    ]
    digest = digest_of(["\0".join(told).encode()])
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", kernels.name)
    journal = Journal(JOURNALS / f"{name}-{digest}.jsonl", flag="--resume")
    identity = {"mutants": kernels.name, "texts and options": digest, **machine_identity("cpu")}
    journal.start(identity, resume=resume, tell=tell)
    options = {"seed": seed, "jobs": jobs or max(1, cores())}
    return Judge(kernels, tests=tests, laws=laws, only=only, journal=journal, **options)


def _texts_behind(kernels: Kernels) -> Iterator[str]:
    """Yield the names and texts of all Python files on which somebody's own tests may depend."""
    here, folder = Path.cwd().resolve(), Path(kernels.folder).resolve()
    for place in [folder] if here.is_relative_to(folder) else [folder, here]:
        for file in modules_in(place):
            yield str(file.relative_to(place))
            yield file.read_text(encoding="utf-8", errors="replace")


def measure(
    judge: Judge,
    stage: str,
    number: int | None,
    tell: Callable[[str], None],
    equivalents: Mapping[str, str],
) -> Measurement:
    """Judge a sample of mutants.

    Args:
        judge: judges them.
        stage: the profile, or ``tests``.
        number: the size of the sample; None for all mutants.
        tell: receives lines on what is done.
        equivalents: see ``Measurement``.
    """
    tell(f"{stage}: the kernel as it is")
    clean = judge.clean(stage)
    running, idle = _of_running(judge.kernels, clean)
    chosen = sample(running, number, judge.seed)
    answers = judge.judge(chosen, stage, clean, tell)
    return Measurement(judge, stage, len(running), idle, clean, chosen, answers, equivalents)


def _of_running(kernels: Kernels, clean: Clean) -> tuple[list[Mutant], list[str]]:
    """Return the mutants of kernels of which some line ran, and the names of the other kernels."""
    every = [each for file in kernels.files for each in mutants_of(file, kernels.text(file))]
    ran = {(each.file, each.kernel) for each in every if clean.ran(each)}
    idle = sorted({each.kernel for each in every if (each.file, each.kernel) not in ran})
    return [each for each in every if (each.file, each.kernel) in ran], idle
