"""Lines of Triton kernels that a run's problems ran: counted, named, and too few of them."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kernelproof.ci.console.errors import INCOMPLETE
from kernelproof.ci.reports.html_report import to_html
from kernelproof.ci.reports.json_report import to_json
from kernelproof.ci.reports.run_outline import print_summary, to_junit
from kernelproof.ci.reports.summary import Summary, summarise
from kernelproof.properties.findings.ledger import Ledger
from kernelproof.properties.findings.report import RunReport
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.space.profiles import Profile

pytest.importorskip("triton")

SUBJECTS = Path(__file__).with_name("kernel_subjects.py")
LINES = SUBJECTS.read_text().splitlines()
FIRST = 1 + LINES.index("        total = unpacked(total)")
LAST = 1 + LINES.index("        total = (low + high) * 0.5")
TINY = Profile("tiny", 6, max_work=2_000, shrink_seconds=5.0, seconds=60.0, thorough=True)


@pytest.fixture(scope="module")
def run() -> RunReport:
    return Run(
        Plan([f"{SUBJECTS}:{name}" for name in ("partly", "wholly", "declares")], TINY)
    ).execute()


def summary_of(run: RunReport, *places: int) -> Summary:
    some = replace(run, implementations=[run.implementations[place] for place in places])
    return summarise(some, Ledger(), gate=False, command="check")


def test_less_than_half_of_a_kernel_is_incomplete_with_its_lines_named(run: RunReport) -> None:
    summary = summary_of(run, 0)
    assert summary.code == INCOMPLETE
    (gap,) = (gap for gap in run.implementations[0].coverage.gaps if gap.code == "kernel")
    assert (gap.name, gap.judged, gap.floor) == ("weigh", 10, 11)
    assert f"{FIRST}-{LAST} under PACKED" in summary.sentence
    screen = io.StringIO()
    print_summary(Console(file=screen, width=200), summary)
    told = f"kernel lines 45 %; never run: weigh {FIRST}-{LAST} under PACKED"
    assert told in screen.getvalue()
    assert f'value="{told}' in to_junit(summary)


def test_lines_that_need_an_unset_flag_are_not_asked_for(run: RunReport) -> None:
    assert not [each for each in run.implementations[2].coverage.gaps if each.code == "kernel"]
    (of_declares,) = to_json(summary_of(run, 2))["implementations"]
    assert of_declares["unset_flags"] == {"PACKED": "engine/merging.py:12"}
    assert of_declares["kernel_lines"]["without_unset"] == {"run": 10, "lines": 10}
    screen = io.StringIO()
    print_summary(Console(file=screen, width=200), summary_of(run, 2))
    assert "kernel lines 45 % (100 % without PACKED); never run: " in screen.getvalue()


def test_a_kernel_that_ran_wholly_is_not(run: RunReport) -> None:
    assert not [each for each in run.implementations[1].coverage.gaps if each.code == "kernel"]
    screen = io.StringIO()
    print_summary(Console(file=screen, width=200), summary_of(run, 1))
    assert "kernel lines 100 %\n" in screen.getvalue()


def test_implementations_of_one_file_are_counted_together(run: RunReport) -> None:
    screen = io.StringIO()
    print_summary(Console(file=screen, width=300), summary_of(run, 0, 1))
    text = "kernel_subjects.py, 2 implementations together: kernel lines 60 %; never run: "
    assert text in screen.getvalue()


def test_the_json_has_each_function_of_the_file(run: RunReport) -> None:
    of_partly, of_wholly = json.loads(json.dumps(to_json(summary_of(run, 0, 1))))["implementations"]
    found = {each["function"]: each for each in of_partly["kernels"]}
    assert [each["role"] for each in found.values()] == ["launched", "called", "not launched"]
    weigh = found["weigh"]
    assert weigh["file"].endswith("kernel_subjects.py")
    assert (weigh["lines"], weigh["run"]) == (21, 10)
    assert weigh["never_run"] == [
        {"first": FIRST, "last": LAST, "under": "PACKED", "statements": 11, "calls": ["unpacked"]}
    ]
    assert (weigh["branches"], weigh["taken"]) == (2, 1)
    assert weigh["constexprs"]["PACKED"] == ["False"]
    assert found["unpacked"]["run"] == 0
    assert of_partly["kernel_lines"]["all"] == {"run": 10, "lines": 22}
    assert of_wholly["kernel_lines"]["all"] == {"run": 8, "lines": 8}


def test_the_page_shows_the_source(run: RunReport) -> None:
    page = to_html(summary_of(run, 0, 1))
    assert f'<span class="bad">{FIRST:5d} !         total = unpacked(total)</span>' in page
    assert "weigh: 10 of 21 lines" in page
