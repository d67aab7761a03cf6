"""The command replay: one case, judged again in an isolated worker."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.text import Text

from ...fixtures import CORPUS, files_of
from ...impl import ImplementationNotFoundError, Target, UnsupportedError
from ...impl.gpu.interpreted import NOTE
from ...impl.registry import resolve_name
from ...properties.findings.cases import MUST_FAIL
from ...properties.findings.corpus import checked_case
from ...properties.findings.ledger import DEVICES, LedgerError, load_ledger
from ...properties.findings.text_format import element_lines, printed_lines, trace_lines
from ...properties.isolation.sanitizer import SanitizerMissingError
from ...properties.isolation.workers import Deadlines, Worker, WorkerPool
from ...properties.laws import Law
from ...properties.search.hang_location import stuck_in
from ...properties.verdicts.text import compact, defaults, one_line
from ...properties.verdicts.verdict import Verdict
from ...properties.worker import tasks
from ...properties.worker.keeping import Kept, read_kept
from ...properties.worker.pools import open_pool
from ...properties.worker.requests import Address, HarnessError, verdict_of
from ...reference import Problem
from ..answers.identity import files_of as files_of_name
from ..console.errors import CONFORMING, MACHINE, NONCONFORMING, MachineError, UsageRefusedError
from ..console.lines import tell
from ..console.terminal import console
from ..releases.packages import FLASHINFER_PACKAGE, PACKAGES
from ..reports.display import command, say, style_of
from .carrying import CALLS
from .reproducing import Kernel, no_script, write_script
from .saving import save_tensors

BITS = (
    "Triton's interpreter computes with the bits of bfloat16, which Kernelproof mends and the "
    "script does not: a kernel that multiplies them (tl.dot) is wrong there even once it is "
    "right; run the script on a GPU, or replay the case"
)
"""What a script of a bfloat16 kernel cannot show in the interpreter."""
AS_IT_WAS = "the function as kernelproof.check took it; after an edit, call that again"
"""What a replay of a function of a notebook or a script says of its source."""


@dataclass(frozen=True)
class Request:
    """What ``replay`` is asked for.

    Attributes:
        case: path of the case file, or the name of one in the shipped corpus.
        device: where; the case's own if None, else that of its ledger entry, else the CPU, or the
            GPU where the implementation needs one.
        implementation: which; the case's own if None.
        deadline: seconds that one call may take.
        release: the release of the package, or an interpreter, that it is judged with; as it is
            here if None.
        package: the package of ``PACKAGES``.
        save: folder for the tensors of the wrong call.
        script: file for a script that makes that call.
        in_process: judge in this process, without isolation.
        distrust: whether another process judges; the case may ask for it too.
    """

    case: Path
    device: str | None = None
    implementation: str | None = None
    deadline: float = 20.0
    release: str | None = None
    package: str = FLASHINFER_PACKAGE.name
    save: Path | None = None
    script: Path | None = None
    in_process: bool = False
    distrust: bool = False


class _Judged(NamedTuple):
    """A verdict, and what it is about."""

    law: Law
    problem: Problem
    address: Address
    verdict: Verdict
    kept: Kept | None


def replay_case(request: Request) -> int:
    """Judge a case again, print its verdict, write what was asked for, and return the exit code.

    Raises:
        UsageRefusedError: the case cannot be read, its implementation is not found, or a script
            cannot show its failure.
        MachineError: there is no such device, or the suite failed.
        OutputError: a file cannot be written.
    """
    stored = _stored(request.case)
    law, problem, data = _read(stored)
    if request.in_process and (request.release or data.get("sanitizer")):
        what = "--release" if request.release else "a case of compute-sanitizer"
        message = f"--in-process does not go with {what}: both need processes of their own"
        raise UsageRefusedError(message)
    if request.distrust and _inside(request):
        message = "--distrust does not go with --in-process, --save and --script"
        raise UsageRefusedError(message)
    if data.get("distrust") and _inside(request):
        alone = "this one is judged in the kernel's, which has the tensors, and may lie there"
        tell(f"{request.case} asks for another process to judge (--distrust): {alone}", err=True)
    stated = request.device or data.get("device") or _device_of_entry(stored)
    judged = _judged(request, law, problem, data, stated or DEVICES[0])
    if stated is None and (judged.verdict.status, judged.verdict.kind) == ("UNSUPPORTED", "device"):
        judged = _judged(request, law, problem, data, "cuda")
    name = request.implementation or data["implementation"]
    code = _tell(request.case, name, law, problem, judged.verdict, _recorded(data))
    if request.save:
        _save(request.save, judged)
    if request.script:
        _write_script(request.script, judged)
    return code


def _device_of_entry(path: Path) -> str | None:
    """Return the device of the shipped ledger's entry that a case belongs to, if it names one."""
    entries = (each for each in load_ledger().entries if each.owns(path))
    return next((each.device or None for each in entries), None)


