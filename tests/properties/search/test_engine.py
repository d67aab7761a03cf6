"""Whole runs: what is found, how small it becomes, and what is told of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kernelproof.properties.findings.corpus import load_case
from kernelproof.properties.findings.ledger import Entry, Ledger, load_ledger
from kernelproof.properties.findings.report import (
    RATIO_EDGES,
    CorpusReport,
    Finding,
    ImplementationReport,
    LawReport,
    RunReport,
)
from kernelproof.properties.isolation.workers import WorkerPool
from kernelproof.properties.search import engine
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.search.progress import Progress
from kernelproof.properties.search.replays import Replayed
from kernelproof.properties.space.profiles import Profile
from kernelproof.properties.space.restrictions import Only
from kernelproof.properties.space.simplifying import FEW_PAGES
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker import pools
from kernelproof.reference import AttentionProblem, MergeProblem, Problem

TWO_FAULTS = ("numeric", "nan", "dtype", "RuntimeError")
"""Kinds of two faults of one implementation, see ``engine_subjects``."""
SUBJECTS = Path(__file__).parents[1] / "engine_subjects.py"
TINY = Profile("tiny", problems=30, max_work=20_000, shrink_seconds=30.0, seconds=30.0)


def subject(name: str) -> str:
    return f"{SUBJECTS}:{name}"


def execute(
    *names: str,
    laws: Sequence[str] = ("parity",),
    profile: Profile = TINY,
    progress: Progress | None = None,
    **options: Any,  # noqa: ANN401  a plan's
) -> RunReport:
    plan = Plan([subject(name) for name in names], profile, laws=laws, **options)
    return Run(plan, progress).execute()


def only_law(report: ImplementationReport) -> LawReport:
    assert not report.error, report.error
    (law,) = report.laws
    assert not law.error, law.error
    return law


def only_finding(report: ImplementationReport) -> Finding:
    finding = only_law(report).finding
    assert finding is not None
    assert report.findings == [finding]
    return finding


def ledger_file(folder: Path, name: str, where: str, case: Problem, kinds: str = "") -> str:
    data = {"law": "parity", "implementation": name, "problem": case.to_json()}
    (folder / "case.json").write_text(json.dumps(data), encoding="utf-8")
    path = folder / "ledger.toml"
    path.write_text(
        f'[[finding]]\nid = "{name}-known"\nimplementation = "{name}"\nlaws = ["parity"]\n'
        f'status = "FAIL"\nkinds = [{kinds}]\nwhere = {where}\nreason = "r"\ncase = "case.json"\n',
        encoding="utf-8",
    )
    return str(path)


class Notes(Progress):
    """Writes down what a run tells."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.count = 0

    def prepared(self, report: ImplementationReport, planned: int) -> None:
        self.events.append(f"prepared {report.name} {planned > 0}")

    def skipped(self, report: ImplementationReport) -> None:
        self.events.append(f"skipped {report.name}")

    def judged(self, name: str, count: int) -> None:
        del name
        self.count += count

    def law_begun(self, name: str, law: str) -> None:
        self.events.append(f"begun {name} {law}")

    def law_ended(self, name: str, law: str) -> None:
        self.events.append(f"ended {name} {law}")

    def law_done(self, report: ImplementationReport, law: LawReport) -> None:
        self.events.append(f"done {report.name} {law.law}")

    def found(self, finding: Finding) -> None:
        self.events.append(f"found {finding.implementation} {finding.verdict.status}")


MANY = (
    "honest_attention",
    "wrong_from_five",
    "never",
    "broken_supports",
    "stumbling_supports",
    "absent",
    "rejects",
)


@pytest.fixture(scope="module")
def notes() -> Notes:
    return Notes()


@pytest.fixture(scope="module")
def report(notes: Notes) -> RunReport:
    return execute(*MANY, jobs=2, progress=notes)


@pytest.fixture(scope="module")
def each(report: RunReport) -> dict[str, ImplementationReport]:
    assert [each.reference for each in report.implementations] == [subject(name) for name in MANY]
    return dict(zip(MANY, report.implementations, strict=True))


