"""The deck: what is asked before laws draw, and that it loses and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kernelproof.fixtures import DECK
from kernelproof.properties.findings.report import ImplementationReport, LawReport, RunReport
from kernelproof.properties.laws import find_law, laws_of
from kernelproof.properties.search import deck
from kernelproof.properties.search.candidate import Candidate
from kernelproof.properties.search.case_runner import CaseRunner
from kernelproof.properties.search.deck import MOST_ENTRIES, DeckEntry, load_deck
from kernelproof.properties.search.engine import Kept, Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.search.progress import Progress
from kernelproof.properties.space.axes import Axes, all_axes
from kernelproof.properties.space.neighbours import may_be_drawn
from kernelproof.properties.space.operations import OPERATIONS
from kernelproof.properties.space.profiles import Profile
from kernelproof.properties.space.restrictions import Only
from kernelproof.reference import AttentionProblem, MergeProblem

SUBJECTS = Path(__file__).parents[1] / "engine_subjects.py"
TINY = Profile("tiny", problems=12, max_work=20_000, shrink_seconds=30.0, seconds=30.0)
LAWS = ("parity", "well_formed", "inputs_unchanged")


class Seen(Kept):
    """Keeps each law's report as it was when the law ended."""

    def __init__(self) -> None:
        self.problems: dict[str, list[str]] = {}

    def keep(self, candidate: Candidate, found: LawReport) -> None:
        del candidate
        self.problems[found.law] = list(found.problems)


def execute(name: str, **options: Any) -> tuple[RunReport, Mapping[str, list[str]]]:  # noqa: ANN401
    seen = Seen()
    words = {"laws": LAWS, "jobs": 1, **options}
    report = Run(Plan([f"{SUBJECTS}:{name}"], TINY, **words), kept=seen).execute()
    assert not report.implementations[0].error
    return report, seen.problems


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_deck_has_problems_that_could_be_drawn_each_once(operation: str) -> None:
    entries = load_deck(operation)
    assert 0 < len(entries) <= MOST_ENTRIES
    assert len({(each.law, each.problem.id) for each in entries}) == len(entries)
    space = Axes(operation, all_axes(operation), 400_000)
    names = {law.name for law in laws_of(operation)}
    for each in entries:
        axes = space.within(find_law(each.law).looks_at)
        assert each.law in names
        assert axes is not None
        assert may_be_drawn(each.problem, axes)


def test_an_operation_without_a_deck_has_no_entries() -> None:
    assert load_deck("no_such_operation") == ()


def test_a_deck_of_another_schema_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"schema": "kernelproof/deck/0"}))
    monkeypatch.setattr(deck, "DECK", tmp_path)
    with pytest.raises(ValueError, match="its schema is 'kernelproof/deck/0'"):
        load_deck("other")


def test_all_decks_are_small() -> None:
    assert sum(path.stat().st_size for path in DECK.glob("*.json")) < 400_000


def test_laws_draw_the_same_problems_behind_the_deck() -> None:
    plain, drawn = execute("merges")
    dealt, judged = execute("merges", deck=True)
    [without], [with_deck] = plain.implementations, dealt.implementations
    assert with_deck.of_deck > 0
    assert without.of_deck == 0
    for law in LAWS:
        behind = [each for each in judged[law] if each in drawn[law]]
        assert behind == drawn[law]
    assert with_deck.judged == without.judged + with_deck.of_deck
    # Its claims are narrow: each entry has been asked for as a neighbour that it takes.
    assert with_deck.unsupported == without.unsupported


def of(law: str, problem: AttentionProblem | MergeProblem) -> tuple[DeckEntry, ...]:
    return (DeckEntry(law, problem),)


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_fails_in_the_deck_is_confirmed_made_small_and_reported_once(
    monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    failing = AttentionProblem(query_lens=(2, 1), seq_lens=(9, 30), seed=5)
    monkeypatch.setattr(deck, "load_deck", lambda _: of("parity", failing))
    report, _ = execute("wrong_from_five", deck=True, jobs=jobs, laws=("parity",))
    [finding] = report.findings
    assert finding.first is not None
    assert finding.first[0] == failing
    assert finding.problem.work < failing.work
    assert report.implementations[0].of_deck == 1


def test_a_law_whose_deck_passes_finds_what_it_would_have_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deck, "load_deck", lambda _: of("parity", AttentionProblem()))
    with_deck, _ = execute("wrong_from_five", deck=True, laws=("parity",))
    without, _ = execute("wrong_from_five", laws=("parity",))
    assert [each.problem for each in with_deck.findings] == [
        each.problem for each in without.findings
    ]


def test_the_deck_keeps_to_the_part_of_the_space_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = AttentionProblem(query_lens=(2, 1), seq_lens=(9, 30), dtype="float16")
    monkeypatch.setattr(deck, "load_deck", lambda _: of("parity", failing))
    only = Only.read(["dtype=float32"])
    report, judged = execute("honest_attention", deck=True, laws=("parity",), only=only)
    assert report.implementations[0].of_deck == 1
    assert failing.id not in judged["parity"]


class EndsAt(Progress):
    """Ends a run once some problems were judged."""

    def __init__(self, problems: int) -> None:
        self._left = problems
        self.run: Run | None = None

    def judged(self, name: str, count: int) -> None:
        del name
        self._left -= count
        if self._left <= 0:
            assert self.run is not None
            self.run.ending.end("terminated")


def ended_at(problems: int, name: str, laws: tuple[str, ...] = LAWS) -> ImplementationReport:
    progress = EndsAt(problems)
    plan = Plan([f"{SUBJECTS}:{name}"], TINY, laws=laws, jobs=1, deck=True)
    progress.run = Run(plan, progress)
    report = progress.run.execute()
    assert report.ended == "terminated"
    return report.implementations[0]


def test_a_run_that_is_cut_off_counts_what_was_dealt() -> None:
    report = ended_at(3, "merges")
    assert 3 <= report.judged == report.of_deck
    assert {law.verdict for law in report.laws} == {"INCOMPLETE"}, "the deck is no law's floor"


def test_what_was_dealt_is_kept_where_the_suite_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = CaseRunner.judge

    def fails_later(self: CaseRunner, problem: Any, **options: Any) -> Any:  # noqa: ANN401
        if self.report.judged == 2:
            message = "the worker pool is closed"
            raise RuntimeError(message)
        return judge(self, problem, **options)

    entries = [DeckEntry("parity", AttentionProblem(seq_lens=(n,))) for n in range(1, 5)]
    monkeypatch.setattr(deck, "load_deck", lambda _: tuple(entries))
    monkeypatch.setattr(CaseRunner, "judge", fails_later)
    plan = Plan([f"{SUBJECTS}:honest_attention"], TINY, laws=("parity",), jobs=1, deck=True)
    report = Run(plan).execute().implementations[0]
    assert report.of_deck == 2
    assert report.error.endswith("the worker pool is closed")


def test_a_failure_is_not_lost_where_its_law_never_began(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = AttentionProblem(query_lens=(2, 1), seq_lens=(9, 30), seed=5)
    monkeypatch.setattr(deck, "load_deck", lambda _: of("parity", failing))
    [law] = ended_at(1, "wrong_from_five", ("parity",)).laws
    assert law.finding is not None
    assert law.finding.problem == failing
    assert law.finding.verdict.message.endswith("then the run ended before it was judged again")


def test_an_implementation_that_dies_of_the_question_is_left_to_the_laws() -> None:
    report, _ = execute("broken_supports", deck=True, laws=("parity",))
    assert report.findings
