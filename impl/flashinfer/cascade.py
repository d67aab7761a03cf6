"""FlashInfer's CUDA kernels around attention: merging of states, appending, shared prefixes."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...reference import Arithmetic, AttentionProblem, build_metadata
from ...reference.tensors.inputs import AppendInputs, MergeInputs, PagedAttentionInputs
from ..targets.refusal import first_reason
from ..targets.target import Target
from .backends import CUDA, FA2, FA3, MERGED_ABOVE, one_module
from .calls import attention_refusal, flashinfer, kv_heads_of, wrapper
from .claims import one_head_dim, two_states, unavailable
from .libraries import attention_library
from .triton import to_base_2, to_natural

Pair = tuple[torch.Tensor, torch.Tensor]


MERGING = replace(CUDA, compile_key=one_module("cascade"))


@MERGING.adapter("merge_state", "flashinfer-merge-state", two_states, unavailable)
def merge_state(inputs: MergeInputs) -> Pair:
    """Call ``merge_state``."""
    s = to_base_2(inputs.lses)
    out, lse = flashinfer().merge_state(inputs.states[0], s[0], inputs.states[1], s[1])
    return out, to_natural(lse)


@MERGING.adapter("merge_state", "flashinfer-merge-state-in-place", two_states, unavailable)
def merge_state_in_place(inputs: MergeInputs) -> Pair:
    """Call ``merge_state_in_place`` on copies of the first state."""
    s = to_base_2(inputs.lses)
    out, lse = inputs.states[0].clone(), s[0].clone()
    flashinfer().merge_state_in_place(out, lse, inputs.states[1], s[1])
    return out, to_natural(lse)


@MERGING.adapter(
    "merge_state",
    "flashinfer-merge-states",
    unavailable,
    arithmetic=Arithmetic(partial_outputs=True),
)
def merge_states(inputs: MergeInputs) -> Pair:
    """Call ``merge_states``, states on the second axis."""
    outs = inputs.outs.transpose(0, 1).contiguous()
    out, lse = flashinfer().merge_states(outs, to_base_2(inputs.lses.transpose(0, 1)))
    return out, to_natural(lse)


@CUDA.adapter(
    "append_paged_kv",
    "flashinfer-append",
    one_head_dim("append_paged_kv_cache has one head_dim"),
    unavailable,
    compile_key=one_module("page"),
)
def append(inputs: AppendInputs) -> Pair:
    """Call ``append_paged_kv_cache`` with positions of ``get_batch_indices_positions``."""
    metadata = inputs.metadata
    caches = inputs.k_cache, inputs.v_cache
    if not inputs.in_place:
        caches = inputs.k_cache.clone(), inputs.v_cache.clone()
    requests, positions = flashinfer().get_batch_indices_positions(
        append_indptr=metadata.qo_indptr, seq_lens=metadata.seq_lens, nnz=inputs.k.shape[0]
    )
    flashinfer().append_paged_kv_cache(
        append_key=inputs.k,
        append_value=inputs.v,
        batch_indices=requests,
        positions=positions,
        paged_kv_cache=caches,
        kv_indices=metadata.paged_kv_indices,
        kv_indptr=metadata.paged_kv_indptr,
        kv_last_page_len=metadata.paged_kv_last_page_len,
        kv_layout=inputs.kv_layout,
    )
    return caches


def _no_cascade(problem: AttentionProblem, _: Target) -> str | None:
    scaled = (problem.k_scale, problem.v_scale) != (1, 1)
    return first_reason(
        (
            problem.kv_cache or scaled or problem.custom_mask,
            "a cascade takes no scales and no mask",
        ),
        (problem.head_dim_qk != problem.head_dim_vo, "a cascade has one head_dim"),
        (problem.sinks, "a cascade has no sinks"),
        (problem.window_left >= 0, "a window over a cascade is of each level by itself"),
    )


@FA2.adapter(
    "paged_attention",
    "flashinfer-cascade",
    _no_cascade,
    attention_refusal,
    features=(),
    library=attention_library("batch_prefill", "auto"),  # FA3's on SM90
    runs=("BatchPrefillWithPagedKVCacheKernel", "PrefillWithKVCacheKernel"),
    build_minutes=FA3.build_minutes,
    arithmetic=replace(FA3.arithmetic, partial_outputs=True, merged_outputs=MERGED_ABOVE),
    wide_arithmetic=(),
    split=0,
)
def cascade(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, None]:
    """Attend to a shared prefix once for all by ``MultiLevelCascadeAttentionWrapper``; no LSE.

    Where there is none, the cascade has one level.
    """
    size, device = inputs.metadata.page_size, inputs.q.device
    query_lens, seq_lens = inputs.metadata.qo_indptr.diff(), inputs.metadata.seq_lens
    table = inputs.block_table
    shared = _shared_pages(table, max(int((seq_lens - query_lens).min()), 0) // size)
    prefix = build_metadata([inputs.q.shape[0]], [shared * size], table[:1], size).to(device)
    own = build_metadata(query_lens, seq_lens - shared * size, table[:, shared:], size).to(device)
    levels = (prefix, own) if shared else (own,)
    planned = wrapper(
        "MultiLevelCascadeAttentionWrapper",
        device,
        num_levels=len(levels),
        kv_layout=inputs.kv_layout,
    )
    planned.plan(
        qo_indptr_arr=[level.qo_indptr for level in levels],
        paged_kv_indptr_arr=[level.paged_kv_indptr for level in levels],
        paged_kv_indices_arr=[level.paged_kv_indices for level in levels],
        paged_kv_last_page_len=[level.paged_kv_last_page_len for level in levels],
        num_qo_heads=inputs.q.shape[1],
        num_kv_heads=kv_heads_of(inputs),
        head_dim=inputs.q.shape[-1],
        page_size=size,
        causal=inputs.causal,
        sm_scale=inputs.sm_scale,
        logits_soft_cap=inputs.logits_soft_cap,
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.k_cache.dtype,
    )
    return planned.run(inputs.q, (inputs.k_cache, inputs.v_cache)), None


def _shared_pages(table: torch.Tensor, most: int) -> int:
    """Count the leading pages that all requests share, of those before any query."""
    alike = (table[:, :most] == table[:1, :most]).all(dim=0)
    return int(alike.int().cumprod(dim=0).sum())
