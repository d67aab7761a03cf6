"""Finding implementations: built in, by entry point, or by MODULE:NAME."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..fixtures.suggestions import did_you_mean
from .targets.exceptions import sentence_of
from .targets.registrations import Registration, registrations

if TYPE_CHECKING:
    from .protocol import Implementation, Operation

NOT_OF_USERS = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
"""Folders of code that is not the user's: Kernelproof, Python, installed packages."""

SHIPPED = {
    "torch-sdpa-paged": "torch.sdpa:paged",
    "torch-sdpa-ragged": "torch.sdpa:ragged",
    "torch-sdpa-default": "torch.sdpa_backends:default",
    "torch-sdpa-math": "torch.sdpa_backends:math_backend",
    "torch-sdpa-flash": "torch.sdpa_backends:flash",
    "torch-sdpa-efficient": "torch.sdpa_backends:efficient",
    "torch-sdpa-cudnn": "torch.sdpa_backends:cudnn",
    "torch-flex-attention-paged": "torch.flex:paged",
    "torch-flex-attention": "torch.flex:ragged",
    "torch-varlen-attn": "torch.varlen:ragged",
    "flashinfer-triton-merge-state": "flashinfer.triton:merge_state",
    "flashinfer-triton-merge-states": "flashinfer.triton:merge_states",
    "flashinfer-triton-variable-length-merge-states": (
        "flashinfer.triton:variable_length_merge_states"
    ),
    "flashinfer-trace-paged-decode": "flashinfer.trace:paged_decode",
    "flashinfer-trace-paged-prefill": "flashinfer.trace:paged_prefill",
    "flashinfer-trace-ragged-prefill": "flashinfer.trace:ragged_prefill",
    "flashinfer-trace-merge-state": "flashinfer.trace:merge_state",
    "flashinfer-trace-merge-states": "flashinfer.trace:merge_states",
    "flashinfer-trace-append": "flashinfer.trace:append",
    "flashinfer-trace-trtllm-context": "flashinfer.trace:trtllm_context",
    "flashinfer-trace-trtllm-decode": "flashinfer.trace:trtllm_decode",
    "flashinfer-trace-xqa": "flashinfer.trace:xqa",
    "flashinfer-decode": "flashinfer.paged:cuda_core_decode",
    "flashinfer-decode-fa2": "flashinfer.paged:tensor_core_decode",
    "flashinfer-decode-fa2-fast-plan": "flashinfer.paged:fast_planned_decode",
    "flashinfer-decode-fa2-fixed-split": "flashinfer.paged:fixed_split_decode",
    "flashinfer-decode-fa2-unsplit": "flashinfer.paged:unsplit_decode",
    "flashinfer-prefill-fa2-uniform": "flashinfer.paged:uniform_prefill",
    "flashinfer-prefill-fa2-unsplit": "flashinfer.paged:unsplit_prefill",
    "flashinfer-prefill-fa2": "flashinfer.paged:prefill_fa2",
    "flashinfer-prefill-fa3": "flashinfer.paged:prefill_fa3",
    "flashinfer-mixed-fa2": "flashinfer.paged:mixed",
    "flashinfer-batch-attention": "flashinfer.paged:batch_attention",
    "flashinfer-nvfp4-dequantize": "flashinfer.paged:dequantised",
    "flashinfer-attention-sink-fa2": "flashinfer.paged:attention_sink",
    "flashinfer-ragged-fa2": "flashinfer.ragged:ragged_fa2",
    "flashinfer-ragged-fa3": "flashinfer.ragged:ragged_fa3",
    "flashinfer-single-prefill-fa2": "flashinfer.ragged:single_prefill",
    "flashinfer-single-decode": "flashinfer.ragged:single_decode",
    "flashinfer-decode-graph": "flashinfer.graphs:decode_graph",
    "flashinfer-decode-fa2-graph": "flashinfer.graphs:decode_fa2_graph",
    "flashinfer-decode-fa2-fast-plan-graph": "flashinfer.graphs:decode_fast_graph",
    "flashinfer-prefill-fa2-graph": "flashinfer.graphs:prefill_fa2_graph",
    "flashinfer-prefill-fa2-uniform-graph": "flashinfer.graphs:prefill_uniform_graph",
    "flashinfer-prefill-fa3-graph": "flashinfer.graphs:prefill_fa3_graph",
    "flashinfer-cascade": "flashinfer.cascade:cascade",
    "flashinfer-merge-state": "flashinfer.cascade:merge_state",
    "flashinfer-merge-state-in-place": "flashinfer.cascade:merge_state_in_place",
    "flashinfer-merge-states": "flashinfer.cascade:merge_states",
    "flashinfer-append": "flashinfer.cascade:append",
    "flashinfer-trtllm-decode": "flashinfer.trtllm:trtllm_decode",
    "flashinfer-trtllm-decode-auto": "flashinfer.trtllm:auto_decode",
    "flashinfer-trtllm-context": "flashinfer.trtllm:trtllm_context",
    "flashinfer-xqa-decode": "flashinfer.trtllm:xqa_decode",
    "flashinfer-xqa-ragged": "flashinfer.trtllm:xqa_ragged",
    "flashinfer-xqa-decode-fp8": "flashinfer.trtllm:xqa_decode_fp8",
    "flashinfer-mla-fa2": "flashinfer.mla:mla_fa2",
    "flashinfer-mla-fa3": "flashinfer.mla:mla_fa3",
    "flashinfer-mla-cutlass": "flashinfer.mla:mla_cutlass",
    "flashinfer-mla-trtllm": "flashinfer.mla:mla_trtllm",
    "flashinfer-mla-xqa": "flashinfer.mla:mla_xqa",
    "flashinfer-trace-route": "flashinfer.moe_trace:trace_route",
    "flashinfer-trace-fused-topk-deepseek": "flashinfer.moe_trace:trace_fused_topk_deepseek",
    "flashinfer-trace-cutlass-moe": "flashinfer.moe_trace:trace_cutlass",
    "flashinfer-trace-bf16-moe": "flashinfer.moe_trace:trace_bf16",
    "flashinfer-trace-fp8-block-moe": "flashinfer.moe_trace:trace_fp8_block",
    "flashinfer-trace-mxfp4-moe": "flashinfer.moe_trace:trace_mxfp4",
    "flashinfer-trace-nvfp4-moe": "flashinfer.moe_trace:trace_nvfp4",
    "flashinfer-triton-silu-and-mul": "flashinfer.moe_triton:silu_and_mul_moe",
    "flashinfer-cutlass-moe": "flashinfer.moe:cutlass_moe",
    "flashinfer-cutlass-moe-fp8-block": "flashinfer.moe:cutlass_moe_fp8_block",
    "flashinfer-trtllm-fp8-block-moe": "flashinfer.moe:trtllm_fp8_block",
    "flashinfer-cute-dsl-moe-bf16": "flashinfer.moe:cute_dsl_bf16",
    "flashinfer-group-gemm-moe": "flashinfer.group_gemm:group_gemm_moe",
    "flashinfer-fused-topk-deepseek": "flashinfer.routing:fused_topk_deepseek",
    "flashinfer-trtllm-gen-routing": "flashinfer.routing:trtllm_gen_routing",
    "flashinfer-rmsnorm-quant": "flashinfer.norms:rmsnorm_quant",
    "flashinfer-add-rmsnorm-quant": "flashinfer.norms:add_rmsnorm_quant",
    "flashinfer-add-rmsnorm-block-quant": "flashinfer.norms:add_rmsnorm_block_quant",
    "flashinfer-group-quant-8bit": "flashinfer.norms:group_8bit",
    "flashinfer-nvfp4-append": "flashinfer.norms:nvfp4_pages",
    "flashinfer-nvfp4-append-slots": "flashinfer.norms:nvfp4_slots",
    "flashinfer-rope-append": "flashinfer.rope:append",
    "flashinfer-mla-rope-quantize": "flashinfer.rope:mla",
    "flashinfer-top-k-route": "flashinfer.routing:top_k_route",
    "flashinfer-plan-decode": "flashinfer.planning:decode",
    "flashinfer-plan-fa2": "flashinfer.planning:fa2",
    "flashinfer-plan-fa3": "flashinfer.planning:fa3",
    "flashinfer-plan-mla": "flashinfer.planning:mla",
    "flashinfer-seq-lens": "flashinfer.preparation:seq_lens",
    "flashinfer-batch-indices-positions": "flashinfer.preparation:batch_indices_positions",
    "flashinfer-segment-packbits": "flashinfer.preparation:segment_packbits",
    "flashinfer-block-scale-interleave": "flashinfer.preparation:block_scales",
    "flashinfer-shuffle-matrix-a": "flashinfer.preparation:shuffled_rows",
    "flashinfer-shuffle-matrix-sf-a": "flashinfer.preparation:shuffled_scales",
    "flashinfer-interleave-moe-scales": "flashinfer.preparation:moe_scales",
    "flashinfer-interleave-moe-weights": "flashinfer.preparation:moe_weights",
    "torch-route": "torch.moe:route",
    "torch-moe": "torch.moe:experts",
    "torch-batched-moe": "torch.batched_moe:experts",
    "torch-slice-context-parallel": "torch.context_parallel:slice_context_parallel",
    "torch-map-slots": "torch.slots:map_slots",
    "torch-prepare-batch": "torch.preparation:prepare_batch",
    "torch-prepare-steps": "torch.steps:prepare_steps",
    "torch-quantize": "torch.quantize:quantize",
    "torch-norm-quantize": "torch.norm_quantize:norm_and_quantize",
    "torch-rearrange": "torch.rearrange:rearrange",
    "torch-rope-append": "torch.rope_append:rope_and_append",
    "reference-metadata": "torch.reference_metadata:build",
    "reference-plan": "torch.reference_plan:plan",
    "triton-attention": "triton.attention:paged",
    "triton-attention-split-kv": "triton.attention:split_kv",
    "triton-attention-graph": "triton.graphs:paged_graph",
    "triton-ragged-attention": "triton.attention:ragged",
    "triton-merge-state": "triton.merge:merge_state",
    "triton-append": "triton.append:append",
    "triton-metadata": "triton.metadata:build",
    "triton-route": "triton.route:route",
    "triton-moe": "triton.moe:experts",
    "triton-norm-quantize": "triton.norm_quantize:norm_and_quantize",
    "triton-rope-append": "triton.rope_append:rope_and_append",
    "triton-quantize": "triton.quantize:quantize",
    "vllm-unified-attention": "engines.vllm_attention:attend_2d",
    "vllm-unified-attention-3d": "engines.vllm_attention:attend_3d",
    "vllm-unified-attention-td": "engines.vllm_attention:attend_2d_td",
    "vllm-unified-attention-3d-td": "engines.vllm_attention:attend_3d_td",
    "vllm-unified-attention-diffkv": "engines.vllm_diffkv:attend_2d",
    "vllm-unified-attention-diffkv-3d": "engines.vllm_diffkv:attend_3d",
    "vllm-chunked-prefill-paged-decode": "engines.vllm_chunked:attend",
    "vllm-decode": "engines.vllm_decode:alone",
    "vllm-decode-grouped": "engines.vllm_decode:grouped",
    "vllm-prefill": "engines.vllm_chunked:prefill",
    "vllm-merge-attn-states": "engines.vllm_merge:merge",
    "vllm-reshape-and-cache-flash": "engines.vllm_append:append",
    "vllm-reshape-and-cache-per-token-head": "engines.vllm_append:append_tokens",
    "vllm-reshape-and-cache-int4": "engines.vllm_append:append_int4",
    "vllm-reshape-and-cache-diffkv": "engines.vllm_append:append_rows",
    "vllm-reshape-and-cache-head-major": "engines.vllm_append:append_head_major",
    "vllm-reshape-and-cache-interleaved": "engines.vllm_append:append_interleaved",
    "vllm-slot-mapping": "engines.metadata.vllm_slots:one_table",
    "vllm-slot-mappings": "engines.metadata.vllm_slots:groups",
    "vllm-group-quant-fp8": "engines.vllm_quantize:group_fp8",
    "vllm-token-quant-int8": "engines.vllm_quantize:token_int8",
    "vllm-quant-mxfp8": "engines.vllm_quantize:mxfp8",
    "vllm-q-kv-rmsnorm-quant": "engines.norm_quantize:query",
    "vllm-quant-mxfp4": "engines.fp4_quantize:mxfp4",
    "vllm-triton-kernels-mxfp4": "engines.fp4_quantize:downcast",
    "vllm-megamoe-nvfp4": "engines.fp4_quantize:staged",
    "vllm-group-quant-int8": "engines.vllm_quantize:group_int8",
    "vllm-static-quant-fp8": "engines.vllm_quantize:static_fp8",
    "vllm-fused-moe": "engines.vllm_moe:experts",
    "vllm-batched-moe": "engines.vllm_batched_moe:experts",
    "vllm-batched-moe-td": "engines.vllm_batched_moe:descriptors",
    "vllm-batched-moe-fp8": "engines.vllm_batched_moe:experts_fp8",
    "vllm-fused-moe-td": "engines.moe.vllm_formats:descriptors",
    "vllm-fused-moe-fp8": "engines.moe.vllm_formats:fp8",
    "vllm-fused-moe-fp8-swap-ab": "engines.moe.vllm_formats:fp8_swapped",
    "vllm-fused-moe-int8": "engines.moe.vllm_formats:int8",
    "vllm-fused-moe-wna16": "engines.moe.vllm_formats:in_groups",
    "vllm-dsv4-topk": "engines.moe.vllm_route:deepseek_v4",
    "vllm-musespark1x-routing": "engines.moe.vllm_route:muse",
    "vllm-positions": "engines.metadata.vllm_batches:positions",
    "vllm-expanded-rows": "engines.metadata.vllm_batches:expanded_rows",
    "vllm-token-to-request": "engines.metadata.vllm_batches:token_to_request",
    "vllm-token-seq-lens": "engines.metadata.vllm_batches:token_seq_lens",
    "vllm-local-seq-lens": "engines.metadata.vllm_batches:local_seq_lens",
    "vllm-page-indices": "engines.metadata.vllm_batches:page_indices",
    "vllm-block-table": "engines.metadata.vllm_batches:block_table",
    "vllm-rejected-tokens": "engines.metadata.vllm_drafts:rejected_tokens",
    "vllm-last-tokens": "engines.metadata.vllm_drafts:last_tokens",
    "vllm-draft-step": "engines.metadata.vllm_drafts:draft_step",
    "vllm-draft-step-graph": "engines.metadata.vllm_drafts:draft_step_graph",
    "vllm-expanded-drafts": "engines.metadata.vllm_drafts:expanded_drafts",
    "vllm-dflash-inputs": "engines.metadata.vllm_drafts:dflash_inputs",
    "vllm-sampled-and-rejected": "engines.metadata.vllm_drafts:sampled_and_rejected",
    "vllm-computed-tokens": "engines.metadata.vllm_drafts:computed_tokens",
    "vllm-input-ids": "engines.metadata.vllm_drafts:input_ids",
    "vllm-steps": "engines.metadata.vllm_steps:steps",
    "sglang-decode": "engines.sglang_decode:alone",
    "sglang-decode-grouped": "engines.sglang_decode:grouped",
    "sglang-extend": "engines.sglang_prefill:extend",
    "sglang-verify-splitkv": "engines.sglang_verify:verify",
    "sglang-verify-mla": "engines.sglang_verify:verify_grouped",
    "sglang-unified-attention-3d-mtp": "engines.sglang_verify:mtp",
    "sglang-prefill": "engines.sglang_prefill:prefill",
    "sglang-merge-state": "engines.sglang_merge:merge",
    "sglang-kv-indices": "engines.metadata.sglang_batches:kv_indices",
    "sglang-kv-indices-of-pages": "engines.metadata.sglang_batches:kv_indices_of_pages",
    "sglang-chunked-kv-indices": "engines.metadata.sglang_batches:chunked_kv_indices",
    "sglang-flashmla-kv-indices": "engines.metadata.sglang_batches:flashmla_kv_indices",
    "sglang-positions": "engines.metadata.sglang_batches:positions",
    "sglang-seqlens-expand": "engines.metadata.sglang_batches:token_seq_lens",
    "sglang-num-kv-splits": "engines.metadata.sglang_batches:num_kv_splits",
    "sglang-decode-metadata": "engines.metadata.sglang_batches:decode_metadata",
    "sglang-decode-metadata-zero-tail": "engines.metadata.sglang_batches:decode_metadata_zero_tail",
    "sglang-decode-metadata-swa": "engines.metadata.sglang_batches:decode_metadata_swa",
    "sglang-draft-extend-metadata-swa": "engines.metadata.sglang_batches:draft_extend_metadata_swa",
    "sglang-swa-spec-page-table": "engines.metadata.sglang_batches:swa_spec_page_table",
    "sglang-trtllm-page-table": "engines.metadata.sglang_batches:trtllm_page_table",
    "sglang-trtllm-graph-metadata": "engines.metadata.sglang_batches:trtllm_graph_metadata",
    "sglang-trtllm-graph-metadata-swa": "engines.metadata.sglang_batches:trtllm_graph_metadata_swa",
    "sglang-kv-read-table": "engines.metadata.sglang_batches:kv_read_table",
    "sglang-kv-read-table-zero-tail": "engines.metadata.sglang_batches:kv_read_table_zero_tail",
    "sglang-steps": "engines.metadata.sglang_steps:steps",
    "sglang-kv-read-stream": "engines.metadata.sglang_batches:kv_read_stream",
    "sglang-pad-draft-query": "engines.metadata.sglang_drafts:pad_draft_query",
    "sglang-unpad-draft-output": "engines.metadata.sglang_drafts:unpad_draft_output",
    "sglang-pad-sequence": "engines.metadata.sglang_drafts:pad_sequence",
    "sglang-bonus-tokens": "engines.metadata.sglang_drafts:bonus_tokens",
    "sglang-accepted-slots": "engines.metadata.sglang_drafts:accepted_slots",
    "sglang-verify-commit": "engines.metadata.sglang_drafts:verify_commit",
    "sglang-draft-extend-inputs": "engines.metadata.sglang_drafts:draft_extend_inputs",
    "sglang-extend-locs": "engines.metadata.sglang_drafts:extend_locs",
    "sglang-extend-locs-uniform": "engines.metadata.sglang_drafts:extend_locs_uniform",
    "sglang-build-tree": "engines.metadata.sglang_drafts:build_tree",
    "sglang-build-tree-full": "engines.metadata.sglang_drafts:build_tree_full",
    "sglang-reconstruct-tree": "engines.metadata.sglang_drafts:reconstruct_tree",
    "sglang-chain-tree": "engines.metadata.sglang_drafts:chain_tree",
    "sglang-pack-verify-mask": "engines.metadata.sglang_drafts:pack_verify_mask",
    "sglang-draft-locs": "engines.metadata.sglang_drafts:draft_locs",
    "sglang-draft-kv-indices": "engines.metadata.sglang_drafts:draft_kv_indices",
    "sglang-draft-kv-indices-of-pages": "engines.metadata.sglang_drafts:draft_kv_indices_of_pages",
    "sglang-draft-extend-metadata": "engines.metadata.sglang_batches:draft_extend_metadata",
    "sglang-dcp-kv-indices": "engines.metadata.sglang_ranks:kv_indices",
    "sglang-dcp-page-table": "engines.metadata.sglang_ranks:page_table",
    "sglang-dcp-page-table-virtual": "engines.metadata.sglang_ranks:virtual_page_table",
    "sglang-dcp-verify-indices": "engines.metadata.sglang_ranks:verify_indices",
    "sglang-dcp-gathered-indices": "engines.metadata.sglang_ranks:gathered_indices",
    "sglang-dcp-local-indices": "engines.metadata.sglang_ranks:local_indices",
    "sglang-dcp-packed-rows": "engines.metadata.sglang_ranks:packed_rows",
    "sglang-pa-page-table": "engines.metadata.sglang_ranks:windowed_table",
    "sglang-rmsnorm-fp8-e8m0": "engines.norm_quantize:blocks",
    "sglang-rmsnorm-mxfp8": "engines.norm_quantize:mxfp8",
    "sglang-rmsnorm-fp8-grid": "engines.norm_quantize:grid",
    "sglang-set-mla-kv-buffer": "engines.sglang_append:append_latents",
    "sglang-fused-qk-rope-cache": "engines.sglang_append:rope_cache",
    "sglang-group-quant-8bit": "engines.sglang_quantize:group_8bit",
    "sglang-static-quant-fp8": "engines.sglang_quantize:static_fp8",
    "sglang-fp8-quantize": "engines.sglang_quantize:cast",
    "sglang-act-quant": "engines.sglang_quantize:act",
    "sglang-token-quant-int8": "engines.sglang_quantize:token_int8",
    "sglang-quant-mxfp8": "engines.sglang_quantize:mxfp8",
    "sglang-quant-mxfp8-swizzled": "engines.sglang_quantize:swizzled_mxfp8",
    "sglang-quant-fp4-indexer": "engines.fp4_quantize:indexer",
    "sglang-quant-fp4-indexer-even": "engines.fp4_quantize:even_indexer",
    "sglang-group-quant-int8": "engines.sglang_quantize:group_int8",
    "sglang-tensor-quant-mla-fp8": "engines.sglang_quantize:tensor_fp8",
    "sglang-group-quant-mla-fp8": "engines.sglang_quantize:masked_fp8",
    "sglang-fused-moe": "engines.moe.sglang:experts",
    "sglang-fused-moe-fp8": "engines.moe.sglang:quantised",
    "sglang-fused-moe-tma": "engines.moe.sglang:described",
    "sglang-fused-moe-fp8-swap-ab": "engines.moe.sglang:swapped",
    "sglang-fused-moe-int8": "engines.moe.sglang:int8",
    "sglang-fused-moe-wna16": "engines.moe.sglang:in_groups",
    "sglang-moe-fused-gate": "engines.moe.sglang_route:gate",
    "sglang-gemma4-routing": "engines.moe.sglang_route:gemma4",
    "sglang-sigmoid-gate-topk-renorm": "engines.moe.sglang_route:inkling",
    "sglang-hash-topk": "engines.moe.sglang_route:hashed",
    "sglang-muse-spark-routing": "engines.moe.sglang_route:muse",
    "liger-fused-moe": "engines.moe.liger:experts",
    "lmdeploy-decode": "engines.lmdeploy:decode",
    "lmdeploy-prefill": "engines.lmdeploy:prefill",
    "lmdeploy-fill-kv-cache": "engines.lmdeploy:append",
    "lmdeploy-fused-moe": "engines.moe.lmdeploy:experts",
    "lmdeploy-fused-moe-compact": "engines.moe.lmdeploy:compact",
    "lmdeploy-fused-moe-fp8-block": "engines.moe.lmdeploy:blocked",
    "lmdeploy-fused-moe-w8a8": "engines.moe.lmdeploy:of_channels",
    "lmdeploy-noaux-tc": "engines.moe.lmdeploy:noaux",
    "lmdeploy-single-group-topk": "engines.moe.lmdeploy:single",
}
"""Module below ``kernelproof.impl`` and attribute of what Kernelproof ships, by name."""
BUILT_IN = {name: f"kernelproof.impl.{place}" for name, place in SHIPPED.items()}
"""Implementations that Kernelproof ships, by name."""


