"""The search of one law; a worker is asked ahead while the next problems are drawn."""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis.database import InMemoryExampleDatabase

from kernelproof.properties import laws
from kernelproof.properties.findings.coverage import Coverage
from kernelproof.properties.findings.ledger import Entry, Ledger
from kernelproof.properties.findings.report import LawReport
from kernelproof.properties.isolation import workers
from kernelproof.properties.isolation.workers import Deadlines, Outcome, Worker, WorkerPool
from kernelproof.properties.laws import find_law
from kernelproof.properties.search.candidate import Candidate, Deadly
from kernelproof.properties.search.drawing import MOST_MASKED, MOST_WITHOUT_ROOM, SearchOptions
from kernelproof.properties.search.examples import Examples
from kernelproof.properties.search.law_search import LawSearch
from kernelproof.properties.space import rounds
from kernelproof.properties.space.attention_strategies import long_axes
from kernelproof.properties.space.axes import Axes, all_axes
from kernelproof.properties.space.drawers import Drawers
from kernelproof.properties.space.longest import MOST_FULL_CHOICES
from kernelproof.properties.space.profiles import GPU_WORK, Cost, Profile
from kernelproof.properties.verdicts.memory_need import NO_ROOM
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.requests import Address, HarnessError
from kernelproof.reference import AttentionProblem, Problem, problem_from_json

HERE = Path(__file__).parents[1]
PATH = [str(HERE), *sys.path]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool("isolation_handlers:misbehave", sys_path=PATH, preload=()) as pool:
        yield pool


@pytest.fixture
def worker(pool: WorkerPool) -> Iterator[Worker]:
    with pool.lease() as worker:
        yield worker


def echo(value: object) -> dict[str, object]:
    return {"do": "echo", "value": value}


class TestWorker:
    def test_answers_come_in_the_order_of_asking(self, worker: Worker) -> None:
        for number in range(5):
            worker.ask(echo(number))
        found = [worker.answer().result for _ in range(5)]
        assert found == [{"value": number} for number in range(5)]
        assert not worker.busy

    def test_a_request_that_waits_has_not_begun(self, worker: Worker) -> None:
        """Each has its deadline from where it begins, and its seconds count from there too."""
        started = time.monotonic()
        for _ in range(10):
            worker.ask({"do": "sleep", "seconds": 0.4}, Deadlines(run=3.0))
        outcomes = [worker.answer() for _ in range(10)]
        assert [outcome.status for outcome in outcomes] == ["done"] * 10
        assert sum(outcome.seconds for outcome in outcomes) <= time.monotonic() - started

    def test_the_process_does_not_wait_for_this_side(self, worker: Worker, tmp_path: Path) -> None:
        for name in "ab":
            worker.ask({"do": "meet", "folder": str(tmp_path), "name": name, "of": 1})
        until = time.monotonic() + 60
        while not (tmp_path / "b").exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert (tmp_path / "b").exists()  # the second has begun, and no answer was taken
        assert [worker.answer().status for _ in range(2)] == ["done"] * 2

    @pytest.mark.parametrize(("do", "status"), [("spin", "hang"), ("abort", "crash")])
    def test_a_death_costs_no_other_verdict(self, worker: Worker, do: str, status: str) -> None:
        for payload in (echo(1), {"do": do}, echo(3), echo(4)):
            worker.ask(payload, Deadlines(run=2.0))
        assert worker.answer().result == {"value": 1}
        assert worker.answer().status == status
        assert not worker.busy
        # The device may be looked at before the others go on, in the same process.
        first = worker.run({"do": "remember", "value": "looked"}).result
        worker.ask({"do": "remember", "value": "later"})
        assert [worker.answer().result for _ in range(2)] == [{"value": 3}, {"value": 4}]
        later = worker.answer().result
        assert first is not None
        assert later == {"seen": ["looked", "later"], "pid": first["pid"]}

    def test_few_wait_and_none_where_answers_take_long(self, worker: Worker) -> None:
        assert not worker.full
        for seconds, most in ((0.0, workers.DEPTH), (2 * workers.QUICK_SECONDS, 0)):
            worker.ask({"do": "sleep", "seconds": seconds})
            worker.answer()
            waiting = 0
            while not worker.full:
                worker.ask(echo(waiting))
                waiting += 1
            assert waiting == most + 1
            assert [(worker.answer().result or {})["value"] for _ in range(waiting)] == [
                *range(waiting)
            ]

    def test_a_handler_may_ask_for_a_fresh_process(self, worker: Worker) -> None:
        for payload in ({"do": "end"}, {"do": "remember", "value": 2}):
            worker.ask(payload)
        ended, after = worker.answer().result, worker.answer().result
        assert ended is not None
        assert after is not None
        assert after["seen"] == [2]
        assert after["pid"] != ended["pid"]

    def test_nothing_is_run_in_between(self, worker: Worker) -> None:
        worker.ask(echo(1))
        with pytest.raises(RuntimeError, match="whose answers were not taken"):
            worker.run(echo(2))
        assert worker.run(echo(3)).result == {"value": 3}

    def test_a_lease_leaves_nothing_to_the_next(self, pool: WorkerPool) -> None:
        with pool.lease() as worker:
            worker.ask({"do": "spin"})
            worker.ask(echo(1))
        with pool.lease() as worker:
            assert worker.run(echo(2)).result == {"value": 2}


