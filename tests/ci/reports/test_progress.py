"""What a run shows while it works: a bar with an honest end, and few lines in a log."""

from __future__ import annotations

import io
import math
import re
import threading
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from kernelproof.ci.console import live
from kernelproof.ci.console.live import MOST_SHOWN
from kernelproof.ci.console.terminal import console
from kernelproof.ci.reports.progress import BUSIEST, Watch
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.findings.report import (
    Finding,
    ImplementationReport,
    LawReport,
    RunReport,
)
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import MergeProblem

LAWS = {"merge_state": 10}
WIDTH = 100


class NoCases:
    def write_found(self, finding: Finding, report: RunReport) -> None:
        """Write nothing."""


@dataclass
class Watched:
    """A watch whose clock stands still."""

    seconds: float = math.inf
    err: Console = field(default_factory=lambda: console(io.StringIO()))
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.reports = [report(f"kernel-{number}") for number in range(6)]
        plan = Plan([r.name for r in self.reports], PROFILES["gate"], seconds=self.seconds)
        run: Any = SimpleNamespace(plan=plan, report=RunReport("gate", 0, {}, self.reports))
        writer: Any = NoCases()
        self.watch = Watch(self.err, run, writer, LAWS, clock=lambda: self.now)
        self.watch.begin()

    def plan(self) -> None:
        self.watch.planned(self.reports, {})

    def end_laws(self, report: ImplementationReport, count: int) -> None:
        for _ in range(count):
            self.watch.law_done(report, LawReport("any"))

    @property
    def block(self) -> list[str]:
        out = Console(file=io.StringIO(), width=WIDTH, force_terminal=True, no_color=True)
        with out.capture() as shown:
            out.print(self.watch.block())
        return re.sub(r"\x1b\[[\d;]*m", "", shown.get()).splitlines()


def report(name: str) -> ImplementationReport:
    return ImplementationReport(name, f"k:{name}", "merge_state")


def test_the_end_is_known_from_the_plan() -> None:
    watched = Watched()
    watch, (first, second, *_) = watched.watch, watched.reports
    assert watch.share is None
    assert watch.line() == "starting: 0 of 6 implementations prepared"
    watch.prepared(first, 100)
    assert watch.line() == "0%: 0 of about 60 laws; starting: 1 of 6 implementations prepared"
    watch.judged(first.name, 60)
    refused = replace(watched.reports[5], refusal=Refusal("no", "rules"))
    watch.skipped(refused)  # then there is less to do
    assert watch.share == 6 / 50
    watched.plan()
    watch.prepared(second, 100)
    assert watch.share == 6 / 60
    watched.end_laws(first, 10)
    assert watch.share == 10 / 60
    watch.judged(second.name, 25)  # laws under way count by their problems
    assert watch.share == 12.5 / 60
    watch.judged(second.name, 1000)  # shrinking judges more than was planned
    assert watch.share == 19.5 / 60
    watched.end_laws(second, 10)
    assert watch.share == 20 / 60
    watched.reports[2].refusal = Refusal("too dear", "time")
    watch.skipped(watched.reports[2])
    assert watch.share == 0.5


def test_the_time_left_follows_from_what_is_done_and_from_the_deadline() -> None:
    watched = Watched(seconds=600.0)
    watch, (first, second, *_) = watched.watch, watched.reports
    assert watch.left() == "at most 10:00 left"
    watched.now += 30
    watch.prepared(first, 100)
    watched.plan()
    watched.now += 60
    assert watch.left() == "at most 8:30 left"
    watched.end_laws(first, 10)  # a sixth in 60 s
    assert watch.left() == "about 5:00 left"
    watched.now += 100
    assert watch.left() == "at most 6:50 left"  # else the estimate, 13:20
    watch.prepared(second, 100)
    assert not Watched().watch.left()


def test_the_busiest_are_named_those_at_work_longest_first() -> None:
    watched = Watched()
    watched.plan()
    for each in watched.reports:
        watched.watch.prepared(each, 100)
        watched.now += 1
        watched.watch.law_begun(each.name, "parity")
    watched.watch.law_ended("kernel-1", "parity")
    named = "kernel-0, kernel-2, kernel-3, kernel-4 and 1 more"
    assert watched.watch.line() == f"0%: 0 of 60 laws; at work: {named}"
    rows = [line for line in watched.block if line.startswith("  kernel-")]
    assert len(rows) == BUSIEST
    assert rows[0].startswith("  kernel-0: 0 of 10 laws, 0 judged; parity 5 s")
    assert "  and 1 more at work" in watched.block


def test_modules_that_are_built_are_counted_together() -> None:
    watched = Watched()
    watched.watch.building("kernel-0", 1, 7)
    watched.watch.building("kernel-1", 2, 2)
    assert "3 of 9 modules built" in watched.watch.line()
    assert "  kernel-0: 1 of 7 modules built" in watched.block
    watched.watch.building("kernel-0", 7, 7)
    assert "modules" not in watched.watch.line()


def test_the_block_never_grows_beyond_a_small_terminal() -> None:
    watched = Watched()
    watched.plan()
    for each in watched.reports:
        watched.watch.prepared(each, 100)
        watched.watch.law_begun(each.name, "parity")
    wrong = Verdict("FAIL", "nan", "out[0] is NaN " * 30)
    for number in range(20):
        found = Finding("kernel-0", f"law-{number}", wrong, MergeProblem(), replay="kernelproof r")
        watched.watch.found(found)
    watched.watch.failing("kernel-0", "parity", wrong)
    block = watched.block
    assert all(len(line) <= WIDTH for line in block)
    assert len(block) == 2 + BUSIEST + 1 + 1 + MOST_SHOWN
    assert block[-1].startswith("FAIL nan  kernel-0  parity: now it is made smaller")
    watched.watch.law_ended("kernel-0", "parity")
    assert watched.block[-1].startswith("FAIL nan  kernel-0  law-19: out[0] is NaN")


def test_a_log_of_five_minutes_has_few_lines_and_one_of_an_hour_not_many() -> None:
    def lines(seconds: float) -> int:
        passed, count = 0.0, 0
        while (passed := passed + live.pause_after(passed)) <= seconds:
            count += 1
        return count

    assert lines(300) == 10
    assert lines(3600) <= 40


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "variables", "block"),
    [
        (Terminal, {"TERM": "xterm"}, True),
        (Terminal, {"TERM": "dumb"}, False),
        (io.StringIO, {"TERM": "xterm", "FORCE_COLOR": "1"}, False),
    ],
)
def test_a_block_needs_a_terminal(
    stream: type[io.StringIO],
    variables: dict[str, str],
    block: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert live.has_block(console(stream())) is block


def test_the_block_disappears_and_findings_do_not_scroll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    watched = Watched(err=console(stream))
    assert not stream.getvalue()
    with live.live(watched.err, watched.watch.block, watched.watch.line):
        watched.watch.found(Finding("kernel-0", "parity", Verdict("FAIL", "nan"), MergeProblem()))
    shown = stream.getvalue()
    assert "1 finding" in shown
    rows = len(watched.block)
    assert shown.endswith("\x1b[1A\x1b[2K" * rows)


def test_a_log_has_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "LEAST_PAUSE", 0.001)
    stream, asked = io.StringIO(), threading.Event()

    def line() -> str:
        asked.set()
        return "half of it\nis done"

    with live.live(console(stream), lambda: "", line):
        assert asked.wait(60)
    assert stream.getvalue().splitlines()[0].endswith(r" s] half of it\nis done")
