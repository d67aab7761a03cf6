"""The laws of planning on an honest stand-in, on seeded faults, and on a release where nvcc is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from importlib import util
from pathlib import Path

import pytest

from kernelproof.ci.cli import main
from kernelproof.ci.console.errors import UsageRefusedError
from kernelproof.ci.plans import planner as planner_module
from kernelproof.ci.plans.answers import Answer
from kernelproof.ci.plans.faults import FAULTS, Copy, Fault, FaultyPlanner, found_after
from kernelproof.ci.plans.judging import Judged, first_unknown, search
from kernelproof.ci.plans.known import KNOWN, Known, explanation
from kernelproof.ci.plans.laws import ADVICE, LAWS, NAMES, Case, broken, judge
from kernelproof.ci.plans.planner import question_of
from kernelproof.ci.plans.problems import DECODE, FA2, KINDS, MLA, PlanProblem, problem_from_json
from kernelproof.ci.plans.reading import LAYOUTS, MLA_TILE
from kernelproof.ci.releases.sandboxes import installed_version
from kernelproof.tests.ci.plans.stand_in import StandIn

SMALL = PlanProblem(FA2, (5, 2), (900, 30), page_size=16, group_size=4, multiprocessors=16)
needs_release = pytest.mark.skipif(
    shutil.which("nvcc") is None or util.find_spec("flashinfer") is None,
    reason="there is no nvcc on the PATH, or no FlashInfer",
)


class Answering:
    """A planner that has one answer."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def plan(self, problem: PlanProblem, *, after: PlanProblem | None = None) -> Answer:
        assert problem != after
        return self.answer


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_planner_breaks_no_law(kind: str) -> None:
    judged = search(StandIn(), "1.0", kind, 40)
    assert not judged.findings
    assert judged.problems >= 40


@pytest.mark.parametrize("seeded", FAULTS, ids=lambda each: each.name)
def test_each_seeded_fault_is_found_by_its_law(seeded: Fault) -> None:
    assert found_after(StandIn(), seeded)


def test_each_law_has_a_fault() -> None:
    assert len(FAULTS) >= 15
    assert {each.law for each in FAULTS} == set(NAMES)
    assert all(each.change.__doc__ for each in FAULTS)


def test_errors_and_deaths_are_findings_and_advice_is_none() -> None:
    raises = Case(Answering(Answer(error="Internal Error")), SMALL)
    assert judge(raises) == ("answers", "it raises: Internal Error")
    assert broken(raises) == ["answers"]
    assert broken(Case(Answering(Answer(died=True)), SMALL)) == ["answers"]
    refused = Case(Answering(Answer(error=f"Buffer overflow. {ADVICE[0]}.")), SMALL)
    assert judge(refused) == ("", "")
    assert broken(refused) == []


def test_what_ends_the_process_is_not_kept() -> None:
    judged = search(Answering(Answer(died=True)), "1.0", DECODE, 5)
    assert [each.problem for each in judged.findings] == [None]
    assert judged.to_json()["findings"] == [
        {"law": "answers", "why": "the process of the plan function ended"}
    ]


class DyingLater(StandIn):
    """A planner whose process ends in the second plan into the same buffers."""

    def plan(self, problem: PlanProblem, *, after: PlanProblem | None = None) -> Answer:
        return super().plan(problem) if after is None else Answer(died=True, error="no answer")


def test_what_ends_the_process_of_a_later_plan_is_not_kept_either() -> None:
    (found,) = search(DyingLater(), "1.0", DECODE, 5).findings
    assert (found.law, found.why, found.problem) == ("answers", "no answer", None)
    assert judge(Case(DyingLater(), SMALL))[0] == "leftovers"


