"""The long run: how many launches there are, what they are compared with, and what is told."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from kernelproof.impl import Implementation, Target, implementation
from kernelproof.properties.findings.cases import CaseWriter
from kernelproof.properties.findings.ledger import Ledger
from kernelproof.properties.laws import find_law, soak
from kernelproof.properties.laws.general import kept
from kernelproof.properties.laws.soak import share_scratch
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.space.profiles import PROFILES, Profile
from kernelproof.properties.verdicts.comparison import Result, same_bits
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import AttentionProblem, MergeProblem, Problem, oracle
from kernelproof.reference.tensors.inputs import MergeInputs, PagedAttentionInputs

PROBLEM = MergeProblem(num_tokens=3, head_dim=4)
SUBJECTS = Path(__file__).parents[1] / "engine_subjects.py"


class _Anywhere:
    def stage(self, name: str) -> AbstractContextManager[None]:
        del name
        return nullcontext()


A_LAUNCH = soak.SECONDS_A_LAUNCH


@pytest.fixture(autouse=True)
def _launches_are_not_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "SECONDS_A_LAUNCH", 60.0)


def soaked(
    subject: Implementation, launches: int, problem: Problem = PROBLEM, device: str = "cpu"
) -> Verdict:
    try:
        found = Subject(subject, Target.here(device), _Anywhere(), launches=launches)
        return find_law("soak").check(found, problem)
    except Stop as stop:
        return stop.verdict


def merging(change: Callable[[int, torch.Tensor], None], **declared: Any) -> Implementation:  # noqa: ANN401
    calls = itertools.count()

    @implementation("merge_state", name="changing", **declared)
    def merge(inputs: MergeInputs) -> tuple[torch.Tensor, torch.Tensor]:
        bounded = oracle.bounded_merge(inputs, merge.arithmetic)
        out = bounded.expected.out.to(inputs.out_dtype)
        change(next(calls), out)
        return out, bounded.expected.lse.to(torch.float32)

    return merge


def test_launches_that_differ_are_counted_and_the_first_is_shown() -> None:
    def change(call: int, out: torch.Tensor) -> None:
        if call % 10 == 9:
            out[2, 0, 1] += 1.0

    said = soaked(merging(change), 35)
    assert (said.status, said.kind) == ("FAIL", "nondeterministic")
    assert said.message.startswith(
        "3 of 35 launches differ from the first; launch 9: out[2, 0, 1] is "
    )
    assert soaked(merging(change), 8).status == "PASS"


def test_the_first_launch_is_compared_with_the_oracle() -> None:
    def change(call: int, out: torch.Tensor) -> None:
        del call
        out.add_(1.0)

    said = soaked(merging(change), 5)
    assert (said.status, said.kind) == ("FAIL", "numeric")


def test_noise_within_the_bound_is_a_fault_unless_it_is_declared() -> None:
    def change(call: int, out: torch.Tensor) -> None:
        if call % 2:
            out.copy_(torch.nextafter(out, torch.zeros(())))

    assert soaked(merging(change), 6).kind == "nondeterministic"
    assert soaked(merging(change, features=("nondeterministic",)), 6).status == "PASS"

    def worse(call: int, out: torch.Tensor) -> None:
        if call == 4:
            out.mul_(1.01)

    said = soaked(merging(worse, features=("nondeterministic",)), 6)
    assert said.kind == "nondeterministic"
    assert said.message.startswith("1 of 6 launches differ from the first; launch 4: ")


def test_a_copy_is_waited_for_before_it_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made on the launch's stream, after the launch has ended, and read on another."""
    events: list[str] = []

    def copied(result: Result) -> Result:
        events.append("copy")
        return kept(result)

    def compared(first: torch.Tensor, second: torch.Tensor) -> bool:
        events.append("read")
        return same_bits(first, second)

    monkeypatch.setattr(soak, "kept", copied)
    monkeypatch.setattr(soak, "same_bits", compared)
    monkeypatch.setattr(Subject, "wait", lambda *_: events.append("wait"))
    assert soaked(merging(lambda *_: None), 1).status == "PASS"
    assert events[-4:] == ["copy", "wait", "read", "read"]


