"""What a run does, on standard error, while it does it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from ...properties.findings.cases import CaseWriter
from ...properties.findings.causes import cause_of, causes_of
from ...properties.findings.report import Finding, ImplementationReport, LawReport
from ...properties.search.engine import Run
from ...properties.search.module_plan import Chosen
from ...properties.search.progress import Progress
from ...properties.verdicts.text import count_of, one_line
from ...properties.verdicts.verdict import Verdict
from .display import style_of
from .statement import opening, statement, to_be_judged
from .summary import state

TICK_SECONDS = 5.0
"""Between two lines of progress where nobody watches a terminal."""
LONGEST_MESSAGE = 160


@dataclass(frozen=True)
class Tally:
    """How far one implementation is."""

    planned: int
    judged: int = 0
    laws_left: int = 0


class Watch(Progress):
    """Keeps count, and shows each finding as it comes."""

    def __init__(self, err: Console, run: Run, writer: CaseWriter, laws: Mapping[str, int]) -> None:
        self.err, self.run = err, run
        self.tallies: dict[str, Tally] = {}
        self.laws = self.laws_ended = 0
        self.lock = threading.RLock()
        self._writer, self._laws = writer, laws
        self._shown: set[int] = set()

    def planned(
        self, reports: Sequence[ImplementationReport], modules: Mapping[str, Chosen]
    ) -> None:
        """Print what will be judged and built, and what will not."""
        judged = to_be_judged(reports, modules)
        with self.lock:
            self.laws = sum(self._laws.get(each.operation, 0) for each in judged)
        for line in statement(reports, modules, self.laws):
            self.say(Text(one_line(line), "dim"))

    def building(self, name: str, done: int, modules: int) -> None:
        """Print how many modules are built."""
        self.say(Text(f"{one_line(name)}: {done} of {modules} modules built", "dim"))

    def prepared(self, report: ImplementationReport, planned: int) -> None:
        """Begin a tally."""
        with self.lock:
            if report.name in self.tallies:  # its first problems were judged
                return
            left = self._laws.get(report.operation, 0)
            self.tallies[report.name] = Tally(planned, laws_left=left)
            self.changed(report.name)

    def judged(self, name: str, count: int) -> None:
        """Count."""
        with self.lock:
            tally = self.tallies[name]
            self.tallies[name] = replace(tally, judged=tally.judged + count)
            self.changed(name)

    def law_done(self, report: ImplementationReport, law: LawReport) -> None:
        """Count, and print a line after the implementation's last law."""
        del law
        with self.lock:
            self.laws_ended += 1
            tally = self.tallies[report.name]
            self.tallies[report.name] = replace(tally, laws_left=tally.laws_left - 1)
            self.changed(report.name)
            if tally.laws_left == 1:
                self.ended(report)

    def failing(self, name: str, law: str, verdict: Verdict) -> None:
        """Show a failure at once: making it smaller takes long."""
        title = f"{verdict.status} {verdict.kind}".strip()
        self.say(Text(one_line(f"{title}  {name}  {law}: now it is made smaller"), "bold red"))

    def found(self, finding: Finding) -> None:
        """Write a finding's case and show it in short."""
        self._writer.write_found(finding, self.run.report)
        verdict = finding.verdict
        title = f"{verdict.status} {verdict.kind}".strip()
        first = self._shown_before(finding)
        if first is not None:
            told = f"  {finding.implementation}  {finding.law}: the same cause as under {first.law}"
            self.say(Text(one_line(f"{title}{told}"), "dim"))
            return
        about = f"  {finding.implementation}  {finding.law}: {verdict.message}".splitlines()[0]
        line = Text.assemble((title, style_of(verdict.status)), one_line(about[:LONGEST_MESSAGE]))
        self.say(line)
        if finding.replay:
            self.say(Text(f"  {one_line(finding.replay)}", "dim"))

    def _shown_before(self, finding: Finding) -> Finding | None:
        """Return another finding with the same cause that was shown before, if there is one."""
        for report in list(self.run.report.implementations):
            if any(each is finding for each in report.findings):
                cause = cause_of(causes_of(report), finding)
                members = cause.members if cause else ()
                shown = [each for each in members if id(each) in self._shown]
                self._shown.add(id(finding))
                return shown[0] if shown else None
        return None

    def say(self, line: Text) -> None:
        """Print a line."""
        self.err.print(line, soft_wrap=True)

    def changed(self, name: str) -> None:
        """Follow a tally that has changed."""

    def ended(self, report: ImplementationReport) -> None:
        """Follow an implementation whose last law has ended."""