def test_a_plan_function_that_does_not_answer_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "host.py"
    script.write_text(
        "import sys, time\nprint('ready', flush=True)\nsys.stdin.readline()\ntime.sleep(600)\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(planner_module, "PROCESS", script)
    monkeypatch.setattr(planner_module, "ANSWER_SECONDS", 0.5)
    with closing(planner_module.ReleasedPlanner("1.0", tmp_path, tmp_path)) as planner:
        for _ in range(2):  # a process of its own each time
            answer = planner.plan(SMALL)
            assert (answer.died, answer.error) == (True, "it did not answer within 0.5 s")


def test_bytes_behind_a_workspace_are_seen() -> None:
    spilled = replace(StandIn().plan(SMALL), spilled=True)
    assert judge(Case(Answering(spilled), SMALL))[0] == "workspace"


def test_keys_that_a_row_sees() -> None:
    assert PlanProblem(FA2, (3,), (10,)).visible(0, 0, 0) == (0, 8)
    assert PlanProblem(FA2, (3,), (10,), window_left=2).visible(0, 0, 2) == (5, 10)
    assert PlanProblem(FA2, (3,), (10,), window_left=2, causal=False).visible(0, 0, 0) == (5, 10)
    assert PlanProblem(MLA, (3,), (10,), group_size=4).visible(0, 4, 7) == (0, 9)
    assert PlanProblem(MLA, (3,), (1,)).visible(0, 0, 0) == (0, 0)


def test_a_finding_becomes_small_and_known_ones_are_counted() -> None:
    seeded = next(each for each in FAULTS if each.name == "part-of-keys-twice")

    class Faulty(StandIn):
        def plan(self, problem: PlanProblem, *, after: PlanProblem | None = None) -> Answer:
            return FaultyPlanner(StandIn(), seeded).plan(problem, after=after)

    judged = search(Faulty(), "1.0", DECODE, 40)
    first = judged.findings[0]
    assert first.law == "keys"
    assert first.problem is not None
    assert len(first.problem.kv_lens) == 1
    assert problem_from_json(first.to_json()["problem"]) == first.problem
    entry = Known("it", NAMES, KNOWN[0].releases, "why", first.problem, holds=lambda _: True)
    again = search(Faulty(), "0.7.2", DECODE, 40, known=[entry])
    assert not again.findings
    assert again.known["it"] > 0


class Flawed:
    """The stand-in with flaws of known findings."""

    def __init__(self, flaw: Callable[[PlanProblem, dict[str, int]], None]) -> None:
        self.flaw = flaw

    def plan(self, problem: PlanProblem, *, after: PlanProblem | None = None) -> Answer:
        answer = StandIn(as_released=True).plan(problem, after=after)
        info = dict(zip(LAYOUTS[problem.kind], answer.info, strict=True))
        self.flaw(problem, info)
        return replace(answer, info=tuple(info.values()))


def no_mask(_problem: PlanProblem, info: dict[str, int]) -> None:
    """Have no mask of valid blocks where keys are not split."""
    if not info["split_kv"]:
        info["block_valid_mask"] = 0


def other_clusters(problem: PlanProblem, info: dict[str, int]) -> None:
    """Depend on the mean rows of a request."""
    mean = problem.query_starts[-1] * problem.num_qo_heads // len(problem.query_lens)
    info["partial_o"] = 4096 * (mean > MLA_TILE)


def another_tile(copy: Copy) -> bool:
    """Have the first block compute the tile behind its own."""
    copy.put("qo_tile_indices", 1, 0)
    return True


SEEDED = {each.name: each for each in FAULTS}
Flaw = Callable[[PlanProblem, dict[str, int]], None]
BESIDE: dict[str, tuple[PlanProblem, Flaw, Fault]] = {
    "decode-graph-empty-requests": (
        PlanProblem(
            DECODE, (1, 1), (900, 0), num_kv_heads=8, graph=True, causal=False, multiprocessors=40
        ),
        lambda *_: None,
        SEEDED["part-of-keys-twice"],
    ),
    "fa2-window-not-causal": (
        PlanProblem(FA2, (260,), (900,), causal=False, window_left=200, multiprocessors=16),
        lambda *_: None,
        SEEDED["row-merges-one-part-fewer"],
    ),
    "fa2-graph-unsplit-padding": (
        PlanProblem(FA2, graph=True, split=False),
        no_mask,
        Fault("another-tile", FA2, "rows", another_tile),
    ),
    "mla-graph-other-clusters": (
        PlanProblem(MLA, (1, 0), (1, 1), group_size=128, graph=True, spare_rows=1),
        other_clusters,
        SEEDED["sums-behind-as-many-results-as-there-are"],
    ),
}
"""By the id of a known finding: a problem, a flaw of a stand-in, and a fault beside it."""


@pytest.mark.parametrize("name", BESIDE)
def test_a_known_finding_hides_no_fault_beside_it(name: str) -> None:
    entry = next(each for each in KNOWN if each.id == name)
    problem, flaw, seeded = BESIDE[name]
    flawed, judged = Flawed(flaw), Judged("0.6.13", entry.kind)
    assert judge(Case(flawed, problem))[0] in entry.laws
    assert first_unknown(Case(flawed, problem), judged, [entry]) == ("", "")
    assert judged.known == {name: 1}
    faulty = FaultyPlanner(flawed, seeded)
    assert first_unknown(Case(faulty, problem), judged, [entry])[0] == seeded.law
    assert faulty.changed


def test_each_known_finding_that_leaves_something_has_a_fault_beside_it() -> None:
    assert [each.id for each in KNOWN if each.holds is None] == [*BESIDE]


def test_works_within_the_room_are_not_excused() -> None:
    entry = next(each for each in KNOWN if each.id == "mla-more-works-than-room")
    assert not entry.mends
    assert entry.holds is not None
    few = Case(StandIn(), replace(entry.smallest, query_lens=(8192,), kv_lens=(8192,)))
    assert not entry.holds(few)  # 16,384 tiles of 64 rows
    assert entry.holds(Case(StandIn(), replace(few.problem, query_lens=(8193,), kv_lens=(8193,))))


@pytest.mark.parametrize("entry", KNOWN, ids=lambda each: each.id)
def test_a_known_finding_is_of_some_releases_and_laws(entry: Known) -> None:
    assert entry.in_release("0.6.13")
    assert not entry.in_release("0.8.0")
    assert set(entry.laws) <= set(NAMES)
    honest = Case(StandIn(), entry.smallest)
    if entry.kind != MLA:  # of MLA the problem has it, whoever plans
        assert explanation(KNOWN, "0.6.13", honest, entry.laws[0]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_question_has_what_the_planner_reads(kind: str) -> None:
    asked = question_of(replace(SMALL, kind=kind))
    assert len(asked["numbers"]) == {"decode": 7, "fa2": 13, "fa3": 10, "mla": 4}[kind]
    assert len(asked["arrays"]) == {"decode": 1, "fa2": 2, "fa3": 3, "mla": 3}[kind]


def test_wrong_problems_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageRefusedError, match="no kind 'fa9'"):
        problem_from_json({"kind": "fa9"})
    assert main(["plan", "0.6.13", "--problem", '{"kind": "fa2", "tile": 3}']) == 2
    assert "a problem of planning has no field 'tile'" in capsys.readouterr().err
    assert main(["plan", "0.6.13", "--problem", "[]"]) == 2
    assert "--problem: it is no object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_lens": [1, "a"]}, r"Expected `int`, got `str` - at `$.kv_lens[1]`"),
        ({"kv_lens": [1]}, "query_lens has 2 requests, kv_lens 1"),
        ({"kv_lens": [], "query_lens": []}, "query_lens has 0 requests"),
        ({"kv_lens": [1, -1]}, "lengths are not negative"),
        ({"kv_lens": [1 << 20, 1]}, "their sum is at most 1048576"),
        ({"page_size": 0}, "page_size 0 is not within 1 to 1024"),
        ({"group_size": True}, "Expected `int`, got `bool`"),
        ({"kind": "decode"}, "query_lens of a decode are 1"),
        ({"kind": "mla", "num_kv_heads": 2}, "num_kv_heads of mla is 1"),
    ],
)
def test_a_problem_that_has_no_plan_is_refused(
    change: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = json.dumps({**SMALL.to_json(), **change})
    assert main(["plan", "0.6.13", "--problem", given]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "--problem: " in told
    assert said in told


def test_without_nvcc_it_is_unsupported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert main(["plan", "0.6.13"]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "UNSUPPORTED: flashinfer 0.6.13 cannot be asked: there is no nvcc in" in said


class Closing(StandIn):
    version = "1.0"

    def close(self) -> None:
        pass


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(planner_module, "open_planner", lambda *_, **__: Closing())
    file = tmp_path / "plans.json"
    assert main(["plan", "1.0", "--kind", "mla", "--problems", "5", "--json", str(file)]) == 0
    assert "1.0 mla: 5 problems: all laws hold" in capsys.readouterr().out
    assert json.loads(file.read_text(encoding="utf-8"))["plans"][0]["kind"] == "mla"
    assert main(["plan", "1.0", "--problem", json.dumps(SMALL.to_json())]) == 0
    assert "1.0 fa2: all laws hold" in capsys.readouterr().out


@needs_release
def test_the_installed_release() -> None:
    version = installed_version()
    assert version is not None
    with closing(planner_module.open_planner(version)) as released:
        for entry in KNOWN:
            if entry.in_release(version):
                case, judged = Case(released, entry.smallest), Judged(version, entry.kind)
                assert judge(case)[0] in entry.laws
                assert first_unknown(case, judged, [entry]) == ("", "")
                assert judged.known == {entry.id: 1}
            if entry.id in BESIDE and entry.in_release(version):
                seeded = BESIDE[entry.id][-1]
                case = Case(FaultyPlanner(released, seeded), entry.smallest)
                assert first_unknown(case, judged, [entry])[0] == seeded.law
        assert broken(Case(released, SMALL)) == []
        judged = search(released, version, FA2, 5, known=KNOWN)
    assert not judged.findings
    assert len(LAWS) == len(NAMES)
