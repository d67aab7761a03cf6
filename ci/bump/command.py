"""The run of `kernelproof bump`: compare, print, write, exit."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...impl import Target, UnsupportedError
from ...impl.registry import built_in_compiler, built_in_provider, registered
from ...impl.targets.capability import CHIPS
from ...impl.targets.unpacked import folders
from ...properties.findings.expectations import read_expectations
from ...properties.findings.files import dumps, make_folder
from ...properties.findings.ledger import LedgerError
from ...properties.findings.report import INTERRUPTED, SUITE_FAILED
from ...properties.isolation.gpus import processes_for, visible_devices
from ...properties.isolation.machine import cores
from ...properties.isolation.spawning import kill_children
from ...properties.search.ending import EndedError, Ending
from ...properties.space.profiles import PROFILES, asked_for
from ..answers.journal import Journal, JournalError
from ..console.errors import INCOMPLETE, MachineError, UsageRefusedError
from ..console.evidence_file import as_evidence
from ..console.outputs import Outputs
from ..console.selection import check_implementations, check_laws, corpus_of, only_of
from ..console.signals import ended_by_signals
from ..console.terminal import console
from ..options import refuse_empty
from ..releases.packages import (
    BEHAVIOUR,
    BINARIES,
    COMPILED,
    DECLARED,
    EVERYTHING,
    FLASHINFER_PACKAGE,
    PACKAGES,
    PARTS,
    SPEED,
    SURFACE,
    Package,
)
from ..support.command import chips_of
from .behaviour.asking import Bench
from .behaviour.compiled import Compilation, compare_compiled
from .behaviour.precompiled import compare_precompiled
from .behaviour.published import compare_published
from .behaviour.records import Comparison
from .behaviour.shipped import compare_binaries
from .behaviour.steps import (
    compare_behaviour,
    compare_declarations,
    find_both,
    missing_sides,
    read_declarations,
    read_uses,
)
from .behaviour.watching import progress
from .report.contents import refused, to_json, with_actions
from .report.outline import print_report, to_junit, to_markdown
from .report.page import to_page
from .sides.plan import SOAK_ON_CPU, BumpPlan, end_of, over
from .sides.releases import BASELINE, CANDIDATE, SIDES, identity_of
from .surface.uses import Source
from .verdicts.findings import REPORT, Chip
from .verdicts.policy import Policy, PolicyError, load_policy

JOURNALS = Path(".kernelproof", "gate")
MOST_JOBS = 4
GPU_MINUTES = 20.0
"""Minutes that a comparison on a GPU may take, unless others are asked for."""


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line, see ``cli.bump_command``.

    On a machine of a cluster, ``cases_as`` and ``sources`` are the folders of ``--cases`` and
    ``--from`` where the command runs.
    """

    baseline: str
    candidate: str
    command: str
    sm: str | None = None
    policy: Path | None = None
    resume: bool = False
    journal: Path | None = None
    minutes: float | None = None
    parts: Sequence[str] = ()
    implementations: Sequence[str] = ()
    profile: str = "gate"
    device: str = "cpu"
    seed: int = 0
    jobs: int | None = None
    modules: int | None = None
    laws: Sequence[str] = ()
    only: Sequence[str] = ()
    soak: int | None = None
    expectations: str | None = None
    corpus: Path | None = None
    cases: Path = Path(".kernelproof", "cases")
    outputs: Outputs = field(default_factory=Outputs)
    compiled: str | None = None
    units: Sequence[str] = ()
    uses: Sequence[Path] = ()
    verbose: bool = False
    package: str = FLASHINFER_PACKAGE.name
    cpu: str = ""
    cases_as: Path | None = None
    sources: Sequence[Path] | None = None
    positional: bool = False
    """Whether the releases are arguments of the command, and not values of its flags."""

    @property
    def compared(self) -> Package:
        """The package that is compared."""
        return PACKAGES[self.package]

    @property
    def journal_path(self) -> Path:
        """The journal that was named, or one for these two releases and this device."""
        if self.journal is not None:
            return self.journal
        given = (self.baseline, self.candidate)
        names = [Path(each).name for each in given]
        if names != [*given]:  # all interpreters are called python
            paths = json.dumps([str(Path(each).expanduser().absolute()) for each in given])
            names.append(hashlib.sha256(paths.encode()).hexdigest()[:8])
        of = [] if self.compared is FLASHINFER_PACKAGE else [self.package]
        return JOURNALS / f"{'-'.join([*of, *names, self.device])}.jsonl"

    @property
    def wanted(self) -> Sequence[str]:
        """The parts that are compared."""
        return self.parts or self.compared.usual_parts

    @property
    def behaviour_part(self) -> str:
        """The option by which only a part of the behaviour was asked for; empty if none was."""
        parts = {
            "--implementation": self.implementations,
            "--law": self.laws,
            "--only": self.only,
        }
        return next((name for name, given in parts.items() if given), "")

    @property
    def compilation(self) -> Compilation | None:
        """What is compiled, None where that was not asked for."""
        if self.compiled is None:
            return None
        chips = tuple(part for part in self.compiled.split(",") if part.strip())
        return Compilation(chips, tuple(self.units), self.jobs or 0)

    @property
    def sides(self) -> dict[str, str]:
        """What was given for each side."""
        return {BASELINE: self.baseline, CANDIDATE: self.candidate}


