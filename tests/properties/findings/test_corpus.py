"""Stored cases: which of them a run replays, before it draws anything, and what it says of them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproof.fixtures import CORPUS
from kernelproof.impl import BUILT_IN
from kernelproof.properties.collection.conformance import Suite
from kernelproof.properties.collection.surveying import Choices
from kernelproof.properties.findings.cases import replay_command
from kernelproof.properties.findings.corpus import (
    Case,
    cases_of,
    load_case,
    open_corpus,
    read_corpus,
)
from kernelproof.properties.findings.ledger import Entry, Ledger, LedgerError, load_ledger
from kernelproof.properties.findings.report import Finding, ImplementationReport, LawReport
from kernelproof.properties.isolation.workers import Worker
from kernelproof.properties.search import replays
from kernelproof.properties.search.candidate import Candidate
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.search.priority_executor import PriorityExecutor
from kernelproof.properties.search.progress import Progress
from kernelproof.properties.search.replays import judge_stored
from kernelproof.properties.space.profiles import Profile
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.requests import Address, DeviceLostError
from kernelproof.reference import AttentionProblem, MergeProblem, Problem

SUBJECTS = Path(__file__).parents[1] / "engine_subjects.py"
WRONG = f"{SUBJECTS}:wrong_from_five"
TINY = Profile("tiny", problems=4, max_work=20_000, shrink_seconds=30.0, seconds=30.0)
FAILS, PASSES = AttentionProblem(seq_lens=(6,)), AttentionProblem(seq_lens=(2,))


def store(folder: Path, name: str, problem: Problem = FAILS, **more: object) -> Path:
    folder.mkdir(exist_ok=True)
    data = {
        "law": "parity",
        "implementation": WRONG,
        "problem": problem.to_json(),
        **more,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def entry(case: Path, **more: Any) -> Entry:  # noqa: ANN401  an entry's fields
    fields = {
        "id": case.stem,
        "implementation": "wrong-from-five",
        "laws": ("parity",),
        "status": "FAIL",
        "where": {},
        "reason": "It is off by one.",
        "case": case,
        **more,
    }
    return Entry(**fields)


class Order(Progress):
    """Writes down what comes first."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def found(self, finding: Finding) -> None:
        self.events.append("found" if finding.replay else "drawn")

    def judged(self, name: str, count: int) -> None:
        del name, count
        self.events.append("judged")

    def law_done(self, report: ImplementationReport, law: LawReport) -> None:
        del report
        self.events.append(law.law)


class TestReading:
    def test_a_case(self, tmp_path: Path) -> None:
        path = store(tmp_path, "a", without_rules=["rule"], soak=7, law="soak")
        case = load_case(path)
        assert case == Case(path, "soak", FAILS, WRONG, None, ("rule",), 7)
        address = Address("m:f", "paged_attention", "cpu", modules=("k",), without_rules=("r",))
        asked = case.request(address)
        assert (asked["law"], asked["soak"], asked["modules"]) == ("soak", 7, [])
        assert asked["without_rules"] == ["r", "rule"]
        assert asked["operation"] == "paged_attention"

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            ({"law": "parities"}, "the field 'law': there is no law 'parities'"),
            ({"law": "merge_union"}, "the law merge_union does not speak of paged_attention"),
            ({"operation": "attend"}, "Invalid value 'attend' - at `$.operation`"),
            ({"problem": 3}, "Expected `object`, got `int` - at `$.problem`"),
        ],
    )
    def test_what_is_wrong_is_named(
        self, tmp_path: Path, more: dict[str, object], said: str
    ) -> None:
        path = store(tmp_path, "a")
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}), encoding="utf-8")
        with pytest.raises(LedgerError) as caught:
            read_corpus(tmp_path)
        assert str(caught.value).startswith(f"{path}: ")
        assert said in str(caught.value)

    def test_a_file_is_the_same_however_it_is_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        path = store(tmp_path, "a", implementation="kernels/mine.py:f")
        case = load_case(path)
        assert case.is_of("kernels/mine.py:f")
        assert case.is_of(f"{tmp_path}/kernels/../kernels/mine.py:f")
        assert not case.is_of("kernels/mine.py:g")
        unknown = load_case(store(tmp_path, "b", implementation="not-installed"))
        assert not unknown.is_of("not-installed")