def test_a_slow_implementation_is_launched_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    clock = SimpleNamespace(perf_counter=lambda: 0.05 * len(calls))
    monkeypatch.setattr(soak, "time", clock)
    monkeypatch.setattr(soak, "SECONDS_A_LAUNCH", A_LAUNCH)

    def change(call: int, out: torch.Tensor) -> None:
        del out
        calls.append(call)

    assert soaked(merging(change), 20).status == "PASS"
    assert 5 <= len(calls) < 15


def test_a_finding_is_replayed_with_as_many_launches(tmp_path: Path) -> None:
    profile = Profile(
        "tiny", problems=30, max_work=20_000, shrink_seconds=2.0, seconds=60.0, soak=120
    )
    name = f"{SUBJECTS}:tires"
    report = Run(Plan([name], profile, laws=["soak"], jobs=1)).execute()
    (tires,) = report.implementations
    (finding,) = tires.findings
    assert finding.verdict.kind == "nondeterministic"
    assert re.match(r"\d+ of 120 launches differ", finding.verdict.message)
    CaseWriter(tmp_path, None, Ledger()).write(finding, tires, report)
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text(encoding="utf-8"))["soak"] == 120


def test_profiles_soak_longer_the_harder_they_look() -> None:
    launches = [PROFILES[name].soak for name in ("quick", "gate", "nightly")]
    assert launches == sorted(launches)
    assert launches[-1] >= 1000


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: streams are CUDA's")


BUSY_CYCLES = 5_000_000
"""Longer than the host takes from one launch to the next, so that launches meet."""


class _Scratch:
    """A session whose workspace is everybody's: runs on several streams meet in it."""

    workspace: ClassVar[dict[tuple[int, ...], torch.Tensor]] = {}

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Plan nothing."""

    def run(self, inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum in the workspace, with time for another stream in between."""
        result = oracle.attention(inputs)
        scratch = self.workspace.setdefault(
            tuple(result.out.shape), torch.zeros_like(result.out, dtype=torch.float32)
        )
        scratch.zero_()
        torch.cuda._sleep(BUSY_CYCLES)
        scratch.add_(result.out)
        torch.cuda._sleep(BUSY_CYCLES)
        return scratch.to(inputs.out_dtype), result.lse.to(torch.float32)


@implementation("paged_attention", name="scratch", session=_Scratch)
def scratch(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run in a session of its own."""
    return _Scratch().run(inputs)


@cuda
def test_sessions_on_several_streams_must_not_share_a_workspace() -> None:
    problem = AttentionProblem(query_lens=(2,), seq_lens=(5,), page_size=4)
    said = soaked(scratch, 200, problem, "cuda")
    assert said.kind == "nondeterministic", said
    # Without sessions, a launch on another stream waits for the one before.
    assert soaked(scratch, 200, AttentionProblem(seq_lens=(5,), seed=1), "cuda").status == "PASS"


class _Own:
    """A session that shares nothing."""

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Plan nothing."""

    def run(self, inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend."""
        result = oracle.attention(inputs)
        return result.out.to(inputs.out_dtype), result.lse.to(torch.float32)


@implementation("paged_attention", name="own", session=_Own)
def own(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Run in a session of its own."""
    return _Own().run(inputs)


@cuda
@pytest.mark.parametrize("seed", [0, 1])  # in sessions, and without
def test_a_copy_that_is_made_late_is_read_later(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(result: Result) -> Result:
        torch.cuda._sleep(BUSY_CYCLES)
        return kept(result)

    problem = AttentionProblem(seq_lens=(9,), seed=seed)
    assert soaked(own, 40, problem, "cuda").status == "PASS"  # loading a kernel waits for others
    monkeypatch.setattr(soak, "kept", late)
    assert soaked(own, 40, problem, "cuda").status == "PASS"


class _Declared(_Scratch):
    """Returns the memory that it uses."""

    def scratch(self) -> list[torch.Tensor]:
        """Return everybody's workspace."""
        return list(self.workspace.values())


def test_sessions_that_say_that_they_share_scratch_memory_wait_for_another() -> None:
    _Scratch.workspace[(7,)] = torch.zeros(7)
    assert share_scratch([_Declared(), _Declared()])
    assert not share_scratch([_Declared(), _Scratch()])
    assert not share_scratch([_Scratch(), _Scratch()])
