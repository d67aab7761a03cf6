"""K and V as views of one allocation: the same values, and strides that are no dense tensor's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.reference import AttentionProblem, materialise
from kernelproof.reference.oracle import append, attention
from kernelproof.reference.problems import KV_VIEWS
from kernelproof.reference.tensors.kv_storage import ODD_STRIDE

PROBLEM = AttentionProblem(
    query_lens=(2, 1), seq_lens=(5, 3), num_kv_heads=2, page_size=4, head_dim_vo=24
)


@pytest.mark.parametrize("kv_views", KV_VIEWS[1:])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("operation", ["paged_attention", "ragged_attention", "append_paged_kv"])
def test_views_hold_the_same_values(operation: str, kv_layout: Any, kv_views: str) -> None:  # noqa: ANN401
    dense = replace(PROBLEM, operation=operation, kv_layout=kv_layout)
    of: Any = append if operation == "append_paged_kv" else attention
    first, second = (of(materialise(each)) for each in (dense, replace(dense, kv_views=kv_views)))
    assert all(map(torch.equal, first, second))


def strides(**changes: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:  # noqa: ANN401
    inputs: Any = materialise(replace(PROBLEM, head_dim_vo=16, **changes))
    return inputs.k_cache.stride(), inputs.v_cache.stride()


def test_each_view_makes_one_more_stride_no_dense_ones() -> None:
    # NHD [pages, 4, 2, 16]: dense strides are 128, 32, 16, 1.
    expected = {
        "row": (256, 64, 32, 1),
        "page": (256, 32, 16, 1),
        "slot": (256, 64, 16, 1),
        "head": (256, 64, 32, 1),
        "layers": (768, 32, 16, 1),
        "channels": (256, 64, 32, 2),
    }
    for name, stride in expected.items():
        assert strides(kv_views=name) == (stride, stride), name
    assert strides(kv_views="slot", kv_layout="HND") == ((256, 128, 32, 1),) * 2
    assert strides(kv_views="head", kv_layout="HND") == ((256, 128, 16, 1),) * 2


@pytest.mark.parametrize("kv_views", KV_VIEWS[1:])
def test_axes_of_size_1_have_any_stride(kv_views: str) -> None:
    k, v = strides(kv_views=kv_views, num_kv_heads=1, page_size=1)
    assert k[1:3] == v[1:3] == (ODD_STRIDE, ODD_STRIDE)


def test_old_cases_have_no_views() -> None:
    assert "kv_views" not in PROBLEM.to_json()
    with pytest.raises(ValueError, match="kv_views"):
        replace(PROBLEM, kv_views="sideways")
    with pytest.raises(ValueError, match="kv_views"):
        replace(
            PROBLEM,
            num_kv_heads=1,
            head_dim_qk=24,
            head_dim_vo=16,
            values_in_keys=True,
            kv_views="row",
        )