class BarWatch(Watch):
    """A bar an implementation, for a terminal."""

    def __init__(
        self, err: Console, run: Run, writer: CaseWriter, laws: Mapping[str, int], bars: Bars
    ) -> None:
        super().__init__(err, run, writer, laws)
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._start = bars.add_task("starting", total=None)

    def changed(self, name: str) -> None:
        """Move a bar."""
        tally = self.tallies[name]
        self._bars.update(self._start, visible=False)
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(one_line(name), total=tally.planned)
        # Shrinking judges more than was planned; a law that fails early, less.
        self._bars.update(self._tasks[name], completed=min(tally.judged, tally.planned))

    def ended(self, report: ImplementationReport) -> None:
        """Fill a bar."""
        task = self._tasks[report.name]
        judged = max(1, self.tallies[report.name].judged)
        self._bars.update(task, total=judged, completed=judged)
        self._bars.stop_task(task)


class LineWatch(Watch):
    """A short line now and then, for a log."""

    def __init__(self, err: Console, run: Run, writer: CaseWriter, laws: Mapping[str, int]) -> None:
        super().__init__(err, run, writer, laws)
        self._started = time.monotonic()
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)
        self._ticker.start()

    def ended(self, report: ImplementationReport) -> None:
        """Print one line an implementation."""
        judged = self.tallies[report.name].judged
        self.say(Text(f"{self._clock()} {one_line(report.name)}: {state(report)}, {judged} judged"))

    def close(self) -> None:
        """Stop the lines."""
        self._over.set()
        self._ticker.join()

    def _tick(self) -> None:
        while not self._over.wait(TICK_SECONDS):
            with self.lock:
                tallies = dict(self.tallies)
            judged = sum(tally.judged for tally in tallies.values())
            busy = [name for name, tally in tallies.items() if tally.laws_left]
            told = f"{self._share()}{count_of(judged, 'problem')} judged"
            told += f", {self.laws_ended} of {self.laws} laws ended" if self.laws else ", starting"
            others = f" and {len(busy) - 2} more" if len(busy) > 2 else ""  # noqa: PLR2004
            at_work = f"; at work: {', '.join(busy[:2])}{others}" if busy else ""
            self.say(Text(f"{self._clock()} {one_line(told + at_work)}"))

    def _share(self) -> str:
        """Return the share of the planned time that has passed, where one is planned."""
        whole = self.run.plan.seconds
        if whole == math.inf:
            return ""
        share = min(1.0, (time.monotonic() - self._started) / whole)
        return f"{share:.0%} of {whole / 60:g} minutes, "

    def _clock(self) -> str:
        return f"[{time.monotonic() - self._started:5.1f} s]"


@contextmanager
def watch(err: Console, run: Run, writer: CaseWriter, laws: Mapping[str, int]) -> Iterator[Watch]:
    """Show what a run does for the length of a with block.

    Args:
        err: where to.
        run: is given its progress.
        writer: of the findings' cases.
        laws: how many run for each operation.
    """
    plan, seed = run.plan, run.report.seed
    err.print(Text(opening(plan, seed, datetime.now().astimezone()), "dim"), soft_wrap=True)
    if err.is_terminal:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Bars(*columns, console=err, transient=True) as bars:
            run.progress = BarWatch(err, run, writer, laws, bars)
            yield run.progress
        return
    lines = LineWatch(err, run, writer, laws)
    run.progress = lines
    try:
        yield lines
    finally:
        lines.close()