def _inside(request: Request) -> bool:
    """Whether the kernel's own process must judge: it has the tensors of the wrong call."""
    return bool(request.in_process or request.save or request.script)


def _judged(
    request: Request, law: Law, problem: Problem, data: dict[str, Any], device: str
) -> _Judged:
    name = request.implementation or _found(request.case, data["implementation"])
    try:
        reference = resolve_name(name)
        Target.here(device)
    except ImplementationNotFoundError as error:
        source = "--implementation" if request.implementation else f"{request.case}: implementation"
        message = f"{source}: {error}"
        raise UsageRefusedError(message) from error
    except UnsupportedError as error:
        message = f"{request.case} needs a GPU, and torch sees no CUDA device on this machine"
        raise MachineError(message) from error
    address = Address(
        reference,
        data.get("operation"),
        device,
        without_rules=tuple(data.get("without_rules", ())),
        soak=data.get("soak", 0),
        tool=data.get("sanitizer") or "",
        distrust=request.distrust or (not _inside(request) and data.get("distrust", False)),
    )
    with tempfile.TemporaryDirectory() as folder:
        keep = {"keep": folder} if request.save or request.script else {}
        case = {**address.case(law.name, problem), **keep}
        if request.in_process:
            verdict = _judge_here(case)
        else:
            with _workers(address, request.release, request.package) as pool:
                verdict = _judge(name, address, case, request.deadline, pool)
        return _Judged(law, problem, address, verdict, read_kept(Path(folder)))


def _found(case: Path, name: str) -> str:
    """Return the name of a case's implementation; by its path, if only the case's project has it.

    That is the folder around the one of cases, ``.kernelproof/cases``.
    """
    module, _, attribute = name.rpartition(":")
    project = case.resolve().parents[min(2, len(case.resolve().parents) - 1)]
    file = project / (module if module.endswith(".py") else f"{module.replace('.', '/')}.py")
    here = any(each.is_file() for each in files_of_name(name)) if module else True
    return f"{file}:{attribute}" if file.is_file() and not here else name


def _save(folder: Path, judged: _Judged) -> None:
    if judged.kept is None:
        message = f"--save {folder}: the kernel was not called, so that there are no tensors"
        raise UsageRefusedError(message)
    about = {
        "implementation": judged.address.reference,
        "law": judged.law.name,
        "problem": judged.problem.to_json(),
        "verdict": judged.verdict.to_json(),
    }
    for path in save_tensors(judged.kept, folder, about):
        tell(f"saved: {path}")


def _write_script(path: Path, judged: _Judged) -> None:
    kernel = Kernel(judged.address.reference, judged.address.device)
    why = no_script(kernel, judged.kept, judged.verdict)
    if why or judged.kept is None:
        message = f"--script {path}: {why}"
        raise UsageRefusedError(message)
    told = (judged.verdict, judged.law.name, judged.problem)
    for each in write_script(path, kernel, judged.kept, *told):
        tell(f"script: {each}")
    if judged.verdict.interpreted and getattr(judged.problem, "dtype", "") == "bfloat16":
        tell(f"script: {BITS}")


class _NoStages:
    """Stages that nobody watches."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Do nothing."""
        del name
        yield


def _judge_here(case: dict[str, Any]) -> Verdict:
    """Judge in this process, as a worker would."""
    tell("in this process: no deadline is watched, and a call that hangs or dies ends the command")
    if case["device"] == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    described = tasks.describe(case, _NoStages())
    if "error" in described:
        raise UsageRefusedError(str(described["error"]))
    verdict = Verdict.from_json(tasks.judge(case, _NoStages()))
    if verdict.kind in ("KeyboardInterrupt", "BdbQuit"):  # the user's, at the terminal
        raise KeyboardInterrupt
    return verdict


