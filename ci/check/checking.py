"""The commands check and gate: one run of the engine, its outputs and its exit code."""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from hypothesis.database import ExampleDatabase

from ...fixtures.suggestions import did_you_mean
from ...impl import OPERATIONS, UnsupportedError
from ...impl.protocol import EVERY_RULE
from ...impl.registry import resolve_name
from ...impl.targets.registrations import Registration
from ...properties.findings.cases import CaseWriter
from ...properties.findings.corpus import Case, failed_before
from ...properties.findings.expectations import read_expectations
from ...properties.findings.ledger import Ledger, LedgerError
from ...properties.findings.report import FOUND, SUITE_FAILED, TIME, Milestones, RunReport
from ...properties.isolation.sanitizer import SanitizerMissingError
from ...properties.isolation.sanitizer import command as sanitizer_command
from ...properties.laws import laws_of
from ...properties.search.costs import CostsError, keep_builds, keep_costs, read_builds, read_costs
from ...properties.search.ending import Ending
from ...properties.search.engine import Run
from ...properties.search.examples import VARIABLE, ExamplesError, open_examples, shared_examples
from ...properties.search.plan import Plan
from ...properties.space.profiles import GATE_SHARE, MINUTES, PROFILES, Cost, asked_for
from ..console.errors import CONFORMING, MACHINE, MachineError, UsageRefusedError
from ..console.evidence_file import as_evidence
from ..console.live import in_one_log
from ..console.outputs import Outputs
from ..console.selection import check_implementations, check_laws, corpus_of, only_of
from ..console.settings import is_from_file
from ..console.signals import ended_by_signals, interrupted_once
from ..console.terminal import console
from ..fleet.command import fleet_at, fleet_to_json, print_chips
from ..fleet.fleet import Fleet
from ..published.including import LEFT_OUT, SHARE, failed, judge_installed, without
from ..published.summary import brief
from ..reports.annotations import annotation_lines
from ..reports.json_report import to_json
from ..reports.outline import filled
from ..reports.progress import watch
from ..reports.published_calls import finding_blocks
from ..reports.run_outline import outline_of, print_summary, to_junit
from ..reports.sarif import to_sarif
from ..reports.summary import Summary, summarise
from .repeated import Repeatable
from .required_claims import FLAG, RequiredClaims, read_claims
from .resuming import KeptLaws, kept_laws
from .reusing import passed_next


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line, see ``RUN_OPTIONS``."""

    implementations: Sequence[str]
    profile: str
    device: str
    seed: int
    jobs: int | None
    modules: int | None
    laws: tuple[str, ...]
    only: tuple[str, ...]
    outputs: Outputs
    expectations: str | None
    cases: Path
    command: str
    operation: str | None = None
    gate: bool = False
    without_rules: tuple[str, ...] = ()
    soak: int | None = None
    sanitizer: str | None = None
    distrust: bool = False
    mps: bool = False
    examples: str | None = None
    corpus: Path | None = None
    costs: Path | None = None
    minutes: float | None = None
    allow_incomplete: bool = False
    require_claims: Path | None = None
    verbose: bool = False
    broken: Sequence[Registration] = ()
    ray: str | None = None
    resume: bool = False
    exit_first: bool = False
    deck: bool = True
    annotations: bool = False
    reuse: bool = False
    failed_first: bool = False
    repeatable: Repeatable | None = None
    called: bool = False
    """Whether a program asks, which gets the summary instead of a print, and keeps its signals."""

    @property
    def seconds(self) -> float:
        """The seconds that all of it may take."""
        return 60 * (self.minutes or MINUTES.get((self.profile, self.device), math.inf))

    @property
    def without_published(self) -> dict[str, Any]:
        """What a gate's report has of published calls that it does not ask; else empty."""
        parts = {
            "--law": self.laws,
            "--only": self.only,
            "--distrust": self.distrust,
            "--ray": self.ray,
        }
        return without(self.device, next((name for name, given in parts.items() if given), ""))