RENDER: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "--json": dumps,
    "--junit": to_junit,
    "--markdown": to_markdown,
    "--html": to_page,
    "--evidence": lambda report: dumps(_kept(report)),
}


def _kept(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without replay commands, traces and paths of the machine."""
    found: dict[str, Any] = as_evidence(report)
    return {**found, "findings": [{**each, "replay": {}} for each in found["findings"]]}


def bump(request: Request) -> int:
    """Compare two releases, print and write the report, and give the exit code.

    Raises:
        UsageRefusedError: something that was asked for does not exist or cannot be read.
        MachineError: the device is not there.
    """
    ending = Ending(seconds_of(request))
    with ended_by_signals(ending.end):  # the report, too, is not for a signal to end
        report, unwritten = compare(request, ending)
        return tell(report, request.outputs, unwritten, verbose=request.verbose)


def compare(request: Request, ending: Ending) -> tuple[dict[str, Any], Sequence[str]]:
    """Compare two releases, and return the report and sentences on cases that were not written.

    Raises:
        UsageRefusedError, MachineError: as of ``bump``; a report that says so is written.
    """
    started = time.monotonic()
    policy: Policy | None = None
    try:
        sources = [Source.read(path) for path in request.uses]
        policy = _policy(request.policy)
        refuse_empty(request.sides, positional=request.positional)
        _refuse_inapplicable(request)
        with progress(ending.seconds) as watched, ending.watched():
            watched.tell(f"comparing {request.baseline} and {request.candidate}")
            machine = _machine(request.device)
            chips = _chips(request, machine)
            request.outputs.check()
            if BEHAVIOUR in request.wanted:
                Outputs({"--cases": request.cases / "case.json"}).check()
            with (
                Journal(request.journal_path, ending) as journal,
                _tensors(request.journal_path) as tensors,
            ):
                plan = _plan(request, tensors)
                bench = Bench(plan, {}, journal, ending, watched)
                comparison = Comparison(request.sides, chips, request.compared)
                steps = _steps(request, comparison, bench, policy, machine, sources)
                comparison = _last(steps, comparison, ending)
    except JournalError:  # of another run, whose outputs these may be
        raise
    except (UsageRefusedError, MachineError) as error:
        report = refused(
            request.sides, policy or load_policy(None), error, request.command, request.compared
        )
        with suppress(UsageRefusedError):  # the first error is the one to tell
            request.outputs.write(_rendered(report))
        raise
    timings = {
        "seconds": round(time.monotonic() - started, 3),
        "asked": journal.answered,
        "remembered": journal.remembered,
    }
    report = to_json(
        comparison,
        plan,
        policy,
        machine=machine,
        command=request.command,
        timings=timings,
        ending=ending,
    )
    return report, comparison.unwritten


def _steps(
    request: Request,
    comparison: Comparison,
    bench: Bench,
    policy: Policy,
    machine: Chip,
    sources: Sequence[Source],
) -> Iterator[Comparison]:
    """Learn what was asked for; yield the record after each step."""
    package, parts = request.compared, request.wanted
    ending, journal, watched = bench.ending, bench.journal, bench.progress
    watched.tell(f"finding both releases, of which {', '.join(parts)} are compared")
    with ending.closing(kill_children):
        comparison = find_both(comparison, ending, watched.tell, request.cpu)
        yield comparison
        own = any(each.own_environment for each in comparison.releases.values())
        plan = _for_environments(request, bench.plan) if own else bench.plan
        if set(comparison.releases) == set(SIDES):  # else there is little to keep
            of = identity_of(comparison.releases, plan.implementations)
            identity = {**_identity(request, plan), **of}
            journal.start(identity, resume=request.resume, tell=watched.tell)
        comparison = read_declarations(comparison, journal, parts, watched.tell)
        yield comparison
        comparison = compare_declarations(comparison, parts)
        yield comparison
        if package is not FLASHINFER_PACKAGE:
            comparison = compare_binaries(comparison, parts, request.cpu, watched.tell)
        elif BINARIES in parts:
            comparison = compare_precompiled(comparison, sources, journal, watched.tell)
        yield comparison
        comparison = read_uses(comparison, sources, ending, watched.tell)
        for each in with_actions(comparison.findings, policy):
            if each.action != REPORT:
                watched.found(f"{each.action}  {each.change}  {each.message}")
        known = {*package.parts, SURFACE, DECLARED, BEHAVIOUR, SPEED}
        left_out = (part for part in PARTS if part in known and part not in parts)
        comparison = comparison.skipping({part: _left_out(part, package) for part in left_out})
        yield comparison
        if package is FLASHINFER_PACKAGE:
            asked = request.compilation
            comparison = compare_compiled(comparison, asked, journal, watched.tell)
            yield comparison
    if BEHAVIOUR in parts:
        here: tuple[Chip, ...] = () if machine == "cpu" else (machine,)
        if package is FLASHINFER_PACKAGE and not missing_sides(comparison):
            comparison = compare_published(
                comparison, replace(bench, plan=plan), here, request.behaviour_part
            )
            yield comparison
        yield from compare_behaviour(
            comparison, replace(bench, plan=plan), here, policy.slower, speed=SPEED in parts
        )
    else:
        yield comparison.skipping({SPEED: "goes with behaviour", **comparison.skipped})


def _left_out(part: str, package: Package) -> str:
    """Return why a part that was not asked for is not compared."""
    if part not in package.parts:
        return inapplicable(package)
    return f"not asked for (--part {part})" if part in package.on_request else "not asked for"


def _last(steps: Iterable[Comparison], comparison: Comparison, ending: Ending) -> Comparison:
    """Return the last record: whatever ends a comparison early, what it learned is worth telling.

    Args:
        steps: records, one after each step.
        comparison: the record before the first step.
        ending: the ending of the comparison.
    """
    try:
        for each in steps:
            comparison = each
    except EndedError:  # before there was a problem to judge
        if not end_of(ending)[1]:
            comparison = comparison.failing(f"nothing was judged: {over(ending)}", INCOMPLETE)
    except KeyboardInterrupt:
        ending.end(INTERRUPTED)
        ending.stop()
    except MachineError as error:  # such as a journal whose disk is full
        comparison = comparison.failing(error.message, error.exit_code)
    except UsageRefusedError:
        raise
    except Exception as error:  # noqa: BLE001  see above
        traceback.print_exc()
        why = f"{SUITE_FAILED}: {type(error).__name__}: {error}".splitlines()[0]
        comparison = comparison.failing(why)
    why, code = end_of(ending)
    return comparison.failing(why, code) if code else comparison


def tell(
    report: dict[str, Any],
    outputs: Outputs,
    unwritten: Sequence[str] = (),
    *,
    verbose: bool = False,
) -> int:
    """Print a report, write what was asked for, and return its exit code.

    Args:
        report: the report of a comparison.
        outputs: files to write.
        unwritten: sentences about other files that could not be written.
        verbose: see ``print_report``.

    Raises:
        UsageRefusedError: a file cannot be written; the report is printed all the same.
    """
    more = f" (and {len(unwritten) - 1} more)" if len(unwritten) > 1 else ""
    try:
        outputs.write(_rendered(report), [f"{each}{more}" for each in unwritten[:1]])
    finally:
        print_report(console(sys.stdout), report, verbose=verbose)
    return int(report["exit_code"])


def _rendered(report: dict[str, Any]) -> dict[str, Callable[[], str]]:
    return {option: partial(render, report) for option, render in RENDER.items()}


def inapplicable(package: Package) -> str:
    """Return why a comparison of a package lacks a part."""
    return f"does not apply to {package.distribution}"


def _refuse_inapplicable(request: Request) -> None:
    """Refuse what a comparison of FlashInfer has, and of this package has not.

    Raises:
        UsageRefusedError: the option is named.
    """
    package = request.compared
    parts = [f"--part {part}" for part in request.parts if part not in package.parts]
    of_flashinfer = {"--uses": request.uses, "--compile": request.compiled, "--unit": request.units}
    others = [option for option, given in of_flashinfer.items() if given]
    libraries = package is not FLASHINFER_PACKAGE and BINARIES in package.parts
    if request.cpu and not libraries:
        message = f"--cpu {inapplicable(package)}"
        raise UsageRefusedError(message)
    if parts or (others and package is not FLASHINFER_PACKAGE):
        message = f"{[*parts, *others][0]} {inapplicable(package)}"
        raise UsageRefusedError(message)


def _policy(path: Path | None) -> Policy:
    try:
        return load_policy(path)
    except PolicyError as error:
        message = f"--policy {error}"
        raise UsageRefusedError(message) from error


def seconds_of(request: Request) -> float:
    """Return the seconds that were asked for, or the usual ones: a GPU is not had for ever."""
    if request.minutes is not None:
        return 60 * request.minutes
    limited = request.device == "cuda" and request.profile != "nightly"
    return 60 * GPU_MINUTES if limited else math.inf


def _machine(device: str) -> Chip:
    try:
        return Target.here(device).sm or "cpu"
    except UnsupportedError as error:
        raise MachineError(str(error)) from error


def _chips(request: Request, machine: Chip) -> tuple[Chip, ...]:
    if request.sm is not None:
        return tuple("cpu" if chip is None else chip for chip in chips_of(request.sm))
    if request.compared.libraries_only:
        return tuple(CHIPS)
    if DECLARED not in request.compared.parts:  # nothing is said of a chip that is not here
        return (machine,)
    return (*(["cpu"] if machine == "cpu" else []), *CHIPS)


def _plan(request: Request, tensors: Path) -> BumpPlan:
    check_laws(request.laws)
    check_implementations(request.implementations, "--implementation")
    only = only_of(request.only)
    try:
        ledger = read_expectations(request.expectations)
    except LedgerError as error:
        raise UsageRefusedError(str(error)) from error
    profile = PROFILES[request.profile]
    soak = request.soak or (SOAK_ON_CPU if request.device == "cpu" else profile.soak)
    return BumpPlan(
        tuple(dict.fromkeys(request.implementations)) or _concerned(request.compared),
        request.device,
        asked_for(profile, modules=request.modules, soak=soak),
        request.seed,
        ledger,
        request.cases,
        tensors,
        laws=tuple(request.laws),
        only=only,
        soak=soak,
        jobs=request.jobs or _usual_jobs(request.device),
        corpus=corpus_of(request.corpus, ledger, request.expectations, profile),
        named=bool(request.implementations),
        cases_as=request.cases_as,
        sources=tuple(folders() if request.sources is None else request.sources),
    )


def _for_environments(request: Request, plan: BumpPlan) -> BumpPlan:
    """Return the plan where a release has an environment of its own, in which all else differs."""
    concerned = _concerned(request.compared, all_of_them=True)
    return plan if plan.named else replace(plan, implementations=concerned)


def _concerned(
    package: Package = FLASHINFER_PACKAGE, *, all_of_them: bool = False
) -> tuple[str, ...]:
    """Name what may behave otherwise with another release, or in another environment."""
    # Of what is not built in nobody knows; other built-in ones are the same code on both sides.
    of = built_in_compiler if package.judged == COMPILED else built_in_provider
    every = package.judged == EVERYTHING or (all_of_them and package.whole)
    return tuple(name for name in registered() if every or of(name) in (None, package.distribution))


def _usual_jobs(device: str) -> int:
    if device == "cuda":
        return max(1, processes_for(visible_devices()[:1], cores()) // 2)
    return max(1, min(cores(), MOST_JOBS))


def _identity(request: Request, plan: BumpPlan) -> dict[str, Any]:
    """Return what the answers of a journal depend on."""
    return {
        "package": request.package,
        "baseline": request.baseline,
        "candidate": request.candidate,
        "device": request.device,
        "profile": request.profile,
        "seed": request.seed,
        "implementations": list(plan.implementations),
        "laws": list(plan.laws),
        "only": [*request.only],
        "modules": request.modules or 0,
        "soak": plan.soak,
        "expectations": request.expectations or "",
        "from": [str(folder) for folder in plan.sources],
        **({"cpu": request.cpu} if request.cpu else {}),
    }


@contextmanager
def _tensors(journal: Path) -> Iterator[Path]:
    """Return a folder for results, beside the journal: a resumed run compares with those in it."""
    folder = journal.with_suffix(".tensors")
    try:
        make_folder(folder)
    except OSError as error:
        message = f"--journal {journal}: its folder cannot be made ({error.strerror})"
        raise UsageRefusedError(message) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
