"""The law of an engine's steps: what it says of faults, and that no other law finds them."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from kernelproof.impl import Implementation, Target, implementation
from kernelproof.impl.protocol import Operation
from kernelproof.impl.torch.steps import prepare_steps
from kernelproof.properties.laws import laws_of
from kernelproof.properties.laws.metadata.builders import WRITTEN
from kernelproof.properties.seeded import steps_bugs as bugs
from kernelproof.properties.strategies import problems
from kernelproof.properties.verdicts.contained import Stop
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import Problem, SlotsProblem, StepsProblem
from kernelproof.reference.problems.steps import ENGINES

DRAWN = int(os.environ.get("KERNELPROOF_TEST_PROBLEMS", "6"))
"""Problems that each fault is tried on under the laws of single batches."""
WORK = 4000
"""Most work of one of them."""
LIFE = (
    "arrive 5", "arrive 9", "run 4", "arrive 2", "pad 2", "run 0", "run 0", "draft 3", "run 0",
    "reject 2", "run 0", "run 0", "finish 0", "share 7", "run 2", "preempt 1", "run 0", "pad 1",
    "draft 2", "run 0", "reject 1", "finish 0", "arrive 4", "run 0", "run 0",
)  # fmt: skip
"""Events of every kind."""
STATE = {"pages", "slots", "computed"}
"""Parts that write an engine's tables: no other operation asks for these."""


class Stages:
    """Stages that nobody watches."""

    def stage(self, _name: str) -> nullcontext[None]:
        """Go through one."""
        return nullcontext()


def verdict(law: Any, made: Implementation, problem: Problem) -> Verdict:  # noqa: ANN401
    try:
        found: Verdict = law.check(Subject(made, Target.here("cpu"), Stages()), problem)
    except Stop as stop:
        return stop.verdict
    return found


def of_single_batches(fault: bugs.Fault, operation: Any) -> Implementation:  # noqa: ANN401
    """Make an implementation of one batch that remembers the batch before, as a builder does."""
    last: list[Any] = [None]

    @implementation(operation, name="remembers")
    def remembers(inputs: Any) -> torch.Tensor:  # noqa: ANN401
        before, last[0] = last[0], inputs
        fault(inputs, before)
        built: torch.Tensor = getattr(inputs, WRITTEN[operation])
        return built

    return remembers


def draw(operation: Operation) -> list[Any]:
    """Draw problems of single batches."""
    drawn: list[Any] = []

    def collect(problem: Problem) -> None:
        drawn.append(problem)

    run = settings(
        max_examples=DRAWN,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    hypothesis.seed(0)(run(given(problems(operation, max_work=WORK))(collect)))()
    return drawn


@pytest.fixture(scope="module")
def batches() -> dict[str, list[Any]]:
    """Draw for the operations whose laws ask for single batches."""
    rest = [replace(each, output="seq_lens", rest="kept") for each in draw("prepare_batch")]
    return {"prepare_batch": rest, "map_slots": draw("map_slots")}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_what_is_right(engine: str, page_size: int) -> None:
    problem = StepsProblem(engine, LIFE, page_size, spare=1)
    for law in laws_of("prepare_steps"):
        for made in (prepare_steps, bugs.steps_of_their_own):
            assert verdict(law, made, problem).status == "PASS"


def bug(name: str) -> Implementation:
    found: Implementation = getattr(bugs, name.replace("-", "_"))
    return found


@pytest.mark.parametrize("name", bugs.FAULTS)
def test_only_this_law_finds_what_is_left_of_the_step_before(
    name: str, batches: dict[str, list[Any]]
) -> None:
    part, fault = bugs.FAULTS[name]
    engine = next(
        e for e, kept in ENGINES.items() if part in kept or (part in STATE and e[0] == "s")
    )
    law = next(each for each in laws_of("prepare_steps") if each.name == "steps_parity")
    events = [StepsProblem(engine, LIFE, size) for size in (1, 2, 4)]
    found = [verdict(law, bug(name), each) for each in events]
    assert "FAIL" in {each.status for each in found}
    assert all(
        each.message.startswith("after arrive 5, arrive 9, run 4") for each in found if each.bad
    )
    if part in STATE:
        return
    operation = "map_slots" if part == "slot_mapping" else "prepare_batch"
    for problem in batches[operation]:
        asked = of_one_rank(problem) if part == "slot_mapping" else replace(problem, output=part)
        for other in laws_of(operation):
            made = of_single_batches(fault, operation)
            if not other.needs:
                single = verdict(other, made, asked)
                assert single.status == "PASS", (other.name, asked, single.message)


def of_one_rank(problem: SlotsProblem) -> SlotsProblem:
    """Return a problem without ranks, and without tokens of requests that have no pages."""
    steps = tuple((tuple(map(min, news, keys)), keys) for news, keys in problem.steps)
    return replace(problem, steps=steps, world=1, rank=0, interleave=1)


def test_every_part_of_both_engines_has_a_fault() -> None:
    parts = {part for part, _ in bugs.FAULTS.values()}
    assert parts == STATE.union(*ENGINES.values())
