"""The one very long request of a law."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernelproof.properties.space.axes import Axes, all_axes
from kernelproof.properties.space.longest import KEYS, longest
from kernelproof.reference.problems import MAX_SEQ_LEN

GATE_WORK = 400_000


@pytest.mark.parametrize("operation", ["paged_attention", "ragged_attention", "append_paged_kv"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_has_many_keys_on_few_heads_and_is_the_same_each_time(
    operation: str, device: str
) -> None:
    axes = Axes(operation, all_axes(operation), GATE_WORK)
    problem = longest(axes, device)
    assert problem is not None
    assert problem == longest(axes, device)
    assert KEYS[device] < problem.most_keys <= MAX_SEQ_LEN
    assert problem.num_requests == problem.num_qo_heads == 1
    assert problem.most_queries <= 2
    assert problem.window_left == problem.window_right == -1


def test_a_kernel_of_prefills_only_has_none() -> None:
    axes = Axes("ragged_attention", all_axes("ragged_attention"), GATE_WORK)
    prefills = replace(axes, values={**axes.values, "phase": ("prefill",), "verify": (0,)})
    assert longest(prefills) is None


def test_a_built_module_has_one_of_its_own_values() -> None:
    axes = Axes("paged_attention", all_axes("paged_attention"), GATE_WORK)
    part = {"head_dims": ((128, 128),), "dtype": ("bfloat16",), "window_left": (127,)}
    problem = longest(replace(axes, restrictions=(part,)))
    assert problem is not None
    found = (problem.head_dim_qk, problem.dtype, problem.window_left)
    assert found == (128, "bfloat16", 127)
