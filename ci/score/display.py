"""What a person sees of a score: its progress, a line a bug, a line a law, the sum."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from ...properties.findings.report import Finding, ImplementationReport, LawReport
from ...properties.laws import find_law, laws_of
from ...properties.search.progress import Progress
from ...properties.seeded import SeededBug
from ...properties.worker.tolerance_baselines import NAMES
from .comparing import Comparison, Tell
from .scoring import Score, Scored, Stage, only_killer, size_of

TICK_SECONDS = 10.0
"""Seconds between two lines of progress where the output is no terminal."""
MANY = 20
"""Comparisons between two lines about them; each takes part of a second."""
MOST_LAWS = 4
"""Killing laws that are named in a bug's row; the others are counted."""
CONTROLS = {"bug": "", "tile": "Triton", "hang": "hang", "crash": "crash"}


class StageProgress(Progress):
    """Counts laws that have ended; the methods are called from several threads."""

    def __init__(self, err: Console, stage: Stage, bars: Bars | None) -> None:
        self._lock = threading.Lock()
        self._err, self._bars, self._title = err, bars, stage.title
        self._done, self._started, self._told = 0, time.monotonic(), time.monotonic()
        self._total = sum(
            sum(not stage.laws or law.name in stage.laws for law in laws_of(bug.operation))
            for bug in stage.bugs
        )
        self._task = bars.add_task(stage.title, total=self._total) if bars else None
        self._killed: set[str] = set()

    def law_done(self, report: ImplementationReport, law: LawReport) -> None:
        """Move the bar, or say how far it is now and then."""
        del report, law
        with self._lock:
            self._done += 1
            if self._bars is not None and self._task is not None:
                self._bars.update(self._task, completed=self._done)
            elif time.monotonic() - self._told > TICK_SECONDS:
                self._told = time.monotonic()
                told = f"{self._title}: {self._done} of {self._total} laws run"
                self._err.print(f"[{self._told - self._started:5.1f} s] {told}")

    def found(self, finding: Finding) -> None:
        """Print the law that was the first to find something."""
        with self._lock:
            if finding.implementation in self._killed:
                return
            self._killed.add(finding.implementation)
        verdict = finding.verdict
        told = f"{finding.implementation}: {verdict.status} under {finding.law}"
        self._err.print(f"  {told} after {finding.seconds:.1f} s", soft_wrap=True)