PROFILE = Profile("tiny", problems=60, max_work=20_000, shrink_seconds=30.0, seconds=60.0)
AXES = Axes("paged_attention", all_axes("paged_attention"), 20_000, {})
LONG = long_axes(AXES, 64, 0)
Judge = Callable[[AttentionProblem], Outcome]


def done(status: str, **more: Any) -> Outcome:  # noqa: ANN401  JSON
    return Outcome("done", {"status": status, **more})


class InProcess:
    """Stands for a worker: it judges in this process, as soon as an answer is wanted."""

    busy = False
    start: Callable[[], None] = staticmethod(lambda: None)
    """The import of the implementation."""
    candidate: Candidate

    shares_gpu = False

    def __init__(self, judge: Judge, depth: int) -> None:
        self.judge, self.depth = judge, depth
        self.asked: deque[Mapping[str, Any]] = deque()
        self.problems: list[AttentionProblem] = []
        self.tasks: list[str] = []
        self.most = self.renewed = 0

    def run(self, payload: Mapping[str, Any], deadlines: Deadlines) -> Outcome:
        del deadlines
        assert not self.busy
        self.tasks.append(payload["task"])
        if payload["task"] == "describe":
            self.start()
            return Outcome("done", {})
        outcome = self._judged(payload)
        if payload["task"] == "try" and outcome.died:
            fields = ("status", "kind", "stage")
            return Outcome("done", {"ended": {name: getattr(outcome, name) for name in fields}})
        return outcome

    run_once = run

    def ask(self, payload: Mapping[str, Any], deadlines: Deadlines) -> None:
        del deadlines
        self.asked.append(payload)
        self.most, self.busy = max(self.most, len(self.asked)), True

    def answer(self) -> Outcome:
        outcome = self._judged(self.asked.popleft())
        self.busy = bool(self.asked) and not outcome.died
        return outcome

    @property
    def full(self) -> bool:
        return len(self.asked) > self.depth

    def forget(self) -> None:
        assert not self.busy  # it would cost the process
        self.asked.clear()

    def renew(self) -> None:
        self.renewed += 1

    @property
    def judged(self) -> list[str]:
        return [problem.id for problem in self.problems]

    def _judged(self, payload: Mapping[str, Any]) -> Outcome:
        problem = problem_from_json(payload["problem"])
        assert isinstance(problem, AttentionProblem)
        self.problems.append(problem)
        return self.judge(problem)


def searched(
    judge: Judge,
    depth: int,
    *,
    smallest: tuple[Problem, ...] = (),
    known: tuple[Entry, ...] = (),
    examples: Examples | None = None,
    deadly: tuple[Deadly, ...] = (),
    long: Axes | None = None,
    law: str = "parity",
    declares: frozenset[str] | None = None,
    axes: Axes = AXES,
    drawers: Drawers | None = None,
) -> tuple[LawReport, InProcess]:
    worker = InProcess(judge, depth)
    candidate = worker.candidate = Candidate(
        "it",
        Address("it", None, "cpu"),
        axes,
        declares,
        Ledger(known),
        smallest=[*smallest],
        deadly=[*deadly],
        long=long,
    )
    options = SearchOptions(
        PROFILE, 5, PROFILE.problems, PROFILE.seconds, floor=3, examples=examples, drawers=drawers
    )
    report = LawSearch(worker, candidate, find_law(law), options).run()  # type: ignore[arg-type]
    assert not worker.asked
    return report, worker