class TestChoosing:
    def test_cases_of_entries_are_the_ledgers(self, tmp_path: Path) -> None:
        known, other = store(tmp_path, "known"), store(tmp_path, "other", PASSES)
        store(tmp_path, "of-another", implementation="elsewhere:f")
        corpus = read_corpus(tmp_path)
        (found,) = cases_of(WRONG, corpus, [entry(known)])
        assert found.path == other

    def test_a_copy_of_a_case_is_the_same_case(self, tmp_path: Path) -> None:
        known = store(tmp_path / "ledger", "known")
        first = store(tmp_path, "a", PASSES)
        store(tmp_path, "b", PASSES)
        store(tmp_path, "copy-of-known")
        alike = store(tmp_path, "c", PASSES, law="well_formed")
        found = cases_of(WRONG, read_corpus(tmp_path), [entry(known)])
        assert [case.path for case in found] == [first, alike]

    def test_quarantine_is_for_the_profile_that_explores(self, tmp_path: Path) -> None:
        hang, plain = store(tmp_path, "hang"), store(tmp_path, "plain")
        ledger = Ledger((entry(hang, quarantine=True),))
        assert [case.path for case in open_corpus(ledger, folder=tmp_path)] == [plain]
        assert len(open_corpus(ledger, folder=tmp_path, explore=True)) == 2

    def test_the_shipped_corpus(self) -> None:
        ledger = load_ledger()
        assert {case.path for case in open_corpus(ledger)} == set(CORPUS.glob("*.json"))
        # What hangs or crashes has no case that a run could walk into.
        assert not any(each.case for each in ledger.entries if each.quarantine)
        forgotten = open_corpus(Ledger(), forget=True)
        assert {case.path for case in forgotten}.isdisjoint(e.case for e in ledger.entries)

    def test_no_such_folder(self, tmp_path: Path) -> None:
        with pytest.raises(LedgerError, match="there is no such folder"):
            open_corpus(Ledger(), folder=tmp_path / "no")

    def test_shipped_cases_can_be_shared(self) -> None:
        for path in CORPUS.glob("*.json"):
            data = json.loads(path.read_text(encoding="utf-8"))
            assert data["implementation"] in BUILT_IN, path.name
            assert "verdict" not in data, path.name
            assert replay_command(path) == f"kernelproof replay {path.name}"
            texts = [each for each in data.values() if isinstance(each, str)]
            assert not any("/" in each for each in texts if each != data["schema"]), path.name


