"""What is known to hang or fault does so in a process that shares its GPU with nobody."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kernelproof.fixtures import LEDGER
from kernelproof.impl import Target
from kernelproof.impl.targets.backends import PROVIDERS
from kernelproof.properties.findings.ledger import Entry, load_ledger
from kernelproof.properties.isolation.mps import NOT_SHARED
from kernelproof.properties.isolation.outcome import Outcome
from kernelproof.properties.isolation.stages import Deadlines
from kernelproof.properties.laws import find_law
from kernelproof.properties.search import case_runner, engine
from kernelproof.properties.search.candidate import Candidate
from kernelproof.properties.search.case_runner import CaseRunner
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan, of_operation, problems_of, seconds_of
from kernelproof.properties.space.axes import Axes
from kernelproof.properties.space.profiles import PROFILES, Cost
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.requests import Address
from kernelproof.reference import MergeProblem


def test_the_shipped_ledger_says_what_hangs() -> None:
    ledger = load_ledger(str(LEDGER))
    here = Target(90, flashinfer="0.7.2.post1", cuda="13.0")
    assert ledger.is_deadly("flashinfer-decode", "host_runs_ahead", here)
    assert not ledger.is_deadly("flashinfer-decode", "parity", here)
    assert not ledger.is_deadly("flashinfer-merge-states", "parity", here)  # it only raises
    # Some problems fault under any law: not for these is every law judged apart.
    assert not ledger.is_deadly("flashinfer-prefill-fa2-unsplit", "parity", here)


@pytest.mark.parametrize(
    ("deadly", "alone", "shares", "renewed"),
    [
        (True, False, True, 1),
        (False, False, True, 0),
        (False, True, True, 1),
        (True, False, False, 0),
    ],
)
def test_a_deadly_law_has_its_own_process(
    deadly: bool,
    alone: bool,
    shares: bool,
    renewed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(case_runner, "warm_up", lambda *_: None)
    times: list[bool] = []
    worker: Any = SimpleNamespace(
        shares_gpu=shares,
        shared_with_others=lambda _: shares,
        renew=lambda *, keep: times.append(keep),
    )
    candidate: Any = SimpleNamespace(
        alone=alone, is_deadly=lambda _: deadly, address=SimpleNamespace(reference="")
    )
    CaseRunner(worker, candidate, find_law("parity")).warm_up()
    assert times == [True] * renewed


@pytest.mark.parametrize("fails_again", [True, False])
def test_a_fault_is_judged_again_whatever_is_known_of_it(
    fails_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case_runner, "warm_up", lambda *_: None)
    monkeypatch.setattr(case_runner, "probe_device", lambda *_: None)
    first = Outcome("crash", kind="SIGKILL", stage="run", shared=True, faulted=True)
    passed = Outcome("done", result=Verdict("PASS").to_json())
    again = Outcome("crash", kind="SIGKILL", stage="run") if fails_again else passed
    answers = iter([first, again])
    worker: Any = SimpleNamespace(
        run=lambda *_: next(answers), shared_with_others=lambda _: False, shares_gpu=False
    )
    candidate = Candidate("mine", Address("mine:mine", None, "cuda"), Axes("merge_state", {}, 1))
    entry = Entry("known", "mine", "CRASH", {}, "It ends its process.", kinds=("SIGKILL",))
    monkeypatch.setattr(candidate, "explanation", lambda *_: entry)
    runner = CaseRunner(worker, candidate, find_law("parity"))
    verdict = runner.judge(MergeProblem())
    assert verdict.status == ("KNOWN" if fails_again else "PASS")
    # Whoever has ended the work of all has processes of its own from now on.
    assert candidate.alone == fails_again


@pytest.mark.parametrize(("shares", "seconds"), [(False, 3.0), (True, 9.0)])
def test_a_call_beside_others_on_a_gpu_may_take_longer(shares: bool, seconds: float) -> None:
    given: list[float] = []

    def run(_: object, deadlines: Deadlines) -> Outcome:
        given.append(deadlines.run)
        return Outcome("done", result=Verdict("PASS").to_json())

    worker: Any = SimpleNamespace(run=run, shares_gpu=shares)
    candidate = Candidate("mine", Address("mine:mine", None, "cuda"), Axes("merge_state", {}, 1))
    CaseRunner(worker, candidate, find_law("parity")).judge(MergeProblem())
    assert given == [seconds]


def test_what_was_to_share_a_gpu_and_could_not_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "is_of_use", lambda *_: True)
    plan = Plan(["triton-merge-state"], PROFILES["quick"], laws=("parity",), share=0.1, mps=True)
    run = Run(plan)
    run.ending.stop()
    assert run.execute().target["mps"] == NOT_SHARED


def test_a_gate_on_a_gpu_ends_slow_laws_sooner() -> None:
    law, on_cpu = find_law("parity"), Plan([], PROFILES["gate"], share=0.25)
    seconds = [
        seconds_of(plan, law, [law], 12)
        for plan in (
            on_cpu,
            replace(on_cpu, device="cuda"),
            replace(on_cpu, device="cuda", share=1.0),
        )
    ]
    assert seconds == pytest.approx([150.0, 60.0, 600.0])


@pytest.mark.parametrize(
    ("device", "share", "backend", "problems"),
    [
        ("cuda", 0.25, "flashinfer-trace", 22),
        ("cuda", 0.25, "fa2", 90),
        ("cpu", 0.25, "flashinfer-trace", 90),
        ("cuda", 1.0, "flashinfer-trace", 360),
    ],
)
def test_a_gate_on_a_gpu_has_fewer_problems_for_published_references(
    device: str, share: float, backend: str, problems: int
) -> None:
    assert backend in PROVIDERS
    plan = Plan([], PROFILES["gate"], device=device, share=share)
    own = of_operation(plan, "paged_attention", backend)
    assert problems_of(own, find_law("parity"), Cost("fast", 1.0, 1)) == problems
    assert problems_of(own, find_law("far_pages"), Cost("fast", 1.0, 1)) >= 3
