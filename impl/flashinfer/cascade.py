"""FlashInfer's CUDA kernels around attention: merging of states, appending, shared prefixes."""

from __future__ import annotations

import torch

from ...reference import Arithmetic, AttentionProblem, MergeProblem, Problem, build_metadata
from ...reference.tensors.inputs import AppendInputs, MergeInputs, PagedAttentionInputs
from ..protocol import implementation
from ..targets.target import Target
from .calls import (
    AUTO,
    BUILD_MINUTES,
    attention_refusal,
    flashinfer,
    kv_heads_of,
    module_key,
    unavailable,
    wrapper,
)
from .triton import to_base_2, to_natural

Pair = tuple[torch.Tensor, torch.Tensor]


def _two_states(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, MergeProblem) and problem.num_states != 2:  # noqa: PLR2004
        return f"merge_state merges 2 states, not {problem.num_states}"
    return unavailable(target) or True


def _any_states(problem: Problem, target: Target) -> bool | str:
    del problem
    return unavailable(target) or True


@implementation(
    "merge_state",
    name="flashinfer-merge-state",
    backend="cuda",
    supports=_two_states,
    compile_key=lambda _: "cascade",
)
def merge_state(inputs: MergeInputs) -> Pair:
    """Call ``merge_state``."""
    s = to_base_2(inputs.lses)
    out, lse = flashinfer().merge_state(inputs.outs[0], s[0], inputs.outs[1], s[1])
    return out, to_natural(lse)


@implementation(
    "merge_state",
    name="flashinfer-merge-state-in-place",
    backend="cuda",
    supports=_two_states,
    compile_key=lambda _: "cascade",
)
def merge_state_in_place(inputs: MergeInputs) -> Pair:
    """Call ``merge_state_in_place`` on copies of the first state."""
    s = to_base_2(inputs.lses)
    out, lse = inputs.outs[0].clone(), s[0].clone()
    flashinfer().merge_state_in_place(out, lse, inputs.outs[1], s[1])
    return out, to_natural(lse)


@implementation(
    "merge_state",
    name="flashinfer-merge-states",
    backend="cuda",
    supports=_any_states,
    arithmetic=Arithmetic(partial_outputs=True),
    compile_key=lambda _: "cascade",
)
def merge_states(inputs: MergeInputs) -> Pair:
    """Call ``merge_states``, states on the second axis."""
    outs = inputs.outs.transpose(0, 1).contiguous()
    out, lse = flashinfer().merge_states(outs, to_base_2(inputs.lses.transpose(0, 1)))
    return out, to_natural(lse)


def _appends(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, AttentionProblem) and problem.head_dim_qk != problem.head_dim_vo:
        return "append_paged_kv_cache has one head_dim"
    return unavailable(target) or True


@implementation(
    "append_paged_kv",
    name="flashinfer-append",
    backend="cuda",
    supports=_appends,
    compile_key=lambda _: "page",
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


def _cascade(problem: Problem, target: Target) -> bool | str:
    if isinstance(problem, AttentionProblem):
        if problem.kv_cache or (problem.k_scale, problem.v_scale) != (1, 1) or problem.custom_mask:
            return "a cascade takes no scales and no mask"
        if problem.head_dim_qk != problem.head_dim_vo:
            return "a cascade has one head_dim"
        if problem.sinks:
            return "a cascade has no sinks"
        if problem.window_left >= 0:
            return "a window over a cascade is of each level by itself"
    return attention_refusal(problem, target) or True


@implementation(
    "paged_attention",
    name="flashinfer-cascade",
    backend="fa2",
    supports=_cascade,
    arithmetic=AUTO,
    compile_key=module_key,
    build_ahead=True,
    build_minutes=BUILD_MINUTES["fa2"],
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
