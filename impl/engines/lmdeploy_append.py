"""lmdeploy's writing of new keys and values into a cache, ``fill_kv_cache``."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ...reference import AttentionProblem
from ...reference.tensors.inputs import AppendInputs
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import Refusal
from ..targets.target import Target
from .claims import by_slots, wrong_here
from .lmdeploy_calls import KERNELS, LEAST_PAGE, POLICIES, is_page, kernel, stubs
from .sources import load, unavailable

FILE = f"{KERNELS}.fill_kv_cache"


def _supports(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    if problem.empty_batch:
        return "engines make no call without a token"
    if not is_page(problem.page_size):
        return f"pages are powers of two from {LEAST_PAGE} keys on"
    if problem.most_queries == 1 and not problem.uniform_queries:
        return "where no request has two new tokens, each has one"
    if target.device == "cpu" and problem.kv_cache:
        return Refusal("Triton's interpreter drops bits where it stores FP8", "device", "a GPU")
    return wrong_here(target, problem.dtype, problem.kv_cache) or unavailable(FILE, target) or True


def _compile_key(problem: AttentionProblem) -> Hashable:
    return (
        problem.dtype, problem.kv_cache, problem.num_kv_heads, problem.head_dim_qk,
        problem.head_dim_vo, problem.page_size, problem.kv_layout, problem.strided_kv,
        problem.most_queries == 1,
    )  # fmt: skip


@kernel(
    "append_paged_kv", name="lmdeploy-fill-kv-cache", supports=_supports, features=("fp8_kv",),
    compile_key=_compile_key,
)  # fmt: skip
def append(inputs: AppendInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Write each request's new tokens behind its earlier keys."""
    caches = inputs.k_cache, inputs.v_cache
    if not inputs.in_place:
        caches = inputs.k_cache.clone(), inputs.v_cache.clone()
    paged = [by_slots(each, inputs.kv_layout) for each in caches]
    metadata = inputs.metadata
    queries = metadata.qo_indptr.diff()
    more: dict[str, object] = {}
    if inputs.kv_format is not None:
        paged = [inputs.kv_format.view(each) for each in paged]
        more = {
            "k_scales_zeros": inputs.k.new_tensor([inputs.k_scale], dtype=torch.float32),
            "v_scales_zeros": inputs.k.new_tensor([inputs.v_scale], dtype=torch.float32),
            "quant_policy": POLICIES[paged[0].dtype],
        }
    with load(FILE, stubs) as kernels, scalars_as_bounds(inputs.k):
        kernels.fill_kv_cache(
            k_states=inputs.k, v_states=inputs.v, k_caches=paged[0], v_caches=paged[1],
            q_start_loc=metadata.qo_indptr[:-1], q_seq_length=queries,
            kv_seq_length=metadata.seq_lens, max_q_seq_length=int(queries.max()),
            block_offsets=_table(inputs), **more,
        )  # fmt: skip
    return caches


def _table(inputs: AppendInputs) -> torch.Tensor:
    """Return the pages of each request, [requests, pages] int32."""
    metadata = inputs.metadata
    counts = metadata.paged_kv_indptr.diff()
    table = metadata.paged_kv_indices.new_zeros(len(counts), int(counts.max()))
    kept = torch.arange(table.shape[1], device=table.device) < counts[:, None]
    table[kept] = metadata.paged_kv_indices[: int(counts.sum())]
    return table
