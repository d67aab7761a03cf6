"""The parts of a report: known causes, what passed, what was not run."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

from kernelproof.ci.console.terminal import console
from kernelproof.ci.reports.markdown import to_markdown
from kernelproof.ci.reports.run_outline import outline_of, print_summary
from kernelproof.ci.reports.summary import (
    Summary,
    in_order,
    known_causes,
    laws_not_run,
    not_run,
    not_run_text,
    passed_text,
    refused,
    state,
    summarise,
)
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.findings.coverage import Coverage, Gap
from kernelproof.properties.findings.ledger import Entry, Ledger
from kernelproof.properties.findings.report import ImplementationReport, LawReport, RunReport

ISSUE = "https://github.com/flashinfer-ai/flashinfer/issues/4051"
CAUSES = 12
LEDGER = Ledger(
    tuple(
        Entry(
            id=f"known-{number}",
            implementation=f"kernel-{number}",
            status="FAIL",
            where={},
            reason=f"Fault {number % CAUSES} of the kernel. " + "More is known of it. " * 9,
            case=Path("case.json"),
            issue=ISSUE if number % CAUSES == 0 else "",
        )
        for number in range(30)
    )
)
NEEDS_GPU = Refusal("FlashInfer's CUDA kernels need a GPU", "device", "a GPU")


def kernel(number: int, *, known: int = 0) -> ImplementationReport:
    laws = [LawReport(f"law-{each}", judged=10) for each in range(5)]
    if known:
        laws[0].known = Counter({f"known-{number}": known})
    laws.append(LawReport("idle", vacuous=3))
    return ImplementationReport(f"kernel-{number}", f"k:{number}", "merge_state", laws=laws)


def other(name: str, refusal: Refusal | None = None) -> ImplementationReport:
    return ImplementationReport(name, name, "moe", refusal=refusal)


def summary(*reports: ImplementationReport, ended: str = "") -> Summary:
    report = RunReport("gate", 0, {"device": "cpu"}, list(reports), seconds=250.0, ended=ended)
    return summarise(report, LEDGER, gate=True, command="kernelproof gate")


def lines_of(made: Summary, *, verbose: bool = False) -> list[str]:
    stream = io.StringIO()
    print_summary(console(stream), made, verbose=verbose)
    return stream.getvalue().splitlines()


def clean_gate() -> Summary:
    judged = [kernel(number, known=2 * (number < 30)) for number in range(38)]
    needs = [other(f"cuda-{number}", NEEDS_GPU) for number in range(31)]
    lacking = Refusal("cutlass is not installed", "package", "nvidia-cutlass-dsl")
    return summary(*judged, *needs, *(other(f"cute-{number}", lacking) for number in range(7)))


def test_a_clean_gate_is_short_and_all_of_it_can_be_asked_for() -> None:
    lines = lines_of(clean_gate())
    assert len(lines) <= 20  # of 40: the others are for what a log shows while it runs
    assert lines[0].startswith("CONFORMING: no new finding, 30 known")
    assert sum(line.startswith("KNOWN known-") for line in lines) == CAUSES
    assert "passed: 8 of 38 implementations, 30 with known findings only; 160 of 228 laws" in lines
    assert lines[-1] == (
        "not run: 38 of 76 implementations: 31 need a GPU, 7 need nvidia-cutlass-dsl; "
        "38 laws with nothing to judge, or unsupported (-v names them)"
    )
    every = "\n".join(lines_of(clean_gate(), verbose=True))
    for number in range(31):
        assert f"UNSUPPORTED  cuda-{number}\n  FlashInfer's CUDA kernels need a GPU" in every
    for number in range(30):
        assert f"KNOWN known-{number}  kernel-{number}: 2 problems: Fault" in every
    assert "not run: kernel-7  idle: nothing to judge" in every


def test_the_outline_of_a_run_can_be_a_comment() -> None:
    text = to_markdown("A gate", outline_of(clean_gate(), whole=True), "made here")
    assert text.startswith("## A gate\n\n- CONFORMING: no new finding, 30 known")
    assert "<summary>Known findings (30)</summary>" in text
    assert "- **KNOWN known-0 kernel-0: 2 problems:** Fault 0 of the kernel." in text
    assert "- kernel-0: 50 judged, 0 unsupported, 0 rejected, 0 new, 1 known, 0.0 seconds" in text
    assert "- and 36 more\n" in text  # of 76 that were not run, or had a law without anything
    assert text.endswith("made here\n")


def test_why_no_module_was_built_is_said_at_the_end_of_the_time_too() -> None:
    dear = Refusal("building one of its modules takes about 432 minutes of a core", "time")
    lines = lines_of(summary(kernel(0), other("late"), other("dear", dear), ended="time"))
    assert lines[lines.index("UNSUPPORTED  dear") + 1].strip() == dear
    assert lines[lines.index("UNJUDGED  late") + 1].strip() == (
        "the run ended before its first law did"
    )


def test_known_findings_with_one_issue_or_reason_are_one_cause() -> None:
    made = summary(*(kernel(number, known=number + 1) for number in (0, 1, 12, 13, 24)))
    first, second = known_causes(made)
    assert [each.entry for each in first.entries] == ["known-0", "known-12", "known-24"]
    line = first.text(100)
    assert line.startswith("known-0 and 2 more: 39 problems: Fault 0 of the ")
    assert line.endswith(" ... (flashinfer-ai/flashinfer#4051)")
    assert 90 < len(line) <= 100
    assert (
        second.text(1000) == f"known-1 and 1 more: 16 problems: {LEDGER.entries[1].reason.strip()}"
    )
    assert "Fault 1 of" in second.text(10)


def test_a_known_finding_without_an_entry_is_named() -> None:
    stray = kernel(1)
    stray.laws[0].known = Counter({"retired": 1})
    (cause,) = known_causes(summary(stray))
    assert cause.text(100) == "retired: 1 problem"


def test_what_was_not_run_is_counted_by_its_code() -> None:
    ruled = [other(f"ruled-{n}", Refusal("no", "rules", f"rule-{n}")) for n in range(2)]
    one = other("one", Refusal("no", "package", "b200-tools"))
    broken = other("broken", NEEDS_GPU)
    broken.error = "it cannot be imported"
    reports = [one, kernel(1), other("stray"), *ruled, broken]
    reasons = [reason for _, reason in not_run(summary(*reports))]
    assert not_run_text(reasons, len(reports)) == (
        "4 of 6 implementations: 2 refused by the support rules, "
        "1 of an operation that no selected law speaks of, 1 needs b200-tools"
    )
    assert ("ended", "") in [reason for _, reason in not_run(summary(*reports, ended="time"))]
    assert refused(reports) == [
        ("package", "b200-tools"),
        ("rules", ""),
        ("rules", ""),
        ("device", "a GPU"),
    ]


def test_a_law_that_judged_nothing_has_its_reason() -> None:
    mine = kernel(1)
    mine.laws.append(LawReport("refused", unsupported=4, unsupported_reason="no windows"))
    told = {law.law: why for law, why in laws_not_run(mine)}
    assert told == {
        "idle": "nothing to judge",
        "refused": "no windows (4 unsupported, 0 with nothing to judge)",
    }
    assert passed_text(summary(mine)) == "5 of 7 laws of kernel-1"
    assert not [*laws_not_run(other("cuda", NEEDS_GPU))]


def test_what_is_wrong_comes_first() -> None:
    short = kernel(2)
    short.coverage = Coverage(gaps=(Gap("law", "law-0"),))
    broken = other("broken")
    broken.error = "it cannot be imported"
    reports = [other("cuda", NEEDS_GPU), kernel(3), short, kernel(1, known=1), broken]
    states = [state(each) for each in in_order(reports)]
    assert states == ["ERROR", "KNOWN", "INCOMPLETE", "PASS", "UNSUPPORTED"]