class TestManyAtOnce:
    """One run over several implementations: each is judged as if it were alone."""

    def test_an_honest_one_passes(self, each: dict[str, ImplementationReport]) -> None:
        report = each["honest_attention"]
        law = only_law(report)
        assert law.finding is None
        assert law.verdict == "PASS"
        assert law.judged >= 4
        assert law.worst_ratio <= 1
        assert report.coverage.lengths["keys"]
        assert not law.problems  # they were counted, and cost memory
        assert (report.name, report.operation, report.judged) == (
            "honest",
            "paged_attention",
            law.judged,
        )
        assert "head_dims=(512, 512)" in report.refused

    def test_a_numeric_bug_is_shrunk_to_one_request(
        self, each: dict[str, ImplementationReport]
    ) -> None:
        finding = only_finding(each["wrong_from_five"])
        assert (finding.law, finding.verdict.status, finding.verdict.kind) == (
            "parity",
            "FAIL",
            "numeric",
        )
        assert isinstance(finding.problem, AttentionProblem)
        assert finding.problem.query_lens == (1,)
        # Five keys are the smallest; a busy machine may run out of time a little earlier.
        assert 5 <= finding.problem.seq_lens[0] <= 16
        assert finding.problem.num_qo_heads == 1
        assert finding.problem.num_pages <= FEW_PAGES
        assert finding.problem.kv_layout == "NHD"
        assert finding.problem.regime == "iid"
        assert finding.attempts > 1
        assert finding.seconds > 0
        assert "expected" in finding.verdict.message
        assert (finding.verdict.ratio or 0.0) > 1  # it adds 1 itself
        assert finding.verdict.error_map is not None
        assert finding.first is not None
        assert finding.first[0].work >= finding.problem.work
        within = RATIO_EDGES.index(1.0) + 1
        ratios = each["wrong_from_five"].ratios
        assert sum(ratios[:within]) > 0
        assert sum(ratios[within:]) > 0
        assert sum(ratios) <= each["wrong_from_five"].judged
        data = json.loads(json.dumps(finding.to_json()))
        assert {"law", "status", "kind", "problem", "message", "replay"} <= set(data)
        assert data["status"] == "FAIL"

    def test_one_that_refuses_everything_is_not_judged(
        self, each: dict[str, ImplementationReport]
    ) -> None:
        report = each["never"]
        assert report.refusal == "not on a cpu"
        assert report.refusal.code == "supports"
        assert (report.judged, report.laws, report.error) == (0, [], "")

    def test_a_supports_that_raises_is_a_crash(self, each: dict[str, ImplementationReport]) -> None:
        finding = only_finding(each["broken_supports"])
        assert (finding.verdict.status, finding.verdict.kind) == ("CRASH", "ZeroDivisionError")
        assert finding.verdict.message == "supports raised ZeroDivisionError: division by zero"
        assert "_broken" in finding.verdict.trace

    def test_a_supports_that_raises_on_single_problems_is_a_crash(
        self, each: dict[str, ImplementationReport]
    ) -> None:
        report = each["stumbling_supports"]
        assert not report.error
        finding = only_finding(report)
        assert (finding.verdict.status, finding.verdict.kind) == ("CRASH", "KeyError")
        assert finding.verdict.message == "supports raised KeyError: 'no such row'"
        assert isinstance(finding.problem, MergeProblem)
        assert finding.problem.num_tokens == 2

    def test_a_name_that_is_missing_is_an_error(
        self, each: dict[str, ImplementationReport]
    ) -> None:
        assert "has no 'absent'" in each["absent"].error

    def test_a_rejection_of_a_claimed_problem_is_a_finding(
        self, each: dict[str, ImplementationReport]
    ) -> None:
        report = each["rejects"]
        finding = only_finding(report)
        assert (finding.verdict.status, finding.verdict.kind) == ("REJECTED", "UnsupportedError")
        assert finding.verdict.message == "windows need another kernel"
        assert finding.problem == AttentionProblem(window_left=0, seed=finding.problem.seed)
        assert only_law(report).rejected >= 1

    def test_all_of_it_is_counted_and_told(self, report: RunReport, notes: Notes) -> None:
        assert report.judged == sum(each.judged for each in report.implementations) == notes.count
        assert {finding.implementation for finding in report.findings} == {
            "wrong-from-five",
            "broken",
            "stumbling",
            "rejects",
        }
        assert report.unknown == report.findings
        assert not report.lost
        assert not report.interrupted
        assert report.target["device"] == "cpu"
        expected = {
            "prepared honest True", "done honest parity", "skipped never", "found broken CRASH",
            "found wrong-from-five FAIL", "found rejects REJECTED",
        }  # fmt: skip
        assert expected <= set(notes.events)
        assert sum(event.startswith("skipped") for event in notes.events) == 2
        steps = [f"{step} honest parity" for step in ("begun", "ended", "done")]
        assert [event for event in notes.events if event in steps] == steps


