"""Narrowing finds kernels that take the heads and the cache of one model only."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.space.axes import narrow
from kernelproof.reference import AttentionProblem, Problem, RouteProblem


@pytest.mark.parametrize("kv_cache", ["", "float8_e4m3fn"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_kernel_of_one_shape_is_found(kv_cache: str, page_size: int) -> None:
    wanted = page_size, 16, 256, 256, kv_cache

    def probe(problems: Sequence[Problem]) -> list[Refusal | None]:
        found = []
        for each in problems:
            assert isinstance(each, AttentionProblem)
            shape = each.page_size, each.group_size, each.head_dim_qk, each.head_dim_vo
            found.append(None if (*shape, each.kv_cache) == wanted else Refusal("another shape"))
        return found

    axes = narrow("paged_attention", probe, 100_000)
    assert axes is not None
    assert axes.allows("group_size") == (16,)
    assert axes.allows("page_size") == (page_size,)
    assert {pair[0] for pair in axes.allows("caches")} == {kv_cache}


@pytest.mark.parametrize("wanted", [(256, 6, "deepseek_v4"), (64, 8, "sigmoid")])
def test_a_router_of_one_model_is_found(wanted: tuple[int, int, str]) -> None:
    def probe(problems: Sequence[Problem]) -> list[Refusal | None]:
        found = []
        for each in problems:
            assert isinstance(each, RouteProblem)
            model = each.num_experts, each.top_k, each.method
            found.append(None if model == wanted and not each.grouped else Refusal("another model"))
        return found

    axes = narrow("route", probe, 100_000)
    assert axes is not None
    names = "num_experts", "top_k", "method"
    assert tuple(axes.allows(name) for name in names) == tuple((each,) for each in wanted)
