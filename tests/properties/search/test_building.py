"""How many compilers each build of a module may start."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from kernelproof.properties.findings.report import ImplementationReport
from kernelproof.properties.isolation.workers import Deadlines, Outcome
from kernelproof.properties.search import building
from kernelproof.properties.search.building import MAX_JOBS, Builder, BuildScheduler
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.search.preparation import Setting
from kernelproof.properties.space.module_selection import Module
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.worker.requests import Address, DeviceLostError
from kernelproof.reference import AttentionProblem


class Pool(AbstractContextManager["Pool"]):
    """Stands for a pool whose worker builds in no time."""

    def __exit__(self, *error: object) -> None:
        pass

    closed = False

    @contextmanager
    def lease(self, owner: str = "") -> Iterator[Pool]:
        del owner
        yield self

    def close(self) -> None:
        self.closed = True

    def run(self, request: object, deadlines: Deadlines) -> Outcome:
        del request, deadlines
        return Outcome("done", result={})


class Counting(Pool):
    """Counts the compilers of all builds that run at a time."""

    now = most = 0
    lock = threading.Lock()

    def __init__(self, compilers: int) -> None:
        self.compilers = compilers

    def run(self, request: object, deadlines: Deadlines) -> Outcome:
        with self.lock:
            Counting.now += self.compilers
            Counting.most = max(Counting.most, Counting.now)
        time.sleep(0.05)
        with self.lock:
            Counting.now -= self.compilers
        return super().run(request, deadlines)


def declared(compilers: int) -> dict[str, float]:
    return {"build_minutes": 5.0, "build_compilers": compilers}


def test_one_of_several_runs_on_a_machine_has_its_share_of_the_compilers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(building, "cores", lambda: 16)
    monkeypatch.setattr("os.sysconf", lambda _: 1 << 20)
    assert building.compilers() == 16
    monkeypatch.setenv(building.COMPILERS, "2")
    assert building.compilers() == 2
    assert building.builds_at_a_time(1, "cpu") == 2


@pytest.mark.parametrize(
    ("modules", "wanted"),
    [
        ((2,), (4,)),
        ((2, 2), (4, 4)),
        ((1, 8), (4, 4)),
        ((3, 3, 3), (4, 4, 4)),
        ((40,), (1,)),
        ((40, 8), (1, 4)),
        ((1, 1), (99, 1)),  # more than there are
    ],
)
def test_builds_beside_each_other_start_no_more_compilers_than_there_are(
    modules: tuple[int, ...], wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_pool(device: str, *, standby: bool, environment: Mapping[str, str]) -> Counting:
        del device, standby
        return Counting(int(environment[MAX_JOBS]))

    monkeypatch.setattr(building, "open_pool", open_pool)
    monkeypatch.setattr(building, "compilers", lambda: 16)
    monkeypatch.delenv(MAX_JOBS, raising=False)
    Counting.most = 0
    builder = Builder(len(modules))

    def build(number: int) -> None:
        report = ImplementationReport(f"slow-{number}", "t", declared=declared(wanted[number]))
        chosen = [Module(str(each), {}, AttentionProblem()) for each in range(modules[number])]
        builder.build(Address(f"tests:slow{number}", None, "cuda"), chosen, report)

    with ThreadPoolExecutor(len(modules)) as threads:
        list(threads.map(build, range(len(modules))))
    assert 0 < Counting.most <= 16


@pytest.mark.parametrize(
    ("modules", "implementations", "wanted", "given", "expected"),
    [
        (1, 1, 4, "", "16"),  # nobody else compiles
        (3, 1, 4, "", "5"),
        (8, 1, 4, "", "4"),  # four at a time
        (1, 3, 4, "", "4"),
        (8, 3, 4, "", "4"),
        (1, 1, 4, "2", None),  # the user's stays
        (1, 1, 1, "", "1"),  # what starts one compiler starts no more
        (40, 1, 1, "", "1"),
    ],
)
def test_the_machine_is_shared(
    modules: int,
    implementations: int,
    wanted: int,
    given: str,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str | None] = []

    def open_pool(
        device: str, *, standby: bool, environment: Mapping[str, str]
    ) -> AbstractContextManager[Pool]:
        del device, standby
        opened.append(environment.get(MAX_JOBS))
        return Pool()

    monkeypatch.setattr(building, "open_pool", open_pool)
    monkeypatch.setattr(building, "compilers", lambda: 16)
    monkeypatch.delenv(MAX_JOBS, raising=False)
    if given:
        monkeypatch.setenv(MAX_JOBS, given)
    report = ImplementationReport("slow", "tests:slow", declared=declared(wanted))
    chosen = [Module(str(number), {}, AttentionProblem()) for number in range(modules)]
    Builder(implementations).build(Address("tests:slow", None, "cuda"), chosen, report)
    # A process builds one module after another.
    assert set(opened) == {expected}
    assert len(opened) <= min(modules, 16 // wanted)


def test_every_module_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Asked(Pool):
        def run(self, request: object, deadlines: Deadlines) -> Outcome:
            assert isinstance(request, dict)
            assert request["task"] == "build"
            asked.append(request["problem"]["seed"])
            return super().run(request, deadlines)

    monkeypatch.setattr(building, "open_pool", lambda *_, **__: Asked())
    monkeypatch.setattr(building, "compilers", lambda: 4)
    report = ImplementationReport("quick", "tests:quick", declared=declared(1))
    chosen = [Module(str(seed), {}, AttentionProblem(seed=seed)) for seed in range(40)]
    told: list[tuple[int, int]] = []
    Builder(1).build(
        Address("tests:quick", None, "cpu"), chosen, report, lambda *each: told.append(each)
    )
    assert sorted(asked) == list(range(40))
    assert sorted(told) == [(done, 40) for done in range(1, 41)]
    assert report.modules == 40


def test_what_implementations_share_is_compiled_once_and_its_cost_is_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever needs what another one builds waits without compilers, and only loads it."""
    shares: list[int] = []
    original = BuildScheduler.turn

    def turn(
        self: BuildScheduler, owner: str, minutes: float, share: int = 1
    ) -> AbstractContextManager[None]:
        shares.append(share if minutes else 0)
        return original(self, owner, minutes, share)

    monkeypatch.setattr(BuildScheduler, "turn", turn)

    class Compiler(Pool):
        def run(self, request: Any, deadlines: Deadlines) -> Outcome:  # noqa: ANN401  JSON
            del deadlines
            wrong = request["problem"]["seed"] == 1
            stopped = {"stopped": {"status": "CRASH"}} if wrong else {}
            return Outcome("done", result={"kernels": 1, **stopped}, seconds=15.0)

    monkeypatch.setattr(building, "open_pool", lambda *_, **__: Compiler())
    monkeypatch.setattr(building, "compilers", lambda: 16)
    builder = Builder(3)

    def build(number: int) -> None:
        report = ImplementationReport(f"slow-{number}", "t", declared=declared(4))
        first = AttentionProblem()
        chosen = [
            Module("a", {}, first, "fa2 a"),
            Module("b", {}, first, "fa2 b"),
            Module("c", {}, first, "fa2 c", exists=True),
            Module("d", {}, AttentionProblem(seed=1), "fa2 d"),  # which does not compile
        ]
        builder.build(Address(f"tests:slow{number}", None, "cpu"), chosen, report)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(build, range(3)))
    assert sorted(shares) == [0] * 9 + [4] * 3
    assert builder.minutes == {"fa2 a": 1.0, "fa2 b": 1.0}


