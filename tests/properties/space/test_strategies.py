"""Drawn problems: valid, at every edge, within their work, and shrinking to the simplest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kernelproof.impl import OPERATIONS
from kernelproof.impl.targets.refusal import OF_THE_MACHINE, Refusal
from kernelproof.properties.space.attention_axes import (
    HEAD_DIMS,
    MOST_DRAFTS,
    PHASES,
    RAGGED,
    head_fields,
)
from kernelproof.properties.space.attention_strategies import (
    FEATURES,
    MOST_FEATURES,
    MOST_KEYS,
    MOST_VERIFIED,
    OF_WINDOWS,
    lengths,
    long_axes,
)
from kernelproof.properties.space.axes import FREE, Axes, all_axes, example, has, narrow, resized
from kernelproof.properties.space.axis_values import FIELDS, NO_FIELDS
from kernelproof.properties.space.moe_axes import TOGETHER
from kernelproof.properties.space.profiles import PROFILES, on_device
from kernelproof.properties.space.rounds import EXAMPLES_A_ROUND, problems, variations
from kernelproof.reference import (
    AttentionProblem,
    MergeProblem,
    MetadataProblem,
    Problem,
    QuantizeProblem,
    materialise,
    problem_from_json,
)

ATTENTION = ("paged_attention", "ragged_attention", "append_paged_kv")
GATE_WORK = 400_000
SEVERAL = (*TOGETHER, "turning", "head_counts", "scales")
"""Axes whose values are those of several fields, in their order."""
OF_FOUR_BITS = ("fp4", "global_scale")
"""Axes that make no field by themselves: a test of their own is about them."""


def draw(operation: str, count: int, max_work: int = GATE_WORK) -> list[Any]:
    """Draw problems as a run does: seeded, generated only."""
    return drawn_from(problems(operation=operation, max_work=max_work), count)


def drawn_from(strategy: st.SearchStrategy[Problem], count: int) -> list[Any]:
    """Draw from a strategy likewise."""
    drawn: list[Any] = []

    def collect(problem: Problem) -> None:
        drawn.append(problem)

    # In rounds, as a hunt draws them: one long run of Hypothesis stays near its first examples.
    for seed in range(0, count, EXAMPLES_A_ROUND):
        run = settings(
            max_examples=min(count - seed, EXAMPLES_A_ROUND),
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        hypothesis.seed(seed)(run(given(strategy)(collect)))()
    return drawn


@pytest.fixture(scope="module")
def paged() -> Sequence[AttentionProblem]:
    return draw("paged_attention", 3000)


INTEGERS = ("build_metadata", "map_slots", "prepare_batch", "prepare_steps", "plan")
"""Operations whose largest problems are small: a page or a token is a few integers."""


def requests(problems: Sequence[AttentionProblem]) -> list[tuple[int, int, AttentionProblem]]:
    return [
        (t, s, problem)
        for problem in problems
        for t, s in zip(problem.query_lens, problem.seq_lens, strict=True)
    ]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_drawn_problems_are_valid_and_can_be_made(operation: str) -> None:
    @settings(max_examples=60)
    @given(problems(operation=operation, max_work=20_000))
    def check(problem: Problem) -> None:
        assert problem.operation == operation
        assert problem_from_json(problem.to_json()) == problem
        materialise(problem)

    check()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_work_stays_near_its_limit(operation: str) -> None:
    works = sorted(problem.work for problem in draw(operation, 150))
    # Lengths are budgeted, tokens of many heads beside them are not: the limit is a rough one.
    assert works[len(works) // 2] <= GATE_WORK
    assert works[int(0.9 * len(works))] <= 4 * GATE_WORK
    if operation not in INTEGERS:
        assert works[-1] > GATE_WORK / 8  # the room is used


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_slow_implementation_gets_smaller_problems(operation: str) -> None:
    def typical(max_work: int) -> int:
        works = [int(problem.work) for problem in draw(operation, 100, max_work)]
        return sorted(works)[80]

    if operation not in INTEGERS:
        assert 10 * typical(2_000) < typical(400_000)
    elif operation == "map_slots":
        assert typical(2_000) < typical(400_000)


@pytest.mark.parametrize("operation", ATTENTION)
def test_an_implementation_whose_heads_cost_much_gets_few_of_them(operation: str) -> None:
    axes = Axes(operation, all_axes(operation), GATE_WORK, max_heads=16)
    drawn = drawn_from(problems(axes), 1000)
    # Latent attention has heads of its own, and groups of several tiles of heads are drawn anyway.
    others = [each for each in drawn if not each.values_in_keys]
    heads = [len(each.seq_lens) * each.num_qo_heads for each in others if each.group_size <= 16]
    assert max(heads) == 16
    large = [each for each in others if each.group_size > 16]
    sizes = () if operation == "append_paged_kv" else {20, 24, 32, 48, 64, 71, 128}
    assert {each.group_size for each in large} == set(sizes)
    assert all(len(each.seq_lens) <= 1 and each.num_kv_heads == 1 for each in large)
    assert len(large) < 100
    assert max(len(each.seq_lens) for each in drawn) == 6
    assert {8, 4, 1} <= {each.num_qo_heads for each in drawn}


@pytest.mark.parametrize("operation", ATTENTION)
def test_a_slow_implementation_gets_long_requests_on_few_heads(operation: str) -> None:
    axes = long_axes(Axes(operation, all_axes(operation), GATE_WORK // 16), 64, 0)
    assert axes is not None
    drawn = drawn_from(problems(axes), 400)
    assert all(len(each.seq_lens) == 1 and each.num_qo_heads <= 6 for each in drawn)
    if operation != "append_paged_kv":
        # What hides keys: wide windows, masks and sinks, each in a quarter of them.
        assert {each.window_left for each in drawn} == {-1, 63}
        for hides in ("custom_mask", "sinks"):
            assert sum(getattr(each, hides) for each in drawn) > len(drawn) // 8
        assert {(each.k_scale, each.strided_q, each.logits_soft_cap) for each in drawn} == {
            (1.0, False, 0.0)
        }
        # A kernel applies it where it merges the parts of a request.
        scaled = sum(each.output_scale not in (None, 1.0) for each in drawn)
        assert len(drawn) // 16 < scaled < len(drawn) // 3
    keys = [max(each.seq_lens) for each in drawn]
    assert {63, 64, 65, 127, 128, 129, 191, 192, 193} <= set(keys)
    assert sum(length > 3 * 64 for length in keys) > len(keys) // 6
    assert max(each.work for each in drawn) <= 2 * GATE_WORK
    assert {each.page_size for each in drawn if each.num_pages > 2} >= (
        {1, 2, 3, 4, 8, 16, 32, 64} if operation != "ragged_attention" else set()
    )
    assert (
        sum(
            t < s
            for each in drawn
            for t, s in zip(each.query_lens, each.seq_lens, strict=True)
            if t > 1
        )
        > len(drawn) // 5
    )


@pytest.mark.parametrize("max_work", [GATE_WORK // 64, GATE_WORK // 16, GATE_WORK])
def test_a_request_of_new_keys_only_is_longer_than_a_tile_whatever_the_work(max_work: int) -> None:
    values = {**all_axes("ragged_attention"), "phase": ("prefill",), "verify": (0,)}
    axes = Axes("ragged_attention", values, max_work)
    long = long_axes(axes, 128, 0, slow=False)
    assert long is not None, "its other requests have 111 keys at most"
    drawn = drawn_from(problems(long), 60)
    assert all(each.query_lens == each.seq_lens for each in drawn)
    assert sum(max(each.seq_lens) > 128 for each in drawn) > len(drawn) // 5
    assert max(each.work for each in drawn) <= 2 * GATE_WORK + 16 * max_work


def test_requests_that_are_long_anyway_are_not_drawn_apart() -> None:
    values = all_axes("paged_attention")
    assert long_axes(Axes("paged_attention", values, GATE_WORK), 32, 0, slow=False) is None
    assert long_axes(Axes("paged_attention", values, GATE_WORK // 16), 32, 0, slow=False)
    assert long_axes(Axes("paged_attention", values, GATE_WORK), 0, 0, slow=False) is None
    decodes = {**values, "phase": ("decode",), "verify": (0,)}
    assert long_axes(Axes("paged_attention", decodes, GATE_WORK), 64, 0, slow=False) is None


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("operation", ["paged_attention", "ragged_attention"])
def test_long_requests_have_several_tiles_of_queries_and_windows(
    operation: str, *, slow: bool
) -> None:
    axes = Axes(operation, all_axes(operation), GATE_WORK // (16 if slow else 1))
    long = long_axes(axes, 64, 0, slow=slow)
    assert long is not None
    drawn = drawn_from(problems(long), 200)
    several = [each for each in drawn if each.most_queries > 64]
    assert len(several) > len(drawn) // 8
    assert sum(each.causal and each.window_left == 63 for each in several) > len(drawn) // 60
    assert max(each.work for each in drawn) <= 2 * long.max_work


@pytest.mark.parametrize("operation", ["paged_attention", "append_paged_kv"])
@pytest.mark.parametrize("max_work", [2_000, 50_000, GATE_WORK])
def test_every_page_size_has_requests_of_two_pages(operation: str, max_work: int) -> None:
    """However little work a problem may have: else a second large page is never read."""
    drawn = draw(operation, 800, max_work)
    several = {each.page_size for each in drawn if each.most_keys > each.page_size}
    assert several == set(all_axes(operation)["page_size"])
    assert all(each.most_keys <= MOST_KEYS for each in drawn)


def test_latent_attention_has_many_heads_and_odd_numbers_of_them() -> None:
    heads = {each.num_qo_heads for each in draw("paged_attention", 1600) if each.values_in_keys}
    assert heads >= {1, 3, 5, 7, 16, 20, 32, 64, 71, 128}


@pytest.mark.parametrize("operation", ATTENTION)
def test_every_value_of_every_axis_is_drawn(operation: str, paged: Any) -> None:  # noqa: ANN401
    drawn = paged if operation == "paged_attention" else draw(operation, 1200)
    axes = all_axes(operation)
    # A layer of latent attention has heads and a scale of its own.
    usual = [problem for problem in drawn if not problem.values_in_keys]
    # Rows of models have others besides.
    for name in sorted(set(axes) - {*NO_FIELDS, "head_dims", "caches"}):
        assert {getattr(problem, name) for problem in usual} >= set(axes[name]), name
    dims = {(problem.head_dim_qk, problem.head_dim_vo) for problem in drawn}
    pairs = {(each[0], each[1]) for each in axes["head_dims"]}
    assert dims >= pairs
    latent = {each for each in HEAD_DIMS if "values_in_keys" in head_fields(each)}
    paged = operation != "ragged_attention"
    assert set(axes["head_dims"]) == (set(HEAD_DIMS) if paged else set(HEAD_DIMS) - latent)
    caches = {(problem.kv_cache, problem.q_dtype) for problem in drawn}
    assert caches == set(axes["caches"])


def test_every_value_of_every_merge_axis_is_drawn() -> None:
    drawn = draw("merge_state", 500)
    for name, values in all_axes("merge_state").items():
        assert {getattr(problem, name) for problem in drawn} == set(values), name
    assert {problem.num_tokens for problem in drawn} >= {0, 1, 2, 8}
    assert {problem.num_heads for problem in drawn} == {*range(1, 9), 16, 32, 64, 128}


def test_the_axes_hold_what_the_contract_names() -> None:
    axes = all_axes("paged_attention")
    assert {1, 16, 256} <= set(axes["page_size"])
    assert {1, 3, 5, 6, 7, 16} <= set(axes["group_size"])
    assert {(16, 16), (80, 80), (96, 96), (192, 128), (512, 512)} <= set(axes["head_dims"])
    assert set(axes["dtype"]) == {"float32", "float16", "bfloat16"}
    assert set(axes["kv_layout"]) == {"NHD", "HND"}
    for name in (*FEATURES, "shared_prefix_pages", "page_order", "causal"):
        assert len(axes[name]) > 1, name


def test_lengths_reach_every_edge(paged: Sequence[AttentionProblem]) -> None:
    drawn = requests(paged)
    seq_lens = {s for _, s, _ in drawn}
    assert {0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33} <= seq_lens
    # Not all of them in one run of this size, but the most.
    assert len({63, 64, 65, 127, 128, 129, 255, 256, 257} & seq_lens) > 5
    assert {0, 1} <= {t for t, _, _ in drawn}
    for rest in (0, 1, -1):
        hits = {p.page_size for _, s, p in drawn if s > 1 and (s - rest) % p.page_size == 0}
        assert {1, 2, 3, 4, 8, 16} <= hits, rest
    for beyond in (0, 1, 2):
        windows = {p.window_left for _, s, p in drawn if s == p.window_left + beyond}
        assert windows - {-1, 0}, beyond


def test_batches_are_mixed(paged: Sequence[AttentionProblem]) -> None:
    sizes = {len(problem.seq_lens) for problem in paged}
    assert sizes == {0, 1, 2, 3, 4, 6}
    drawn = requests(paged)
    kinds = {
        "decode": any(t == 1 and s > 1 for t, s, _ in drawn),
        "prefill": any(t == s and t > 1 for t, s, _ in drawn),
        "chunk": any(1 < t < s for t, s, _ in drawn),
        "no query": any(t == 0 and s for t, s, _ in drawn),
        "no keys": any(t and s == 0 for t, s, _ in drawn),
        "more queries than keys": any(t > s > 0 for t, s, _ in drawn),
        "mixed": any({1, 0} < set(problem.query_lens) for problem in paged),
    }
    assert all(kinds.values()), kinds
    shared = [p for p in paged if p.shared_prefix_pages]
    assert any(
        sum(s >= p.page_size * p.shared_prefix_pages for s in p.seq_lens) > 1 for p in shared
    )
    for name in ("partial_last_page", "rows_without_keys", "empty_requests", "empty_batch"):
        assert {getattr(problem, name) for problem in paged} == {True, False}, name


def test_features_come_alone_and_together(paged: Sequence[AttentionProblem]) -> None:
    off = AttentionProblem()
    used = [frozenset(n for n in FEATURES if getattr(p, n) != getattr(off, n)) for p in paged]
    most = max(MOST_FEATURES, (len(FEATURES) + 1) // 2)
    assert {*range(most + 1)} <= {len(names) for names in used}
    # FP8 queries may bring per-head scales besides, and some features others that they need: a
    # mask, its pattern, slopes, a window.
    assert max(map(len, used)) <= most + 5
    never_alone = {"custom_mask", "mask_pattern", "mask_by_head", "alibi_function", *OF_WINDOWS}
    alone = {next(iter(names)) for names in used if len(names) == 1}
    assert alone | never_alone == set(FEATURES)
    assert sum(not names for names in used) > len(used) / 20


def test_appended_tokens_are_always_in_the_cache() -> None:
    for t, s, _ in requests(draw("append_paged_kv", 300)):
        assert t <= s


def test_metadata_steps_shrink_and_grow() -> None:
    drawn = draw("build_metadata", 400)
    assert {problem.page_size for problem in drawn} == set(all_axes("paged_attention")["page_size"])
    sizes = [[len(q) for q, _ in problem.steps] for problem in drawn]
    assert {len(steps) for steps in sizes} == {1, 2, 3, 4}
    assert any(a > b for steps in sizes for a, b in pairwise(steps))
    assert any(a < b for steps in sizes for a, b in pairwise(steps))
    assert any(0 in steps for steps in sizes)
    lens = {s % p.page_size for p in drawn for _, step in p.steps for s in step if p.page_size == 8}
    assert lens == set(range(8))


def test_long_lengths_reach_the_edges_of_tiles_and_pages() -> None:
    drawn = set()

    @settings(max_examples=400, phases=[Phase.generate])
    @given(lengths(2000, 48, 99))
    def collect(length: int) -> None:
        drawn.add(length)

    collect()
    assert {1, 255, 256, 257, 511, 512, 513, 1024, 1025} <= drawn
    assert {47, 48, 49, 96, 97} <= drawn  # pages
    assert {99, 100, 101} <= drawn  # the window


@given(st.integers(1, 300), st.sampled_from([1, 3, 16, 256]), st.integers(-1, 128), st.data())
def test_lengths_stay_below_their_cap(
    cap: int, page_size: int, window: int, data: st.DataObject
) -> None:
    assert 1 <= data.draw(lengths(cap, page_size, window)) <= cap


def accept(rule: Callable[[Any], bool]) -> Callable[[Sequence[Problem]], list[Refusal | None]]:
    def probe(asked: Sequence[Problem]) -> list[Refusal | None]:
        return [None if rule(problem) else Refusal("no") for problem in asked]

    return probe


class TestNarrow:
    def test_a_kernel_of_fp8_alone_is_found(self) -> None:
        def probe(asked: Sequence[Problem]) -> list[Refusal | None]:
            in_fp8 = [getattr(each, "q_dtype", "") == "float8_e4m3fn" for each in asked]
            return [None if fits else Refusal(f"not {i}") for i, fits in enumerate(in_fp8)]

        axes = narrow("paged_attention", probe, GATE_WORK)
        assert axes is not None
        assert axes.allows("caches")[0] == ("float8_e4m3fn", "float8_e4m3fn")
        assert narrow("paged_attention", accept(lambda _: False), GATE_WORK) is None

    @pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "nvfp4"])
    @pytest.mark.parametrize("reasons", [("plain", "page size"), ("no", "no")])
    def test_a_kernel_of_one_quantised_cache_is_found(
        self, name: str, reasons: tuple[str, str]
    ) -> None:
        def why(problem: Any) -> Refusal | None:  # noqa: ANN401  any problem
            if problem.q_dtype or problem.values_in_keys:
                return Refusal("not named", "feature")
            if problem.kv_cache == name and problem.page_size == 16 and problem.head_dim_qk == 128:
                return None
            return Refusal(reasons[problem.kv_cache == name])

        axes = narrow("paged_attention", lambda asked: list(map(why, asked)), GATE_WORK)
        assert axes is not None
        assert axes.allows("caches") == ((name, ""),)
        assert axes.allows("page_size") == (16,)

    def test_a_kernel_of_grouped_queries_alone_is_found(self) -> None:
        axes = narrow("paged_attention", accept(lambda problem: problem.group_size > 1), GATE_WORK)
        assert axes is not None
        assert axes.allows("group_size") == all_axes("paged_attention")["group_size"][1:]
        assert axes.allows("head_dims") == all_axes("paged_attention")["head_dims"]

    @pytest.mark.parametrize("code", OF_THE_MACHINE)
    def test_a_refusal_of_the_machine_is_asked_for_once(self, code: Any) -> None:  # noqa: ANN401
        asked: list[int] = []

        def probe(problems: Sequence[Problem]) -> list[Refusal | None]:
            asked.append(len(problems))
            return [Refusal("not here", code)] * len(problems)

        assert narrow("paged_attention", probe, GATE_WORK) is None
        assert len(asked) == 1

    def test_everything(self) -> None:
        for operation in OPERATIONS:
            axes = narrow(operation, accept(lambda _: True), 100)
            assert axes is not None
            assert axes.values == all_axes(operation)
            assert axes.refused == {}

    def test_axes_of_which_none_is_free(self) -> None:
        small = narrow(
            "merge_state",
            accept(lambda problem: problem.head_dim < 64),
            100,
            axes={"head_dim": (4, 16, 64)},
        )
        assert small is not None
        assert small.values == {"head_dim": (4, 16)}

    def test_nothing(self) -> None:
        for operation in OPERATIONS:
            assert narrow(operation, accept(lambda _: False), 100) is None

    def test_what_is_refused_is_not_drawn(self) -> None:
        def rule(problem: AttentionProblem) -> bool:
            return (
                problem.dtype == "bfloat16"
                and problem.kv_layout == "HND"
                and all(t == 1 for t in problem.query_lens)
                and problem.page_size in (16, 64)
                and problem.head_dim_qk == problem.head_dim_vo == 128
                and not problem.sinks
            )

        axes = narrow("paged_attention", accept(rule), GATE_WORK)
        assert axes is not None
        assert axes.allows("dtype") == ("bfloat16",)
        assert axes.allows("phase") == ("decode", "no_keys")
        assert axes.allows("page_size") == (16, 64)
        assert axes.allows("head_dims") == ((128, 128),)
        assert axes.allows("sinks") == (False,)
        assert axes.refused["sinks=True"] == "no"

        @settings(max_examples=60)
        @given(problems(axes))
        def check(problem: Problem) -> None:
            assert isinstance(problem, AttentionProblem)
            assert problem.dtype == "bfloat16"
            assert problem.kv_layout == "HND"
            assert problem.page_size in (16, 64)
            assert not problem.sinks

        check()

    def test_a_feature_that_only_goes_with_another_is_kept(self) -> None:
        axes = narrow("paged_attention", accept(lambda p: p.window_left < 0 or p.causal), GATE_WORK)
        assert axes is not None
        assert axes.allows("window_left") == all_axes("paged_attention")["window_left"]

    def test_the_example_of_a_format_of_four_bits_has_it(self) -> None:
        axes = all_axes("quantize")
        simplest = {name: values[0] for name, values in axes.items()}
        for format_, factor in itertools.product(axes["fp4"], axes["global_scale"]):
            chosen = {**simplest, "fp4": format_, "blocks": (1, 16, None), "global_scale": factor}
            problem = example("quantize", chosen)
            assert isinstance(problem, QuantizeProblem)
            assert (problem.codes == "e2m1") == bool(format_)
            assert has(problem, "scale_format", format_.split()[0] if format_ else "float32")
            assert has(problem, "global_scale", factor if format_ == "e4m3" else 1.0)

    @pytest.mark.parametrize("operation", OPERATIONS)
    def test_the_example_of_each_value_has_it(self, operation: str) -> None:
        axes = all_axes(operation)
        simplest = {name: values[0] for name, values in axes.items()}
        by_themselves = {name: axes[name] for name in axes if name not in OF_FOUR_BITS}
        for name, values in by_themselves.items():
            for value in values:
                problem = example(operation, {**simplest, name: value})
                if name == "phase":
                    assert isinstance(problem, AttentionProblem)
                    assert (problem.query_lens[0], problem.seq_lens[0]) == PHASES[value]
                elif name == "verify":
                    assert isinstance(problem, AttentionProblem)
                    assert problem.uniform_queries == (value >= 0)
                    assert problem.most_queries == (value or 1) or value == RAGGED
                elif name == "head_dims":
                    assert isinstance(problem, AttentionProblem)
                    for field, wanted in head_fields(value).items():
                        assert getattr(problem, field) == wanted
                elif name in SEVERAL:
                    assert tuple(getattr(problem, field) for field in FIELDS[name]) == value
                elif name in ("caches", "outputs", "blocks", "kinds"):
                    assert has(problem, name, value)
                elif name == "real":
                    assert operation in (*ATTENTION, "route", "moe")  # compared in test_real_values
                else:
                    assert getattr(problem, name) == value
        assert all(name in simplest for name in FREE if name in axes)

    def test_another_limit(self) -> None:
        axes = Axes("merge_state", all_axes("merge_state"), 100)
        assert resized(axes, 5).max_work == 5
        assert resized(axes, 5).values == axes.values


class _FailureError(Exception):
    """What Hypothesis shrinks on."""


def smallest(operation: str, rule: Callable[[Any], bool], seed: int = 0) -> Any:  # noqa: ANN401
    """Return the problem that a run would report if the law failed where the rule holds."""
    axes = Axes(operation, all_axes(operation), GATE_WORK)
    failing: list[Problem] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=3000, database=None, phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(variations(problems(axes), axes, 3))
    def law(drawn: list[Problem]) -> None:
        for problem in drawn:
            if rule(problem):
                failing.append(problem)
                raise _FailureError

    with pytest.raises(_FailureError):
        law()
    return failing[-1]


SIMPLEST = AttentionProblem()
SHRUNK: list[tuple[str, Callable[[AttentionProblem], bool], AttentionProblem]] = [
    ("anything", lambda _: True, SIMPLEST),
    ("a rest", lambda p: p.partial_last_page, replace(SIMPLEST, page_size=2)),
    ("a query", lambda p: not p.empty_batch, SIMPLEST),
    ("bfloat16", lambda p: p.dtype == "bfloat16", replace(SIMPLEST, dtype="bfloat16")),
    ("a window", lambda p: p.window_left >= 0, replace(SIMPLEST, window_left=0)),
    ("HND", lambda p: p.kv_layout == "HND", replace(SIMPLEST, kv_layout="HND")),
    ("a group", lambda p: p.group_size > 4, replace(SIMPLEST, group_size=5)),
    (
        "wide",
        lambda p: p.head_dim_qk > 128,
        replace(SIMPLEST, head_dim_qk=192, head_dim_vo=128),
    ),
    ("scattered", lambda p: p.page_order > 0, replace(SIMPLEST, page_order=1)),
    ("sinks", lambda p: p.sinks, replace(SIMPLEST, sinks=True)),
    ("strided", lambda p: p.strided_kv, replace(SIMPLEST, strided_kv=True)),
    ("a cap", lambda p: p.logits_soft_cap > 0, replace(SIMPLEST, logits_soft_cap=30.0)),
    ("a regime", lambda p: p.exact, replace(SIMPLEST, regime="exact_grid")),
    ("keys", lambda p: max(p.seq_lens, default=0) >= 20, replace(SIMPLEST, seq_lens=(20,))),
    ("no keys", lambda p: p.empty_requests, replace(SIMPLEST, seq_lens=(0,))),
    (
        "surplus",
        lambda p: p.rows_without_keys and all(p.seq_lens),
        replace(SIMPLEST, query_lens=(2,), seq_lens=(1,), causal=True),
    ),
    ("two", lambda p: len(p.seq_lens) > 1, replace(SIMPLEST, query_lens=(1, 1), seq_lens=(1, 1))),
    (
        "two features",
        lambda p: p.causal and p.strided_q and p.page_size > 8,
        replace(SIMPLEST, causal=True, strided_q=True, page_size=16),
    ),
]


@pytest.mark.parametrize(
    ("rule", "expected"), [each[1:] for each in SHRUNK], ids=[each[0] for each in SHRUNK]
)
def test_counterexamples_shrink_to_the_simplest(
    rule: Callable[[AttentionProblem], bool], expected: AttentionProblem
) -> None:
    # From some problems Hypothesis ends with more heads than needed: a run goes on by itself.
    found = (smallest("paged_attention", rule, seed) for seed in range(4))
    assert expected in (replace(each, seed=0) for each in found)


def test_merges_shrink() -> None:
    simplest = MergeProblem(head_dim=4, num_tokens=0)
    assert smallest("merge_state", lambda _: True) == simplest
    found = smallest("merge_state", lambda p: p.empty == "all" and p.num_tokens)
    assert found == replace(simplest, num_tokens=1, empty="all")
    assert smallest("merge_state", lambda p: p.num_states > 3).num_states == 4


def test_metadata_shrinks() -> None:
    assert smallest("build_metadata", lambda _: True) == MetadataProblem(steps=(((), ()),))
    found = smallest("build_metadata", lambda p: any(min(*q, *k, 1) for q, k in p.steps if q))
    assert found == MetadataProblem(steps=(((1,), (1,)),))
    grown = smallest("build_metadata", lambda p: len(p.steps) > 1)
    assert grown == MetadataProblem(steps=(((), ()), ((), ())))


def test_variations_change_the_regime_and_seed_alone() -> None:
    axes = Axes("paged_attention", all_axes("paged_attention"), GATE_WORK)
    base = problems(axes)

    @settings(max_examples=80)
    @given(variations(base, axes, 3))
    def check(drawn: list[Problem]) -> None:
        first = drawn[0]
        assert isinstance(first, AttentionProblem)
        assert 1 <= len(drawn) <= 4
        for i, other in enumerate(drawn[1:]):
            assert isinstance(other, AttentionProblem)
            assert replace(other, regime=first.regime, seed=first.seed) == first
            assert other.seed == first.seed + 1 + i

    check()


def test_no_request_has_more_tokens_than_a_problem_may_have() -> None:
    """Where there is work for any length, as in the nightly profile on a GPU."""
    small: dict[str, tuple[Any, ...]] = {
        "phase": ("surplus",), "head_dims": ((16, 16),), "num_kv_heads": (1,), "group_size": (1,),
    }  # fmt: skip
    work = on_device(PROFILES["nightly"], "cuda").max_work
    axes = Axes("paged_attention", {**all_axes("paged_attention"), **small}, work)
    longest = max(max(each.query_lens, default=0) for each in drawn_from(problems(axes), 300))
    assert MOST_KEYS - 100 < longest <= MOST_KEYS


def test_a_verify_on_a_gpu_has_keys_for_several_passes() -> None:
    small: dict[str, tuple[Any, ...]] = {
        "verify": (4, RAGGED), "head_dims": ((16, 16),), "num_kv_heads": (1,), "group_size": (1,),
    }  # fmt: skip
    work = on_device(PROFILES["gate"], "cuda").max_work
    axes = Axes("paged_attention", {**all_axes("paged_attention"), **small}, work)
    drawn = drawn_from(problems(axes), 100)
    assert MOST_VERIFIED // 2 < max(each.most_keys for each in drawn) <= MOST_VERIFIED
    assert not any(each.more_queries_than_keys for each in drawn)
    assert {each.uniform_queries for each in drawn if each.num_requests > 1} == {True, False}
    assert max(each.most_queries for each in drawn) == MOST_DRAFTS


def test_a_kernel_that_takes_equally_many_tokens_gets_decodes_and_verifies() -> None:
    axes = narrow("paged_attention", accept(lambda p: p.uniform_queries), GATE_WORK)
    assert axes is not None
    assert axes.allows("verify") == all_axes("paged_attention")["verify"][:-1]
    drawn = drawn_from(problems(axes), 100)
    assert sum(each.uniform_queries for each in drawn) > 80
    assert sum(each.most_queries > 1 for each in drawn) > 15


def test_a_kernel_of_decodes_gets_decodes() -> None:
    axes = narrow("paged_attention", accept(lambda p: p.most_queries <= 1), GATE_WORK)
    assert axes is not None
    assert axes.allows("verify") == (0,)
    assert "verify" not in axes.allows("phase")


def test_where_no_cache_fits_the_channels_one_in_the_dtype_of_queries_is_drawn() -> None:
    fields = {"caches": (("nvfp4", ""),), "head_dims": ((24, 40), (64, 64)), "real": (0,)}
    whole = Axes("paged_attention", all_axes("paged_attention"), GATE_WORK, {})
    drawn = drawn_from(problems(replace(whole, values={**whole.values, **fields})), 100)
    assert {(each.head_dim_qk, each.kv_cache) for each in drawn} == {(24, ""), (64, "nvfp4")}


def test_a_kernel_of_one_request_is_given_no_other_batch() -> None:
    axes = narrow("paged_attention", accept(lambda p: p.num_requests == 1), GATE_WORK)
    assert axes is not None
    assert axes.max_requests == 1
    drawn = drawn_from(problems(axes), 100)
    assert {problem.num_requests for problem in drawn} == {1}
    axes = narrow("paged_attention", accept(lambda p: p.num_requests != 1), GATE_WORK)
    assert axes is None or not axes.max_requests


def test_a_tree_has_no_spans_whatever_else_is_chosen() -> None:
    simplest = {name: values[0] for name, values in all_axes("paged_attention").items()}
    made = example("paged_attention", {**simplest, "tree": 1, "spans_in_window": True})
    assert isinstance(made, AttentionProblem)
    assert (made.tree, made.spans) == (1, "")


def test_trees_are_drawn_where_tokens_are_verified() -> None:
    axes = narrow("paged_attention", accept(lambda p: not p.custom_mask), GATE_WORK)
    assert axes is not None
    drawn = drawn_from(problems(axes), 300)
    trees = [each for each in drawn if each.tree]
    assert len(trees) > 20