def full(problem: AttentionProblem) -> Outcome:
    del problem
    return done("UNSUPPORTED", kind=NO_ROOM, message="no room", waited=4.5)


def test_a_law_without_room_leaves_its_problems_for_the_end_of_the_run() -> None:
    report, worker = searched(full, 0)
    assert report.ended == "room"
    assert (report.judged, len(report.without_room)) == (0, MOST_WITHOUT_ROOM)
    assert report.incomplete
    again = LawSearch(
        InProcess(right, 0),  # type: ignore[arg-type]
        worker.candidate,
        find_law("parity"),
        SearchOptions(PROFILE, 5, PROFILE.problems, PROFILE.seconds),
        again=tuple(report.without_room.values()),
    ).run()
    assert again.judged == MOST_WITHOUT_ROOM
    report.include_later(again)
    assert (report.judged, report.unsupported, report.ended) == (MOST_WITHOUT_ROOM, 0, "")
    assert not report.incomplete


def test_what_has_no_room_at_the_end_either_is_incomplete() -> None:
    report, worker = searched(full, 0)
    options = SearchOptions(PROFILE, 5, PROFILE.problems, PROFILE.seconds)
    left = tuple(report.without_room.values())
    law = find_law("parity")
    again = LawSearch(InProcess(full, 0), worker.candidate, law, options, again=left).run()  # type: ignore[arg-type]
    report.include_later(again)
    assert (report.unsupported, report.ended, report.incomplete) == (len(left), "room", True)


def searched_for_full_batches(
    judge: Judge, device: str = "cuda"
) -> tuple[LawReport, list[AttentionProblem]]:
    """Return the report of parity, and the batches of 64 requests and more that it asked about."""
    worker = InProcess(judge, 0)
    values = {**all_axes("paged_attention"), "phase": ("decode",), "verify": (0,)}
    most = GPU_WORK * 400_000
    axes = Axes("paged_attention", values, most)
    candidate = Candidate("it", Address("it", None, device), axes, cost=Cost("fast", 1.0, most))
    worker.candidate = candidate
    options = SearchOptions(replace(PROFILE, long="oracle"), 5, 3, PROFILE.seconds)
    report = LawSearch(worker, candidate, find_law("parity"), options).run()  # type: ignore[arg-type]
    return report, [problem for problem in worker.problems if problem.num_requests >= 64]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_that_fill_a_gpu_are_judged_on_one(device: str) -> None:
    report, full_ones = searched_for_full_batches(right, device)
    counts = [problem.num_requests for problem in full_ones]
    assert counts == ([64, 512] if device == "cuda" else [])
    assert report.without_full == ""


def test_a_full_batch_that_is_refused_has_others_in_its_place() -> None:
    def uniform_only(problem: AttentionProblem) -> Outcome:
        if problem.num_requests < 64 or len(set(problem.seq_lens)) == 1:
            return right(problem)
        return done("UNSUPPORTED", kind="gate", message="lengths differ")

    report, full_ones = searched_for_full_batches(uniform_only)
    uniform = [problem.num_requests for problem in full_ones if len(set(problem.seq_lens)) == 1]
    assert (uniform, len(full_ones)) == ([64, 512], 4)
    assert report.without_full == ""


def test_the_report_says_that_no_full_batch_was_judged() -> None:
    def few_only(problem: AttentionProblem) -> Outcome:
        if problem.num_requests < 512:
            return right(problem)
        return done("UNSUPPORTED", kind="gate", message="512 requests")

    report, full_ones = searched_for_full_batches(few_only)
    tried = sum(problem.num_requests == 512 for problem in full_ones)
    assert 1 < tried <= MOST_FULL_CHOICES
    assert report.without_full == (
        f"no batch of 512 short requests: each of {tried} was refused, the first because "
        "512 requests"
    )
    assert replace(Coverage(), without_full=report.without_full).text.endswith("512 requests")