@contextmanager
def _workers(address: Address, release: str | None, package: str) -> Iterator[WorkerPool]:
    """Open the pool that judges, with another release of a package where one was asked for."""
    if release is not None:
        from ..bump.sides.releases import find_release

        if address.tool:
            message = f"--release does not go with a case of compute-sanitizer's {address.tool}"
            raise UsageRefusedError(message)
        found = find_release(release, PACKAGES[package], tell=lambda line: tell(line, err=True))
        with found.workers(address.device) as pool:
            yield pool
        return
    try:
        pool = open_pool(address.device, standby=False, tool=address.tool)
    except SanitizerMissingError as error:
        raise UsageRefusedError(str(error)) from error
    with pool:
        yield pool


def _judge(
    name: str, address: Address, case: dict[str, Any], deadline: float, pool: WorkerPool
) -> Verdict:
    deadlines = Deadlines(run=address.slowness * deadline)
    with pool.lease() as worker:
        try:
            _load(worker, name, address)
            return verdict_of(worker.run(case, deadlines), address.tool)
        except HarnessError as error:
            message = f"{name}: the suite failed: {error}"
            raise MachineError(message) from error


def _load(worker: Worker, name: str, address: Address) -> None:
    """Import the implementation: its absence is no failure of a law."""
    outcome = worker.run(address.request("describe"), Deadlines())
    if outcome.status != "done":
        message = f"{name} cannot be imported: {verdict_of(outcome).message}"
        raise MachineError(message)
    if "error" in (outcome.result or {}):
        raise UsageRefusedError(str((outcome.result or {})["error"]))


def _stored(path: Path) -> Path:
    """Return the case of the shipped corpus that goes by this name, where no such file is here."""
    shipped = CORPUS / path.name
    known = path.name == str(path) and not path.exists() and shipped in files_of(CORPUS)
    return shipped if known else path


def _read(path: Path) -> tuple[Law, Problem, dict[str, Any]]:
    try:
        return checked_case(path)
    except LedgerError as error:
        raise UsageRefusedError(str(error)) from error


def _recorded(data: dict[str, Any]) -> str:
    """Return the kind of the verdict that the case was written for."""
    verdict = data.get("verdict")
    return str(verdict.get("kind", "")) if isinstance(verdict, dict) else ""


def _details(law: Law, problem: Problem, verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield labelled lines on what was judged, and what is wrong in it."""
    yield "law", law.statement
    yield from (("wrong", each) for each in element_lines(verdict))
    yield from (("printed", each) for each in printed_lines(verdict))
    if verdict.interpreted:
        yield "interpreted", NOTE
    yield "problem", compact(problem)
    yield "default", defaults(problem)


def _tell(
    path: Path, name: str, law: Law, problem: Problem, verdict: Verdict, recorded: str
) -> int:
    """Print a verdict and return the exit code that follows from it."""
    out = console(sys.stdout)
    title = f"{verdict.status} {verdict.kind}".strip()
    message = verdict.message
    if verdict.status == "HANG" and (where := stuck_in(verdict.trace)):
        message = f"{message}; stuck in {where}"
    code, meaning = CONFORMING, f"{path} passes"
    if verdict.bad:
        code, meaning = NONCONFORMING, f"{path} still fails"
    elif verdict.status != "PASS":
        code, meaning = MACHINE, f"{path} was not judged: {verdict.status}"
    elif verdict.vacuous:
        code, meaning = MACHINE, f"{path} was not judged: {law.name} has nothing to judge in it"
    elif recorded == MUST_FAIL:
        code, meaning = NONCONFORMING, f"{path} passes, but the ledger says that it fails"
    if verdict.ratio is not None and not verdict.bad:
        message = message or f"the worst error is {verdict.ratio:.3g} of its bound"
    say(out, f"{title}  {name}  {law.name}", message or law.statement, style=verdict.status)
    for line in trace_lines(verdict):
        out.print(Text(f"    {one_line(line)}", "dim"), soft_wrap=True)
    for label, text in _details(law, problem, verdict):
        command(out, label, text)
    if f"{CALLS}/" in name:
        command(out, "source", AS_IT_WAS)
    out.print(Text(one_line(meaning), style_of("PASS" if not code else "FAIL")), soft_wrap=True)
    return code