def test_nothing_to_build_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "open_pool", None)
    report = ImplementationReport("ready", "t", declared=declared(4))
    Builder(1).build(Address("tests:ready", None, "cpu"), [], report)
    assert report.modules == 0


def test_processes_that_build_have_room_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "compilers", lambda: 64)
    monkeypatch.setattr(building, "free_memory", lambda _: [24 << 10])
    assert building.builds_at_a_time(1, "cuda") == 12
    assert building.builds_at_a_time(4, "cuda") == 12
    assert building.builds_at_a_time(8, "cuda") == 8
    assert building.builds_at_a_time(1, "cpu") == 64


def test_what_fails_does_not_spoil_the_next_module(monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[int] = []

    class Failing(Pool):
        def run(self, request: object, deadlines: Deadlines) -> Outcome:
            del request, deadlines
            return Outcome("error", kind="ImportError", detail="no such module")

        def renew(self) -> None:
            renewed.append(1)

    monkeypatch.setattr(building, "open_pool", lambda *_, **__: Failing())
    monkeypatch.setattr(building, "compilers", lambda: 1)
    report = ImplementationReport("broken", "tests:broken", declared=declared(1))
    chosen = [Module(str(seed), {}, AttentionProblem(seed=seed)) for seed in range(3)]
    Builder(1).build(Address("tests:broken", None, "cpu"), chosen, report)
    assert len(renewed) == 3


def test_a_device_that_is_lost_ends_the_builds_of_all_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    class Lost(Pool):
        def run(self, request: object, deadlines: Deadlines) -> Outcome:
            del request, deadlines
            asked.append(1)
            raise DeviceLostError

    monkeypatch.setattr(building, "open_pool", lambda *_, **__: Lost())
    monkeypatch.setattr(building, "compilers", lambda: 2)
    report = ImplementationReport("broken", "tests:broken", declared=declared(1))
    chosen = [Module(str(seed), {}, AttentionProblem(seed=seed)) for seed in range(40)]
    with pytest.raises(DeviceLostError):
        Builder(1).build(Address("tests:broken", None, "cpu"), chosen, report)
    assert len(asked) <= 2


@pytest.mark.parametrize("declares", [0.0, 5.0])
def test_a_build_that_the_end_of_a_run_ended_is_known_to_take_longer(
    declares: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(Pool):
        def run(self, request: object, deadlines: Deadlines) -> Outcome:
            del request, deadlines
            builder.close()
            message = "the pool is closed"
            raise RuntimeError(message)

        def close(self) -> None:
            pass

    monkeypatch.setattr(building, "open_pool", lambda *_, **__: Ended())
    builder = Builder(2)
    facts = {"build_minutes": declares, "build_compilers": 4}
    report = ImplementationReport("slow", "t", declared=facts)
    chosen = [Module("a", {}, AttentionProblem(), "fa2 a")]
    with pytest.raises(CancelledError):
        builder.build(Address("tests:slow", None, "cpu"), chosen, report)
    assert [*builder.minutes] == ([] if declares else ["fa2 a"])


def test_implementations_share_the_processes_that_build_and_the_last_ends_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Pool] = []

    def open_pool(*_: object, **__: object) -> Pool:
        opened.append(Pool())
        return opened[-1]

    monkeypatch.setattr(building, "open_pool", open_pool)
    monkeypatch.setattr(building, "compilers", lambda: 2)
    builder = Builder(9)
    chosen = [Module(str(seed), {}, AttentionProblem(seed=seed)) for seed in range(5)]
    both = threading.Barrier(9)

    def build(number: int) -> None:
        both.wait()
        report = ImplementationReport(f"quick-{number}", "t", declared=declared(1))
        builder.build(Address(f"tests:quick{number}", None, "cpu"), chosen, report)

    with ThreadPoolExecutor(9) as threads:
        list(threads.map(build, range(9)))
    assert all(each.closed for each in opened)
    # As many as build at a time; one more where all builds that had begun had ended for a moment.
    assert len(opened) < 9


def test_a_process_that_no_build_needs_any_more_ends_while_others_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gate had two dozen of them, which held 60 GB of the GPU until the last build had ended."""
    both, ended = threading.Event(), threading.Event()
    opened: list[Pool] = []

    class Slow(Pool):
        def run(self, request: object, deadlines: Deadlines) -> Outcome:
            assert isinstance(request, dict)
            waits_for = ended if request["problem"]["seed"] else both
            assert waits_for.wait(20)
            return super().run(request, deadlines)

        def close(self) -> None:
            super().close()
            ended.set()

    def open_pool(*_: object, **__: object) -> Pool:
        opened.append(Slow())
        if len(opened) > 1:
            both.set()
        return opened[-1]

    monkeypatch.setattr(building, "open_pool", open_pool)
    monkeypatch.setattr(building, "compilers", lambda: 4)
    builder = Builder(2)

    def build(seed: int) -> None:
        report = ImplementationReport(f"slow-{seed}", "t", declared=declared(1))
        chosen = [Module(str(seed), {}, AttentionProblem(seed=seed))]
        builder.build(Address(f"tests:slow{seed}", None, "cpu"), chosen, report)

    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(build, seed) for seed in range(2)]:
            each.result(30)
    assert all(each.closed for each in opened)


def test_a_device_that_is_lost_elsewhere_ends_what_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compilers would go on for minutes, for laws that nothing runs any more."""
    building_now, ended = threading.Event(), list[bool]()

    class Waiting(Pool):
        def __init__(self) -> None:
            self.end = threading.Event()

        def run(self, request: object, deadlines: Deadlines) -> Outcome:
            del request, deadlines
            building_now.set()
            ended.append(self.end.wait(20))
            message = "the worker pool is closed"
            raise RuntimeError(message)

        def close(self) -> None:
            self.end.set()

    def prepare(setting: Setting, report: ImplementationReport, *_: object, **__: object) -> None:
        if report.name == "m:takes_the_device":
            building_now.wait(20)
            message = "cuda did not come back"
            raise DeviceLostError(message)
        report.declared = declared(1)
        chosen = [Module("one", {}, AttentionProblem())]
        setting.builder.build(Address("m:builds", None, "cpu"), chosen, report)

    monkeypatch.setattr(building, "open_pool", lambda *_, **__: Waiting())
    monkeypatch.setattr("kernelproof.properties.search.engine.prepare", prepare)
    names = ["m:builds", "m:takes_the_device"]
    assert Run(Plan(names, PROFILES["quick"], jobs=2)).execute().lost == "cuda did not come back"
    assert ended == [True]
