"""How many compilers each build of a module may start."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import pytest

from kernelproof.properties import building
from kernelproof.properties.building import MAX_JOBS, Builder
from kernelproof.properties.isolation import Deadlines, Outcome
from kernelproof.properties.modules import Module
from kernelproof.properties.quarry import Address
from kernelproof.properties.report import ImplementationReport
from kernelproof.reference import AttentionProblem


class Pool(AbstractContextManager["Pool"]):
    """Stands for a pool whose worker builds in no time."""

    def __exit__(self, *error: object) -> None:
        pass

    @contextmanager
    def lease(self) -> Iterator[Pool]:
        yield self

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


@pytest.mark.parametrize("modules", [(2,), (2, 2), (1, 8), (3, 3, 3)])
def test_builds_beside_each_other_start_no_more_compilers_than_there_are(
    modules: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
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
        report = ImplementationReport(f"slow-{number}", "t", declared={"build_minutes": 5.0})
        chosen = [Module(str(each), {}, AttentionProblem()) for each in range(modules[number])]
        builder.build(Address(f"tests:slow{number}", None, "cuda"), chosen, report)

    with ThreadPoolExecutor(len(modules)) as threads:
        list(threads.map(build, range(len(modules))))
    assert 0 < Counting.most <= 16


@pytest.mark.parametrize(
    ("modules", "implementations", "given", "expected"),
    [
        (1, 1, "", "16"),  # nobody else compiles
        (3, 1, "", "5"),
        (8, 1, "", "4"),  # four at a time
        (1, 3, "", "4"),
        (8, 3, "", "4"),
        (1, 1, "2", None),  # the user's stays
    ],
)
def test_the_machine_is_shared(
    modules: int,
    implementations: int,
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
    report = ImplementationReport("slow", "tests:slow", declared={"build_minutes": 5.0})
    chosen = [Module(str(number), {}, AttentionProblem()) for number in range(modules)]
    Builder(implementations).build(Address("tests:slow", None, "cuda"), chosen, report)
    assert opened == [expected] * modules