class TestReplaying:
    def run(self, corpus: Path, ledger: Ledger, **more: Any) -> tuple[ImplementationReport, Order]:  # noqa: ANN401
        order = Order()
        fields = {"laws": ["parity"], "jobs": 2, **more}
        plan = Plan([WRONG], TINY, ledger=ledger, corpus=read_corpus(corpus), **fields)
        (report,) = Run(plan, order).execute().implementations
        assert not report.error
        return report, order

    def test_a_case_that_fails_is_a_finding_before_anything_is_drawn(self, tmp_path: Path) -> None:
        path = store(tmp_path, "old")
        store(tmp_path, "fixed", PASSES)
        store(tmp_path, "of-another", implementation="elsewhere:f")
        store(tmp_path, "of-another-law", law="well_formed")
        report, order = self.run(tmp_path, Ledger())
        assert report.corpus.replayed == 2
        assert (report.corpus.of_ledger, report.corpus.known, report.corpus.unjudged) == (0, 0, 0)
        (finding,) = report.replayed
        assert (finding.law, finding.verdict.status, finding.problem) == ("parity", "FAIL", FAILS)
        assert finding.entry is None
        assert finding.replay == replay_command(path)
        assert order.events[0] == "found"
        assert "judged" in order.events
        assert report.corpus.seconds > 0

    def test_what_the_ledger_knows_is_no_finding(self, tmp_path: Path) -> None:
        corpus = tmp_path / "corpus"
        store(corpus, "old")
        store(corpus, "not-supported", AttentionProblem(head_dim_qk=64, head_dim_vo=64))
        case = store(tmp_path, "known", AttentionProblem(seq_lens=(5,)))
        quarantined = entry(
            store(corpus, "hang", AttentionProblem(seq_lens=(8,))), id="hang", quarantine=True
        )
        report, order = self.run(corpus, Ledger((entry(case), quarantined)))
        assert report.replayed == []
        assert order.events[0] == "judged"
        assert (report.corpus.replayed, report.corpus.of_ledger) == (3, 1)
        assert (report.corpus.known, report.corpus.unjudged) == (1, 1)
        assert report.to_json()["corpus"]["replayed"] == 3

    @pytest.mark.parametrize("ending", ["lost", "interrupted"])
    def test_what_was_found_before_a_run_ended_early_is_reported(
        self, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for number in range(6):
            store(tmp_path, f"{number}", AttentionProblem(seq_lens=(6 + number,)))

        def judged(case: Case, worker: Worker, candidate: Candidate) -> Verdict:
            if case.path.stem == "3":
                if ending == "lost":
                    raise DeviceLostError(ending)
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.3)  # until the run has taken note
            return judge_stored(case, worker, candidate)

        monkeypatch.setattr(replays, "judge_stored", judged)
        order = Order()
        plan = Plan([WRONG], TINY, laws=["parity"], jobs=1, corpus=read_corpus(tmp_path))
        run = Run(plan, order)
        # As the commands do: a KeyboardInterrupt while an answer is taken would cost that answer.
        before = signal.signal(signal.SIGINT, lambda *_: run.ending.end("interrupted"))
        try:
            report = run.execute()
        finally:
            signal.signal(signal.SIGINT, before)
        assert (bool(report.lost), report.interrupted) == (ending == "lost", ending != "lost")
        (one,) = report.implementations
        told = order.events.count("found")
        assert told >= 3
        lengths = [each.problem.seq_lens for each in one.findings]  # type: ignore[union-attr]
        assert lengths == [(6 + number,) for number in range(told)]
        assert one.corpus.replayed == told
        assert one.corpus.seconds > 0

    def test_cases_come_before_all_laws_and_do_not_cost_a_law_its_turn(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ranks: list[int] = []
        submit = PriorityExecutor.submit

        def noted(
            self: PriorityExecutor, work: Callable[[], Any], *rank: int, owner: str = ""
        ) -> Future[Any]:
            if owner:  # what is prepared beside the questions has none
                ranks.append(*rank)
            return submit(self, work, *rank, owner=owner)

        monkeypatch.setattr(PriorityExecutor, "submit", noted)
        for number in range(3):
            store(tmp_path, f"{number}", AttentionProblem(seq_lens=(1 + number,)))
        self.run(tmp_path, Ledger(), laws=["parity", "well_formed"])
        assert ranks == [0, 0, 0, 1, 2, 0], "cases, laws, and what tells the causes apart"

    def test_an_entry_of_first_calls_alone_is_not_retired_by_a_call_before(
        self, tmp_path: Path
    ) -> None:
        """A worker has run other cases; the entry's is judged again in a fresh one."""
        slow = f"{SUBJECTS}:starts_slowly"
        given = {"law": "repeated_calls", "implementation": slow}
        first = store(tmp_path, "first", MergeProblem(num_tokens=9), **given)
        second = store(tmp_path, "second", MergeProblem(num_tokens=10), **given)
        known = {"implementation": "starts-slowly", "laws": ("repeated_calls",)}
        ledger = Ledger((entry(first, **known), entry(second, **known)))
        plan = Plan([slow], TINY, laws=("repeated_calls",), ledger=ledger, first_only=True)
        (report,) = Run(plan).execute().implementations
        assert report.corpus.of_ledger == 2
        assert report.replayed == []

    def test_nor_under_pytest(self, tmp_path: Path) -> None:
        slow, cases = f"{SUBJECTS}:starts_slowly", tmp_path / "cases"
        text = ""
        for name, tokens in (("first", 9), ("second", 10)):
            given = {"law": "repeated_calls", "implementation": slow}
            case = store(cases, name, MergeProblem(num_tokens=tokens), **given)
            text += (
                f'[[finding]]\nid = "{name}"\nimplementation = "starts-slowly"\nstatus = "FAIL"\n'
                f'laws = ["repeated_calls"]\ncase = "{case}"\nwhere = {{}}\nreason = "So."\n'
            )
        ledger = tmp_path / "ledger.toml"
        ledger.write_text(text, encoding="utf-8")
        choices = Choices((slow,), None, TINY, "cpu", 0, str(ledger), cases)
        with closing(Suite(choices)) as suite:
            judged = [suite.judge(item) for item in suite.items if item.case]
        assert [each.outcome for each in judged] == ["xfailed", "xfailed"]


@pytest.mark.parametrize(
    ("status", "kinds", "shares", "renewed"),
    [
        ("HANG", (), True, 1),
        ("CRASH", ("AcceleratorError",), True, 1),
        ("HANG", (), False, 0),
        ("FAIL", (), True, 0),
    ],
)
def test_a_known_hang_shares_its_gpu_with_nobody(
    status: str,
    kinds: tuple[str, ...],
    shares: bool,
    renewed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    worker: Any = SimpleNamespace(shares_gpu=shares, renew=lambda: order.append("renewed"))
    candidate: Any = SimpleNamespace()

    def judged(*_: object) -> Verdict:
        order.append("judged")
        return Verdict("PASS")

    monkeypatch.setattr(replays, "judge_stored", judged)
    monkeypatch.setattr(replays, "warm_up", lambda *_: None)
    known = entry(store(tmp_path, "case"), status=status, kinds=kinds)
    monkeypatch.setattr(Entry, "explains", lambda *_: True)
    replays.judge_known(known, load_case(tmp_path / "case.json"), worker, candidate)
    assert order == [*(["renewed"] * renewed), "judged"]
