"""The oracle: attention, merging, metadata and MoE by definition, with bounds on what may differ.

It imports torch and the standard library, nothing else. The default arithmetic is float64.
Results carry no gradients: the oracle is for judging kernels, not for training.
"""

from __future__ import annotations

import sys

from . import operations
from .attention.append import append_paged_kv, append_paged_nvfp4, append_paged_scaled
from .attention.append_bounds import append_error_bound
from .attention.bounds import attention_error_bound, ragged_attention_error_bound
from .attention.context_parallel import slice_context_parallel
from .attention.definition import AttentionOutput, paged_attention, ragged_attention
from .attention.drafts import Drafts
from .attention.merge import merge_error_bound, merge_states
from .attention.metadata import BatchMetadata, build_metadata
from .attention.phases import slice_phases, split_decodes_and_prefills
from .attention.preparation import prepare_batch
from .attention.rope import RopeAppended, rope_and_append
from .attention.slots import PAD_SLOT, map_slots
from .attention.splits import Splits
from .formats.arithmetic import UNIT_ROUNDOFF, Arithmetic, unit_roundoff
from .formats.kv_format import KVCacheFormat
from .formats.quantization import (
    MXTensor,
    NVFP4Tensor,
    deinterleave_v_scales,
    dequantize_e2m1,
    dequantize_e8m0,
    dequantize_fp8,
    dequantize_mxfp4,
    dequantize_mxfp8,
    dequantize_nvfp4,
    interleave_v_scales,
    pack_e2m1,
    quantize_e2m1,
    quantize_fp8,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
    swizzle_scales_128x4,
    unpack_e2m1,
    unswizzle_scales_128x4,
)
from .formats.quantizers import Quantized, QuantizedFormat, quantize
from .formats.rearrange import rearrange
from .moe.activations import ACTIVATIONS
from .moe.batched import batched_moe
from .moe.bounds import moe_error_bound
from .moe.definition import moe
from .moe.norm_quantize import NormQuantized, norm_and_quantize
from .moe.routing import Routing, route
from .moe.routing_bounds import RoutingComparison, compare_routing
from .moe.routing_methods import METHODS, ROUTING_NAMES
from .moe.weights import MatrixFormat, QuantizedMatrix
from .operations import materialise, problem_from_json
from .problems import (
    AttentionProblem,
    BatchedMoEProblem,
    BatchProblem,
    ContextParallelProblem,
    MergeProblem,
    MetadataProblem,
    MoEProblem,
    NormQuantizeProblem,
    PlanProblem,
    Problem,
    QuantizeProblem,
    RearrangeProblem,
    RopeAppendProblem,
    RouteProblem,
    SlotsProblem,
    StepsProblem,
)
from .tensors.planner import plan
from .validation import KVLayout

# The function has the name of a module that was here before. Importing that module under its old
# name would put it into the function's place, unless it is there already.
sys.modules[f"{__name__}.materialise"] = operations

__all__ = [
    "ACTIVATIONS",
    "METHODS",
    "PAD_SLOT",
    "ROUTING_NAMES",
    "UNIT_ROUNDOFF",
    "Arithmetic",
    "AttentionOutput",
    "AttentionProblem",
    "BatchMetadata",
    "BatchProblem",
    "BatchedMoEProblem",
    "ContextParallelProblem",
    "Drafts",
    "KVCacheFormat",
    "KVLayout",
    "MXTensor",
    "MatrixFormat",
    "MergeProblem",
    "MetadataProblem",
    "MoEProblem",
    "NVFP4Tensor",
    "NormQuantizeProblem",
    "NormQuantized",
    "PlanProblem",
    "Problem",
    "QuantizeProblem",
    "Quantized",
    "QuantizedFormat",
    "QuantizedMatrix",
    "RearrangeProblem",
    "RopeAppendProblem",
    "RopeAppended",
    "RouteProblem",
    "Routing",
    "RoutingComparison",
    "SlotsProblem",
    "Splits",
    "StepsProblem",
    "append_error_bound",
    "append_paged_kv",
    "append_paged_nvfp4",
    "append_paged_scaled",
    "attention_error_bound",
    "batched_moe",
    "build_metadata",
    "compare_routing",
    "deinterleave_v_scales",
    "dequantize_e2m1",
    "dequantize_e8m0",
    "dequantize_fp8",
    "dequantize_mxfp4",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "interleave_v_scales",
    "map_slots",
    "materialise",
    "merge_error_bound",
    "merge_states",
    "moe",
    "moe_error_bound",
    "norm_and_quantize",
    "pack_e2m1",
    "paged_attention",
    "plan",
    "prepare_batch",
    "problem_from_json",
    "quantize",
    "quantize_e2m1",
    "quantize_fp8",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "ragged_attention",
    "ragged_attention_error_bound",
    "rearrange",
    "rope_and_append",
    "route",
    "slice_context_parallel",
    "slice_phases",
    "split_decodes_and_prefills",
    "swizzle_scales_128x4",
    "unit_roundoff",
    "unpack_e2m1",
    "unswizzle_scales_128x4",
]