def examine(request: Request) -> int:
    """Run, print, write the outputs, and return the exit code, see ``judge``."""
    return judge(request).code


def judge(request: Request) -> Summary:
    """Run, print, write the outputs, and return the summary.

    Raises:
        UsageRefusedError: something that was asked for does not exist or cannot be read.
        MachineError: the device is not there.
    """
    ledger, required = Ledger(), None
    with ExitStack() as opened:
        try:
            request.outputs.check()
            ledger = _read_ledger(request.expectations)
            required = _required(request)
            plan = _plan(request, ledger)
            writer = CaseWriter(
                request.cases, request.operation, ledger, without_rules=plan.without_rules
            )
            summarised = partial(_summarise, request, ledger=ledger, required=required)
            run = opened.enter_context(_started(request, plan, summarised))
            run.report.broken = request.broken
        except (UsageRefusedError, MachineError) as error:
            target: dict[str, object] = {"device": request.device}
            report = RunReport(request.profile, request.seed, target)
            ended = _summarise(request, report, ledger, failure=error.message)
            with suppress(UsageRefusedError):  # the first error is the one to tell
                _write_outputs(request, replace(ended, code=error.exit_code))
            raise
        return _carry_out(request, run, writer, summarised)


def _carry_out(
    request: Request,
    run: Run | Fleet,
    writer: CaseWriter,
    summarised: Callable[..., Summary],
) -> Summary:
    started = time.monotonic()
    ended = interrupted_once if request.called else ended_by_signals
    with ended(run.ending.end):
        laws, repeated = _laws_by_operation(request), in_one_log() and not request.called
        with watch(console(sys.stderr), run, writer, laws, repeated=repeated):
            try:
                run.execute()
            except Exception as error:  # noqa: BLE001  what was learned until then is worth printing
                traceback.print_exc()
                why = f"{SUITE_FAILED}: {type(error).__name__}: {error}"
                run.report.failure = why.splitlines()[0]
                run.report.seconds = time.monotonic() - started
        writer.write_all(run.report)
        try:
            published = _published(request, run.report, time.monotonic() - started)
        except Exception as error:  # noqa: BLE001  the laws' report is worth writing
            traceback.print_exc()
            published = failed(f"{type(error).__name__}: {error}".splitlines()[0], MACHINE)
        summary = summarised(run.report, failure=run.report.failure, published=published)
        more = fleet_to_json(run, summarised) if isinstance(run, Fleet) else {}
        try:
            _write_outputs(request, summary, writer.failed, more)
        finally:
            if not request.called:
                print_summary(console(sys.stdout), summary, verbose=request.verbose)
            if isinstance(run, Fleet) and len(run.chips) > 1:
                print_chips(console(sys.stdout), run)
            if request.annotations:
                for line in annotation_lines(summary):
                    click.echo(line)
        if not run.plan.sanitizer:  # under which calls take many times longer
            keep_costs(request.cases, run.plan.profile, request.device, run.costs)
        keep_builds(request.cases, run.builds)
    return summary


def _asks_published(request: Request) -> bool:
    return request.gate and not request.without_published


def _published(request: Request, report: RunReport, seconds: float) -> dict[str, Any]:
    """Return what a gate's report has of published calls, which are asked after the laws.

    Args:
        request: the request.
        report: what the laws have found.
        seconds: the seconds that they took.
    """
    if not request.gate:
        return {}
    if said := request.without_published:
        return said
    if report.interrupted or report.lost or (request.exit_first and report.unknown):
        return {"state": LEFT_OUT, "why": "the run ended before them"}
    err = console(sys.stderr)
    err.print("judging what FlashInfer publishes of its calls", style="dim", markup=False)
    ending = Ending(request.seconds - seconds)

    def tell(call: Mapping[str, Any]) -> None:
        for block in finding_blocks(
            {"device": request.device, "seed": request.seed, "calls": [call]}
        ):
            err.print(f"{block.title}: {block.message}", markup=False, soft_wrap=True)
            if request.exit_first:
                ending.end(FOUND)

    with ended_by_signals(ending.end):
        found = judge_installed(
            request.device,
            request.seed,
            request.jobs,
            ending,
            lambda said: tell(brief(said)),
            known=request.expectations != "none",
        )
    if ending.asked not in ("", TIME):
        report.ended = ending.asked
    return found


