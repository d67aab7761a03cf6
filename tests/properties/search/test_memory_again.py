"""What found no memory on a CPU is judged again: an earlier problem may have filled the process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.findings.ledger import load_ledger
from kernelproof.properties.findings.report import LawReport
from kernelproof.properties.isolation.outcome import KILLED_FOR_MEMORY, Outcome
from kernelproof.properties.search import replays
from kernelproof.properties.search.case_runner import CaseRunner
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.memory_deaths import OF_THE_MACHINE
from kernelproof.reference import AttentionProblem


@pytest.fixture
def runner() -> Any:  # noqa: ANN401  of parts only
    """One whose worker judges that all is right."""
    made: Any = object.__new__(CaseRunner)
    address = SimpleNamespace(device="cpu", case=lambda *_: {})
    made.candidate = SimpleNamespace(address=address, deadlines_of=lambda *_: None)
    made.law = SimpleNamespace(name="parity")
    made.warm_up = lambda: None
    made._worker = SimpleNamespace(run=lambda *_: Outcome("done", {"status": "PASS"}))
    return made


@pytest.mark.parametrize(
    ("kind", "device", "status"),
    [
        ("memory", "cpu", "PASS"),
        ("out of memory", "cpu", "PASS"),
        ("nan", "cpu", "first"),
        ("memory", "cuda", "first"),
    ],
)
def test_a_fresh_process_decides(
    runner: Any,  # noqa: ANN401
    kind: str,
    device: str,
    status: str,
) -> None:
    runner.candidate.address.device = device
    first = Outcome("done", {"status": "first", "kind": kind})
    result = runner._with_memory(AttentionProblem(), first).result
    assert result is not None
    assert result["status"] == status


ABORT = "terminate called after throwing an instance of 'std::bad_alloc'"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("first", "again"),
    [
        (Outcome("crash", kind=KILLED_FOR_MEMORY, starved=True, stage="run"), True),
        (Outcome("crash", kind="SIGABRT", stderr=ABORT, stage="run"), True),
        (Outcome("error", kind="start", starved=True), True),
        (Outcome("error", kind="start", detail="Traceback\nMemoryError"), True),
        (Outcome("crash", kind="SIGABRT", stderr="an assertion", stage="run"), False),
        (Outcome("crash", kind="SIGKILL", stage="run"), False),
        (Outcome("error", kind="start", detail="Traceback\nOSError"), False),
    ],
    ids=str,
)
def test_a_process_that_memory_ended_is_asked_again(
    runner: Any,  # noqa: ANN401
    device: str,
    first: Outcome,
    *,
    again: bool,
) -> None:
    runner.candidate.address.device = device
    assert (runner._with_memory(AttentionProblem(), first) is first) is not again


def test_a_case_of_the_ledger_that_found_no_room_is_not_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = next(each for each in load_ledger().entries if each.case)
    no_room = Verdict("UNSUPPORTED", "memory", "too large")
    monkeypatch.setattr(replays, "warm_up", lambda *_: None)
    monkeypatch.setattr(replays, "judge_known", lambda *_: no_room)
    candidate: Any = SimpleNamespace(name="any")
    counts, finding = replays.replay(entry, cast("Any", None), candidate)
    assert finding is None
    assert (counts.of_ledger, counts.unjudged) == (1, 1)


FULL = Refusal("the machine is full", "memory", OF_THE_MACHINE)


@pytest.mark.parametrize(
    ("device", "message", "later"),
    [("cuda", "no room", True), ("cpu", FULL, True), ("cpu", "too large", False)],
)
def test_what_a_limit_refuses_is_not_tried_again_at_the_end(
    runner: Any,  # noqa: ANN401
    device: str,
    message: str,
    *,
    later: bool,
) -> None:
    runner.candidate.address.device = device
    runner.report = LawReport("parity")
    runner._counted(AttentionProblem(), Verdict("UNSUPPORTED", "memory", message))
    assert len(runner.report.without_room) == 1
    assert runner.report.too_large == (0 if later else 1)
