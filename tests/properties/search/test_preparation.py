"""What is told of an implementation that refuses everything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.registry import resolve_name
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.findings.report import ImplementationReport
from kernelproof.properties.isolation.workers import Deadlines, Outcome, Worker
from kernelproof.properties.search.building import Builder
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.search.preparation import Setting, prepare, survey
from kernelproof.properties.space.axes import all_axes, narrow
from kernelproof.properties.space.profiles import PROFILES, Cost
from kernelproof.properties.worker.requests import Address
from kernelproof.properties.worker.tasks import handle


class Here(Worker):
    """Answers in this process, through JSON."""

    def __init__(self) -> None:
        pass

    def run(self, payload: Mapping[str, object], deadlines: Deadlines | None = None) -> Outcome:
        del deadlines
        return Outcome("done", json.loads(json.dumps(handle(payload, self))))

    def stage(self, name: str) -> nullcontext[None]:
        del name
        return nullcontext()


@pytest.mark.parametrize(
    ("name", "tile", "split"),
    [
        ("triton-attention", 64, 0),
        ("triton-attention-split-kv", 64, 64),
        ("flashinfer-decode", 0, 128),
        ("flashinfer-prefill-fa3", 192, 0),
        ("torch-sdpa-paged", 0, 0),
    ],
)
def test_the_parent_learns_tile_and_split(name: str, tile: int, split: int) -> None:
    report = ImplementationReport(name, resolve_name(name))
    survey(Here(), Address(report.reference, None, "cpu"), PROFILES["quick"].max_work, report)
    assert (report.declared["tile"], report.declared["split"]) == (tile, split)


@pytest.mark.parametrize(
    ("cost", "edges"),
    [(Cost("slow", 0.2, 25_000), (64, 128, 192, 256)), (Cost("medium", 0.5, 25_000), None)],
)
def test_a_slow_implementation_alone_gets_long_problems(
    cost: Cost, edges: tuple[int, ...] | None
) -> None:
    name = "torch-sdpa-paged"
    plan = Plan([name], PROFILES["quick"], costs={name: cost})
    candidate = prepare(
        Setting(plan, Target.here("cpu"), Builder(1)),
        ImplementationReport(name, resolve_name(name)),
        lambda: nullcontext(Here()),
    )
    assert candidate is not None
    assert candidate.axes.edges == ()
    assert (candidate.long and candidate.long.edges) == edges


def test_a_first_call_that_takes_too_long_is_timed_again() -> None:
    class Busy(Here):
        calls = 0

        def run(self, payload: Mapping[str, object], deadlines: Deadlines | None = None) -> Outcome:
            self.calls += payload["task"] == "cost"
            if payload["task"] == "cost" and self.calls == 1:
                return Outcome("hang", stage="run")
            return super().run(payload, deadlines)

    name, busy = "torch-sdpa-paged", Busy()
    report = ImplementationReport(name, resolve_name(name))
    setting = Setting(Plan([name], PROFILES["quick"]), Target.here("cpu"), Builder(1))
    candidate = prepare(setting, report, lambda: nullcontext(busy))
    assert report.call_seconds > 0
    assert candidate is not None
    assert candidate.warm_up is not None


@pytest.mark.parametrize("name", ["flashinfer-prefill-fa2", "flashinfer-xqa-decode"])
def test_what_needs_a_gpu_is_not_said_to_lack_a_feature(name: str) -> None:
    """The last problems that are asked about are of latent attention, which they do not name."""
    assert "mla" not in find_implementation(name).features
    report = ImplementationReport(name, resolve_name(name))
    address = Address(report.reference, None, "cpu")
    assert survey(Here(), address, PROFILES["quick"].max_work, report) is None
    assert report.refusal is not None
    assert report.refusal.code in ("package", "device")
    assert report.to_json()["unsupported_reason"] == report.refusal
    assert report.to_json()["unsupported_code"] == report.refusal.code


class Answers(Here):
    """A worker whose process says something of its own when it is asked for a survey."""

    def __init__(self, answer: Outcome) -> None:
        self.said = answer

    def run(self, payload: Mapping[str, object], deadlines: Deadlines | None = None) -> Outcome:
        return self.said if payload["task"] == "survey" else super().run(payload, deadlines)


def test_everything_counts_as_claimed_where_supports_ends_its_process() -> None:
    report = ImplementationReport("torch-sdpa-paged", resolve_name("torch-sdpa-paged"))
    address = Address(report.reference, None, "cpu")
    axes = survey(Answers(Outcome("crash", kind="SIGABRT")), address, 200_000, report)
    assert axes is not None
    assert axes.refused == {}
    assert axes.values["dtype"] == all_axes("paged_attention")["dtype"]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"axes": {"operation": "paged_attention"}, "refusal": None, "questions": 1},
        {"axes": 3, "refusal": None, "questions": 1},
        {"axes": None, "refusal": {"reason": "no", "code": "whim", "about": ""}, "questions": 1},
    ],
)
def test_a_survey_of_another_form_is_an_error_of_the_implementation(answer: dict[str, Any]) -> None:
    report = ImplementationReport("torch-sdpa-paged", resolve_name("torch-sdpa-paged"))
    address = Address(report.reference, None, "cpu")
    assert survey(Answers(Outcome("done", result=answer)), address, 200_000, report) is None
    assert report.error.startswith("survey: its process gave no answer")


def test_what_a_process_says_of_its_axes_is_what_narrowing_gives_here() -> None:
    name = "torch-sdpa-ragged"
    implementation, here = find_implementation(name), Target.here("cpu")
    report = ImplementationReport(name, resolve_name(name))
    found = survey(Here(), Address(report.reference, None, "cpu"), 200_000, report)
    assert found == narrow(
        "ragged_attention",
        lambda problems: [implementation.refusal(each, here) for each in problems],
        200_000,
    )
    assert found is not None
    codes = {each.code for each in found.refused.values() if isinstance(each, Refusal)}
    assert codes == {"feature", "supports"}


@pytest.mark.parametrize(
    "claims",
    [
        {"values": {"dtype": ["float128"]}},
        {"values": {"no_such_axis": [1]}},
        {"simplest": {"dtype": "float128"}},
    ],
)
def test_a_process_claims_nothing_that_it_was_not_asked_about(claims: dict[str, Any]) -> None:
    report = ImplementationReport("torch-sdpa-paged", resolve_name("torch-sdpa-paged"))
    address = Address(report.reference, None, "cpu")
    honest = survey(Here(), address, 200_000, report)
    assert honest is not None
    axes = {**honest.to_json(), **claims}
    axes["values"] = {**honest.values, **axes["values"]}
    said = Outcome("done", result={"axes": axes, "refusal": None, "questions": 1})
    assert survey(Answers(said), address, 200_000, report) is None
    assert report.error.startswith("survey: its process gave no answer")


def test_a_process_says_something_of_each_axis() -> None:
    report = ImplementationReport("torch-sdpa-paged", resolve_name("torch-sdpa-paged"))
    address = Address(report.reference, None, "cpu")
    honest = survey(Here(), address, 200_000, report)
    assert honest is not None
    axes = {**honest.to_json(), "values": {"dtype": honest.values["dtype"]}}
    said = Outcome("done", result={"axes": axes, "refusal": None, "questions": 1})
    assert survey(Answers(said), address, 200_000, report) is None
    assert "nothing of " in report.error


def test_a_process_cannot_ask_for_larger_problems() -> None:
    report = ImplementationReport("torch-sdpa-paged", resolve_name("torch-sdpa-paged"))
    address = Address(report.reference, None, "cpu")
    honest = survey(Here(), address, 200_000, report)
    assert honest is not None
    axes = {**honest.to_json(), "max_work": 10**12, "operation": "merge_state", "edges": [2**30]}
    said = Outcome("done", result={"axes": axes, "refusal": None, "questions": 1})
    assert survey(Answers(said), address, 200_000, report) == honest


class Turn:
    """Counts who is within, and those who were."""

    within = entered = 0

    def __enter__(self) -> None:
        self.within += 1
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        self.within -= 1


def test_only_a_survey_waits_for_its_turn() -> None:
    """What is known already is timed before surveys that have not begun."""
    turn, asked = Turn(), []

    class Notes(Here):
        def run(self, payload: Mapping[str, object], deadlines: Deadlines | None = None) -> Outcome:
            asked.append((payload["task"], turn.within))
            return super().run(payload, deadlines)

    name = "torch-sdpa-paged"
    plan, here = Plan([name], PROFILES["quick"]), Target.here("cpu")
    setting = Setting(plan, here, Builder(1), surveys=turn)
    report = ImplementationReport(name, resolve_name(name))
    assert prepare(setting, report, lambda: nullcontext(Notes())) is not None
    assert {within for task, within in asked if task == "survey"} == {1}
    assert {within for task, within in asked if task == "cost"} == {0}
    assert (turn.within, turn.entered) == (0, 1)
