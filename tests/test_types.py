"""What type checkers make of code that uses the package: `make types` runs mypy and pyright on it.

Each ignored error must be one, and nothing else may be: both checkers report comments that they
do not need.
"""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from typing_extensions import assert_type

from kernelproof.impl import (
    OPERATIONS,
    AttentionOutput,
    Implementation,
    MoEInputs,
    Operation,
    PagedAttentionInputs,
    Target,
    implementation,
)
from kernelproof.impl.gating import Feature, require
from kernelproof.reference import BatchMetadata, KVLayout, build_metadata, paged_attention


@implementation("paged_attention", name="mine")
def mine(inputs: PagedAttentionInputs) -> AttentionOutput:
    assert_type(inputs.q, torch.Tensor)
    assert_type(inputs.metadata, BatchMetadata)
    assert_type(inputs.kv_layout, KVLayout)
    assert_type(inputs.sinks, torch.Tensor | None)
    return paged_attention(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.metadata, kv_layout=inputs.kv_layout
    )


@implementation("moe", name="experts")
def experts(inputs: MoEInputs) -> torch.Tensor:
    return torch.zeros_like(inputs.topk_weights, dtype=inputs.out_dtype)


def test_what_a_decorator_makes() -> None:
    assert_type(mine, Implementation)
    assert mine.operation == "paged_attention"
    assert experts.name == "experts"


def test_operations_are_literals() -> None:
    assert get_args(Operation) == OPERATIONS
    with pytest.raises(ValueError, match="operation is 'attention'"):
        implementation("attention", name="mine")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_layouts_are_literals() -> None:
    metadata = build_metadata([1], [1], [[0]], 1)
    q, cache = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1, 1)
    found = paged_attention(q, cache, cache, metadata, kv_layout="HND")
    assert_type(found.lse, torch.Tensor)
    with pytest.raises(ValueError, match="kv_layout is 'hnd'"):
        paged_attention(q, cache, cache, metadata, kv_layout="hnd")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_a_chip_may_be_given_as_a_pair() -> None:
    target = Target(sm=(9, 0), flashinfer="0.7.2.post1", artifacts={"TRTLLM_GEN_FMHA": "55bba5592"})
    assert_type(target.sm, int | None)
    assert target == Target(90, "0.7.2.post1", None, [("TRTLLM_GEN_FMHA", "55bba5592")])
    decision = require(
        Feature("paged_attention", phase="mixed", head_dim_qk=128, kv_dtype="fp8", group_size=8),
        target,
    )
    assert_type(decision.feature.backend, str)
    with pytest.raises(ValueError, match="not a compute capability"):
        Target(sm=9.0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
