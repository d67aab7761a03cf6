"""Problems of routing and experts have rows of what models have, at sizes that are affordable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kernelproof.fixtures import read_real_values
from kernelproof.impl import Target, find_implementation
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.space.axes import Axes, all_axes, example, narrow
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.space.real_layers import (
    TILES,
    fitting,
    many_values,
    row_values,
)
from kernelproof.properties.space.real_values import (
    MANY,
    experts_of,
    layers_of,
    router_of,
)
from kernelproof.properties.space.restrictions import Only
from kernelproof.properties.space.rounds import draw_problems
from kernelproof.reference import MoEProblem, Problem, RouteProblem

WORK = 400_000
KIMI = {"family": "kimi", "kind": "swiglu",
        "experts": "384", "top_k": "8", "groups": "1", "topk_groups": "1",
        "method": "deepseek_v3", "bias": "yes", "scaling_factor": "2.827", "hidden": "7168",
        "inter": "2048", "shared_experts": "1", "shared_gate": "", "activation": "swiglu",
        "weights": "fp8_block"}  # fmt: skip


def axes(operation: str, work: int = WORK, **values: tuple[object, ...]) -> Axes:
    return Axes(operation, {**all_axes(operation), **values}, work)


def drawn(space: Axes, most: int = 400) -> list[Problem]:
    return draw_problems(space, PROFILES["gate"], 1, most)


def test_a_row_is_the_fields_of_two_problems() -> None:
    router, experts = router_of(KIMI), experts_of(KIMI)
    assert router is not None
    assert experts is not None
    problem = RouteProblem(**router.fields)
    assert (problem.num_experts, problem.top_k, problem.bias) == (384, 8, True)
    assert (problem.method, problem.scaling_factor) == ("deepseek_v3", 2.827)
    assert dict(experts.fields) == {"num_experts": 384, "top_k": 8, "activation": "swiglu"}
    assert dict(experts.options) == {"shared_experts": 1, "quantized": "fp8_block"}
    assert experts.sizes == (7168, 2048)
    gated = experts_of({**KIMI, "shared_gate": "sigmoid", "kind": "swiglulim", "weights": "bf16"})
    assert gated is not None
    assert dict(gated.options) == {
        "shared_experts": 1,
        "shared_gate": "logits",
        "swiglu_parameters": "limit",
    }
    scaled = router_of({**KIMI, "method": "perexpert", "bias": "no"})
    assert scaled is not None
    assert scaled.fields["expert_scales"]
    assert not experts_of({**KIMI, "hidden": ""})  # a router alone
    assert not router_of({**KIMI, "method": "unheard_of"})


@pytest.mark.parametrize("operation", ["route", "moe"])
def test_each_row_has_an_example_of_its_own(operation: str) -> None:
    simplest = {name: values[0] for name, values in all_axes(operation).items()}
    for number, layer in enumerate(layers_of(operation), 1):
        problem = example(operation, {**simplest, "real": number})
        assert {name: getattr(problem, name) for name in layer.fields} == layer.fields


def test_the_table_has_what_is_asked_of_it() -> None:
    routers = {(layer.fields["num_experts"], layer.fields["top_k"]) for layer in layers_of("route")}
    assert {(288, 8), (384, 8), (512, 22), (512, 10), (896, 16)} <= routers
    groups = {layer.values["groups"] for layer in layers_of("route")}
    assert {(1, 1), (8, 3), (8, 4)} <= groups
    sizes = {layer.sizes for layer in layers_of("moe")}
    assert {(2880, 2880), (2048, 1408), (2688, 1856), (2816, 704)} <= sizes
    rows = [row for row in read_real_values() if row["class"] == "moe"]
    assert all(row["source"] and row["date"] for row in rows)
    assert len({row["family"] for row in rows}) >= 70


@pytest.mark.parametrize("operation", ["route", "moe"])
def test_some_problems_have_the_values_of_rows(operation: str) -> None:
    rows = [dict(layer.fields) for layer in layers_of(operation)]
    problems = drawn(axes(operation))
    of_rows = [
        each
        for each in problems
        if any(
            all(getattr(each, name) == v for name, v in row.items())
            for row in rows
            if row["num_experts"] >= 16
        )
    ]
    assert len(problems) / 20 < len(of_rows) < len(problems) / 3
    several = {getattr(each, "num_experts", 0) for each in of_rows}
    assert several - {*all_axes(operation)["num_experts"]}


def test_experts_are_affordable_at_sizes_that_keep_what_is_left_of_a_tile() -> None:
    problems = [each for each in drawn(axes("moe"), 600) if isinstance(each, MoEProblem)]
    of_rows = {(layer.fields["num_experts"], layer.fields["top_k"]) for layer in layers_of("moe")}
    # Problems of floors are beyond the work, too, and have a test of their own.
    beyond = [
        each for each in problems if each.work > WORK and (each.num_experts, each.top_k) in of_rows
    ]
    assert beyond
    assert len(beyond) < len(problems) / 16
    sizes = {
        (each.hidden, each.inter)
        for each in problems
        if (each.num_experts, each.top_k) in of_rows and each.num_experts > 32
    }
    assert {(16, 16), (64, 64)} <= sizes
    assert any(each.num_experts > 256 and not each.expert_parallel for each in problems)
    whole = drawn(axes("moe", 1024 * WORK), 200)
    assert any(
        isinstance(each, MoEProblem)
        and (each.hidden, each.inter) in {layer.sizes for layer in layers_of("moe")}
        for each in whole
    )


def test_a_kernel_of_aligned_sizes_has_rows_too() -> None:
    tile = 128

    def probe(asked: Sequence[Problem]) -> list[Refusal | None]:
        fits = [
            isinstance(each, MoEProblem) and not (each.hidden % tile or each.inter % tile)
            for each in asked
        ]
        return [None if each else Refusal("no") for each in fits]

    space = narrow("moe", probe, WORK)
    assert space is not None
    problems = [each for each in drawn(space) if isinstance(each, MoEProblem)]
    assert all(each.hidden % tile == 0 and each.inter % tile == 0 for each in problems)
    assert fitting(space)
    nightly = replace(space, max_work=10 * WORK)
    assert len(fitting(nightly)) > len(fitting(space))


def test_rows_keep_to_what_may_be_drawn() -> None:
    few = axes("route", num_experts=(2, 16, 64), top_k=(1, 2, 6))
    for number in fitting(few):
        layer = layers_of("route")[number - 1]
        assert layer.fields["num_experts"] in (16, 64) or (
            layer.fields["num_experts"] not in all_axes("route")["num_experts"]
        )
    alone = axes("route", method=("llama4",))
    assert {layers_of("route")[n - 1].fields["method"] for n in fitting(alone)} == {"llama4"}
    assert not fitting(axes("moe", 1000))
    assert not fitting(axes("moe", real=(0,)))


def test_only_leaves_the_rows_that_it_asks_for() -> None:
    only = Only.read(["num_experts=256,384", "method=deepseek_v3"])
    numbers = only.axes("route")["real"]
    assert len(numbers) > 1
    fields = [layers_of("route")[n - 1].fields for n in numbers if n]
    assert {each["num_experts"] for each in fields} == {256, 384}
    assert {each["method"] for each in fields} == {"deepseek_v3"}
    space = Axes("route", only.axes("route"), WORK)
    assert all(only.meets(each) for each in drawn(space, 100))
    assert Only.read(["hidden=64"]).axes("moe")["real"] == (0,)


def test_values_of_ten_families_are_asked_for_where_they_are_reachable() -> None:
    many = many_values(axes("route"))
    wanted = {("num_experts", "256"), ("top_k", "8"), ("method", "deepseek_v3"), ("bias", "True")}
    assert wanted <= {*many}
    assert ("num_experts", "896") not in many
    assert all(0 < share <= 1 / 4 for share in many.values())
    families = {
        each
        for layer in layers_of("route")
        if layer.fields["num_experts"] == 256
        for each in layer.families
    }
    assert len(families) >= MANY
    cpu, gpu = many_values(axes("moe")), many_values(axes("moe", 1024 * WORK))
    assert ("hidden", "2048") in gpu
    assert ("hidden", "2048") not in cpu
    assert any("hidden" in row for row in row_values(axes("moe", 10**13)))


@pytest.mark.parametrize("name", ["torch-moe", "torch-route"])
def test_plain_torch_takes_every_row(name: str) -> None:
    found, target = find_implementation(name), Target.here("cpu")
    space = narrow(found.operation, lambda asked: [found.refusal(e, target) for e in asked], WORK)
    assert space is not None
    assert len(fitting(space)) == len(layers_of(found.operation))
    assert math.gcd(*TILES) == TILES[-1]
