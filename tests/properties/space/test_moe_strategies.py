"""Problems of routing and experts as they are drawn: within the work, and of every kind."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.features import ROUTE_FEATURES, drawn_features
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.laws.general import others
from kernelproof.properties.space.axes import Axes, all_axes, narrow
from kernelproof.properties.space.floors import (
    LEAST_EXPERTS,
    MANY_EXPERTS,
    MANY_SLOTS,
    RARELY,
    edges_of_experts,
    edges_owed_by_experts,
    floor_problems,
    long_problems,
)
from kernelproof.properties.space.moe_axes import ROUTE_AXES, ROUTE_RULES, moe_example
from kernelproof.properties.space.operations import simplify
from kernelproof.reference import ACTIVATIONS, METHODS, MoEProblem, Problem, RouteProblem
from kernelproof.reference.moe.weights import OF_128
from kernelproof.reference.problems.moe import (
    ASSIGNMENTS,
    MOE_REGIMES,
    OUTPUT_NORMS,
    QUANTISED,
    ROUTE_REGIMES,
    SHARED_GATES,
    SWIGLU_PARAMETERS,
)
from kernelproof.reference.tensors.moe_regimes import assignment

Draw = Callable[[Axes, int], list[Any]]
WORK = 400_000
TARGET = Target.here("cpu")


@pytest.fixture(scope="module")
def experts(drawn: Draw) -> Sequence[MoEProblem]:
    found = drawn(Axes("moe", all_axes("moe"), WORK), 800)
    assert all(isinstance(each, MoEProblem) for each in found)
    return found


@pytest.fixture(scope="module")
def routes(drawn: Draw) -> Sequence[RouteProblem]:
    found = drawn(Axes("route", all_axes("route"), WORK), 500)
    assert all(isinstance(each, RouteProblem) for each in found)
    return found


def test_problems_stay_within_the_work(experts: Sequence[MoEProblem]) -> None:
    beyond = [each for each in experts if each.work > WORK]
    assert len(beyond) < len(experts) / RARELY
    # Only those that show what no problem within the work does, and several blocks of scales.
    assert all(
        each.num_experts > MANY_EXPERTS or each.top_k > MANY_SLOTS or each.quantized in OF_128
        for each in beyond
    )
    assert sum(each.work > WORK // 4 for each in experts) > 40


def test_everything_is_drawn(experts: Sequence[MoEProblem]) -> None:
    assert {each.activation for each in experts} == set(ACTIVATIONS)
    assert {each.regime for each in experts} == set(MOE_REGIMES)
    assert {each.assignment for each in experts} == set(ASSIGNMENTS)
    assert {each.quantized for each in experts} == set(QUANTISED)
    for name in ("biases", "interleaved", "expert_parallel", "weights_on_input", "shared_experts",
                 "quantized_hidden", "swiglu_parameters", "strided_hidden", "output_norm",
                 "shared_gate", "shared_weight", "one_product"):  # fmt: skip
        assert sum(bool(getattr(each, name)) for each in experts) > 20, name
    assert {each.swiglu_parameters for each in experts} == set(SWIGLU_PARAMETERS)
    assert {each.output_norm for each in experts} == set(OUTPUT_NORMS)
    assert {each.shared_gate for each in experts} == set(SHARED_GATES)
    assert {each.routed_scaling_factor for each in experts} == {1.0, 2.5, 0.5}
    assert {each.shared_weight for each in experts if each.shared_experts} == {0.0, 1.0, 2.5}
    assert any(each.num_tokens == 0 for each in experts)
    assert any(each.num_experts >= 32 for each in experts)
    assert any(each.num_tokens * each.top_k > 64 for each in experts)
    assert any(each.quantized in OF_128 and each.hidden > 128 for each in experts)


def test_every_route_is_drawn(routes: Sequence[RouteProblem]) -> None:
    assert {each.method for each in routes} == set(METHODS)
    assert {each.regime for each in routes} == set(ROUTE_REGIMES)
    assert max(each.work for each in routes) <= WORK
    for name in ("bias", "grouped"):
        assert sum(getattr(each, name) for each in routes) > 100, name
    assert {each.masked_groups for each in routes if each.grouped} == {"-inf", "zero"}
    for name in ROUTE_FEATURES:
        assert sum(name in drawn_features(each) for each in routes) > 20, name
    for name in ROUTE_RULES:
        assert {getattr(each, name) for each in routes} == set(ROUTE_AXES[name]), name


def test_what_is_not_named_is_not_drawn(drawn: Draw) -> None:
    plain = find_implementation("kernelproof.properties.seeded.moe.bugs:relu2_not_squared")
    axes = narrow("moe", lambda asked: [plain.refusal(each, TARGET) for each in asked], WORK)
    assert axes is not None
    assert axes.allows("quantisation") == (("", False),)
    assert axes.allows("assignment") == ("iid", "balanced", "one_expert", "sparse")
    assert "does not name the feature moe_biases" in axes.refused["biases=True"]
    assert all(plain.refusal(each, TARGET) is None for each in drawn(axes, 100))


def supported(operation: str, rule: Callable[[Any], bool], work: int = WORK) -> Axes:
    """Return the axes of a kernel that supports the problems of a rule."""
    axes = narrow(
        operation, lambda asked: [None if rule(each) else Refusal("no") for each in asked], work
    )
    assert axes is not None
    return axes


def of_tiles(number: int) -> Axes:
    """Return the axes of a kernel that takes hidden and inter in multiples of a number only."""
    return supported("moe", lambda each: not (each.hidden % number or each.inter % number))


@pytest.mark.parametrize("number", [128, 256, 512, 1024])
def test_a_kernel_of_whole_tiles_has_several_experts_and_rows_beyond_a_tile(
    drawn: Draw, number: int
) -> None:
    axes = of_tiles(number)
    found = drawn(axes, 260)
    assert sum(edges_of_experts(each)["several_experts"] for each in found) > 8
    # Tokens on each of four experts at least, whose loads differ.
    loads = [
        Counter(assignment(each, torch.device("cpu")).flatten().tolist())
        for each in found
        if each.num_experts >= LEAST_EXPERTS and not each.expert_parallel
    ]
    assert sum(len(load) >= LEAST_EXPERTS for load in loads) > 8
    assert sum(len(set(load.values())) > 1 for load in loads) > 8
    rows = [each.num_tokens * each.top_k / each.num_experts for each in found]
    assert sum(each > 16 for each in rows) > 4
    assert sum(each > 64 for each in rows) > 1
    assert sum(each.top_k > 1 for each in found) > 20
    assert any(each.hidden != each.inter for each in found)


@pytest.mark.parametrize("work", [4_000, WORK])
@pytest.mark.parametrize("number", [1, 256])
def test_floors_of_experts_are_reached_by_a_few_problems_of_each_run(
    number: int, work: int
) -> None:
    axes = replace(of_tiles(number), max_work=work)
    found = floor_problems(axes)
    assert found == floor_problems(axes)
    crossed = [edges_of_experts(each) for each in found]
    owed = edges_owed_by_experts(axes)
    assert owed == ("several_experts", "rows_beyond_a_tile", "several_slots")
    assert all(any(each[name] for each in crossed) for name in owed)
    assert len(found) <= 4


def test_many_experts_slots_and_tokens_are_asked_for_on_the_smallest_sizes() -> None:
    axes = of_tiles(1)
    found = floor_problems(axes)
    assert max(each.num_experts for each in found) == 896
    assert max(each.top_k for each in found) == 22
    assert max(each.work for each in found) < 10 * WORK
    (long,) = long_problems(axes)
    assert (long.num_tokens, long.top_k, long.num_experts) == (4097, 1, 4)
    (longer,) = long_problems(axes, "cuda")
    assert longer.num_tokens == 16411
    assert longer.top_k > 1
    assert long_problems(replace(axes, max_work=6_250)) == ()


@pytest.mark.parametrize("work", [6_250, WORK])
def test_a_router_of_many_experts_has_tokens_beyond_a_tile_whatever_its_calls_cost(
    drawn: Draw, work: int
) -> None:
    axes = supported("route", lambda each: each.num_experts == 256, work)
    found = drawn(axes, 100)
    assert {each.num_experts for each in found} == {256}
    assert sum(each.num_tokens > 16 for each in found) > 5


def test_a_kernel_of_one_expert_owes_no_others() -> None:
    axes = of_tiles(256)
    alone = {**axes.values, "num_experts": (1,), "top_k": (1,)}
    assert edges_owed_by_experts(replace(axes, values=alone)) == ("rows_beyond_a_tile",)
    assert all(each.num_experts == 1 for each in floor_problems(replace(axes, values=alone)))


@pytest.mark.parametrize("name", ["torch-moe", "torch-route"])
def test_plain_torch_claims_whatever_is_drawn(drawn: Draw, name: str) -> None:
    found = find_implementation(name)
    axes = narrow(
        found.operation, lambda asked: [found.refusal(each, TARGET) for each in asked], WORK
    )
    assert axes is not None
    assert not axes.refused
    for each in drawn(axes, 100):
        assert found.refusal(each, TARGET) is None
        assert all(found.refusal(other, TARGET) is None for other in others(each))


def test_a_crash_is_simplified_to_what_it_takes() -> None:
    problem = MoEProblem(
        num_tokens=65,
        num_experts=8,
        top_k=3,
        hidden=64,
        inter=64,
        activation="relu2",
        dtype="bfloat16",
        biases=True,
        regime="saturated",
        assignment="sparse",
        seed=7,
    )
    axes = Axes("moe", all_axes("moe"), WORK, {}, {})
    tried = [0]

    def fails(each: Problem) -> bool:
        tried[0] += 1
        assert isinstance(each, MoEProblem)
        return each.activation == "relu2" and each.num_tokens > 16

    found = simplify(problem, axes, fails, lambda: True)
    assert isinstance(found, MoEProblem)
    assert found == MoEProblem(num_tokens=17, activation="relu2")
    assert tried[0] < 100


def test_every_combination_has_an_example() -> None:
    """As modules are chosen: of values that no problem has together some are let go."""
    chance, axes = random.Random(0), all_axes("moe")  # noqa: S311  no secret
    for _ in range(3000):
        moe_example({name: chance.choice(values) for name, values in axes.items()})
