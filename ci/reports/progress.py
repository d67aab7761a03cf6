"""What a run says on standard error: what it will judge and build, and how far it is."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ...properties.findings.cases import CaseWriter
from ...properties.findings.causes import cause_of, causes_of
from ...properties.findings.report import Finding, ImplementationReport, LawReport, RunReport
from ...properties.search.module_plan import Chosen
from ...properties.search.plan import Plan
from ...properties.search.progress import Progress
from ...properties.verdicts.text import count_of, one_line
from ...properties.verdicts.verdict import Verdict
from ..console.live import bar, has_block, live, minutes, newest, row
from .display import style_of
from .summary import not_run_text, refused


def opening(plan: Plan, seed: int, now: datetime) -> str:
    """Return the line on what was asked for, with the deadline of the run."""
    until = ""
    if plan.seconds < math.inf:
        end = now + timedelta(seconds=plan.seconds)
        until = f", until {end:%H:%M:%S} ({plan.seconds / 60:g} minutes)"
    return (
        f"{count_of(len(plan.implementations), 'implementation')} on {plan.device}, profile "
        f"{plan.profile.name}, seed {seed}{until}"
    )


def to_be_judged(
    reports: Sequence[ImplementationReport], modules: Mapping[str, Chosen]
) -> list[ImplementationReport]:
    """Return the implementations that were surveyed, refuse nothing, and have a module."""
    return [
        each
        for each in reports
        if each.operation and not each.error and not each.refusal and not _too_dear(each, modules)
    ]


def statement(
    reports: Sequence[ImplementationReport], modules: Mapping[str, Chosen], laws: int
) -> Iterator[str]:
    """Yield the lines on what will be judged and built, and what will not.

    Args:
        reports: the reports of all implementations.
        modules: the modules that were chosen, by implementation.
        laws: the laws that will run, each counted once an implementation.
    """
    judged = to_be_judged(reports, modules)
    counted = count_of(len(judged), "implementation")
    if len(judged) == 1:
        yield f"to be judged: {counted} under {count_of(laws, 'law')}"
    else:
        yield f"to be judged: {counted}, each under the laws of its operation: {laws:,} in all"
    libraries = {
        module.library: module.exists for each in modules.values() for module in each.modules
    }
    if libraries:
        minutes = sum(each.minutes for each in modules.values())
        yield (
            f"modules: {sum(libraries.values())} exist, {len(libraries) - sum(libraries.values())} "
            f"to be built, in about {minutes:.0f} minutes of one core"
        )
    dear = [
        f"{each.name} ({modules[each.name].missing:.0f} minutes of one core)"
        for each in reports
        if _too_dear(each, modules)
    ]
    if dear:
        yield f"not built, for they take longer than the run may: {', '.join(dear)}"
    if reasons := refused(reports):
        yield f"not run: {not_run_text(reasons, len(reports))}"


def _too_dear(report: ImplementationReport, modules: Mapping[str, Chosen]) -> bool:
    chosen = modules.get(report.name)
    return chosen is not None and bool(chosen.missing) and not chosen.modules


BUSIEST = 4
"""Most implementations that are named as being at work."""
LONGEST_MESSAGE = 160
LEAST_SHARE = 0.05
"""Part of the laws that must be done before the rest is estimated."""


@dataclass(frozen=True)
class Tally:
    """How far one implementation is.

    Attributes:
        planned: problems that its laws are to judge.
        laws: how many run on it.
    """

    planned: int
    laws: int = 0
    judged: int = 0
    laws_ended: int = 0

    @property
    def done(self) -> float:
        """Laws that are done, those under way by the problems that they have judged."""
        if self.laws_ended >= self.laws:
            return self.laws
        # Shrinking judges more than was planned, and a law that fails less: only ending ends it.
        judged = self.laws * self.judged / max(1, self.planned)
        return max(self.laws_ended, min(judged, self.laws - 0.5))


class Watched(Protocol):
    """A run, on one machine or on many."""

    plan: Plan
    report: RunReport
    progress: Progress


class Watch(Progress):
    """Keeps count of a run, and each finding as it comes.

    Args:
        err: where it is shown.
        run: the run that is watched.
        writer: the writer of the findings' cases.
        laws: how many run for each operation.
        clock: returns the time in seconds.
        repeated: whether the summary goes to the same log, which then has each finding once.
    """

    def __init__(
        self,
        err: Console,
        run: Watched,
        writer: CaseWriter,
        laws: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
        *,
        repeated: bool = False,
    ) -> None:
        self.err, self.run, self._clock = err, run, clock
        self.tallies: dict[str, Tally] = {}
        self.laws = 0
        """Laws to be judged, once all implementations were surveyed: each counted once for each."""
        self._known: set[str] = set()
        self._refused_late = 0
        self._expected: set[str] = set()
        self._at_work: dict[tuple[str, str], float] = {}
        self._building: dict[str, tuple[int, int]] = {}
        self._shrinking: dict[tuple[str, str], Text] = {}
        self._findings: list[Text] = []
        self._lock = threading.RLock()
        self._repeated = repeated
        self._writer, self._laws = writer, laws
        self._shown: set[int] = set()
        self._started = self._first = clock()
        self._opening = ""

    def begin(self) -> None:
        """Show what the run was asked to do, with its deadline."""
        seed = self.run.report.seed
        self._opening = opening(self.run.plan, seed, datetime.now().astimezone())
        self.say(Text(self._opening, "dim"))

    def planned(
        self, reports: Sequence[ImplementationReport], modules: Mapping[str, Chosen]
    ) -> None:
        """Receive what will be judged and built, and what will not."""
        judged = to_be_judged(reports, modules)
        with self._lock:
            self._expected = {each.name for each in judged}
            self.laws = sum(self._laws.get(each.operation, 0) for each in judged)
        for line in statement(reports, modules, self.laws):
            self.say(Text(one_line(line), "dim"))

    def building(self, name: str, done: int, modules: int) -> None:
        """Receive how many modules are built."""
        with self._lock:
            self._building[name] = (done, modules)

    def prepared(self, report: ImplementationReport, planned: int) -> None:
        """Begin a tally."""
        with self._lock:
            if report.name in self.tallies:  # its first problems were judged
                return
            self._known.add(report.reference)
            if not self.tallies:
                self._first = self._clock()
            self.tallies[report.name] = Tally(planned, self._laws.get(report.operation, 0))

    def skipped(self, report: ImplementationReport) -> None:
        """Count one that is not judged after all."""
        with self._lock:
            self._known.add(report.reference)
            if report.name in self._expected:
                self._refused_late += self._laws.get(report.operation, 0)

    def judged(self, name: str, count: int) -> None:
        """Count."""
        with self._lock:
            tally = self.tallies[name]
            self.tallies[name] = replace(tally, judged=tally.judged + count)

    def law_begun(self, name: str, law: str) -> None:
        """Note what is at work."""
        with self._lock:
            self._at_work[name, law] = self._clock()

    def law_ended(self, name: str, law: str) -> None:
        """Forget what was at work."""
        with self._lock:
            self._at_work.pop((name, law), None)
            self._shrinking.pop((name, law), None)

    def law_done(self, report: ImplementationReport, law: LawReport) -> None:
        """Count."""
        del law
        with self._lock:
            tally = self.tallies[report.name]
            self.tallies[report.name] = replace(tally, laws_ended=tally.laws_ended + 1)

    def failing(self, name: str, law: str, verdict: Verdict) -> None:
        """Show a failure at once: making it smaller takes long."""
        title = f"{verdict.status} {verdict.kind}".strip()
        line = Text(one_line(f"{title}  {name}  {law}: now it is made smaller"), "bold red")
        with self._lock:
            self._shrinking[name, law] = line
        self.say(line)

    def found(self, finding: Finding) -> None:
        """Write a finding's case and show it in short."""
        self._writer.write_found(finding, self.run.report)
        verdict = finding.verdict
        title = f"{verdict.status} {verdict.kind}".strip()
        first = self._shown_before(finding)
        if self._repeated:  # the summary comes into the same log, with all that is known by then
            if first is None:
                with self._lock:
                    self._findings.append(Text(title))
            self.say(Text(one_line(f"found: {finding.implementation}  {finding.law}"), "dim"))
            return
        if first is not None:
            told = f"  {finding.implementation}  {finding.law}: the same cause as under {first.law}"
            self.say(Text(one_line(f"{title}{told}"), "dim"))
            return
        about = f"  {finding.implementation}  {finding.law}: {verdict.message}".splitlines()[0]
        line = Text.assemble((title, style_of(verdict.status)), one_line(about[:LONGEST_MESSAGE]))
        with self._lock:
            self._findings.append(line)
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
        """Print a line, where it does not scroll away."""
        if not has_block(self.err):
            self.err.print(line, soft_wrap=True)

    @property
    def whole(self) -> int:
        """Laws of the whole run, each counted once an implementation; 0 until one is prepared.

        Until all are planned, an implementation that is not known yet counts as those that are
        prepared do on average.
        """
        with self._lock:
            if self.laws or not self.tallies:
                return self.laws
            laws = sum(each.laws for each in self.tallies.values())
            unknown = len(self.run.plan.implementations) - len(self._known)
            return laws + round(unknown * laws / len(self.tallies))

    @property
    def share(self) -> float | None:
        """Part of all laws that is done; None until it can be said how many there are."""
        with self._lock:
            done = sum(each.done for each in self.tallies.values()) + self._refused_late
            return min(1.0, done / self.whole) if self.whole else None

    def left(self) -> str:
        """Return how long the run still takes: by what is done of it, and by its deadline."""
        now = self._clock()
        deadline = self.run.plan.seconds - (now - self._started)
        share = self.share or 0.0
        rest = (now - self._first) * (1 / share - 1) if share >= LEAST_SHARE else None
        if rest is not None and rest <= deadline:
            return f"about {minutes(rest)} left"
        return f"at most {minutes(deadline)} left" if deadline < float("inf") else ""

    def line(self) -> str:
        """Return the state of the run in one line."""
        busy = [name for name, _ in self._busiest()]
        more = f" and {len(busy) - BUSIEST} more" if len(busy) > BUSIEST else ""
        at_work = f"at work: {', '.join(busy[:BUSIEST])}{more}" if busy else ""
        share = self.share
        percent = "" if share is None else f"{share:.0%}: "
        return percent + "; ".join(filter(None, (*self._counts(), self.left(), at_work)))

    def block(self) -> RenderableType:
        """Return the state of the run for a terminal: a bar, the busiest, the findings."""
        passed = minutes(self._clock() - self._started)
        told = "  ".join(filter(None, (passed, self.left(), *self._counts())))
        busy = self._busiest()
        rows = [row(f"  {name}: {what}", "dim") for name, what in busy[:BUSIEST]]
        if (more := len(busy) - BUSIEST) > 0:
            rows.append(row(f"  and {more} more at work", "dim"))
        with self._lock:
            shown = [*self._findings, *self._shrinking.values()]
        return Group(row(self._opening, "dim"), bar(self.share, told), *rows, *newest(shown))

    def _counts(self) -> Iterator[str]:
        """Yield what is done so far, in words."""
        with self._lock:
            tallies = list(self.tallies.values())
            built = list(self._building.values())
            findings = len(self._findings)
        if findings:
            yield count_of(findings, "finding")
        ended = sum(each.laws_ended for each in tallies)
        about = "" if self.laws else "about "
        if self.whole:
            yield f"{ended:,} of {about}{count_of(self.whole, 'law')}"
        if not self.laws:
            of = count_of(len(self.run.plan.implementations), "implementation")
            yield f"starting: {len(self._known)} of {of} prepared"
        if judged := sum(each.judged for each in tallies):
            yield f"{count_of(judged, 'problem')} judged"
        if (done := sum(d for d, _ in built)) < (modules := sum(m for _, m in built)):
            yield f"{done} of {modules} modules built"

    def _busiest(self) -> list[tuple[str, str]]:
        """Return the implementations at work, that with the longest call of a law first."""
        now = self._clock()
        with self._lock:
            laws: dict[str, list[str]] = {}
            for (name, law), begun in sorted(self._at_work.items(), key=lambda item: item[1]):
                laws.setdefault(name, []).append(f"{law} {now - begun:.0f} s")
            busy = []
            for name, told in laws.items():
                tally = self.tallies[name]
                counts = f"{tally.laws_ended} of {tally.laws} laws, {tally.judged:,} judged"
                busy.append((name, f"{counts}; {', '.join(told)}"))
            building = [
                (name, f"{done} of {modules} modules built")
                for name, (done, modules) in self._building.items()
                if done < modules and name not in laws
            ]
        return [*busy, *building]


@contextmanager
def watch(
    err: Console,
    run: Watched,
    writer: CaseWriter,
    laws: Mapping[str, int],
    *,
    repeated: bool = False,
) -> Iterator[Watch]:
    """Show what a run does for the length of a with block.

    Args:
        err: where to.
        run: the run, which is given its progress.
        writer: the writer of the findings' cases.
        laws: how many run for each operation.
        repeated: see ``Watch``.
    """
    made = Watch(err, run, writer, laws, repeated=repeated)
    run.progress = made
    made.begin()
    with live(err, made.block, made.line):
        yield made
