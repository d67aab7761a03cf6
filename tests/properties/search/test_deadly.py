"""What is known to hang or fault does so in a process that shares its GPU with nobody."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kernelproof.fixtures import LEDGER
from kernelproof.impl import Target
from kernelproof.properties.findings.ledger import load_ledger
from kernelproof.properties.isolation.mps import NOT_SHARED
from kernelproof.properties.laws import find_law
from kernelproof.properties.search import case_runner
from kernelproof.properties.search.case_runner import CaseRunner
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.space.profiles import PROFILES


def test_the_shipped_ledger_says_what_hangs() -> None:
    ledger = load_ledger(str(LEDGER))
    here = Target(90, flashinfer="0.7.2.post1", cuda="13.0")
    assert ledger.is_deadly("flashinfer-decode", "host_runs_ahead", here)
    assert not ledger.is_deadly("flashinfer-decode", "parity", here)
    assert not ledger.is_deadly("flashinfer-merge-states", "parity", here)  # it only raises


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
    times: list[int] = []
    worker: Any = SimpleNamespace(
        shares_gpu=shares, shared_with_others=lambda _: shares, renew=lambda: times.append(1)
    )
    candidate: Any = SimpleNamespace(
        alone=alone, is_deadly=lambda _: deadly, address=SimpleNamespace(reference="")
    )
    CaseRunner(worker, candidate, find_law("parity")).warm_up()
    assert len(times) == renewed


def test_what_was_to_share_a_gpu_and_could_not_says_so() -> None:
    plan = Plan(["triton-merge-state"], PROFILES["quick"], laws=("parity",), share=0.1, mps=True)
    run = Run(plan)
    run.ending.stop()
    assert run.execute().target["mps"] == NOT_SHARED
