"""Problems have rows of what models have: as often as families have them, on affordable heads."""

from __future__ import annotations

from dataclasses import replace

from kernelproof.properties.space.axes import Axes, all_axes, example
from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.space.real_drawing import fitting, many_values, wide_problems
from kernelproof.properties.space.real_values import MANY, fields_of_row, rows_of
from kernelproof.properties.space.restrictions import Only
from kernelproof.properties.space.rounds import draw_problems
from kernelproof.reference import AttentionProblem

ROW = {"kind": "swa", "query_heads": "64", "kv_heads": "8", "head_dim_qk": "128",
       "head_dim_vo": "128", "window_left": "1023", "soft_cap": "50"}  # fmt: skip


def axes(operation: str = "paged_attention", **values: tuple[object, ...]) -> Axes:
    return Axes(operation, {**all_axes(operation), **values}, 400_000)


def drawn(space: Axes, most: int = 300) -> list[AttentionProblem]:
    found = draw_problems(space, PROFILES["gate"], 1, most)
    return [each for each in found if isinstance(each, AttentionProblem)]


def test_a_row_is_the_fields_of_a_problem() -> None:
    problem = AttentionProblem(**fields_of_row(ROW))
    assert (problem.num_kv_heads, problem.group_size, problem.causal) == (8, 8, True)
    assert (problem.window_left, problem.logits_soft_cap, problem.sm_scale) == (1023, 50.0, None)
    latent = {"kind": "mla", "query_heads": "128", "kv_heads": "1",
              "head_dim_qk": "576", "head_dim_vo": "512"}  # fmt: skip
    assert fields_of_row(latent)["values_in_keys"]
    assert fields_of_row(latent)["sm_scale"] == 192**-0.5


def test_each_row_has_an_example_of_its_own() -> None:
    for operation in ("paged_attention", "ragged_attention", "append_paged_kv"):
        simplest = {name: values[0] for name, values in all_axes(operation).items()}
        assert rows_of(operation)
        for number, real in enumerate(rows_of(operation), 1):
            problem = example(operation, {**simplest, "real": number})
            fields = real.problem_fields(operation)
            assert {name: getattr(problem, name) for name in fields} == fields
            assert problem.num_kv_heads == real.kv_heads[0]  # type: ignore[union-attr]


def test_the_table_has_what_is_asked_of_it() -> None:
    values = {
        (name, value)
        for real in rows_of("paged_attention")
        for name, value in real.values("paged_attention").items()
    }
    assert {("window_left", each) for each in (127, 511, 1023, 4095)} <= values
    assert {("page_size", each) for each in (528, 544)} <= values
    assert {("logits_soft_cap", 50.0), ("chunk", 8192), ("head_dims", (72, 72))} <= values


def test_some_problems_have_values_that_no_axis_lists() -> None:
    problems, usual = drawn(axes(), 600), drawn(axes(real=(0,)), 300)
    windows = [{each.window_left for each in some} for some in (problems, usual)]
    assert not windows[0] <= {*all_axes("paged_attention")["window_left"]}
    assert windows[1] <= {*all_axes("paged_attention")["window_left"]}


def test_rows_keep_to_what_may_be_drawn() -> None:
    for space in (
        axes(head_dims=((64, 64),)),
        axes(window_left=(15, 16)),
        axes(causal=(False,), sinks=(False,)),
        axes(page_size=(1, 2)),
        axes(logits_soft_cap=(0.0,)),
    ):
        for number in fitting(space):
            row = rows_of("paged_attention")[number - 1].values("paged_attention")
            for name, value in row.items():
                listed = all_axes("paged_attention")[name]
                assert value in space.allows(name) or value not in listed
    assert {
        rows_of("paged_attention")[n - 1].head_dims for n in fitting(axes(head_dims=((64, 64),)))
    } == {(64, 64)}
    assert not fitting(replace(axes(), edges=(64,)))
    assert not fitting(replace(axes(), max_work=100))


def test_only_leaves_the_rows_that_it_asks_for() -> None:
    only = Only.read(["window_left=1023", "head_dims=256x256,128x128"])
    rows = [rows_of("paged_attention")[n - 1] for n in only.axes("paged_attention")["real"] if n]
    assert rows
    assert {real.fields["window_left"] for real in rows} == {1023}
    assert {real.head_dims for real in rows} <= {(256, 256), (128, 128)}
    assert Only.read(["num_kv_heads=3"]).axes("paged_attention")["real"] == (0,)
    space = Axes("paged_attention", only.axes("paged_attention"), 400_000)
    assert all(only.meets(each) for each in drawn(space, 60))


def test_one_request_reaches_beyond_each_window_of_many_families() -> None:
    wide = wide_problems(axes())
    assert [(each.window_left, each.seq_lens) for each in wide] == [(4095, (4133,))]
    assert wide_problems(axes()) == wide
    assert not wide_problems(axes(phase=("prefill",)))
    assert not wide_problems(axes("append_paged_kv"))


def test_values_of_ten_families_are_asked_for() -> None:
    many = many_values(axes())
    assert {("head_dims", "(128, 128)"), ("window_left", "4095"), ("group_size", "4")} <= {*many}
    assert ("head_dims", "(72, 72)") not in many
    assert all(0 < share < 1 / 8 for share in many.values())
    families = {
        each
        for real in rows_of("paged_attention")
        if has_window(real.fields, 4095)
        for each in real.families
    }
    assert len(families) >= MANY


def has_window(fields: object, window: int) -> bool:
    assert isinstance(fields, dict)
    return bool(fields["window_left"] == window)