@contextmanager
def _started(
    request: Request, plan: Plan, summarised: Callable[..., Summary]
) -> Iterator[Run | Fleet]:
    """Yield a run that is ready to begin, on this machine or on a cluster."""
    if request.ray is not None:
        with fleet_at(request.ray, plan, request.cases, resume=request.resume) as fleet:
            yield fleet
        return
    with kept_laws(request.cases, plan, resume=request.resume, reuse=request.reuse) as (
        plan_here,
        kept,
    ):
        run = _start(plan_here, kept)
        yield run
        if not (request.gate or request.resume):  # what the run before has read is not known
            kept.pass_on(request.cases, plan, run)
        kept.end(run.report.ended or run.report.lost or run.report.failure)
    if request.repeatable is not None:
        _keep_repeated(request, request.repeatable, plan, run.report, summarised)


def _keep_repeated(
    request: Request,
    repeatable: Repeatable,
    plan: Plan,
    report: RunReport,
    summarised: Callable[..., Summary],
) -> None:
    """Keep what the next such check says, if it asks nothing."""
    passed = passed_next(request.cases, plan)
    if len(passed.whole) < len(plan.implementations):
        return
    known, milestones = [*passed.whole.values()], Milestones(report.milestones.started)
    again = replace(report, implementations=known, seconds=0.0, respawns=0, milestones=milestones)
    if (summary := summarised(again)).code == CONFORMING:
        repeatable.keep(
            passed.read,
            summary.date,
            filled(outline_of(summary, whole=request.verbose)),
            annotation_lines(summary) if request.annotations else (),
            {flag: _contents(summary)[flag]() for flag in request.outputs.paths},
        )


def _plan(request: Request, ledger: Ledger) -> Plan:
    if request.operation is not None and request.operation not in OPERATIONS:
        meant = did_you_mean(request.operation, OPERATIONS)
        message = f"--operation {request.operation!r}: {meant}there are {', '.join(OPERATIONS)}"
        raise UsageRefusedError(message)
    check_laws(request.laws)
    check_implementations(request.implementations)
    only = only_of(request.only)
    profile = PROFILES[request.profile]
    names = list(dict.fromkeys(request.implementations))
    failed = _failed(request, names)
    names.sort(key=lambda name: not any(case.is_of(resolve_name(name)) for case in failed))
    return Plan(
        names,
        asked_for(profile, modules=request.modules, soak=request.soak),
        operation=request.operation,
        device=request.device,
        seed=request.seed,
        ledger=ledger,
        corpus=corpus_of(request.corpus, ledger, request.expectations, profile),
        jobs=request.jobs or 0,
        laws=request.laws,
        share=GATE_SHARE if request.gate else 1.0,
        deck=request.deck,
        examples=_examples(request),
        without_rules=_rules(request.without_rules),
        only=only,
        costs=_costs(request),
        sanitizer=_sanitizer(request),
        distrust=request.distrust,
        mps=request.mps,
        seconds=request.seconds * (1 - SHARE if _asks_published(request) else 1),
        builds=read_builds(request.cases),
        exit_first=request.exit_first,
        failed=failed,
    )


def _failed(request: Request, names: Sequence[str]) -> tuple[Case, ...]:
    """Return the cases of what failed last time, where that is asked for."""
    if not request.failed_first:
        return ()
    try:
        return failed_before(request.cases, [resolve_name(name) for name in names])
    except LedgerError as error:
        message = f"--failed-first: {error}"
        raise UsageRefusedError(message) from error


