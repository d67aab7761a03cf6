"""The oracle: attention, merging, metadata and MoE by definition, with bounds on what may differ.

It imports torch and the standard library, nothing else. The default arithmetic is float64.
"""

from __future__ import annotations

from .activations import ACTIVATIONS
from .append import append_paged_kv, append_paged_nvfp4
from .arithmetic import UNIT_ROUNDOFF, Arithmetic, unit_roundoff
from .attention import AttentionOutput, paged_attention, ragged_attention
from .bounds import attention_error_bound, ragged_attention_error_bound
from .expert_weights import MatrixFormat, QuantizedMatrix
from .kv_format import KVCacheFormat
from .materialise import materialise
from .merge import merge_error_bound, merge_states
from .metadata import BatchMetadata, build_metadata
from .moe import moe
from .moe_bounds import moe_error_bound
from .moe_problems import MoEProblem, RouteProblem
from .phases import slice_phases, split_decodes_and_prefills
from .problem_json import problem_from_json
from .problems import (
    AttentionProblem,
    MergeProblem,
    MetadataProblem,
    Problem,
)
from .quantization import (
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
from .routing import Routing, route
from .routing_bounds import RoutingComparison, compare_routing
from .routing_methods import METHODS, ROUTING_NAMES

__all__ = [
    "ACTIVATIONS",
    "METHODS",
    "ROUTING_NAMES",
    "UNIT_ROUNDOFF",
    "Arithmetic",
    "AttentionOutput",
    "AttentionProblem",
    "BatchMetadata",
    "KVCacheFormat",
    "MXTensor",
    "MatrixFormat",
    "MergeProblem",
    "MetadataProblem",
    "MoEProblem",
    "NVFP4Tensor",
    "Problem",
    "QuantizedMatrix",
    "RouteProblem",
    "Routing",
    "RoutingComparison",
    "append_paged_kv",
    "append_paged_nvfp4",
    "attention_error_bound",
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
    "materialise",
    "merge_error_bound",
    "merge_states",
    "moe",
    "moe_error_bound",
    "pack_e2m1",
    "paged_attention",
    "problem_from_json",
    "quantize_e2m1",
    "quantize_fp8",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "ragged_attention",
    "ragged_attention_error_bound",
    "route",
    "slice_phases",
    "split_decodes_and_prefills",
    "swizzle_scales_128x4",
    "unit_roundoff",
    "unpack_e2m1",
    "unswizzle_scales_128x4",
]
