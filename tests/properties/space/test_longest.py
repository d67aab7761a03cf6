"""The very long requests of a law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernelproof.properties.space.axes import Axes, all_axes
from kernelproof.properties.space.longest import (
    KEYS,
    MOST_FULL_CHOICES,
    full_batches,
    longest,
    of_hidden_tiles,
    of_one_sign,
)
from kernelproof.properties.space.profiles import GPU_WORK
from kernelproof.reference import AttentionProblem, materialise
from kernelproof.reference.problems import MAX_SEQ_LEN
from kernelproof.reference.tensors.inputs import AttentionInputs, RaggedAttentionInputs

GATE_WORK = 400_000


def _axes(operation: str) -> Axes:
    return Axes(operation, all_axes(operation), GATE_WORK)


@pytest.mark.parametrize("operation", ["paged_attention", "ragged_attention", "append_paged_kv"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_has_many_keys_on_few_heads_and_is_the_same_each_time(
    operation: str, device: str
) -> None:
    axes = _axes(operation)
    problems = longest(axes, device)
    assert problems == longest(axes, device)
    assert len(problems) == 2
    for problem in problems:
        assert KEYS[device] <= problem.most_keys <= MAX_SEQ_LEN
        assert problem.num_requests == problem.num_qo_heads == 1
        assert problem.most_queries <= 2
        assert problem.window_left == problem.window_right == -1
    plain, full = problems
    assert plain.most_keys % 64
    assert not plain.kv_cache
    assert (full.most_queries, full.most_keys, full.kv_cache) == (2, KEYS[device], "float8_e4m3fn")


def test_the_last_key_of_the_second_has_almost_all_weight() -> None:
    problem = longest(_axes("ragged_attention"))[1]
    inputs = materialise(replace(problem, kv_cache=""))
    assert isinstance(inputs, RaggedAttentionInputs)
    weights = torch.einsum("qhd,khd->hqk", inputs.q, inputs.k).mul(inputs.sm_scale).softmax(-1)
    assert weights[..., -1].min() > 0.9


@pytest.mark.parametrize("operation", ["paged_attention", "ragged_attention"])
def test_operands_of_one_sign_fill_whole_tiles_where_both_are_fp8(operation: str) -> None:
    axes = _axes(operation)
    problems = of_one_sign(axes)
    assert len(problems) == 2
    for problem in problems:
        assert problem.q_dtype == problem.kv_cache == "float8_e4m3fn"
        assert (problem.regime, problem.head_dim_qk >= 96, problem.most_keys) == (
            "one_sign",
            True,
            200,
        )
        inputs = materialise(problem)
        assert isinstance(inputs, AttentionInputs)
        assert inputs.q.float().min() >= 0
    for name, values in (("caches", (("", ""),)), ("regime", ("iid",)), ("head_dims", ((64, 64),))):
        assert not of_one_sign(replace(axes, values={**axes.values, name: values}))
    assert not of_one_sign(_axes("append_paged_kv"))


@pytest.mark.parametrize("operation", ["paged_attention", "ragged_attention"])
def test_long_masks_hide_a_leading_and_an_inner_tile_of_256_keys(operation: str) -> None:
    axes = _axes(operation)
    hidden = set()
    for problem in of_hidden_tiles(axes):
        inputs = materialise(problem)
        assert isinstance(inputs, AttentionInputs)
        assert inputs.custom_mask is not None
        seen = inputs.custom_mask.view(problem.num_tokens, -1).any(dim=0)
        assert len(seen) == problem.most_keys
        starts = range(0, len(seen) - 255, 256)
        hidden |= {(problem.mask_pattern, at > 0) for at in starts if not seen[at : at + 256].any()}
    assert hidden == {("leading_tile", False), ("inner_tile", True)}
    without = replace(axes, values={**axes.values, "custom_mask": (False,)})
    assert not of_hidden_tiles(without)
    assert not of_hidden_tiles(_axes("append_paged_kv"))


@pytest.mark.parametrize("operation", ["paged_attention", "ragged_attention"])
@pytest.mark.parametrize(
    ("phases", "whole"),
    [(("decode",), False), (("chunk", "prefill"), False), (("prefill",), True)],
    ids=["decodes", "chunks", "prefills"],
)
def test_a_gpu_has_batches_that_fill_it(
    operation: str, phases: tuple[str, ...], whole: bool
) -> None:
    axes = _axes(operation)
    axes = replace(axes, values={**axes.values, "phase": phases, "verify": (0,)})
    long, short = (choices[0] for choices in full_batches(axes).values())
    assert (long.num_requests, short.num_requests) == (64, 512)
    assert min(long.seq_lens) > max(short.seq_lens)
    for problem in (long, short):
        assert problem.num_kv_heads == 4
        assert len(set(problem.seq_lens)) > 10
        assert (problem.query_lens == problem.seq_lens) == whole
        assert problem.work <= GPU_WORK * GATE_WORK  # as much as one that is drawn
    for choices in full_batches(replace(axes, restrictions=({"num_kv_heads": (2,)},))).values():
        heads = {problem.num_kv_heads for problem in choices if not problem.values_in_keys}
        assert heads == {2}
    assert not any(full_batches(replace(axes, max_requests=1)).values())
    assert not full_batches(replace(axes, operation="append_paged_kv"))


@pytest.mark.parametrize(
    "takes",
    [
        lambda problem: len(set(problem.seq_lens)) == 1,
        lambda problem: problem.query_lens == problem.seq_lens,
        lambda problem: problem.dtype == "bfloat16" and problem.num_kv_heads == 4,
        lambda problem: problem.causal,
        lambda problem: problem.page_size == 1 and problem.dtype == "float32",
        lambda problem: problem.num_kv_heads == 1,
        lambda problem: problem.head_dim_qk == 128,
        lambda problem: problem.kv_layout == "HND",
        lambda problem: problem.group_size == 8,
        lambda problem: problem.custom_mask,
    ],
    ids=["equal", "whole", "bfloat16", "causal", "single", "head", "wide", "HND", "group", "mask"],
)
def test_what_refuses_the_plainest_full_batch_has_other_choices(
    takes: Callable[[AttentionProblem], bool],
) -> None:
    axes = _axes("paged_attention")
    for choices in full_batches(axes).values():
        assert not takes(choices[0])
        assert any(map(takes, choices))
        assert len(choices) == len(set(choices)) <= MOST_FULL_CHOICES


def test_other_modules_have_full_batches_of_their_own() -> None:
    axes = _axes("paged_attention")
    parts = tuple({"dtype": (dtype,)} for dtype in ("float16", "bfloat16"))
    for choices in full_batches(replace(axes, restrictions=parts)).values():
        assert {problem.dtype for problem in choices} == {"float16", "bfloat16"}


def test_a_kernel_of_prefills_only_has_none() -> None:
    axes = _axes("ragged_attention")
    prefills = replace(axes, values={**axes.values, "phase": ("prefill",), "verify": (0,)})
    assert not longest(prefills)


def test_a_built_module_has_one_of_its_own_values() -> None:
    axes = _axes("paged_attention")
    part = {"head_dims": ((128, 128),), "dtype": ("bfloat16",), "window_left": (127,)}
    for problem in longest(replace(axes, restrictions=(part,))):
        found = (problem.head_dim_qk, problem.dtype, problem.window_left)
        assert found == (128, "bfloat16", 127)
