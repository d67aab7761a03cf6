"""Kernels that a run's calls launched: named in every report, and a finding where not claimed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kernelproof.ci.answers.records import from_data, to_data
from kernelproof.ci.console.errors import NONCONFORMING
from kernelproof.ci.reports.html_report import to_html
from kernelproof.ci.reports.json_report import to_json
from kernelproof.ci.reports.run_outline import print_summary
from kernelproof.ci.reports.summary import Summary, summarise
from kernelproof.properties.findings.launched import Launched, launched_text
from kernelproof.properties.findings.ledger import Ledger
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.seeded.attention.launch_bugs import MOST_KEYS, PLAIN, TILED
from kernelproof.properties.space.profiles import PROFILES

MODULE = "kernelproof.properties.seeded.attention.launch_bugs"


@pytest.fixture(scope="module")
def summary() -> Summary:
    names = [f"{MODULE}:{name}" for name in ("silent_fallback", "launches_what_it_claims")]
    plan = Plan(names, PROFILES["quick"], laws=("parity",), seconds=20.0)
    return summarise(Run(plan).execute(), Ledger(), gate=False, command="check")


def test_a_fallback_is_a_finding_with_both_names(summary: Summary) -> None:
    assert summary.code == NONCONFORMING
    (finding,) = summary.report.findings
    assert (finding.verdict.status, finding.verdict.kind) == ("FAIL", "backend")
    assert finding.verdict.message == f"it claims the kernel {TILED}; the call launched {PLAIN}"
    assert max(finding.problem.seq_lens) == MOST_KEYS  # type: ignore[union-attr]
    (told,) = to_json(summary)["findings"]
    assert told["kernels"] == [PLAIN]


def test_every_report_has_the_names(summary: Summary) -> None:
    report = to_json(summary)
    wrong, honest = report["implementations"]
    assert {name for call in wrong["launched"]["calls"] for name in call["names"]} == {TILED, PLAIN}
    (call,) = honest["launched"]["calls"]
    assert call["kernels"] == ["prepare", TILED]
    assert honest["laws"][0]["specialisations"] == [call["id"]]
    assert (report["launched"]["distinct"], report["launched"]["named"]) == (3, 3)
    assert TILED in to_html(summary)
    screen = io.StringIO()
    print_summary(Console(file=screen, width=200), summary)
    assert "kernels run: 3 distinct, in 3 of 3 specialisations" in screen.getvalue()


def test_a_run_that_goes_on_knows_them(summary: Summary) -> None:
    (law,) = summary.report.implementations[1].laws
    assert from_data(to_data(law)).launched == law.launched


def test_what_was_not_named_is_a_sentence() -> None:
    launched = Launched()
    assert launched_text(launched, 9.0) == ""
    launched.add({"called": ["0123456789"], "seconds": 0.09})
    assert launched_text(launched, 9.0) == (
        "kernels run: 0 distinct, in 0 of 1 specialisation, in 1.0% of the laws' time; not "
        "recorded: 1 specialisation ended before a call of it was profiled"
    )
    empty = {"id": "0123456789", "step": "", "module": "", "features": [], "size": 0, "kernels": []}
    launched.add({"calls": [empty]})
    assert "in 1 of 1 specialisation (1 launched none), in" in launched_text(launched, 9.0)
    other = Launched()
    other.add({"calls": [{**empty, "kernels": [TILED]}]})
    launched.include(other)  # kernels of another call count, whichever comes first
    other.include(launched)
    assert launched.kernels == other.kernels == (TILED,)
    launched.calls.clear()
    launched.add({"why": "torch's profiler raised OSError: no CUPTI"})
    assert launched_text(launched, 9.0) == (
        "kernel names: not recorded, torch's profiler raised OSError: no CUPTI"
    )