def run_of_files(folder: Path, texts: dict[str, str], *names: str) -> RunReport:
    """Run implementations of files with these texts, and others by their names."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return Run(Plan([*(f"{folder / name}.py:mine" for name in texts), *names], TINY)).execute()


def test_no_more_workers_start_than_there_are_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def open_pool(device: str, *, size: int, **others: object) -> None:
        del device, others
        sizes.append(size)

    monkeypatch.setattr("kernelproof.properties.search.engine.open_pool", open_pool)
    for names, laws in ((("a",), ("parity",)), (("a", "b"), ("parity",)), (("a",), ())):
        Run(Plan(names, TINY, laws=laws, jobs=4))
    assert sizes == [1, 2, 4]


def test_a_module_that_does_not_import_is_an_error(tmp_path: Path) -> None:
    texts = {
        "needs": "import surely_not_installed",
        "fails": "raise RuntimeError('no driver')",
        "dies": "import os; os.abort()",
    }
    report = run_of_files(tmp_path, texts, "kernelproof.nowhere:mine")
    needs, fails, dies, nowhere = (each.error for each in report.implementations)
    assert "needs 'surely_not_installed', not installed" in needs
    assert "RuntimeError: no driver" in fails
    assert "SIGABRT" in dies
    assert "there is no module 'kernelproof.nowhere'" in nowhere
    assert (report.judged, report.findings) == (0, [])


def test_exits_at_import_are_one_sentence_with_the_line(tmp_path: Path) -> None:
    texts = {
        "leaves": "import sys\nsys.exit(4)\n",
        "ends": "import os\nos._exit(4)\n",
        "names": "x = 1\ny = surely_nowhere\n",
        "syntax": "def f(:\n",
    }
    report = run_of_files(tmp_path, texts)
    said = {Path(each.reference).stem: each.error for each in report.implementations}
    assert not any("\n" in each for each in said.values())
    assert [each.error for each in report.implementations if each.suite_failed] == []
    assert f"SystemExit: 4 ({tmp_path}/leaves.py:2)" in said["leaves"]
    assert "importing it ended the process: exit 4" in said["ends"]
    assert f"({tmp_path}/names.py:2)" in said["names"]
    assert "syntax.py, line 1" in said["syntax"]


def test_a_hang_at_import_is_one_sentence_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is tried twice. A process in place of the first starts within it, on a busy machine too.
    monkeypatch.setattr("kernelproof.properties.search.preparation.IMPORT_SECONDS", 5.0)
    (report,) = run_of_files(tmp_path, {"hangs": "import time\ntime.sleep(600)\n"}).implementations
    assert not report.suite_failed
    assert "\n" not in report.error
    assert "importing it took longer than 5 s" in report.error
    assert "hangs.py:2)" in report.error


class TestLedger:
    def test_a_failure_on_the_problem_that_a_law_made_is_known(self, tmp_path: Path) -> None:
        """Under a causal mask it is right; sensitivity takes the mask away."""
        case = AttentionProblem(query_lens=(2,), seq_lens=(2,))
        ledger = load_ledger(ledger_file(tmp_path, "always-causal", "{ causal = false }", case))
        (entry,) = ledger.entries
        both = Ledger((structs.replace(entry, laws=("parity", "sensitivity")),))
        masked: dict[str, Any] = {"only": Only({"causal": (True,)}), "laws": ["sensitivity"]}
        found = only_finding(execute("always_causal", **masked).implementations[0])
        assert "with False it is wrong, too" in found.verdict.message
        law = only_law(execute("always_causal", ledger=both, **masked).implementations[0])
        assert (law.verdict, law.known["always-causal-known"] > 0) == ("KNOWN", True)

    def test_known_failures_are_counted_and_not_shrunk(self, tmp_path: Path) -> None:
        case = AttentionProblem(seq_lens=(1,), page_size=2)
        ledger = load_ledger(
            ledger_file(tmp_path, "wrong-twice", "{ partial_last_page = true }", case)
        )
        profile = replace(TINY, problems=300)
        report = execute("wrong_twice", ledger=ledger, profile=profile)
        law = only_law(report.implementations[0])
        assert law.known["wrong-twice-known"] >= 1
        assert report.implementations[0].replayed == []
        # The other fault is found all the same, and is not taken for the known one.
        finding = law.finding
        assert finding is not None
        assert finding.entry is None
        assert isinstance(finding.problem, AttentionProblem)
        assert finding.problem.sinks
        assert finding.problem.causal
        assert report.unknown == [finding]

    def test_where_everything_is_known_nothing_is_unknown(self, tmp_path: Path) -> None:
        case = AttentionProblem(seq_lens=(5,))
        ledger = load_ledger(ledger_file(tmp_path, "wrong-from-five", "{}", case, '"numeric"'))
        report = execute("wrong_from_five", ledger=ledger)
        law = only_law(report.implementations[0])
        assert law.verdict == "KNOWN"
        assert law.finding is not None
        assert law.finding.entry == "wrong-from-five-known"
        assert law.finding.attempts == 0
        assert law.finding.to_json()["status"] == "KNOWN"
        assert report.unknown == []
        assert law.judged >= TINY.problems / 2  # a known failure does not end the search

    def test_a_second_bug_beside_a_known_one_of_any_kind_is_found(self, tmp_path: Path) -> None:
        """Its kind is that of the known one, and the entry names no law."""
        case = tmp_path / "case.json"
        about = {"law": "parity", "implementation": "x", "problem": MergeProblem().to_json()}
        case.write_text(json.dumps(about), encoding="utf-8")
        entries = tuple(
            Entry(
                id=kind,
                implementation=f"two-faults-{kind}",
                where={"empty": ["some", "all", "one"]},
                status="CRASH" if kind == "RuntimeError" else "FAIL",
                kinds=(kind,),
                reason="r",
                case=case,
                quarantine=True,
            )
            for kind in TWO_FAULTS
        )
        report = execute(
            *(f"two_faults_{kind}" for kind in TWO_FAULTS),
            laws=("parity", "well_formed"),
            profile=replace(TINY, problems=60),
            ledger=Ledger(entries),
            jobs=2,
        )
        for one, entry in zip(report.implementations, entries, strict=True):
            assert sum(law.known[entry.id] for law in one.laws) > 0, entry.id
            new = [
                each.problem
                for each in one.findings
                if each.entry is None and each.verdict.kind == entry.kinds[0]
            ]
            assert new, entry.id
            for problem in new:
                assert isinstance(problem, MergeProblem)
                assert (problem.empty, problem.num_states) == ("none", 3)

    def test_an_entry_whose_case_passes_is_a_finding(self, tmp_path: Path) -> None:
        ledger = load_ledger(ledger_file(tmp_path, "merges", "{}", MergeProblem()))
        report = execute("merges", ledger=ledger)
        (finding,) = report.findings
        assert (finding.verdict.status, finding.verdict.kind) == ("FAIL", "unexpected_pass")
        assert "merges-known expects FAIL under parity, but its case gives PASS" in (
            finding.verdict.message
        )
        assert finding.problem == MergeProblem()
        assert (finding.entry, finding.contradicts) == (None, "merges-known")
        assert report.unknown == [finding]

    @pytest.mark.parametrize("known", [False, True])
    def test_a_case_that_fails_otherwise_than_its_entry_says_does_not_pass(
        self, tmp_path: Path, *, known: bool
    ) -> None:
        """A race gives another failure now and then, which may have an entry of its own."""
        name, case = "two-faults-RuntimeError", MergeProblem(empty="all")
        ledger = load_ledger(ledger_file(tmp_path, name, "{}", case, '"numeric"'))
        mine = ledger.entries[0]
        crash = structs.replace(
            mine, id="crash", status="CRASH", kinds=("RuntimeError",), quarantine=True
        )
        ledger = replace(ledger, entries=(mine, crash) if known else (mine,))
        (report,) = execute("two_faults_RuntimeError", ledger=ledger).implementations
        assert (report.corpus.replayed, report.corpus.of_ledger, report.corpus.known) == (1, 1, 0)
        said = [(each.verdict.status, each.contradicts) for each in report.replayed]
        assert said == ([] if known else [("CRASH", None)])


class TestDeterminism:
    def ids(self, path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> list[str]:
        monkeypatch.setenv("KERNELPROOF_TEST_RECORD", str(path))
        execute("recorded", laws=["well_formed"], jobs=1, seed=seed)
        return path.read_text(encoding="ascii").split()

    def test_a_seed_says_which_problems_are_drawn(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = self.ids(tmp_path / "a", monkeypatch, 3)
        assert len(set(first)) > 20
        assert self.ids(tmp_path / "b", monkeypatch, 3) == first
        other = self.ids(tmp_path / "c", monkeypatch, 4)
        assert len(set(other) - set(first)) > 5


def test_what_had_no_room_is_tried_again_when_nothing_else_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The builders hold the GPU while the law is searched, and have ended by the end of the run."""
    held = LawReport("parity", floor=1, ended="room", unsupported=1)
    problem = AttentionProblem(query_lens=(1,), seq_lens=(3,))
    held.without_room[problem.id] = problem
    search, asked = Run._search, []

    def full(run: Run, *given: Any, again: Sequence[Problem] = ()) -> LawReport:  # noqa: ANN401
        asked.append(tuple(again))
        worker, candidate, law, options = given
        return search(run, worker, candidate, law, options, again) if again else held

    monkeypatch.setattr(Run, "_search", full)
    (report,) = execute("honest_attention").implementations
    assert asked == [(), (problem,)]
    law = only_law(report)
    assert (law.judged, law.unsupported, law.ended, law.incomplete) == (1, 0, "", False)
    assert all(gap.code != "law" for gap in report.coverage.gaps)


