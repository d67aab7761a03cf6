"""A part of the space of problems: ``--only FIELD=VALUE``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernelproof.impl import Target, find_implementation
from kernelproof.properties.space.attention_axes import HYBRID_PAGES
from kernelproof.properties.space.axes import Axes, narrow
from kernelproof.properties.space.restrictions import Only, OnlyError
from kernelproof.reference import AttentionProblem, MergeProblem, MoEProblem

Draw = Callable[[Axes, int], list[Any]]
H200 = Target(sm=90, flashinfer="0.7.2.post1", cuda="13.0", triton="3.6.0", device="cuda")
WINDOWS = ("q_dtype=float8_e4m3fn", "window_left=127,511", "head_dims=128x128")


def axes_of(name: str, *texts: str, without: tuple[str, ...] = ()) -> Axes | None:
    found = find_implementation(name)
    axes = Only.read(texts).axes(found.operation)
    return narrow(
        found.operation,
        lambda given: [found.refusal(each, H200, without_rules=without) for each in given],
        100_000_000,
        axes=axes,
    )


def test_what_is_drawn_has_the_values_alone_and_everything_else_is_free(drawn: Draw) -> None:
    axes = axes_of("flashinfer-prefill-fa3", *WINDOWS)
    assert axes is not None
    found = drawn(axes, 60)
    assert {(p.q_dtype, p.head_dim_qk, p.head_dim_vo) for p in found} == {
        ("float8_e4m3fn", 128, 128)
    }
    assert {p.window_left for p in found} == {127, 511}
    assert len({p.page_size for p in found}) > 3
    assert any(max(p.seq_lens, default=0) > 256 for p in found)


def test_a_part_that_is_refused_is_no_part_of_the_space(drawn: Draw) -> None:
    assert axes_of("flashinfer-prefill-fa2", "sinks=true") is None
    axes = axes_of("flashinfer-prefill-fa2", "sinks=true", without=("fa2-sinks-ignored",))
    assert axes is not None
    assert all(problem.sinks for problem in drawn(axes, 10))


def test_other_caches_leave_only_the_shapes_that_they_can_have() -> None:
    axes = Only.read(["kv_cache=nvfp4 interleaved"]).axes("paged_attention")
    assert axes["page_size"] == (4, 8, 16, 32, 64, 128, 256, *HYBRID_PAGES)
    assert axes["head_dims"] == ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512))


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["window_left=-1,511"], {"window_left": (-1, 511)}),
        (["window_left=127", "window_left=511"], {"window_left": (127, 511)}),
        (["causal=true"], {"causal": (True,)}),
        (["causal=True,False"], {"causal": (True, False)}),
        (["sm_scale=None"], {"sm_scale": (None,)}),
        (["sm_scale=none,2"], {"sm_scale": (None, 2.0)}),
        (["head_dims=160"], {"head_dims": ((160, 160),)}),
        (["head_dim_qk=192"], {"head_dim_qk": (192,)}),
        (["kv_cache=,float8_e5m2"], {"kv_cache": ("", "float8_e5m2")}),
        (["phase=decode", "num_kv_heads=12"], {"phase": ("decode",), "num_kv_heads": (12,)}),
        (["num_states=9"], {"num_states": (9,)}),
        (["regime=shifted"], {"regime": ("shifted",)}),
    ],
)
def test_what_may_be_asked_for(texts: list[str], found: dict[str, tuple[Any, ...]]) -> None:
    assert Only.read(texts).values == found


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["window_left"], "'window_left' is no FIELD=VALUE"),
        (["colour=red"], "'colour' is no field of a problem; there are activation, "),
        (["query_lens=three"], "query_lens=three is no length; give one number"),
        (["windo_lef"], "'windo_lef' is no FIELD=VALUE[,VALUE...]; did you mean window_left?"),
        (
            ["windo_lef=3"],
            "'windo_lef' is no field of a problem; did you mean window_left? there are ",
        ),
        (["causal=TRUE"], "did you mean true? there are false, true"),
        (["dtype=bf16"], "did you mean bfloat16? there are float32,"),
        (
            ["dtype=fp8_e4m3"],
            "did you mean codes=float8_e4m3fn or kv_cache=float8_e4m3fn or q_dtype=float8_e4m3fn? ",
        ),
        (["dtype=int4"], "dtype=int4 is no value of it; did you mean uint8? there are float32, "),
        (["page_size=0"], "page_size=0 is no value"),
        (["group_size=two"], "group_size=two is no value"),
        (["head_dim_vo=0"], "head_dim_vo=0 is no value of it; there are 16, 32, 40, "),
        (["hidden=0"], "hidden=0 is no value of it"),
        (["sizes=64"], "sizes=64 is no value of it"),
        (["hidden=24", "quantized=nvfp4"], "no weights of nvfp4 have the sizes 24x"),
        (["seed=3"], "seed of a problem follows from others, or from the seed; "),
        (["head_dims=1x2x3"], "head_dims=1x2x3 is no value"),
        (["q_dtype=float8_e4m3fn", "kv_cache="], "no problem of paged_attention has kv_cache="),
        (["kv_cache=nvfp4", "head_dims=24x40"], "no cache of nvfp4 has head_dims=24x40"),
    ],
)
def test_what_does_not_exist(texts: list[str], told: str) -> None:
    with pytest.raises(OnlyError) as error:
        Only.read(texts)
    assert told in str(error.value)


UNUSUAL = {
    "moe": ("hidden=2880", "inter=1408", "pad_to=48", "pad_states=true", "sizes=2880x720",
            "hidden=200 inter=56", "hidden=96 quantized=mxfp4,nvfp4"),
    "batched_moe": ("hidden=2880", "inter=200", "hidden=2880 inter=2880"),
    "route": ("scaling_factor=0.3", "num_experts=72"),
    "paged_attention": ("head_dim_qk=100", "head_dim_vo=72", "head_dim_qk=72 head_dim_vo=40",
                        "output_divisor=0.5"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "texts"), [(name, each) for name, those in UNUSUAL.items() for each in those]
)
def test_any_number_that_a_problem_can_have_is_drawn(
    operation: str, texts: str, drawn: Draw
) -> None:
    only = Only.read(texts.split())
    axes = narrow(
        operation, lambda given: [None] * len(given), 100_000_000, axes=only.axes(operation)
    )
    assert axes is not None
    found = drawn(axes, 20)
    assert len(found) >= 20
    assert all(only.meets(each) for each in found)


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        ("route", "num_groups=16"),
        ("route", "topk_groups=13"),
        ("route", "num_groups=5 topk_groups=3"),
        ("route", "jitter=0.2"),
        ("moe", "shared_weight=0.3"),
    ],
)
def test_numbers_of_a_rule_are_drawn_with_it(operation: str, text: str, drawn: Draw) -> None:
    only = Only.read(text.split())
    axes = narrow(
        operation, lambda given: [None] * len(given), 100_000_000, axes=only.axes(operation)
    )
    assert axes is not None
    assert any(only.meets(each) for each in drawn(axes, 40))


def test_an_operation_without_the_field_says_so() -> None:
    with pytest.raises(OnlyError, match="problems of merge_state have no window_left"):
        Only.read(["window_left=3"]).axes("merge_state")


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("head_dims=192x128", True),
        ("head_dims=128x128", False),
        ("head_dim_qk=192", True),
        ("head_dim_vo=64", False),
        ("window_left=127,511", True),
        ("q_dtype=", True),
        ("hidden=64", False),
    ],
)
def test_a_problem_that_meets_what_is_asked_for(text: str, met: bool) -> None:
    problem = AttentionProblem(head_dim_qk=192, head_dim_vo=128, window_left=127)
    only = Only.read([text])
    assert only.meets(problem) == met
    assert not Only({**only.values, "page_size": (problem.page_size + 1,)}).meets(problem)


def test_sizes_are_met_together_and_merges_have_none() -> None:
    only = Only.read(["sizes=64x32", "dtype=float32"])
    assert only.meets(MoEProblem(hidden=64, inter=32))
    assert not only.meets(MoEProblem(hidden=64, inter=64))
    assert not only.meets(MergeProblem())
    assert str(only) == "sizes=64x32 dtype=float32"