class ImplementationNotFoundError(LookupError):
    """No implementation goes by that name.

    Args:
        name: the name that was not found.
        why: what was tried.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.why = why


def installed_implementations() -> dict[str, str]:
    """Return the entry points of group ``kernelproof.implementations``: name to MODULE:NAME."""
    return {each.name: each.reference for each in installed() if not each.reason}


def installed() -> list[Registration]:
    """Return the entry points of all distributions, with the reasons why some are left out."""
    return registrations(BUILT_IN)


def registered() -> list[str]:
    """Return the names of all implementations that are built in or installed."""
    return list(dict.fromkeys([*BUILT_IN, *installed_implementations()]))


def resolve_name(name: str) -> str:
    """Turn a built-in or entry-point name into MODULE:NAME; leave MODULE:NAME as it is.

    Raises:
        ImplementationNotFoundError: it is neither.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    installed = installed_implementations()
    if name in installed:
        return installed[name]
    if ":" in name:
        return name
    meant = did_you_mean(name, {**BUILT_IN, **installed})
    known = f"{meant}`kernelproof list` names them all"
    why = f"no MODULE:NAME and no registered implementation; {known}"
    raise ImplementationNotFoundError(name, why)


def find_implementation(name: str, operation: str | None = None) -> Implementation:
    """Import an implementation.

    Args:
        name: MODULE:NAME (a dotted module, or a path that ends in .py), a built-in name, or that
            of an entry point. The current folder is searched too.
        operation: wraps a plain function as an implementation of this operation.

    Raises:
        ImplementationNotFoundError: the module or the name is missing, or it is something else.
    """
    # Only here: names are looked up without torch.
    from .protocol import Implementation, implementation

    reference = resolve_name(name)
    module_name, _, attribute = reference.rpartition(":")
    module = _import_module(module_name, reference)
    try:
        found: Any = module
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        why = f"module {module_name!r} has no {attribute!r}; {did_you_mean(attribute, dir(module))}"
        raise ImplementationNotFoundError(reference, why.rstrip("; ")) from error
    except BaseException as error:  # a module may look its names up by code of its own
        why = f"looking up {attribute!r} raised {sentence_of(error)}"
        raise ImplementationNotFoundError(reference, why) from error
    if isinstance(found, Implementation):
        if operation not in (None, found.operation):
            why = f"it implements {found.operation}, not {operation}"
            raise ImplementationNotFoundError(reference, why)
        return found
    if callable(found) and operation is not None:
        return implementation(cast("Operation", operation), name=reference)(found)
    hint = "decorate it with @implementation(...), or name its --operation"
    why = f"it is {type(found).__name__}, not an implementation: {hint}"
    raise ImplementationNotFoundError(reference, why)