def test_what_a_law_s_own_time_left_below_its_floor_is_judged_in_the_run_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One slow problem has taken the law's time; the run has minutes left."""
    held = LawReport("parity", judged=1, floor=3, ended="time")
    search, asked = Run._search, []

    def slow(run: Run, *given: Any, again: Sequence[Problem] = ()) -> LawReport:  # noqa: ANN401
        del again
        *_, options = given
        asked.append((options.problems, options.seed))
        return search(run, *given) if len(asked) > 1 else held

    monkeypatch.setattr(Run, "_search", slow)
    (report,) = execute("honest_attention").implementations
    assert len(asked) == 2
    assert asked[1] == (2, asked[0][1] + 1), "what is missing, of problems that were not drawn"
    law = only_law(report)
    assert law.judged >= 3
    assert not law.incomplete
    assert all(gap.code != "law" for gap in report.coverage.gaps)


def test_under_a_sanitizer_replays_have_a_tenth_of_the_run_and_come_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty stored cases take as long as the law does in all."""
    problem = AttentionProblem(query_lens=(1,), seq_lens=(3,))
    name = subject("honest_attention")
    cases = []
    for number in range(30):
        stored = replace(problem, seed=number).to_json()
        case = {"law": "parity", "implementation": name, "problem": stored}
        (tmp_path / f"{number}.json").write_text(json.dumps(case), encoding="utf-8")
        cases.append(load_case(tmp_path / f"{number}.json"))
    order = []

    def replayed(*_: object) -> Replayed:
        order.append("case")
        time.sleep(0.1)
        return Replayed(Verdict("PASS"), CorpusReport(replayed=1))

    def searched(*_: object, **__: object) -> LawReport:
        order.append("law")
        return LawReport("parity", judged=3, seconds=3.0)

    def open_pool(device: str, *, tool: str, **options: Any) -> WorkerPool:  # noqa: ANN401
        del tool  # there is none here
        return opened(device, **options)

    opened = pools.open_pool
    monkeypatch.setattr(engine, "open_pool", open_pool)
    monkeypatch.setattr(engine, "replay", replayed)
    monkeypatch.setattr(Run, "_search", searched)
    (report,) = execute("honest_attention", sanitizer="memcheck", corpus=cases).implementations
    assert not report.error, report.error
    assert order[0] == "law"
    assert 1 <= report.corpus.replayed <= 3  # a ninth of the law's three seconds
    assert report.corpus.replayed + report.corpus.left_out == 30
    (whole,) = execute("honest_attention", corpus=cases).implementations
    assert (whole.corpus.replayed, whole.corpus.left_out) == (30, 0)