def _costs(request: Request) -> dict[str, Cost]:
    if request.costs is None:
        return {}
    if request.sanitizer:
        message = "--costs holds what calls cost without compute-sanitizer: leave --sanitizer out"
        raise UsageRefusedError(message)
    try:
        return read_costs(request.costs, PROFILES[request.profile], request.device)
    except CostsError as error:
        message = f"--costs {error}"
        raise UsageRefusedError(message) from error


def _examples(request: Request) -> ExampleDatabase | None:
    """Open the example database of a profile that explores."""
    if not PROFILES[request.profile].explore:
        if request.examples is not None and not is_from_file("examples"):
            message = f"--examples goes with --profile nightly: {request.profile} keeps none"
            raise UsageRefusedError(message)
        return None
    try:
        return open_examples(shared_examples(request.examples), request.cases / "examples")
    except ExamplesError as error:
        named = "--examples" if request.examples is not None else VARIABLE
        message = f"{named}: {error}"
        raise UsageRefusedError(message) from error


def _sanitizer(request: Request) -> str:
    """Return the tool of compute-sanitizer that was asked for, if it can run here."""
    tool = request.sanitizer or ""
    if tool and request.device != "cuda":
        message = f"--sanitizer {tool} looks at what runs on a GPU: it needs --device cuda"
        raise UsageRefusedError(message)
    try:
        if tool:
            sanitizer_command(tool)
    except SanitizerMissingError as error:
        message = f"--sanitizer {tool}: {error}"
        raise UsageRefusedError(message) from error
    return tool


def _rules(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the rules that are not to be asked."""
    if not names:
        return ()
    from ...impl.gating import load_rules

    known = {rule.id for rule in load_rules().rules}
    unknown = [name for name in names if name not in (EVERY_RULE, *known)]
    if unknown:
        meant = did_you_mean(unknown[0], known)
        message = f"--without-rule {unknown[0]}: there is no such rule; {meant}".rstrip("; ")
        raise UsageRefusedError(message)
    return names


def _read_ledger(choice: str | None) -> Ledger:
    try:
        return read_expectations(choice)
    except LedgerError as error:
        raise UsageRefusedError(str(error)) from error


def _start(plan: Plan, kept: KeptLaws) -> Run:
    try:
        return Run(plan, kept=kept)
    except UnsupportedError as error:
        raise MachineError(str(error)) from error


def _required(request: Request) -> RequiredClaims | None:
    if request.require_claims is None:
        return None
    if request.only:
        message = f"{FLAG} does not go with --only: a value may be refused with these values only"
        raise UsageRefusedError(message)
    return read_claims(request.require_claims)


def _summarise(
    request: Request,
    report: RunReport,
    ledger: Ledger,
    required: RequiredClaims | None = None,
    *,
    failure: str = "",
    published: Mapping[str, Any] = MappingProxyType({}),
) -> Summary:
    return summarise(
        report,
        ledger,
        gate=request.gate,
        command=request.command,
        laws=request.laws,
        failure=failure,
        allow_incomplete=request.allow_incomplete,
        lost=required.lost(report, gate=request.gate) if required else (),
        published=published,
    )


def _laws_by_operation(request: Request) -> dict[str, int]:
    """Count the laws that will run for each operation."""
    return {
        operation: sum(not request.laws or law.name in request.laws for law in laws_of(operation))
        for operation in OPERATIONS
    }


def _write_outputs(
    request: Request, summary: Summary, unwritten: str = "", more: Mapping[str, Any] | None = None
) -> None:
    request.outputs.write(_contents(summary, more or {}), [unwritten])


def _contents(
    summary: Summary, more: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Callable[[], Any]]:
    """Return what makes the content of each file to write, by the option that names it."""
    # Imported here: the first problem need not wait for templates.
    from ..reports.html_report import to_html

    return {
        "--json": lambda: {**to_json(summary), **more},
        "--evidence": lambda: as_evidence({**to_json(summary), **more}),
        "--junit": lambda: to_junit(summary),
        "--html": lambda: to_html(summary),
        "--sarif": lambda: to_sarif(summary),
    }
