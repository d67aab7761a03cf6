"""The command replay: one case, judged again in an isolated worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.text import Text

from ...fixtures import CORPUS
from ...impl import ImplementationNotFoundError, Target, UnsupportedError
from ...impl.registry import resolve_name
from ...properties.findings.cases import MUST_FAIL
from ...properties.findings.corpus import checked_case
from ...properties.findings.ledger import DEVICES, LedgerError
from ...properties.findings.text_format import element_lines, printed_lines, trace_lines
from ...properties.isolation.sanitizer import SanitizerMissingError
from ...properties.isolation.workers import Deadlines, Worker, WorkerPool
from ...properties.laws import Law
from ...properties.search.hang_location import stuck_in
from ...properties.verdicts.text import compact, defaults, one_line
from ...properties.verdicts.verdict import Verdict
from ...properties.worker.pools import open_pool
from ...properties.worker.requests import Address, HarnessError, verdict_of
from ...reference import Problem
from ..console.errors import CONFORMING, MACHINE, NONCONFORMING, MachineError, UsageRefusedError
from ..console.lines import tell
from ..console.terminal import console
from ..reports.display import command, say, style_of


def replay_case(
    path: Path,
    *,
    device: str | None,
    implementation: str | None,
    deadline: float,
    release: str | None = None,
) -> int:
    """Judge a case again, print its verdict, and return the exit code.

    Args:
        path: of the case file, or the name of one in the shipped corpus.
        device: where; the case's own if None.
        implementation: which; the case's own if None.
        deadline: seconds that one call may take.
        release: of FlashInfer, or an interpreter, that it is judged with; as it is here if None.

    Raises:
        UsageRefusedError: the case cannot be read, or its implementation is not found.
        MachineError: there is no such device, or the suite failed.
    """
    law, problem, data = _read(_stored(path))
    device = device or data.get("device") or DEVICES[0]
    name = implementation or data["implementation"]
    try:
        reference = resolve_name(name)
        Target.here(device)
    except ImplementationNotFoundError as error:
        source = "--implementation" if implementation else f"{path}: implementation"
        message = f"{source}: {error}"
        raise UsageRefusedError(message) from error
    except UnsupportedError as error:
        message = f"device {device!r} of {path}: {error}"
        raise MachineError(message) from error
    address = Address(
        reference,
        data.get("operation"),
        device,
        without_rules=tuple(data.get("without_rules", ())),
        soak=data.get("soak", 0),
        tool=data.get("sanitizer") or "",
    )
    with _workers(address, release) as pool:
        verdict = _judge(name, address, address.case(law.name, problem), deadline, pool)
    return _tell(path, name, law, problem, verdict, _recorded(data))


@contextmanager
def _workers(address: Address, release: str | None) -> Iterator[WorkerPool]:
    """Open the pool that judges, with another release where one was asked for."""
    if release is not None:
        from ..bump.sides.releases import find_release

        if address.tool:
            message = f"--release does not go with a case of compute-sanitizer's {address.tool}"
            raise UsageRefusedError(message)
        found = find_release(release, tell=lambda line: tell(line, err=True))
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
    return shipped if path.name == str(path) and not path.exists() and shipped.is_file() else path


def _read(path: Path) -> tuple[Law, Problem, dict[str, Any]]:
    try:
        return checked_case(path)
    except LedgerError as error:
        raise UsageRefusedError(str(error)) from error


def _recorded(data: dict[str, Any]) -> str:
    """Return the kind of the verdict that the case was written for."""
    verdict = data.get("verdict")
    return str(verdict.get("kind", "")) if isinstance(verdict, dict) else ""


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
    command(out, "law", law.statement)
    for line in element_lines(verdict):
        command(out, "wrong", line)
    for line in printed_lines(verdict):
        command(out, "printed", line)
    command(out, "problem", compact(problem))
    command(out, "default", defaults(problem))
    out.print(Text(one_line(meaning), style_of("PASS" if not code else "FAIL")), soft_wrap=True)
    return code