def built_in_provider(name: str) -> str | None:
    """Return the provider of a built-in implementation, None for any other name."""
    return find_implementation(name).provider if name in BUILT_IN else None


def built_in_compiler(name: str) -> str | None:
    """Return what compiles a built-in implementation's kernels, None for any other name."""
    return find_implementation(name).compiler if name in BUILT_IN else None


def _on_path(module_name: str, reference: str) -> str:
    """Return the name to import a module or a file by, with its folder on ``sys.path``."""
    path = Path(module_name)
    if path.suffix == ".py":
        if not path.is_file():
            raise ImplementationNotFoundError(reference, f"there is no file {module_name!r}")
        folder, module_name = str(path.parent.resolve()), path.stem
    else:
        folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return module_name


def _import_module(module_name: str, reference: str) -> Any:  # noqa: ANN401  a module of anybody's
    module_name = _on_path(module_name, reference)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            why = f"there is no module {module_name!r} (searched sys.path)"
        else:
            needs = f"importing {module_name!r} needs {error.name!r}, not installed"
            why = f"{needs}{_place_of(error)}"
        raise ImplementationNotFoundError(reference, why) from error
    # SystemExit too: a file that ends its process when it is imported is no implementation.
    except BaseException as error:
        why = f"importing {module_name!r} failed: {sentence_of(error)}{_place_of(error)}"
        raise ImplementationNotFoundError(reference, why) from error


def _place_of(error: BaseException) -> str:
    """Return the innermost file and line of the user's where an import failed, in parentheses."""
    if isinstance(error, SyntaxError):  # its text names both
        return ""
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if each.filename != __file__ and "importlib" not in each.filename
    ]
    # Of code that was made while running, as a dataclass's __init__, there is no file.
    frames = [each for each in frames if Path(each.filename).is_file()]
    mine = [each for each in frames if not each.filename.startswith(NOT_OF_USERS)] or frames
    return f" ({mine[-1].filename}:{mine[-1].lineno})" if mine else ""