def test_waiting_for_room_is_no_time_of_the_law() -> None:
    """The problems wait for twice the seconds that the law has."""

    def late(problem: AttentionProblem) -> Outcome:
        time.sleep(0.8)
        outcome = right(problem)
        assert outcome.result is not None
        return replace(outcome, result={**outcome.result, "waited": 0.8})

    worker = InProcess(late, 0)
    candidate = worker.candidate = Candidate("it", Address("it", None, "cpu"), AXES)
    options = SearchOptions(PROFILE, 5, 5, 2.0)
    report = LawSearch(worker, candidate, find_law("parity"), options).run()  # type: ignore[arg-type]
    assert report.ended == ""
    assert report.judged >= 5


def at_edge(problem: AttentionProblem) -> Outcome:
    bad = max(problem.seq_lens, default=0) > 64
    return done("FAIL", kind="numeric") if bad else right(problem)


def told(report: LawReport) -> tuple[object, ...]:
    finding = report.finding
    return (
        report.judged,
        report.unsupported,
        report.vacuous,
        report.flaky,
        report.ended,
        report.error,
        finding and (finding.problem, finding.verdict),
    )


def honest(problem: AttentionProblem) -> Outcome:
    return done("UNSUPPORTED" if problem.dtype == "bfloat16" else "PASS")


def right(problem: AttentionProblem) -> Outcome:
    del problem
    return done("PASS")


def never(problem: AttentionProblem) -> Outcome:
    del problem
    return done("PASS", vacuous=True)


def wrong(problem: AttentionProblem) -> Outcome:
    bad = max(problem.seq_lens, default=0) >= 5 and problem.causal
    return done("FAIL", kind="numeric") if bad else honest(problem)


def test_a_law_that_needs_what_is_not_declared_draws_nothing() -> None:
    report, worker = searched(never, 2, law="output_buffers", declares=frozenset({"fp8_kv"}))
    assert (report.ended, report.judged, report.vacuous, worker.problems) == ("idle", 0, 0, [])
    assert (report.incomplete, report.verdict) == (False, "UNSUPPORTED")
    report, _ = searched(right, 2, law="output_buffers", declares=frozenset({"writes_out"}))
    assert report.judged == PROFILE.problems


def test_a_law_draws_only_what_it_has_something_to_say_of() -> None:
    plain = replace(AXES, values={**AXES.values, "caches": (("", ""),)})
    report, worker = searched(right, 2, law="dequantised", axes=plain)
    assert (report.ended, report.verdict, worker.problems) == ("idle", "UNSUPPORTED", [])
    quantised = replace(AXES, values={**AXES.values, "caches": (("", ""), ("float8_e4m3fn", ""))})
    report, worker = searched(right, 2, law="dequantised", axes=quantised)
    assert report.judged == PROFILE.problems
    assert {each.kv_cache for each in worker.problems} == {"float8_e4m3fn"}
    # Of modules, those that hold something; decodes of one token hold no chunks of a prefill.
    modules = ({"window_left": (-1,)}, {"window_left": (-1, 7), "page_size": (16,)})
    _, worker = searched(
        right, 2, law="keys_behind_window", axes=replace(AXES, restrictions=modules)
    )
    assert {(each.window_left, each.page_size) for each in worker.problems} == {(7, 16)}
    # A module of one page size may be compared with one of another.
    sizes = ({"page_size": (16,)}, {"page_size": (32,)})
    _, worker = searched(
        right, 2, law="page_size_invariance", axes=replace(AXES, restrictions=sizes)
    )
    assert {each.page_size for each in worker.problems} == {16, 32}
    alone = replace(AXES, restrictions=sizes[:1])
    report, _ = searched(right, 2, law="page_size_invariance", axes=alone)
    assert report.ended == "idle"
    decodes = replace(AXES, values={**AXES.values, "phase": ("decode",), "verify": (0,)})
    report, _ = searched(right, 2, law="chunked_prefill", axes=decodes)
    assert report.ended == "idle"
    verifies = replace(decodes, values={**decodes.values, "verify": (0, 4)})
    _, worker = searched(right, 2, law="chunked_prefill", axes=verifies)
    assert {t for each in worker.problems for t in each.query_lens} == {4}


@pytest.mark.parametrize("judge", [right, wrong])
@pytest.mark.parametrize("long", [None, LONG])
def test_other_processes_draw_the_same(judge: Judge, long: Axes | None) -> None:
    class Apart(Drawers):
        def _opened(self) -> None:
            return None

    alone, _ = searched(judge, 3, long=long)
    report, _ = searched(judge, 3, long=long, drawers=Apart(1))
    assert told(report) == told(alone)


