"""The score: what it says of reports made by hand, and a small run of the command."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kernelproof.ci.console.terminal import console
from kernelproof.ci.score.command import score as command
from kernelproof.ci.score.display import print_score
from kernelproof.ci.score.scoring import Score, Scored, only_killer, size_of, stages
from kernelproof.properties.findings.report import Finding, ImplementationReport, LawReport
from kernelproof.properties.laws import LAWS
from kernelproof.properties.seeded import BUGS, CATALOGUE, SeededBug, triton_bugs
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import AttentionProblem, MergeProblem, MetadataProblem

BUG = SeededBug("bug", "module:bug", "merge_state", "Merge wrongly.", "parity")
PROBLEM = MergeProblem(num_states=3, num_tokens=2)


def scored(bug: SeededBug, *laws: str, status: str = "FAIL", seconds: float = 1.0) -> Scored:
    verdict = Verdict.from_json({"status": status})
    reports = [
        LawReport(law, judged=5, finding=Finding(bug.name, law, verdict, PROBLEM, seconds=seconds))
        for law in laws
    ]
    reports.append(LawReport("well_formed", judged=5))
    return Scored(bug, ImplementationReport(bug.name, bug.reference, laws=reports))


def score(*found: Scored) -> Score:
    return Score("gate", 0, found, {"seeded bugs": 1.0})


def named(name: str, control: str = "bug") -> SeededBug:
    return replace(BUG, name=name, control=control)  # type: ignore[arg-type]  # one of the literals


def printed(made: Score) -> str:
    stream = io.StringIO()
    print_score(console(stream), made)
    return stream.getvalue()


def test_a_killed_bug_counts_with_its_earliest_law_and_problem() -> None:
    made = scored(BUG, "parity", "merge_union")
    assert made.killed
    assert made.laws == ["parity", "merge_union"]
    assert made.smallest == PROBLEM
    assert score(made).shortfalls == []
    assert score(made).kills_by_law["merge_union"] == [made]
    assert only_killer([made, scored(named("other"), "parity")])[0].bug.name == "other"


def test_a_survivor_brings_the_share_below_the_line() -> None:
    made = score(scored(BUG, "parity"), scored(named("alive")))
    assert made.share_killed == 0.5
    assert made.shortfalls == ["50.0% of the seeded bugs killed, not 95 %"]
    assert "SURVIVED" in printed(made)


def test_the_share_of_small_problems_is_that_of_attention_bugs() -> None:
    made = score(scored(BUG, "parity"))  # of merge_state
    assert made.share_small is None
    assert "attention bugs shrunk" not in printed(made)
    attention = scored(named("paged"), "parity")
    for keys, share in (((2,), "100%"), ((2, 2), "0%")):
        (first, *_) = attention.findings
        first.problem = AttentionProblem(query_lens=(1,) * len(keys), seq_lens=keys, page_size=4)
        assert f"{share} of the attention bugs shrunk" in printed(score(attention))


def test_a_hang_that_is_seen_as_a_failure_only_is_not_killed() -> None:
    made = score(scored(named("hangs", "hang"), "parity", status="FAIL"))
    assert made.shortfalls == ["hangs did not become a HANG"]
    assert score(scored(named("hangs", "hang"), "parity", status="HANG")).shortfalls == []


def test_a_fault_of_a_triton_kernel_counts_apart_and_none_may_survive() -> None:
    made = score(scored(BUG, "parity"), scored(named("tail", "tile")))
    assert (made.share_killed, made.shortfalls) == (1.0, ["tail survived"])
    assert "tail (Triton)" in printed(made)
    assert "0 of 1 faults of Triton kernels" in printed(made)
    assert replace(made, profile="quick").shortfalls == []


def test_an_accused_honest_control_is_a_shortfall() -> None:
    made = score(scored(named("good", "honest"), "parity"))
    assert made.shortfalls == ["good is honest, but parity accuses it"]
    assert made.honest_judged == 10
    assert "1 accusations in 10 problems" in printed(made)


def test_an_honest_control_that_was_not_judged_is_a_shortfall() -> None:
    control = named("good", "honest")
    made = score(Scored(control, ImplementationReport("good", "module:good", error="no module")))
    assert made.shortfalls == ["good: no problem was judged no module"]


def test_a_slow_median_is_a_shortfall() -> None:
    assert "a median of 11.0 s" in score(scored(BUG, "parity", seconds=11.0)).shortfalls[0]


def test_a_law_that_kills_nothing_alone_is_a_shortfall_of_its_operation() -> None:
    """Of a law that speaks of other operations too, this score knows nothing."""
    bugs = [bug for bug in BUGS if bug.operation == "merge_state"]
    found = [scored(bug, "parity") for bug in bugs]
    told = score(*found).shortfalls
    assert [each.split()[2] for each in told] == [
        law.name for law in LAWS if law.operations == ("merge_state",) and not law.overlap
    ]
    assert score(*found[1:]).shortfalls == []


def test_stages_hold_the_whole_catalogue_or_what_was_asked_for() -> None:
    *rest, honest = stages()
    (tiles,) = (stage for stage in rest if stage.bugs[0].control == "tile")
    assert tiles.bugs == tuple(triton_bugs.BUGS)
    assert (tiles.laws, tiles.first_only) == (triton_bugs.LAWS, True)
    assert sum(len(each.bugs) for each in (*rest, honest)) == len(CATALOGUE) + len(tiles.bugs)
    assert [[bug.name for bug in stage.bugs] for stage in stages(["merge"])] == [["merge"]]


def test_sizes_are_short() -> None:
    assert size_of(PROBLEM) == "3 states, 2 tokens"
    assert size_of(MetadataProblem()) == "1 batches, 1 requests"
    paged = AttentionProblem(seq_lens=(5,), page_size=2)
    assert size_of(paged) == "1 requests, 1 tokens, 5 keys in 3 pages"
    ragged = AttentionProblem("ragged_attention", seq_lens=(5,))
    assert size_of(ragged) == "1 requests, 1 tokens, 5 keys"


def test_an_unknown_name_is_wrong_usage() -> None:
    done = CliRunner().invoke(command, ["--only", "nothing"])
    assert done.exit_code == 2
    assert "'nothing' is no seeded bug" in done.output


def test_the_command_runs_a_bug_and_an_honest_control(tmp_path: Path) -> None:
    path = tmp_path / "score.json"
    words = ["--profile", "quick", "--jobs", "1", "--json", str(path)]
    names = ["--only", "merged-lse-is-maximum", "--only", "merge"]
    code = command.main([*words, *names], standalone_mode=False)
    assert code == 0
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["passed"]
    killed, honest = data["bugs"]
    assert killed["name"] == "merged-lse-is-maximum"
    assert killed["laws"]
    assert killed["problem"]["type"] == "merge"
    assert honest["judged"] > 50


def test_a_result_that_cannot_be_written_is_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernelproof.ci.score.scoring.run_score", lambda *_, **__: score())
    blocked = tmp_path / "file"
    blocked.write_text("")
    words = ["--profile", "quick", "--json", str(blocked / "score.json")]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 2
    assert "cannot be written" in done.output
