"""The run of `kernelproof check --gating`: both sides of the support table, tried here."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ... import __version__
from ...impl import ImplementationNotFoundError, UnsupportedError
from ...impl.gating import RulesError, load_rules
from ...impl.gating.knowledge import SCHEMA
from ...impl.protocol import EVERY_RULE
from ...impl.registry import resolve_name
from ...impl.targets.registrations import Registration
from ...properties.findings import report as endings
from ...properties.findings.cases import case_of, loading_name, replay_command, versions
from ...properties.findings.expectations import read_expectations
from ...properties.findings.files import Output, OutputError
from ...properties.findings.ledger import LedgerError
from ...properties.findings.report import Finding
from ...properties.gating.cells import REFUSED, SUPPORTED
from ...properties.gating.trials import FINDING, Trial, counts
from ...properties.gating.trying import Order, Report, Trying
from ...properties.space.axis_values import NO_FIELDS
from ...properties.verdicts.text import compact, count_of, one_line
from ..console.errors import (
    CONFORMING,
    INCOMPLETE,
    INTERRUPTED,
    MACHINE,
    NONCONFORMING,
    TERMINATED,
    USAGE,
    MachineError,
    UsageRefusedError,
)
from ..console.evidence_file import as_evidence
from ..console.outputs import Outputs
from ..console.selection import only_of
from ..console.signals import ended_by_signals
from ..console.terminal import console
from ..reports.display import command, line, print_broken, say
from ..reports.summary import VERDICTS, WORDS


@dataclass(frozen=True)
class GatingRequest:
    """What was asked for on the command line."""

    implementations: Sequence[str]
    device: str
    jobs: int | None
    modules: int | None
    only: tuple[str, ...]
    outputs: Outputs
    expectations: str | None
    cases: Path
    command: str
    rules: Path | None = None
    minutes: float | None = None
    allow_incomplete: bool = False
    broken: Sequence[Registration] = ()


@dataclass(frozen=True)
class Ended:
    """The result of a run that has ended."""

    report: Report
    code: int
    sentence: str
    command: str
    date: str
    broken: Sequence[Registration] = ()


def try_gating(request: GatingRequest) -> int:
    """Try the cells of the support table, print what became of them, and return the exit code."""
    ended = tried(request)
    print_ended(ended)
    data = to_json(ended)
    request.outputs.write({"--json": lambda: data, "--evidence": lambda: as_evidence(data)})
    return ended.code


def tried(request: GatingRequest) -> Ended:
    """Try the cells of the support table, and write the case of each finding.

    Raises:
        UsageRefusedError: something that was asked for does not exist or cannot be read.
        MachineError: the device is not there.
    """
    order = _order(request)
    err = console(sys.stderr)
    try:
        trying = Trying(order, lambda line: err.print(Text(one_line(line), "dim"), soft_wrap=True))
    except UnsupportedError as error:
        raise MachineError(str(error)) from error
    with ended_by_signals(trying.ending.end):
        report = trying.execute()
        _write_cases(request, report)
    code, sentence = conclude(report, allow_incomplete=request.allow_incomplete)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Ended(report, code, sentence, request.command, date, request.broken)


def _order(request: GatingRequest) -> Order:
    only = only_of(request.only)
    if lengths := next((name for name in NO_FIELDS if name in only.values), ""):
        message = f"--only {lengths} does not go with --gating, whose cells are of every phase"
        raise UsageRefusedError(message)
    try:
        found = {name: resolve_name(name) for name in dict.fromkeys(request.implementations)}
        book = load_rules(request.rules) if request.rules else load_rules()
        ledger = read_expectations(request.expectations)
        request.outputs.check()
    except (ImplementationNotFoundError, LedgerError) as error:
        raise UsageRefusedError(str(error)) from error
    except RulesError as error:
        message = f"--rules: {error}"
        raise UsageRefusedError(message) from error
    return Order(
        found,
        request.device,
        book,
        ledger,
        modules=request.modules or 0,
        jobs=request.jobs or 0,
        only=only,
        seconds=math.inf if request.minutes is None else 60 * request.minutes,
    )


def conclude(report: Report, *, allow_incomplete: bool = False) -> tuple[int, str]:
    """Return the exit code of a run, and its result in a sentence."""
    code, why = _exit_of(report)
    word = WORDS[VERDICTS.get(code, "error")]
    number = counts(report.trials)
    tried = f"{number['tried']:,} of {count_of(number['cells'], 'cell')} tried"
    built = sum(len(each.builds) for each in report.implementations)
    building = f", {count_of(built, 'module')} built in {report.build_seconds:.0f} s" * bool(built)
    code = CONFORMING if code == INCOMPLETE and allow_incomplete else code
    return code, f"{word}: {why}; {tried}{building}, {report.seconds:.1f} s in all"


def _exit_of(report: Report) -> tuple[int, str]:
    broken = [each for each in report.implementations if each.error]
    number = counts(report.trials)
    if report.interrupted or report.lost:
        return _exit_of_stopped(report)
    if broken:
        # One that cannot even be imported has no operation yet.
        code = MACHINE if any(each.operation for each in broken) else USAGE
        return code, f"{broken[0].name}: {broken[0].error}"
    if number["findings"]:
        found = count_of(number["findings"], "cell")
        return NONCONFORMING, f"{found} not as the rules say, {number['known']} known"
    if report.ended:
        return INCOMPLETE, "the time was over (--minutes) before every cell was tried"
    if not number["tried"]:
        idle = report.implementations[0]
        why = idle.reason or "none of its cells was run"
        return MACHINE, f"nothing was tried: {idle.name}: {why}"
    return CONFORMING, f"every cell is as the rules say, {number['known']} known"


def _exit_of_stopped(report: Report) -> tuple[int, str]:
    """Return the exit code of a run that a signal or its device ended, and why."""
    if not report.interrupted:
        return MACHINE, f"the device was lost: {report.lost}"
    code = TERMINATED if report.ended == endings.TERMINATED else INTERRUPTED
    return code, f"{report.ended}, this is what was learned until then"


def _write_cases(request: GatingRequest, report: Report) -> None:
    """Write the case of each finding, and give it the command that replays it."""
    for tried_one in report.implementations:
        name = loading_name(tried_one.reference)
        tried_one.trials = [
            replace(trial, replay=_case(request, report, name, trial))
            if trial.status == FINDING and trial.outcome != "right"
            else trial
            for trial in tried_one.trials
        ]


def _case(request: GatingRequest, report: Report, name: str, trial: Trial) -> str:
    finding = Finding(trial.implementation, trial.law, trial.verdict, trial.cell.problem)
    data = case_of(
        finding, name, operation=None, seed=0, target=report.target, without_rules=[EVERY_RULE]
    )
    path = request.cases / f"gating-{trial.implementation}-{trial.cell.problem.id}.json"
    try:
        Output("--cases", path).write(data)
    except OutputError as error:
        raise UsageRefusedError(str(error)) from error
    return replay_command(path)


def to_json(ended: Ended) -> dict[str, Any]:
    """Return everything that a run learned."""
    report = ended.report
    return {
        "schema": SCHEMA,
        "verdict": VERDICTS.get(ended.code, "error"),
        "message": ended.sentence,
        "exit_code": ended.code,
        "command": ended.command,
        "date": ended.date,
        "kernelproof": __version__,
        "device": report.target.get("device"),
        "target": {**report.target, **versions(report.target)},
        "seconds": round(report.seconds, 3),
        "build_seconds": round(report.build_seconds, 3),
        "interrupted": report.interrupted,
        "ended": report.ended,
        "lost": report.lost,
        "broken": [vars(each) for each in ended.broken],
        **counts(report.trials),
        "implementations": [each.to_json() for each in report.implementations],
        "trials": [trial.to_json() for trial in report.trials],
    }


def print_ended(ended: Ended) -> None:
    """Print the verdict, findings, and the tables."""
    out = console(sys.stdout)
    line(out, "", ended.sentence, {0: "bold green", 1: "bold red"}.get(ended.code, "bold yellow"))
    print_broken(out, ended.broken)
    _print_trials(out, ended.report)


STYLES = {"ok": "green", "known": "yellow", "finding": "bold red", "not run": "dim"}
LONGEST = 120


def _print_trials(out: Console, report: Report) -> None:
    """Print each finding with its problem and its replay, then a table of each side."""
    for trial in report.trials:
        if trial.status == FINDING:
            _print_finding(out, trial)
    for side, title in (
        (SUPPORTED, "Supported by the rules: the answer must be right"),
        (REFUSED, "Refused by the rules, called anyway: must be refused cleanly"),
    ):
        rows = [trial for trial in report.trials if trial.cell.side == side]
        if rows:
            out.print(Text(title, "bold"))
            out.print(_table(rows))
    for tried in report.implementations:
        why = tried.error or tried.reason
        if why:
            say(out, f"nothing tried  {tried.name}", why, style="UNSUPPORTED")


def _table(trials: list[Trial]) -> Table:
    """Return a row for each rule and implementation, and for what became of their cells."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, safe_box=True)
    for heading in ("rule", "implementation", "cells", "", "what happened"):
        table.add_column(heading, overflow="fold")
    for (rules, name, status, *_), group in groupby(sorted(trials, key=_row), key=_row):
        alike = list(group)
        first = alike[0].cell.title
        cells = first if len(alike) == 1 else f"{len(alike)} cells: {first}; ..."
        # Messages differ from cell to cell: all are in the JSON.
        entry = f"{alike[0].entry}: " if alike[0].entry else ""
        what = one_line(entry + alike[0].happened)
        shown = what if len(what) <= LONGEST else f"{what[:LONGEST]}..."
        table.add_row(rules, name, cells, Text(status, STYLES[status]), Text(shown))
    return table


def _row(trial: Trial) -> tuple[str, str, str, str, str]:
    rules = ", ".join(trial.cell.rules)
    return rules, trial.implementation, trial.status, trial.outcome, trial.entry


def _print_finding(out: Console, trial: Trial) -> None:
    title = f"FINDING  {trial.implementation}  {trial.cell.title}"
    say(out, title, f"{trial.meaning}. {trial.happened}", style="FAIL")
    command(out, "problem", compact(trial.cell.problem))
    if trial.replay:
        command(out, "replay", trial.replay)
    out.print()
