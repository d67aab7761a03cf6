"""Choosing which modules of a slowly compiling implementation a run looks at."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase

from kernelproof.impl import Implementation, Target, find_implementation, implementation
from kernelproof.impl.flashinfer.backends import CUDA_CORE, FA2, FA3, XQA, module_key
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.findings.corpus import load_case, read_corpus
from kernelproof.properties.findings.ledger import load_ledger
from kernelproof.properties.findings.report import ImplementationReport
from kernelproof.properties.search.building import Builder
from kernelproof.properties.search.engine import Run
from kernelproof.properties.search.plan import Plan
from kernelproof.properties.space.axes import Axes, has, narrow
from kernelproof.properties.space.module_selection import (
    MOST_COMBINATIONS,
    Keys,
    Module,
    Selection,
    combinations,
    find_modules,
)
from kernelproof.properties.space.profiles import PROFILES, asked_for
from kernelproof.properties.space.rounds import problems
from kernelproof.properties.worker.requests import Address
from kernelproof.reference import AttentionProblem, Problem
from kernelproof.tests.choosing import choose

ON_H200 = Target(sm=90, flashinfer="0.7.2.post1", cuda="13.0", triton="3.6.0", device="cuda")
WORK = 400_000


def asked(name: str, target: Target = ON_H200) -> tuple[Axes, Keys, Implementation]:
    found = find_implementation(name)
    key = found.compile_key
    assert key is not None

    def refusals(given: object) -> list[Refusal | None]:
        return [found.refusal(problem, target) for problem in given]  # type: ignore[attr-defined]

    def keys(given: object) -> list[str | None]:
        return [
            repr(key(problem)) if found.refusal(problem, target) is None else None
            for problem in given  # type: ignore[attr-defined]
        ]

    axes = narrow(found.operation, refusals, WORK)
    assert axes is not None
    return axes, keys, found


def pairs_of(modules: list[Module]) -> set[frozenset[tuple[str, object]]]:
    return {
        frozenset(pair)
        for module in modules
        for pair in itertools.combinations(module.values.items(), 2)
    }


@pytest.mark.parametrize(
    "name", ["flashinfer-prefill-fa2", "flashinfer-prefill-fa3", "flashinfer-decode"]
)
def test_pairs_are_covered_and_the_simplest_comes_first(name: str) -> None:
    axes, keys, _ = asked(name)
    few, many, all_of_them = (choose(axes, keys, most) for most in (4, 64, 10_000))
    assert len(few) == 4
    assert few == many[:4]
    assert many == all_of_them  # pairs need few: no more is built than they do
    assert len({module.key for module in many}) == len(many) < 30
    assert few[0].values["window_left"] == (-1,)
    supported = [axis for axis in few[0].values if axis != "caches"]
    for axis in supported:
        seen = {value for module in many for value in module.values[axis]}
        assert seen == set(axes.allows(axis)), axis
    assert len(pairs_of(few)) > 0.8 * 4 * len(pairs_of(few[:1]))  # hardly one is covered twice


def test_a_quantised_cache_that_few_head_dims_have_is_among_them() -> None:
    axes, keys, _ = asked("flashinfer-prefill-fa2")
    caches = {pair for module in choose(axes, keys, 8) for pair in module.values["caches"]}
    assert {"", "float8_e4m3fn", "float8_e5m2", "nvfp4"} == {name for name, _ in caches}


def test_a_quantised_cache_that_one_dtype_has_is_among_them() -> None:
    axes, keys, _ = asked("flashinfer-mla-fa3")
    modules = choose(axes, keys, 8)
    assert [module.values["caches"] for module in modules].count((("float8_e4m3fn", ""),)) == 1
    assert all(
        isinstance(each.first, AttentionProblem) and each.first.values_in_keys for each in modules
    )


def test_a_window_that_is_refused_without_a_causal_mask_is_among_them() -> None:
    """Its problems would be drawn otherwise, and each refused for its module."""

    def keys(given: Sequence[Problem]) -> list[str | None]:
        attention = [each for each in given if isinstance(each, AttentionProblem)]
        return [
            None
            if each.window_left >= 0 and not each.causal
            else f"{each.causal} {each.window_left}"
            for each in attention
        ]

    axes, *_ = asked("flashinfer-prefill-fa2")
    assert axes.simplest["causal"] is False
    modules = choose(axes, keys, 1000)
    windows = {value for module in modules for value in module.values["window_left"]}
    assert windows == set(axes.allows("window_left"))


@pytest.mark.parametrize("name", ["flashinfer-prefill-fa2", "flashinfer-decode"])
def test_modules_of_stored_cases_are_among_them(name: str) -> None:
    """They are built anyway: for others in their place a run would wait twice."""
    axes, keys, _ = asked(name)
    entries = [each for each in load_ledger().entries if each.applies_to(name, ON_H200)]
    cases = [load_case(each.case) for each in entries if each.case]
    stored = [case.problem for case in cases if not case.without_rules]
    modules, others = choose(axes, keys, 8, stored=stored), choose(axes, keys, 8)
    assert stored
    assert len(modules) == len(others)
    assert set(keys(stored)) <= {module.key for module in modules}
    assert selected(axes, keys, 8, stored).others() == []
    assert len(pairs_of(modules)) > 0.9 * len(pairs_of(others))


def test_modules_of_stored_cases_are_built_where_few_are_chosen() -> None:
    axes, keys, _ = asked("flashinfer-prefill-fa2")
    stored = [AttentionProblem(head_dim_qk=d, head_dim_vo=d, dtype="float16") for d in (64, 128)]
    refused = AttentionProblem(dtype="float16")
    modules = choose(axes, keys, 1, stored=stored)
    assert keys([refused]) == [None]
    others = selected(axes, keys, 1, [*stored, *stored, refused]).others()
    assert len(others) == 1
    assert {modules[0].key, *keys([each.first for each in others])} == set(keys(stored))


def selected(axes: Axes, keys: Keys, most: int, stored: Sequence[Problem]) -> Selection:
    selection = Selection(find_modules(axes, keys, stored=stored), axes.simplest, most)
    while found := selection.next():
        selection.take(found)
    return selection


@pytest.mark.parametrize("name", ["flashinfer-prefill-fa2", "flashinfer-prefill-fa3"])
def test_only_problems_of_chosen_modules_are_drawn(name: str) -> None:
    axes, keys, found = asked(name)
    modules = choose(axes, keys, 3)
    allowed = {module.key for module in modules}
    restricted = Axes(
        axes.operation,
        axes.values,
        WORK,
        {},
        axes.simplest,
        tuple(module.values for module in modules),
    )
    seen: set[str] = set()

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=150, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @hypothesis.given(problems(restricted))
    def look(problem: Problem) -> None:
        assert isinstance(problem, AttentionProblem)
        if found.refusal(problem, ON_H200) is None:
            assert found.compile_key is not None
            seen.add(repr(found.compile_key(problem)))

    look()
    assert seen == allowed


@pytest.mark.parametrize("name", ["decode-fa2", "xqa-decode-fp8", "xqa-ragged"])
def test_two_modules_are_of_one_query_token_and_of_several(name: str) -> None:
    """A run that builds few modules draws ``q_len_per_req`` all the same, and draft trees."""
    axes, keys, found = asked(f"flashinfer-{name}")
    modules = choose(axes, keys, 2)
    wide = replace(axes, max_work=1024 * WORK)
    restricted = replace(wide, restrictions=tuple(module.values for module in modules))
    drawn: set[tuple[int, bool]] = set()

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=100, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @hypothesis.given(problems(restricted))
    def look(problem: Problem) -> None:
        assert isinstance(problem, AttentionProblem)
        if keys([problem])[0] in {module.key for module in modules}:
            drawn.add((problem.most_queries, problem.tree > 0))

    look()
    assert {1} < {queries for queries, _ in drawn}
    assert any(tree for _, tree in drawn) == ("tree" in found.features)


def test_modules_of_codes_come_with_those_of_plain_numbers() -> None:
    """Laws compare the two: alone, a module of codes has nothing to be compared with."""
    axes, keys, _ = asked("triton-attention")
    alone, together = (choose(axes, keys, 40, companions=each) for each in (False, True))
    assert len(together) == len({each.key for each in together}) == 40

    def with_partners(modules: Sequence[Module]) -> float:
        every = [dict(each.values) for each in modules]
        coded = [each for each in every if each["caches"][0][0]]
        plain = [{**each, "caches": every[0]["caches"]} for each in coded]
        return sum(each in every for each in plain) / len(coded)

    assert with_partners(alone) < 0.5
    assert with_partners(together) > 0.9
    # What they cost is few pairs: both of a couple count.
    assert len(pairs_of(together)) > 0.85 * len(pairs_of(alone))


def test_combinations_that_are_too_many_are_spread_over_all() -> None:
    groups = {name: [(value,) for value in range(9)] for name in "abcdef"}
    found = list(combinations(groups))
    assert len(found) == MOST_COMBINATIONS < 9**6
    assert found[0] == dict.fromkeys(groups, (0,))
    assert len({tuple(each.values()) for each in found}) == len(found)
    pairs = {frozenset(pair) for each in found for pair in itertools.combinations(each.items(), 2)}
    assert len(pairs) == 15 * 81  # every pair of values of every two axes
    few = {name: groups[name] for name in "ab"}
    assert len(list(combinations(few))) == 81


def test_what_does_not_go_together_is_no_module() -> None:
    """The example of 24 channels in NVFP4 has 64: its module is that of 64."""
    axes, keys, _ = asked("triton-attention")
    for each in choose(axes, keys, 1000, companions=True):
        assert all(
            any(has(each.first, name, value) for value in values)
            for name, values in each.values.items()
        )


built: list[Hashable] = []


def head_dim_and_window(problem: Problem) -> Hashable:
    assert isinstance(problem, AttentionProblem)
    return problem.head_dim_qk, problem.window_left >= 0


@implementation(
    "paged_attention", name="slow-to-compile", compile_key=head_dim_and_window, build_ahead=True
)
def slow_to_compile(inputs: object) -> object:
    from kernelproof.properties.seeded.honest import float32

    return float32(inputs)


def test_a_run_builds_its_modules_and_refuses_the_others() -> None:
    plan = Plan([f"{__file__}:slow_to_compile"], PROFILES["quick"], laws=("parity", "sensitivity"))
    report = Run(plan).execute().implementations[0]
    assert report.error == ""
    assert report.findings == []
    assert report.modules == PROFILES["quick"].modules
    assert report.build_seconds > 0
    assert report.to_json()["modules"] == report.modules
    parity, sensitivity = report.laws
    assert parity.judged >= PROFILES["quick"].problems
    # Switching a window on leads to a module that is built for one head dim alone.
    assert sensitivity.judged


def test_modules_of_stored_cases_are_built_before_they_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dims, most = (32, 64, 96, 128, 256), PROFILES["quick"].modules
    stored = [AttentionProblem(head_dim_qk=dim, head_dim_vo=dim) for dim in dims]
    name = f"{__file__}:slow_to_compile"
    for problem in stored:
        case = {"law": "parity", "implementation": name, "problem": problem.to_json()}
        (tmp_path / f"{problem.head_dim_qk}.json").write_text(json.dumps(case))
    ahead: list[Module] = []

    def build(
        self: Builder,
        address: Address,
        modules: Sequence[Module],
        report: ImplementationReport,
        built: Callable[[int, int], None] | None = None,
    ) -> None:
        ahead.extend(modules)
        original(self, address, modules, report, built)

    original = Builder.build
    monkeypatch.setattr(Builder, "build", build)
    plan = Plan([name], PROFILES["quick"], laws=("parity",), corpus=read_corpus(tmp_path))
    report = Run(plan).execute().implementations[0]
    assert report.error == ""
    assert report.corpus.replayed == len(dims) > most
    assert report.modules == most  # of which problems are drawn
    dims_built = [
        each.first.head_dim_qk for each in ahead if isinstance(each.first, AttentionProblem)
    ]
    assert sorted(dims_built) == sorted(dims)


def test_fewer_modules_are_built_where_one_takes_minutes() -> None:
    minutes = {each.backend: each.build_minutes for each in (CUDA_CORE, FA2, FA3, XQA)}
    counts = {
        name: {backend: PROFILES[name].modules_of(each) for backend, each in minutes.items()}
        for name in PROFILES
    }
    assert counts == {
        "quick": {"cuda-core": 3, "fa2": 3, "fa3": 1, "xqa": 3},
        "gate": {"cuda-core": 8, "fa2": 8, "fa3": 3, "xqa": 7},
        "nightly": dict.fromkeys(minutes, 64),
    }
    # Of Triton's, which take seconds, there are many more.
    assert [PROFILES[name].modules_of(0.2) for name in PROFILES] == [10, 60, 300]
    asked = asked_for(PROFILES["gate"], modules=5, soak=None)
    assert asked.modules_of(0.2) == 5
    assert asked.modules_of(FA3.build_minutes) == 5


def test_module_keys_tell_what_flashinfer_builds_apart() -> None:
    base = AttentionProblem(head_dim_qk=64, head_dim_vo=64, dtype="float16")
    fields: list[dict[str, object]] = [
        {"dtype": "bfloat16"}, {"head_dim_qk": 128}, {"window_left": 3}, {"logits_soft_cap": 5.0},
        {"kv_cache": "nvfp4"}, {"custom_mask": True},
        {"kv_cache": "float8_e5m2", "q_dtype": "float8_e5m2"},
    ]  # fmt: skip
    from dataclasses import replace

    keys = {module_key(replace(base, **each)) for each in fields}  # type: ignore[arg-type]
    assert len(keys | {module_key(base)}) == len(fields) + 1
    assert module_key(replace(base, seq_lens=(9,), page_size=4)) == module_key(base)
