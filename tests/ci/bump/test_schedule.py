"""A cold comparison of two FlashInfer releases on one H200 with 16 cores, on a clock of its own.

Modules are chosen, ordered and handed out by the comparison's own code. Compilers, surveys and
judges are made up: they take the seconds that were measured.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproof.ci.answers.journal import Journal
from kernelproof.ci.bump.behaviour import building
from kernelproof.ci.bump.behaviour.asking import PATIENCE, Bench, Side
from kernelproof.ci.bump.behaviour.building import (
    Build,
    Builders,
    Wanted,
    choose_modules,
    ordered_builds,
)
from kernelproof.ci.bump.behaviour.judging import Judging
from kernelproof.ci.bump.behaviour.records import DEAR, TIME, Planned, Surveyed, Tried
from kernelproof.ci.bump.sides.plan import JUDGED, BumpPlan
from kernelproof.ci.bump.sides.releases import SIDES
from kernelproof.properties.findings.ledger import Ledger
from kernelproof.properties.isolation.outcome import Outcome
from kernelproof.properties.isolation.workers import Deadlines
from kernelproof.properties.laws import find_law
from kernelproof.properties.search.costs import read_builds
from kernelproof.properties.search.ending import Ending
from kernelproof.properties.search.priority_executor import FairQueue
from kernelproof.properties.space.axes import Axes, narrow
from kernelproof.properties.space.profiles import GATE_SHARE, PROFILES
from kernelproof.properties.worker.requests import Address
from kernelproof.reference import AttentionProblem, problem_from_json

MINUTES, CORES, COMPILERS_EACH = 20.0, 16, 4
JUDGES, RATE = 4, 150.0
"""Problems that are judged at a time, and in a second, with both releases."""
PROBLEMS = 300
"""Problems of an implementation."""
SLOW_SECONDS = 1.0
"""Seconds that a problem of a reference in Python takes."""
SURVEYED = 8.0
"""Seconds until the first implementation is surveyed: both releases are read, workers imported."""
CHOSEN = 30.0
"""Seconds until all are, and their modules chosen."""
NO_MODULES = {"flashinfer-merge-state": False, "flashinfer-append": False} | {
    f"flashinfer-trace-{number}": True for number in range(10)
}
"""Implementations that need no module, and whether they are slow: fewer than FlashInfer has."""
DEAREST = "flashinfer-cutlass-moe"
# Whose libraries they share, and minutes of one core, as declared and measured.
WITH_MODULES = {
    "flashinfer-decode": ("decode", 1.5),
    "flashinfer-decode-graph": ("decode", 1.5),
    "flashinfer-single-decode": ("single-decode", 1.5),
    "flashinfer-decode-fa2": ("fa2", 5.5),
    "flashinfer-prefill-fa2": ("fa2", 5.5),
    "flashinfer-mixed-fa2": ("fa2", 5.5),
    "flashinfer-ragged-fa2": ("fa2", 5.5),
    "flashinfer-decode-fa2-graph": ("fa2", 5.5),
    "flashinfer-prefill-fa2-graph": ("fa2", 5.5),
    "flashinfer-cascade": ("fa2", 5.5),
    "flashinfer-batch-attention": ("persistent", 5.5),
    "flashinfer-single-prefill-fa2": ("single-fa2", 5.5),
    "flashinfer-mla-fa2": ("mla-fa2", 5.5),
    "flashinfer-xqa-decode": ("xqa", 6.0),
    "flashinfer-xqa-decode-fp8": ("xqa-fp8", 6.0),
    "flashinfer-trtllm-decode-auto": ("xqa-auto", 6.0),
    "flashinfer-prefill-fa3": ("fa3", 15.0),
    "flashinfer-ragged-fa3": ("fa3", 15.0),
    "flashinfer-prefill-fa3-graph": ("fa3", 15.0),
    "flashinfer-mla-fa3": ("mla-fa3", 15.0),
    "flashinfer-group-gemm-moe": ("group-gemm", 1.0),
    DEAREST: ("cutlass", 432.0),
}


class Survey(Side):
    """Answers for an implementation whose modules differ in dtype and head dim."""

    def __init__(self) -> None:  # it has no workers
        self.there: set[str] = set()

    def run(self, payload: Mapping[str, Any], deadlines: Deadlines) -> Outcome:
        del deadlines
        backend = WITH_MODULES[payload["implementation"]][0]
        found = [problem_from_json(each) for each in payload["problems"]]
        keys = [key(each) for each in found if isinstance(each, AttentionProblem)]
        names = [f"{backend} {each}" for each in keys]
        libraries = [[name, name in self.there] for name in names]
        return Outcome("done", result={"keys": keys, "libraries": libraries})

    def remember(self, question: Mapping[str, Any], answer: Callable[[], Any]) -> Any:  # noqa: ANN401
        del question
        return answer()


class Compiler(Survey):
    """Compiles anything in as many seconds."""

    SECONDS = 3.0

    def ask(self, *_: object, **__: object) -> Outcome:
        return Outcome("done", result={}, seconds=self.SECONDS)


def key(problem: AttentionProblem) -> str:
    return f"{problem.dtype} {problem.head_dim_qk}"


def axes() -> Axes:
    found = narrow("paged_attention", lambda problems: [None] * len(problems), 10**9)
    assert found is not None
    differ = ("dtype", "head_dims")
    values = {name: each if name in differ else each[:1] for name, each in found.values.items()}
    return replace(found, values=values)


AXES = axes()


def surveyed(name: str) -> Surveyed:
    addresses = {side: Address(name, None, "cuda") for side in SIDES}
    minutes = WITH_MODULES[name][1] if name in WITH_MODULES else 0.0
    return Surveyed(
        name, name, "paged_attention", axes=AXES, addresses=addresses, build_minutes=minutes
    )


def bench(side: Side, journal: Journal, cases: Path, minutes: float = math.inf) -> Bench:
    return Bench(plan(cases), dict.fromkeys(SIDES, side), journal, Ending(60 * minutes))


def plan(cases: Path = Path("cases")) -> BumpPlan:
    names = [*NO_MODULES, *WITH_MODULES]
    return BumpPlan(names, "cuda", PROFILES["gate"], 0, Ledger(), cases, Path("tensors"))


@dataclass(frozen=True)
class Task:
    """A problem of an implementation that waits to be judged, and the module that it needs."""

    found: Planned
    rank: tuple[int, ...]
    module: str | None


@dataclass
class Schedule:
    """What a comparison does and when, in seconds from its start."""

    minutes: float = MINUTES
    there: set[str] = field(default_factory=set)
    cases: Path = Path("cases")
    now: float = 0.0
    first: float = 0.0
    built: float = 0.0
    last: float = 0.0
    idle: float = 0.0
    judged: Counter[str] = field(default_factory=Counter)
    by: dict[float, int] = field(default_factory=dict)
    wanted: list[Wanted] = field(default_factory=list)
    implementations: list[Planned] = field(default_factory=list)

    def run(self) -> Schedule:
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._queue, self._builds = FairQueue[Task](), deque[Build]()
        self._unbuilt: defaultdict[tuple[str, str], list[Task]] = defaultdict(list)
        self._free_judges, self._free_builders = JUDGES, CORES // COMPILERS_EACH
        self._libraries: set[tuple[str, str]] = set()
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._sides: Counter[int] = Counter()
        for number, name in enumerate(NO_MODULES):
            self._at(SURVEYED + number, partial(self._ready, Planned.after(surveyed(name))))
        self._at(CHOSEN, self._choose)
        while self._events:
            when, _, happen = heapq.heappop(self._events)
            if self._judgeable() and self._free_judges:
                self.idle += when - self.now
            self.now = when
            happen()
            self._go_on()
        return self

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happen))

    def _go_on(self) -> None:
        if self.now > 60 * JUDGED * self.minutes:
            return
        while self._free_builders and self._builds:
            build = self._builds.popleft()
            self._free_builders -= 1
            seconds = 60 * build.wanted[0].found.build_minutes / COMPILERS_EACH
            self._at(self.now + seconds, partial(self._end, build))
        while self._free_judges and (taken := self._queue.take()) is not None:
            task = taken.item
            self._free_judges -= 1
            self._waiting[self._module(task)] -= 1
            slow = NO_MODULES.get(task.found.name, False)
            seconds = SLOW_SECONDS if slow else JUDGES / RATE
            self._at(self.now + seconds, partial(self._judge, task, seconds))

    def _judgeable(self) -> bool:
        """Whether a problem waits whose module both releases have, whoever built it."""
        return any(
            count
            and (
                not module
                or all((side, self._library[name, module]) in self._libraries for side in SIDES)
            )
            for (name, module), count in self._waiting.items()
        )

    @staticmethod
    def _module(task: Task) -> tuple[str, str]:
        return task.found.name, task.module or ""

    def _ready(self, found: Planned) -> None:
        self.implementations.append(found)
        keys = [each.key for each in self.wanted if each.found is found]
        modules: list[str | None] = [*keys] or [None]
        tasks = [
            Task(found, (number,), module)
            for number, module in zip(range(PROBLEMS), itertools.cycle(modules), strict=False)
        ]
        self._waiting.update(map(self._module, tasks))
        for task in tasks:
            if task.module is None:
                self._queue.put(found.name, task.rank, task)
            else:
                self._unbuilt[self._module(task)].append(task)

    def _choose(self) -> None:
        side = Survey()
        side.there = self.there
        found, self.wanted = choose_modules(
            [surveyed(name) for name in WITH_MODULES],
            bench(side, Journal(None), self.cases, self.minutes),
        )
        self._library = {
            (each.found.name, each.key): each.libraries[SIDES[0]][0] for each in self.wanted
        }
        for each in found:
            if not each.left_out:
                self._ready(each)
        for build in ordered_builds(self.wanted):
            if build.exists:
                self._take(build)
            else:
                self._builds.append(build)

    def _end(self, build: Build) -> None:
        self._free_builders += 1
        self.built = self.now
        self._take(build)

    def _take(self, build: Build) -> None:
        self._libraries.add((build.side, build.wanted[0].libraries[build.side][0]))
        for each in build.wanted:
            self._sides[id(each)] += 1
            if self._sides[id(each)] == len(SIDES):
                for task in self._unbuilt.pop((each.found.name, each.key), ()):
                    self._queue.put(each.found.name, task.rank, task)

    def _judge(self, task: Task, seconds: float) -> None:
        self._free_judges += 1
        self._queue.end(task.found.name, seconds)
        self.judged[task.found.name] += 1
        self.first = self.first or self.now
        self.last = self.now
        self.by[self.now] = self.judged.total()


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "compilers", lambda: CORES)


def test_a_cold_comparison_judges_enough_with_both_releases_in_its_time() -> None:
    found = Schedule().run()
    print(  # noqa: T201  the numbers of docs/gpu.md
        f"first {found.first:.0f} s, idle {found.idle:.0f} s, built {found.built:.0f} s, "
        f"ended {found.last:.0f} s, judged {found.judged.total()}, "
        f"{len(ordered_builds(found.wanted))} compilations"
    )
    assert found.first < CHOSEN  # what needs no module waits for no survey of others
    assert found.idle == 0.0
    assert found.last <= 60 * JUDGED * MINUTES
    assert found.judged.total() >= 5000
    assert {each.name for each in found.implementations} == {*NO_MODULES, *WITH_MODULES} - {DEAREST}
    assert min(found.judged.values()) == max(found.judged.values()) == PROBLEMS
    before = [count for when, count in found.by.items() if when <= 5 * 60]
    assert before[-1] > 1000  # what a signal after five minutes leaves
    assert {each.found.left_out for each in found.wanted} == {""}


def test_a_comparison_whose_modules_are_there_builds_no_others() -> None:
    cold = Schedule().run()
    there = {each.libraries[SIDES[0]][0] for each in cold.wanted}
    warm = Schedule(there=there).run()
    again = {each.libraries[SIDES[0]][0] for each in warm.wanted}
    assert again == there
    assert warm.idle == 0.0


def test_what_builds_took_is_kept_and_decides_how_many_a_later_run_has(tmp_path: Path) -> None:
    cold = Schedule(cases=tmp_path).run()
    made_up = bench(Compiler(), Journal(None), tmp_path)
    builders = Builders({}, made_up)
    builders.bench = made_up
    builders.build(cold.wanted, lambda _: None)
    minutes = builders.compilers_each * Compiler.SECONDS / 60
    kept = read_builds(tmp_path)
    assert kept == {
        each.wanted[0].libraries[each.side][0]: minutes for each in ordered_builds(cold.wanted)
    }
    later = Schedule(cases=tmp_path).run()
    assert len(ordered_builds(later.wanted)) > len(ordered_builds(cold.wanted))


def test_a_short_comparison_names_what_it_has_no_time_for(tmp_path: Path) -> None:
    def chosen(minutes: float, journal: Journal) -> tuple[dict[str, str], list[str]]:
        found, wanted = choose_modules(
            [surveyed(name) for name in WITH_MODULES],
            bench(Survey(), journal, Path("cases"), minutes),
        )
        left_out = {each.name: each.left_out for each in found if each.left_out}
        return left_out, [f"{each.found.name} {each.key}" for each in wanted]

    with Journal(tmp_path / "j.jsonl") as journal:
        journal.start({"of": "both"})
        left_out, modules = chosen(5.0, journal)
    assert left_out[DEAREST] == DEAR
    assert left_out["flashinfer-xqa-decode"] == TIME
    assert "flashinfer-decode" not in left_out
    with Journal(tmp_path / "j.jsonl") as journal:  # with another time, the same is asked
        journal.start({"of": "both"}, resume=True)
        assert chosen(60.0, journal) == (left_out, modules)


def test_a_problem_goes_to_a_worker_that_has_loaded_its_module() -> None:
    leased: list[tuple[str, float]] = []

    class Pool:
        @contextmanager
        def lease(self, *wanted: Any) -> Iterator[Any]:  # noqa: ANN401  an owner, and seconds
            leased.append(wanted)
            yield SimpleNamespace(run=lambda *_: Outcome("done", {}))

    def ask(number: int, *_: object) -> Tried:
        side.ask({"task": "judge", "number": number}, Deadlines())
        return Tried("parity", AttentionProblem(), {})

    side = Side("baseline", Journal(None), lambda: nullcontext(Pool()))  # type: ignore[arg-type]
    asked = bench(side, Journal(None), Path("cases"))
    judging = Judging(asked, Builders({}, asked))
    for number, key in enumerate(("fp8", None)):
        found = Planned("mine", "mine.py:mine")
        question, _ = judging._asking(found, (0, 0, number), partial(ask, number), key)
        question.ask(asked)
    assert sorted(leased) == [("", 0.0), ("mine fp8", PATIENCE)]


def test_a_law_gets_seven_tenths_of_a_gates_problems_on_a_gpu() -> None:
    parity = find_law("parity")
    every = round(PROFILES["gate"].problems * GATE_SHARE * parity.weight)
    assert plan().count(parity, first=True, sides=2) == round(0.7 * every)
