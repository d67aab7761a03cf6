"""What found no memory on a CPU is judged again: an earlier problem may have filled the process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.findings.ledger import load_ledger
from kernelproof.properties.findings.report import LawReport, ProblemVerdict
from kernelproof.properties.isolation.memory_use import MemoryUse
from kernelproof.properties.isolation.outcome import KILLED_FOR_MEMORY, Outcome
from kernelproof.properties.search import replays
from kernelproof.properties.search.case_runner import CaseRunner
from kernelproof.properties.search.confirmation import Confirmation
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.properties.worker.memory_deaths import OF_THE_MACHINE
from kernelproof.properties.worker.requests import HarnessError
from kernelproof.reference import AttentionProblem


@pytest.fixture
def runner() -> Any:  # noqa: ANN401  of parts only
    """One whose worker judges that all is right."""
    made: Any = object.__new__(CaseRunner)
    address = SimpleNamespace(device="cpu", tool="", case=lambda *_: {})
    deadlines = SimpleNamespace(run=5.0)
    made.candidate = SimpleNamespace(
        address=address, deadlines_of=lambda *_, **__: deadlines, named=set()
    )
    made.law = SimpleNamespace(name="parity")
    made.warm_up = lambda: None
    passes = Outcome("done", {"status": "PASS"})
    made._worker = SimpleNamespace(run=lambda *_: passes, shares_gpu=False)
    return made


NONE: dict[str, Any] = {"status": "UNSUPPORTED", "kind": "memory"}
TOO_MUCH: dict[str, Any] = {"status": "CRASH", "kind": "out of memory"}


@pytest.mark.parametrize(
    ("first", "device", "status"),
    [
        (NONE, "cpu", "PASS"),
        (NONE, "cuda", "UNSUPPORTED"),
        (TOO_MUCH, "cpu", "CRASH"),
        ({"status": "FAIL", "kind": "nan"}, "cpu", "FAIL"),
        ({"status": "UNSUPPORTED", "kind": "device"}, "cpu", "UNSUPPORTED"),
    ],
)
def test_a_fresh_process_decides(
    runner: Any,  # noqa: ANN401
    first: dict[str, Any],
    device: str,
    status: str,
) -> None:
    runner.candidate.address.device = device
    _, verdict = runner._with_memory(AttentionProblem(), Outcome("done", first))
    assert verdict.status == status


ABORT = "terminate called after throwing an instance of 'std::bad_alloc'"
LITTLE = MemoryUse(limit=1 << 30, room=100 << 20, held=200 << 20, peak=250 << 20)
MUCH = MemoryUse(limit=1 << 30, room=900 << 20, held=200 << 20, peak=950 << 20)


def ended(use: MemoryUse | None, **more: Any) -> Outcome:  # noqa: ANN401  fields
    return Outcome("crash", stage="run", memory=use, **more)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("first", "again"),
    [
        (ended(LITTLE, kind=KILLED_FOR_MEMORY, starved=True), True),
        (ended(MUCH, kind=KILLED_FOR_MEMORY, starved=True), False),
        (ended(LITTLE, kind="SIGABRT", stderr=ABORT), True),
        (ended(MUCH, kind="SIGABRT", stderr=ABORT), False),
        (ended(None, kind="SIGABRT", stderr=ABORT), False),  # no limit was in force
        (Outcome("error", kind="start", starved=True), True),
        (Outcome("error", kind="start", detail="Traceback\nMemoryError"), True),
        (ended(LITTLE, kind="SIGABRT", stderr="an assertion"), False),
        (ended(LITTLE, kind="SIGKILL"), False),
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
    outcome, verdict = runner._with_memory(AttentionProblem(), first)
    assert (outcome is first) is not again
    assert verdict.bad is not again


def test_an_error_of_the_suite_is_not_asked_again(runner: Any) -> None:  # noqa: ANN401
    with pytest.raises(HarnessError):
        runner._with_memory(
            AttentionProblem(), Outcome("error", kind="start", detail="Traceback\nOSError")
        )


class Passes(CaseRunner):
    """One whose worker, which never dies, judges that all is right."""

    def __init__(self, parts: Any) -> None:  # noqa: ANN401
        vars(self).update(vars(parts))
        self.report = LawReport("parity")
        self._confirms = self.always_fresh = self.died = False
        self.attempts = []
        parts.candidate.explanation = lambda *_: None
        parts.candidate.deadlines = SimpleNamespace(record=lambda *_: None)
        self.verdicts, self.starting_seconds = {}, 0.0
        self._judged = lambda _: None

    def probe_device(self) -> None:
        """Take it that the device is there."""

    def renew(self) -> None:
        """Go on in the same."""


@pytest.mark.parametrize(
    "first",
    [
        Outcome("done", TOO_MUCH),
        ended(MUCH, kind="SIGABRT", stderr=ABORT),
        ended(MUCH, kind=KILLED_FOR_MEMORY, starved=True),
    ],
    ids=str,
)
def test_what_asked_for_too_much_once_and_passes_then_is_flaky(
    runner: Any,  # noqa: ANN401
    first: Outcome,
) -> None:
    problem, asked = AttentionProblem(), Passes(runner)
    verdict = asked._learn(problem, first)
    assert verdict.bad
    asked.verdicts[problem.id] = verdict
    confirmation = Confirmation(asked)
    assert confirmation.confirm(problem) is None
    assert confirmation.flaky is not None
    assert confirmation.flaky.verdict.status == "FLAKY"
    assert confirmation.flaky.verdict.message.startswith("CRASH at first, PASS when confirmed: ")
    assert asked.report.flaky == 1


class Differs(Passes):
    """One whose worker gives another verdict each time."""

    def judge(self, _: Any, *, again: bool = False) -> Verdict:  # type: ignore[override]  # noqa: ANN401
        """Fail first, then crash."""
        return Verdict("CRASH", "SIGSEGV") if again else Verdict("FAIL", "numeric")


def test_what_fails_and_then_crashes_is_no_chance(runner: Any) -> None:  # noqa: ANN401
    asked = Differs(runner)
    cast("Any", asked.candidate).deadlines_of = lambda *_: SimpleNamespace(run=1.0)
    failure = Confirmation(asked).confirm(AttentionProblem())
    assert failure is not None
    assert (failure.verdict.status, asked.report.flaky) == ("CRASH", 0)


def test_a_case_of_the_ledger_that_found_no_room_is_not_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = next(each for each in load_ledger().entries if each.case)
    no_room = Verdict("UNSUPPORTED", "memory", "too large")
    monkeypatch.setattr(replays, "warm_up", lambda *_: None)
    monkeypatch.setattr(replays, "judge_known", lambda *_: no_room)
    candidate: Any = SimpleNamespace(name="any")
    replayed = replays.replay(entry, cast("Any", None), candidate)
    assert replayed.finding is None
    assert (replayed.counts.of_ledger, replayed.counts.unjudged) == (1, 1)


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
    problem, report = AttentionProblem(), runner.report
    for _ in range(2):  # a problem counts once, however often it is asked
        runner._counted(problem, Verdict("UNSUPPORTED", "memory", message))
        assert (report.unsupported, list(report.without_room)) == (1, [problem.id])
        assert report.too_large == (set() if later else {problem.id})
        assert report.with_room_later == ([problem] if later else [])
    runner._judged = lambda _: None
    runner._counted(problem, Verdict("PASS"))
    assert (report.unsupported, report.judged) == (0, 1)
    assert not report.without_room
    assert not report.too_large


A, B, C = (AttentionProblem(query_lens=(1,), seq_lens=(each,)) for each in (5, 6, 7))


def without_room(*problems: AttentionProblem, too_large: tuple[AttentionProblem, ...]) -> LawReport:
    report = LawReport("parity", ended="room")
    for each in problems:
        report.count_without_room(each, too_large=each in too_large)
        report.problems[each.id] = ProblemVerdict(each, "UNSUPPORTED", "memory", vacuous=False)
    return report


def test_only_what_was_answered_later_had_room() -> None:
    report = without_room(A, B, C, too_large=(A,))
    later = without_room(B, too_large=(B,))
    later.ended, later.judged = "", 0
    report.include_later(later)
    assert list(report.without_room) == [A.id, C.id, B.id]
    assert (report.unsupported, report.too_large) == (3, {A.id, B.id})
    assert report.ended == "room"

    answered = LawReport("parity", judged=1)
    answered.problems[C.id] = ProblemVerdict(C, "PASS", "", vacuous=False)
    report.include_later(answered)
    assert list(report.without_room) == [A.id, B.id]
    assert (report.unsupported, report.judged, report.ended) == (2, 1, "room")
    assert report.problems[C.id].status == "PASS"


def test_a_search_takes_over_what_had_no_room_in_the_first() -> None:
    report = without_room(A, too_large=())
    report.problems[B.id] = ProblemVerdict(B, "PASS", "", vacuous=False)
    report.include(without_room(A, B, C, too_large=(A,)))
    assert list(report.without_room) == [A.id, C.id]
    assert (report.unsupported, report.too_large) == (2, {A.id})


def test_earlier_calls_that_filled_the_process_are_a_crash(runner: Any) -> None:  # noqa: ANN401
    full = MemoryUse(limit=1 << 30, room=100 << 20, left=600 << 20)
    first = ended(full, kind="SIGABRT", stderr=ABORT)
    _, verdict = runner._with_memory(AttentionProblem(), first)
    assert (verdict.status, verdict.kind) == ("CRASH", "out of memory")
    assert verdict.message.startswith("earlier calls had left 600 MiB in their process, of 1,024 ")
    first = Outcome("done", NONE, memory=full)
    assert runner._with_memory(AttentionProblem(), first)[1].bad


@pytest.mark.parametrize(
    "use",
    [
        None,
        MemoryUse(limit=1 << 30, left=500 << 20),  # malloc keeps some, and a call may need some
        MemoryUse(limit=1 << 30, left=700 << 20, need=30 << 20),
        MemoryUse(left=600 << 20),  # without a limit, on a GPU
    ],
    ids=str,
)
def test_what_earlier_calls_may_leave_is_no_crash(
    runner: Any,  # noqa: ANN401
    use: MemoryUse | None,
) -> None:
    first = Outcome("done", NONE, memory=use)
    assert runner._with_memory(AttentionProblem(), first)[1].status == "PASS"


def test_earlier_calls_of_others_are_nobodys_crash(runner: Any) -> None:  # noqa: ANN401
    full = MemoryUse(limit=1 << 30, left=600 << 20)
    first = Outcome("done", NONE, memory=full, shared=True)
    assert runner._with_memory(AttentionProblem(), first)[1].status == "PASS"
    assert runner.candidate.alone


def test_what_would_not_fit_into_a_fresh_process_either_is_no_crash(
    runner: Any,  # noqa: ANN401
) -> None:
    full = MemoryUse(limit=1 << 30, left=600 << 20)
    runner._worker = SimpleNamespace(run=lambda *_: Outcome("done", NONE), shares_gpu=False)
    first = Outcome("done", NONE, memory=full)
    assert runner._with_memory(AttentionProblem(), first)[1].status == "UNSUPPORTED"
