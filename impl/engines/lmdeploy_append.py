"""lmdeploy's writing of new keys and values into a cache, ``fill_kv_cache``."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from ...reference import AttentionProblem
from ...reference.tensors.inputs import AppendInputs
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import Refusal
from ..targets.target import Target
from .claims import wrong_here
from .lmdeploy_calls import KERNELS, LEAST_PAGE, is_page, kernel, quantised, stubs
from .sources import load, unavailable

FILE = f"{KERNELS}.fill_kv_cache"


def _supports(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    if problem.empty_batch:
        return "engines make no call without a token"
    if not is_page(problem.page_size):
        return f"pages are powers of two from {LEAST_PAGE} keys on"
    if problem.most_queries == 1 and not problem.uniform_queries:
        return "where no request has two new tokens, each has one"
    return wrong_here(target, problem.kv_cache) or unavailable(FILE, target) or True


def _compile_key(problem: AttentionProblem) -> Hashable:
    return (
        problem.dtype, problem.kv_cache, problem.num_kv_heads, problem.head_dim_qk,
        problem.head_dim_vo, problem.page_size, problem.kv_layout, problem.strided_kv,
        problem.most_queries == 1,
    )  # fmt: skip


@kernel(
    "append_paged_kv", name="lmdeploy-fill-kv-cache", supports=_supports,
    features=("fp8_kv", "zero_point_kv"), compile_key=_compile_key,
)  # fmt: skip
def append(inputs: AppendInputs) -> tuple[torch.Tensor, ...]:
    """Write each request's new tokens behind its earlier keys."""
    k_cache, v_cache, *scales = (
        each if inputs.in_place else each.clone() for each in inputs.written
    )
    given = replace(
        inputs,
        k_cache=k_cache,
        v_cache=v_cache,
        kv_cache_sf=(scales[0], scales[1]) if scales else None,
    )
    paged, more = quantised(given, inputs.k)
    metadata = inputs.metadata
    queries = metadata.qo_indptr.diff()
    with load(FILE, stubs) as kernels, scalars_as_bounds(inputs.k):
        kernels.fill_kv_cache(
            k_states=inputs.k,
            v_states=inputs.v,
            k_caches=paged[0],
            v_caches=paged[1],
            q_start_loc=metadata.qo_indptr[:-1],
            q_seq_length=queries,
            kv_seq_length=metadata.seq_lens,
            max_q_seq_length=int(queries.max()),
            block_offsets=_table(inputs),
            **more,
        )
    return given.written


def _table(inputs: AppendInputs) -> torch.Tensor:
    """Return the pages of each request, [requests, pages] int32."""
    metadata = inputs.metadata
    counts = metadata.paged_kv_indptr.diff()
    table = metadata.paged_kv_indices.new_zeros(len(counts), int(counts.max()))
    kept = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    table[kept] = metadata.paged_kv_indices[: int(counts.sum())]
    return table
