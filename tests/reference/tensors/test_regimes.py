"""What the value regimes promise of the tensors that they make."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kernelproof.properties.space.axes import Axes, all_axes
from kernelproof.properties.space.rounds import problems
from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    MergeProblem,
    Problem,
    materialise,
    oracle,
)
from kernelproof.reference.problems import EXACT_RANKS
from kernelproof.reference.problems.base import DTYPES
from kernelproof.reference.tensors.inputs import MergeInputs, RaggedAttentionInputs
from kernelproof.reference.tensors.regimes import EDGES, attention_values
from kernelproof.reference.tensors.values import (
    bell,
    bits,
    choose,
    integers,
    mix,
    mix_int,
    stream,
)

CPU = torch.device("cpu")
DOMINANT = "dominant_key"
RAGGED = AttentionProblem(
    "ragged_attention",
    query_lens=(3,),
    seq_lens=(40,),
    head_dim_qk=64,
    head_dim_vo=32,
    num_kv_heads=2,
    group_size=2,
)


def ragged(problem: AttentionProblem) -> RaggedAttentionInputs:
    inputs = materialise(problem)
    assert isinstance(inputs, RaggedAttentionInputs)
    return inputs


def raw_logits(problem: AttentionProblem) -> torch.Tensor:
    """Return q k^T of the only request, [tokens, heads, keys]."""
    inputs = ragged(problem)
    k = inputs.k.double().repeat_interleave(problem.group_size, dim=1)
    return torch.einsum("thd,shd->ths", inputs.q.double(), k)


def probabilities(problem: AttentionProblem) -> torch.Tensor:
    return torch.softmax(raw_logits(problem) * problem.scale, dim=-1)


class TestHash:
    def test_tensors_and_integers_are_mixed_alike(self) -> None:
        numbers = [0, 1, 2, 3, 1000, 2**31, 2**32 - 1]
        mixed = mix(torch.tensor(numbers).to(torch.int32))
        assert [n % 2**32 for n in mixed.tolist()] == [mix_int(n) for n in numbers]

    def test_streams_differ_by_seed_and_tag(self) -> None:
        keys = {stream(seed, tag) for seed in (0, 1, 2**32, 2**40) for tag in ("q", "k", "v")}
        assert len(keys) == 12
        assert all(0 <= key < 2**32 for key in keys)

    def test_bits_are_a_function_of_row_and_column_alone(self) -> None:
        whole = bits(5, torch.arange(9), 7)
        assert torch.equal(bits(5, torch.tensor([8, 3]), 4), whole[[8, 3], :4])
        assert bool(((whole >= 0) & (whole < 2**32)).all())

    def test_bell_looks_normal_and_uses_all_bits_of_a_float32(self) -> None:
        values = bell(stream(0, "q"), torch.arange(200), 200).double()
        assert abs(values.mean()) < 0.02
        assert abs(values.std() - 1.15) < 0.02
        assert values.abs().max() < 4
        assert bool((values * 2**21 == (values * 2**21).round()).all())
        assert (values.bfloat16() == values).double().mean() < 0.05

    def test_choices_and_integers_stay_in_range_and_reach_its_ends(self) -> None:
        assert {choose(seed, "edge", 0, 3) for seed in range(50)} == {0, 1, 2}
        values = integers(1, torch.arange(50), 50, -3, 4)
        assert set(values.flatten().tolist()) == set(range(-3, 5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_the_dominant_key_dominates(seed: int, dtype: str) -> None:
    problem = replace(RAGGED, regime=DOMINANT, seed=seed, dtype=dtype)
    weights = probabilities(problem)
    edge = EDGES[choose(seed, "dominant", 0, len(EDGES))]
    assert (weights.argmax(dim=-1) == min(edge, 39)).all()
    assert weights.max(dim=-1).values.mean() > 0.98
    without = raw_logits(replace(problem, regime="iid")) * problem.scale
    assert torch.softmax(without, dim=-1).max(dim=-1).values.mean() < 0.5


def test_dominant_keys_stand_at_every_edge_and_at_the_last_key() -> None:
    found = set()
    for seed in range(150):
        problem = replace(
            RAGGED,
            query_lens=(1,),
            seq_lens=(300,),
            head_dim_qk=4,
            head_dim_vo=1,
            num_kv_heads=1,
            group_size=1,
            seed=seed,
            regime=DOMINANT,
        )
        values = attention_values(problem, CPU)
        found.add(int(values.k[:, 0, 0].argmax()))
    assert found == {*(edge for edge in EDGES if edge < 300), 299}


def test_every_request_has_its_dominant_key() -> None:
    problem = AttentionProblem(query_lens=(1, 1, 1), seq_lens=(1, 3, 9), regime=DOMINANT)
    marked = attention_values(problem, CPU).k[:, 0, 0] > 0
    assert [int(part.sum()) for part in marked.split([1, 3, 9])] == [1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(16, 16), (80, 80), (512, 512)])
def test_shifted_logits_lie_beyond_minus_infinity_stand_ins(
    dims: tuple[int, int], dtype: str
) -> None:
    signs = set()
    for seed in range(8):
        problem = replace(
            RAGGED,
            regime="shifted_logits",
            seed=seed,
            dtype=dtype,
            head_dim_qk=dims[0],
            head_dim_vo=dims[1],
        )
        raw = raw_logits(problem)
        assert raw.abs().min() > 1e5
        signs.add(float(raw.flatten()[0].sign()))
        assert bool((raw.sign() == raw.flatten()[0].sign()).all())
        spread = raw.max() - raw.min()
        assert 1 < spread < 1e3  # one constant for all keys: softmax does not see it
    assert signs == {-1.0, 1.0}


def test_position_coded_values_tell_positions_and_heads_apart() -> None:
    problem = replace(RAGGED, seq_lens=(200,), head_dim_vo=16, regime="position_coded")
    v = ragged(problem).v
    assert len(torch.unique(v.flatten(0, 1), dim=0)) == 200 * problem.num_kv_heads
    assert probabilities(problem).max() < 0.05  # attention is spread over all of them


def test_one_channel_each_is_an_outlier() -> None:
    problem = replace(RAGGED, query_lens=(40,), regime="outlier_channels")
    inputs = ragged(problem)
    for tensor in (inputs.q, inputs.k, inputs.v):
        loud = (tensor.abs().mean(dim=(0, 1)) > 10).nonzero().flatten()
        assert loud.numel() == 1


EXACT_AXES = {**all_axes("paged_attention"), "regime": ("exact_grid",),
              "logits_soft_cap": (0.0,), "v_scale": (1.0, 0.5, 2.0)}  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    problems(Axes("paged_attention", EXACT_AXES, 60_000)),
    st.sampled_from([None, 1.0, 0.25, 0.05]),
)
def test_the_exact_grid_gives_exactly_representable_results(
    problem: Problem, sm_scale: float | None
) -> None:
    assert isinstance(problem, AttentionProblem)
    problem = replace(problem, sm_scale=sm_scale)
    assume(problem.exact)  # a quantised cache may have too few channels for the digits
    inputs = materialise(problem)
    assert not isinstance(inputs, MergeInputs)
    out = oracle.attention(inputs).out  # type: ignore[arg-type]
    # Whatever weight the other keys have in float64 is far below float32's smallest number.
    rounded = out.to(torch.float32)
    assert torch.equal(rounded.double().to(getattr(torch, problem.dtype)).float(), rounded)
    assert (out - rounded.double()).abs().max().item() < 1e-45 if out.numel() else True
    # Each row is a row of V times its scale, or nothing.
    quarter = 0.25 * problem.v_scale * (0.5 if problem.per_head_scales else 1.0)
    quarter /= problem.output_divisor
    assert torch.equal(rounded / quarter, (rounded / quarter).round())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_head", [False, True])
def test_the_exact_grid_attends_to_one_key(dtype: str, per_head: bool) -> None:
    problem = AttentionProblem(
        query_lens=(4,),
        seq_lens=(700,),
        page_size=16,
        dtype=dtype,
        regime="exact_grid",
        num_kv_heads=3,
        per_head_scales=per_head,
        v_scale=0.5,
    )
    inputs = materialise(problem)
    bounded = oracle.bounded_attention(inputs, Arithmetic())  # type: ignore[arg-type]
    values = attention_values(problem, CPU)
    rank = values.k[:, 0, :2].double().sum(dim=-1)
    assert len(set(rank.tolist())) == 700  # all different, and so are their logits
    factors = 2.0 ** (torch.arange(3) % 3 - 1.0) if per_head else torch.ones(3)
    best = values.v[int(rank.argmax())].double() * 0.5 * factors[:, None]
    assert torch.equal(bounded.expected.out, best.expand_as(bounded.expected.out))
    spacing = float(rank.sort().values.diff().min())
    q = float(values.q[0, 0, 0])
    assert spacing * q * problem.scale * (0.5 if per_head else 1.0) >= 128


def test_the_grid_ranks_all_positions_differently() -> None:
    problem = AttentionProblem(
        "ragged_attention",
        seq_lens=(EXACT_RANKS,),
        head_dim_qk=2,
        head_dim_vo=1,
        dtype="bfloat16",
        regime="exact_grid",
    )
    k = attention_values(problem, CPU).k[:, 0].double()
    assert sorted((k[:, 0] + k[:, 1]).tolist()) == list(range(EXACT_RANKS))


def merge(problem: MergeProblem) -> MergeInputs:
    inputs = materialise(problem)
    assert isinstance(inputs, MergeInputs)
    return inputs


EXACT_MERGES = {**all_axes("merge_state"), "regime": ("exact_grid",), "output_scale": (None,)}
"""A scale of the output divides it, so that it is no state: such a problem is not exact."""


@settings(max_examples=80)
@given(problems(Axes("merge_state", EXACT_MERGES, 5_000)))
def test_the_exact_merge_gives_one_of_the_states(problem: Problem) -> None:
    assert isinstance(problem, MergeProblem)
    assert problem.exact
    inputs = merge(problem)
    merged = oracle.bounded_merge(inputs, Arithmetic()).expected.out
    assert torch.equal(merged.to(inputs.out_dtype).double(), merged.float().double())
    best = inputs.lses.argmax(dim=0)
    chosen = inputs.outs.double().gather(
        0, best[None, :, :, None].expand(1, *best.shape, problem.head_dim)
    )[0]
    seen = inputs.lses.max(dim=0).values.isfinite()
    assert torch.equal(merged.float()[seen], chosen.float()[seen])


def test_empty_states_are_nothing_and_minus_infinity() -> None:
    shape = {"num_states": 4, "num_tokens": 8, "num_heads": 4}
    for empty, low, high in (("none", 0, 0), ("some", 10, 60), ("all", 128, 128), ("one", 32, 32)):
        inputs = merge(MergeProblem(**shape, empty=empty))  # type: ignore[arg-type]
        gone = inputs.lses.isneginf()
        assert low <= int(gone.sum()) <= high
        assert not inputs.outs[gone].any()
        assert inputs.outs[~gone].any(dim=-1).all()
        if empty == "one":
            assert int(gone.sum(dim=0).max()) == 1


def test_merge_regimes() -> None:
    shifted = merge(MergeProblem(num_states=3, num_tokens=4, regime="shifted"))
    assert bool((shifted.lses < -1e5).all())
    dominant = merge(MergeProblem(num_states=3, num_tokens=64, regime="dominant_state"))
    weights = torch.softmax(dominant.lses.double(), dim=0)
    assert weights.mean(dim=(1, 2)).max() > 0.98