def deadly(problem: AttentionProblem) -> Outcome:
    bad = max(problem.seq_lens, default=0) >= 5 and problem.causal
    return Outcome("crash", kind="SIGABRT", stage="run") if bad else honest(problem)


class TestLawSearch:
    def test_starting_is_no_part_of_its_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = [0.0]
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])

        def start() -> None:
            clock[0] += 10 * PROFILE.seconds

        monkeypatch.setattr(InProcess, "start", staticmethod(start))
        report, _ = searched(right, 0)
        assert (report.judged, report.ended) == (PROFILE.problems, "")

    def test_a_slow_machine_has_twice_the_time_below_the_floor(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = iter(range(10_000))
        monkeypatch.setattr(time, "monotonic", lambda: PROFILE.seconds * next(clock) / 8)
        report, _ = searched(right, 0)
        assert report.ended == "time"
        assert 0 < report.judged < PROFILE.problems
        assert report.incomplete == (report.judged < 3)

    def test_a_law_without_anything_to_judge_gives_up(self) -> None:
        report, worker = searched(never, 0)
        assert (report.judged, report.ended) == (0, "idle")
        assert len(worker.judged) >= 60

    def test_a_law_whose_problems_are_all_refused_is_incomplete(self) -> None:
        # They were drawn among those that the implementation has claimed.
        report, _ = searched(lambda _: done("UNSUPPORTED"), 0)
        assert (report.judged, report.ended, report.verdict) == (0, "idle", "INCOMPLETE")
        report, _ = searched(never, 0)
        assert (report.judged, report.incomplete, report.verdict) == (0, False, "UNSUPPORTED")

    @pytest.mark.parametrize(("ticks", "ended"), [(10, "time"), (50, "idle")])
    def test_a_busy_machine_gives_up_too(
        self, ticks: int, ended: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = itertools.count()
        monkeypatch.setattr(time, "monotonic", lambda: PROFILE.seconds * next(clock) / ticks)
        report, worker = searched(never, 0)
        assert (report.judged, report.ended) == (0, ended)
        assert (len(worker.judged) > 60) == (ended == "idle")
        assert len(worker.judged) < 4 * PROFILE.problems

    def test_what_waits_may_have_something_to_judge(self) -> None:
        number = iter(range(1, 10_000))
        last = 4 * PROFILE.problems

        def at_last(problem: AttentionProblem) -> Outcome:
            return right(problem) if next(number) > last - 2 else never(problem)

        report, _ = searched(at_last, 4)
        assert (report.judged, report.ended) == (PROFILE.problems, "")

    @pytest.mark.parametrize("judge", [honest, never, wrong, deadly])
    def test_as_one_at_a_time(self, judge: Judge) -> None:
        """The same problems are judged, and the same one is found."""
        alone, at_a_time = searched(judge, 0)
        report, ahead = searched(judge, 4)
        assert (at_a_time.most, ahead.most) == (1, 5)
        assert told(report) == told(alone)
        if report.finding is None:
            assert ahead.judged == at_a_time.judged
        else:
            # What was asked ahead of the failure is done for nothing.
            assert 0 <= len(ahead.judged) - len(at_a_time.judged) <= 4
            assert isinstance(report.finding.problem, AttentionProblem)
            assert report.finding.problem.seq_lens == (5,)
            assert ahead.renewed == at_a_time.renewed

    def test_long_problems_of_a_slow_implementation_come_first(self) -> None:
        """They take half of what there is; the others are the first of those without them."""
        report, worker = searched(right, 0, long=LONG)
        half = PROFILE.problems // 2
        longest = [max(problem.seq_lens, default=0) for problem in worker.problems]
        assert sum(length > 64 for length in longest[:half]) > half // 2
        assert len(longest) == report.judged == PROFILE.problems
        later = worker.judged[half:]
        assert later == searched(right, 0)[1].judged[: len(later)]

    @pytest.mark.parametrize("judge", [at_edge, wrong])
    def test_what_a_long_problem_shows_is_made_small(self, judge: Judge) -> None:
        report, _ = searched(judge, 0, long=LONG)
        assert report.finding is not None
        found = report.finding.problem
        assert isinstance(found, AttentionProblem)
        assert found.seq_lens == ((65,) if judge is at_edge else (5,))
        assert found.num_pages <= 2

    def test_what_another_law_found_loses_what_this_one_does_not_need(self) -> None:
        found = AttentionProblem(query_lens=(1,), seq_lens=(9,), logits_soft_cap=30.0)
        report, _ = searched(wrong, 0, smallest=(found,))
        assert report.finding is not None
        assert isinstance(report.finding.problem, AttentionProblem)
        assert report.finding.problem.seq_lens == (5,)
        assert report.finding.problem.logits_soft_cap == 0

    def test_what_costs_a_process_is_not_searched_anew(self) -> None:
        """The next law tries the smallest problem once, and goes on with problems unlike it."""

        def deadly_pages(problem: AttentionProblem) -> Outcome:
            if problem.page_size >= 16:
                return Outcome("hang", kind="run", stage="run")
            return done("PASS")

        first, worker = searched(deadly_pages, 0)
        (deadly,) = worker.candidate.deadly
        assert first.finding
        assert (deadly.problem, deadly.values) == (
            first.finding.problem,
            {"page_size": {"min": 16}},
        )
        again, other = searched(deadly_pages, 0, deadly=(deadly,))
        assert again.finding
        assert again.finding.problem == deadly.problem
        assert [each.page_size >= 16 for each in other.problems] == [
            True,
            *[False] * (len(other.problems) - 1),
        ]
        assert other.tasks == ["describe", "try"]  # in a fork: no process is lost
        # Of the first law: confirmed and judged last in a process of its own, shrunk in forks.
        shrunk = worker.tasks.count("try")
        assert shrunk > 0
        assert worker.tasks.count("judge") == 2
        assert worker.renewed == 2
        assert again.judged > PROFILE.problems / 2

    def test_a_hang_in_the_same_place_is_the_same(self) -> None:
        """A law may have made of its problem the one that hangs."""
        stack = (
            'Current thread 0x1:\n  File "mine.py", line 7 in loop\n'
            f'  File "{laws.__file__}", line 1 in check\n'
        )

        def stuck(problem: AttentionProblem) -> Outcome:
            if problem.page_size >= 16:
                return Outcome("hang", kind="run", stage="run", stack=stack)
            return done("PASS")

        elsewhere = Verdict("HANG", "run")
        for place, noted in (("loop (mine.py)", True), ("other (mine.py)", False)):
            known = Deadly(
                AttentionProblem(sinks=True), elsewhere, {"sinks": True}, place=place, shrunk=True
            )
            report, worker = searched(stuck, 0, deadly=(known,))
            assert report.finding
            assert report.finding.place == "loop (mine.py)"
            assert (len(worker.candidate.deadly) == 1) == noted
            assert (worker.tasks.count("try") == 1) == noted  # else it was shrunk

    def test_two_laws_beside_each_other_shrink_a_hang_once(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = Deadly(AttentionProblem(page_size=16), Verdict("HANG", "run"))

        def shrink(seconds: float) -> None:  # which the other law does meanwhile
            del seconds
            other.values, other.shrunk = {"page_size": {"min": 16}}, True

        def renew(worker: InProcess) -> None:  # which confirming begins with
            worker.candidate.deadly[:] = [other]

        def deadly_pages(problem: AttentionProblem) -> Outcome:
            if problem.page_size >= 16:
                return Outcome("hang", kind="run", stage="run")
            return done("PASS")

        monkeypatch.setattr(InProcess, "renew", renew)
        monkeypatch.setattr(time, "sleep", shrink)
        report, worker = searched(deadly_pages, 0)
        assert report.finding
        assert report.finding.verdict.status == "HANG"
        assert worker.candidate.deadly == [other]
        assert "try" not in worker.tasks
        assert report.judged > PROFILE.problems / 2  # without what hangs

    def test_a_law_that_an_error_ends_lets_others_go_on(self) -> None:
        """They wait until the hang that it has found is shrunk."""

        hangs = itertools.count()

        def stuck(problem: AttentionProblem) -> Outcome:
            if problem.page_size < 16:
                return done("PASS")
            if next(hangs) > 1:  # found and confirmed, it is being shrunk
                raise HarnessError("the pool was closed")  # noqa: TRY003, EM101
            return Outcome("hang", kind="run", stage="run")

        report, worker = searched(stuck, 0)
        assert report.error == "the pool was closed"
        assert [each.shrunk for each in worker.candidate.deadly] == [True]

    def test_what_fails_otherwise_where_another_law_hung_is_a_finding(self) -> None:
        problem = AttentionProblem(query_lens=(1,), seq_lens=(3,))
        hung = Deadly(problem, Verdict("HANG", "run", "stuck"), shrunk=True)

        def judge(each: AttentionProblem) -> Outcome:
            return done("FAIL", kind="numeric") if each.id == problem.id else right(each)

        report, _ = searched(judge, 2, deadly=(hung,))
        assert report.finding is not None
        assert (report.finding.verdict.status, report.verdict) == ("FAIL", "FAIL")

    @pytest.mark.parametrize("asked", [1, 2, 3, 9])
    @pytest.mark.parametrize("judge", [wrong, deadly])
    def test_a_failure_stays_where_the_run_is_cut_off(self, judge: Judge, asked: int) -> None:
        """While it is confirmed (1 more), shrunk, or judged in a fresh process."""
        seen = 0

        def cut(problem: AttentionProblem) -> Outcome:
            nonlocal seen
            outcome = judge(problem)
            seen += bool(seen) or outcome.died or (outcome.result or {}).get("status") == "FAIL"
            if seen > asked:
                message = "the worker pool is closed"
                raise RuntimeError(message)
            return outcome

        report, _ = searched(cut, 0)
        assert report.error == "the worker pool is closed"
        assert report.finding is not None
        found = report.finding.verdict
        assert found.status == ("FAIL" if judge is wrong else "CRASH")
        assert found.message.endswith("; then the law ended before it was judged again")

    def test_another_failure_behind_a_hang_is_found(self) -> None:
        def both(problem: AttentionProblem) -> Outcome:
            hang = Outcome("hang", kind="run", stage="run")
            return hang if problem.page_size >= 16 else wrong(problem)

        smallest = AttentionProblem(page_size=16)
        known = Deadly(smallest, Verdict("HANG", "run"), {"page_size": {"min": 16}}, shrunk=True)
        report, _ = searched(both, 0, deadly=(known,))
        assert report.finding
        assert report.finding.verdict.status == "FAIL"

    def test_a_failure_that_does_not_repeat_is_flaky(self) -> None:
        seen: list[str] = []

        def at_first(problem: AttentionProblem) -> Outcome:
            outcome = honest(problem) if seen else wrong(problem)
            if (outcome.result or {})["status"] == "FAIL":
                seen.append(problem.id)
            return outcome

        alone, _ = searched(at_first, 0)
        seen.clear()
        report, _ = searched(at_first, 4)
        assert told(report) == told(alone)
        assert report.flaky
        assert report.finding is not None
        assert report.finding.verdict.status == "FLAKY"

    @pytest.mark.parametrize(("seconds", "status"), [(2.0, None), (0.01, "FLAKY")])
    def test_a_slow_call_that_overran_its_deadline_once_did_not_hang(
        self, seconds: float, status: str | None
    ) -> None:
        seen: list[str] = []

        def at_first(problem: AttentionProblem) -> Outcome:
            if (wrong(problem).result or {})["status"] != "FAIL":
                return done("PASS")
            seen.append(problem.id)
            hang = Outcome("hang", kind="run", stage="run")
            return hang if len(seen) == 1 else done("PASS", seconds=seconds, calls=1)

        report, _ = searched(at_first, 0)
        assert len(seen) > 1
        assert (report.finding.verdict.status if report.finding else None) == status
        assert report.flaky == (status is not None)

    @pytest.mark.parametrize("period", [2, 3])
    def test_a_failure_that_comes_and_goes_is_not_of_first_calls_alone(self, period: int) -> None:
        """It is wrong again in a fresh process, and then right: that is no proof."""
        looks = itertools.count()

        def now_and_then(problem: AttentionProblem) -> Outcome:
            bad = (wrong(problem).result or {})["status"] == "FAIL"
            return honest(problem) if bad and next(looks) % period else wrong(problem)

        report, _ = searched(now_and_then, 0)
        assert report.flaky
        assert report.finding is not None
        assert report.finding.verdict.status == "FLAKY"

    def test_all_that_other_runs_have_kept_is_tried_first(self) -> None:
        """What fails on another chip passes here, and must not be in the way of what is behind."""
        memory, kept = InMemoryExampleDatabase(), set[str]()
        there = Examples(memory, "90").of("parity", "it")
        for number in range(16):
            failed: list[str] = []

            def look(problem: Problem, number: int = number, failed: list[str] = failed) -> None:
                if problem.seed % 16 == number:
                    failed.append(problem.id)
                    raise rounds.Counterexample

            assert rounds.draw_round(AXES, PROFILE, number, look, database=there, most=200)
            kept.add(failed[-1])
        report, worker = searched(right, 4, examples=Examples(memory, "100"))
        assert kept <= set(worker.judged)
        # They take nothing from what a search draws by itself.
        assert report.judged >= PROFILE.problems + len(kept)

    def test_a_failure_that_the_ledger_explains_when_confirmed_is_known(self) -> None:
        """A race may show itself as a HANG here and as a FAIL there; an entry may name one."""
        seen: list[str] = []

        def by_turns(problem: AttentionProblem) -> Outcome:
            outcome = wrong(problem)
            if (outcome.result or {})["status"] != "FAIL":
                return outcome
            seen.append(problem.id)
            return Outcome("hang", kind="run", stage="run") if len(seen) == 1 else outcome

        race = Entry("race", "it", "FAIL", {}, "It is a race.", Path("race.json"), ("parity",))
        report, _ = searched(by_turns, 0, known=(race,))
        assert len(seen) > 1
        assert report.flaky == 0
        assert report.finding is not None
        assert report.finding.entry == "race"

    def test_known_failures_do_not_fill_the_plan_of_a_law(self) -> None:
        """Another fault would not show in them: the law judges its problems beside them."""
        masked = Entry("known", "it", "FAIL", {}, "It is wrong.", Path("known.json"), ("parity",))

        def wrong_where_causal(problem: AttentionProblem) -> Outcome:
            return done("FAIL", kind="numeric") if problem.causal else done("PASS")

        report, _ = searched(wrong_where_causal, 0, known=(masked,))
        assert report.known["known"] > 0
        assert report.judged - report.known["known"] >= PROFILE.problems

    def test_where_all_failures_are_known_a_law_ends(self) -> None:
        masked = Entry("known", "it", "FAIL", {}, "It is wrong.", Path("known.json"), ("parity",))
        report, _ = searched(lambda _: done("FAIL", kind="numeric"), 0, known=(masked,))
        assert report.judged == report.known["known"]
        assert report.judged <= (MOST_MASKED + 2) * PROFILE.problems

    def test_a_death_before_a_case_began_is_not_its_own(self) -> None:
        """The process was asked ahead: what ended it may be left from the case before."""
        died: list[str] = []

        def late(problem: AttentionProblem) -> Outcome:
            if len(died) < 3 and problem.causal and problem.id not in died:
                died.append(problem.id)
                return Outcome("crash", kind="SIGABRT", stage="load")
            return honest(problem)

        report, _ = searched(late, 4)
        assert len(died) == 3
        assert told(report) == told(searched(honest, 0)[0])

    def test_what_is_not_drawn_again_is_found_all_the_same(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Hypothesis draws the same problems again, as long as nothing else has changed."""
        calls: list[int] = []
        draw_round = rounds.draw_round

        def otherwise(axes: Axes, profile: Profile, seed: int, *args: Any, **more: Any) -> bool:  # noqa: ANN401
            calls.append(seed)
            return draw_round(axes, profile, seed + len(calls), *args, **more)

        def rarely(problem: AttentionProblem) -> Outcome:
            bad = len(calls) == 1 and max(problem.seq_lens, default=0) >= 2
            found.update([problem.id] if bad else [])
            return done("FAIL", kind="numeric") if problem.id in found else honest(problem)

        found: set[str] = set()
        monkeypatch.setattr("kernelproof.properties.search.drawing.draw_round", otherwise)
        report, _ = searched(rarely, 4)
        assert len(calls) == 2
        assert report.finding is not None
        assert report.finding.verdict.status == "FAIL"

    def test_a_worker_that_cannot_answer_ends_the_search(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(problem: AttentionProblem) -> Outcome:
            return Outcome("error", kind="ValueError") if problem.causal else honest(problem)

        monkeypatch.setattr(InProcess, "forget", lambda self: self.asked.clear())
        report, _ = searched(broken, 4)
        assert "ValueError" in report.error
        assert report.finding is None