@contextmanager
def watch(err: Console, stage: Stage) -> Iterator[StageProgress]:
    """Show the progress of a stage for the length of a with block."""
    if not err.is_terminal:
        err.print(f"{stage.title}: {len(stage.bugs)}")
        yield StageProgress(err, stage, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bars(*columns, TimeElapsedColumn(), console=err, transient=True) as bars:
        yield StageProgress(err, stage, bars)


@contextmanager
def watch_comparison(err: Console, total: int) -> Iterator[Tell]:
    """Show the progress of the comparisons for the length of a with block."""
    err.print(f"comparisons: {total}")
    started, lock, done = time.monotonic(), threading.Lock(), 0

    def tell(bug: SeededBug, count: int) -> None:
        nonlocal done
        with lock:
            done += 1
            if done % MANY == 0:
                clock = f"[{time.monotonic() - started:5.1f} s]"
                told = f"{done} of {total} compared, last {bug.name} on {count} problems"
                err.print(f"{clock} comparisons: {told}", soft_wrap=True)

    yield tell


def print_score(out: Console, score: Score) -> None:
    """Print a score that has ended."""
    bugs, honest = score.of("bug", "tile", "hang", "crash"), score.of("honest")
    if bugs:
        out.print(bug_table(bugs))
        out.print(law_table(score))
    if honest:
        out.print(honest_table(honest))
    if score.comparison is not None and score.comparison.compared:
        out.print(comparison_table(score, score.comparison))
    print_totals(out, score)


def bug_table(bugs: list[Scored]) -> Table:
    """Return one row a bug."""
    table = _table("bug", "killed", "s", "killing laws", "smallest problem")
    for each in bugs:
        control = CONTROLS[each.bug.control]
        word = each.findings[0].verdict.status if each.killed else "SURVIVED"
        more = f" +{len(each.laws) - MOST_LAWS}" if len(each.laws) > MOST_LAWS else ""
        table.add_row(
            f"{each.bug.name} ({control})" if control else each.bug.name,
            Text(word, "green" if each.killed else "bold red"),
            "" if each.seconds is None else f"{each.seconds:.1f}",
            ", ".join(each.laws[:MOST_LAWS]) + more,
            size_of(each.smallest) if each.smallest else each.report.error.partition("\n")[0],
        )
    return table


def law_table(score: Score) -> Table:
    """Return one row a law."""
    table = _table("law", "kills", "alone", "bugs that only it kills, or why it is kept")
    for name, kills in score.kills_by_law.items():
        alone = [each.bug.name for each in only_killer(kills)]
        told = ", ".join(alone) or find_law(name).overlap
        table.add_row(name, f"{len(kills)}", f"{len(alone)}", told)
    return table


def comparison_table(score: Score, comparison: Comparison) -> Table:
    """Return one row a yardstick: the bugs with floating-point answers that it catches."""
    bugs, honest = comparison.of("bug"), comparison.of("honest")
    of_moe = sum(each.bug.operation == "moe" for each in bugs)
    table = _table(
        "comparison",
        f"bugs caught of {len(bugs)}",
        f"MoE of {of_moe}",
        f"honest accused of {len(honest)}",
    )
    for name in NAMES:
        accused = comparison.accused(name)
        told = f"{len(accused)}: {', '.join(accused)}" if accused else "0"
        caught = comparison.caught(name), comparison.caught(name, "moe")
        table.add_row(name, *(f"{len(each)}" for each in caught), told)
    compared = {each.bug.name for each in bugs}
    killed = [each for each in score.of("bug") if each.killed and each.bug.name in compared]
    accused = sorted({finding.implementation for finding in score.accused})
    of_moe = sum(each.bug.operation == "moe" for each in killed)
    table.add_row("all laws", f"{len(killed)}", f"{of_moe}", f"{len(accused)}")
    return table


def honest_table(honest: list[Scored]) -> Table:
    """Return one row an honest control."""
    table = _table("honest control", "judged", "accusations", "worst error / bound", "s")
    for each in honest:
        accused = len(each.report.findings)
        worst = max((law.worst_ratio for law in each.report.laws), default=0.0)
        table.add_row(
            each.bug.name,
            f"{each.report.judged:,}",
            Text(f"{accused}", "bold red" if accused else "green"),
            f"{worst:.3f}",
            f"{each.report.seconds:.1f}",
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, safe_box=True)
    for heading in headings:
        right = heading in ("s", "kills", "alone", "judged", "accusations", "worst error / bound")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    return table


def print_totals(out: Console, score: Score) -> None:
    """Print the sums of the table, and what keeps it from passing."""
    bugs, tiles, processes = score.of("bug"), score.of("tile"), score.of("hang", "crash")
    for each in score.accused:
        out.print(
            Text(f"{each.implementation}, {each.law}: {each.verdict.message}", "red"),
            soft_wrap=True,
        )
        out.print(Text(f"  {each.problem}"), soft_wrap=True)
    killed = sum(each.killed for each in bugs)
    share, small = f" ({score.share_killed:.1%})" if bugs else "", score.share_small
    attention = "of the attention bugs shrunk to one request and two pages"
    told = [
        f"{killed} of {len(bugs)} bugs killed{share}",
        f"{sum(each.killed for each in tiles)} of {len(tiles)} faults of Triton kernels",
        f"{sum(each.killed for each in processes)} of {len(processes)} hangs and crashes",
        f"median {score.median_seconds:.1f} s to kill",
        *([] if small is None else [f"{small:.0%} {attention}"]),
        f"{len(score.accused)} accusations in {score.honest_judged:,} problems of honest controls",
    ]
    seconds = ", ".join(f"{title} {spent:.0f} s" for title, spent in score.stage_seconds.items())
    out.print(f"profile {score.profile}, seed {score.seed}: {'; '.join(told)}", soft_wrap=True)
    out.print(f"time: {seconds}", soft_wrap=True)
    for shortfall in score.shortfalls:
        out.print(Text(f"FALLS SHORT: {shortfall}", "bold red"), soft_wrap=True)
    if not score.shortfalls:
        out.print(Text("PASSED", "bold green"))
