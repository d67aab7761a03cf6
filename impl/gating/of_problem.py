"""The gating question that a problem asks."""

from __future__ import annotations

from ...reference import (
    AttentionProblem,
    MergeProblem,
    MoEProblem,
    Problem,
    QuantizeProblem,
    RopeAppendProblem,
    RouteProblem,
)
from ...reference.moe.weights import WEIGHT_FORMATS
from .feature import PADDINGS, Feature

QUANTISATIONS = {
    "": "none",
    "fp8_tensor": "fp8_per_tensor",
    "fp8_channel": "fp8_per_channel",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "int8_tensor": "int8_per_tensor",
    "int8_channel": "int8_per_channel",
    "int8_block": "int8_block",
    "fp8_block_ue8m0": "fp8_block_ue8m0",
    "mxfp8": "mxfp8",
    "int4_g32": "w4a16",
    "int4_g128": "w4a16",
    "int4_zp_g32": "w4a16",
    "int4_zp_g128": "w4a16",
    "nvfp4_gate_up": "nvfp4",
}
"""Quantisations of weights in features, by a problem's ``quantized``."""
QUANTISED_BY_THE_KERNEL = (("cutlass", "fp8_block"),)
"""Backends that take 16-bit hidden states and quantise them as the weights are."""

DECODING = (
    ("paged_attention", "xqa"),
    *(("mla", each) for each in ("xqa", "trtllm-gen", "cutlass")),
)
"""Operations and backends that only decode, whoever calls them."""


def feature_of(problem: Problem, backend: str, *, decodes: bool = False) -> Feature:
    """Return the feature that one call of a backend on a problem needs.

    A batch with both decodes (one query a request) and longer requests is mixed, unless the call
    ``decodes``: then the query tokens of a request are its ``query_len``.
    """
    if isinstance(problem, MergeProblem):
        return Feature(
            problem.operation, backend, head_dim_qk=problem.head_dim, q_dtype=problem.dtype
        )
    if isinstance(problem, RouteProblem):
        return Feature("route", backend, q_dtype=problem.dtype, routing=problem.method)
    if isinstance(problem, QuantizeProblem | RopeAppendProblem):
        return Feature(problem.operation, backend, q_dtype=problem.dtype)
    if isinstance(problem, MoEProblem):
        return _of_experts(problem, backend)
    if not isinstance(problem, AttentionProblem):
        return Feature(problem.operation, backend)
    mask = "tree" if problem.tree else "custom" if problem.custom_mask else ""
    latent = problem.values_in_keys and problem.operation == "paged_attention"
    operation = "mla" if latent else problem.operation
    verifies = decodes or (operation, backend) in DECODING
    kinds = {"decode" if t <= 1 or verifies else "prefill" for t in problem.query_lens}
    return Feature(
        operation,
        backend,
        phase="mixed" if len(kinds) > 1 else next(iter(kinds), "decode"),
        query_len=max(problem.most_queries, 1) if verifies else 1,
        head_dim_qk=problem.head_dim_qk,
        head_dim_vo=problem.head_dim_vo,
        q_dtype=problem.q_dtype or problem.dtype,
        kv_dtype=problem.kv_element,
        kv_storage=problem.kv_storage,
        kv_layout=problem.kv_layout,
        page_size=problem.page_size,
        group_size=problem.group_size,
        window=problem.window_left >= 0,
        soft_cap=bool(problem.logits_soft_cap),
        sinks=problem.sinks,
        ragged_queries=verifies and not problem.uniform_queries,
        mask=mask or ("causal" if problem.causal else "none"),
        padding=_padding(problem),
    )


def _padding(problem: AttentionProblem) -> str:
    """Return the emptiest kind of request that a batch has, of ``PADDINGS``."""
    found = {
        "no_query" if not t else "no_keys" if not s else "few_keys" if t > s else "none"
        for t, s in zip(problem.query_lens, problem.seq_lens, strict=True)
    }
    return max(found, key=PADDINGS.index, default="none")


def _of_experts(problem: MoEProblem, backend: str) -> Feature:
    """Return the feature of experts; SwiGLU with numbers of its own is a kernel of its own."""
    quantisation, q_dtype = QUANTISATIONS[problem.quantized], problem.dtype
    swiglu = problem.activation == "swiglu"
    if problem.quantized_hidden and (backend, problem.quantized) not in QUANTISED_BY_THE_KERNEL:
        q_dtype = WEIGHT_FORMATS[problem.quantized].hidden.element
    if problem.quantized.startswith("int4") and problem.quantized_hidden:
        quantisation = "w4a8"
    if problem.quantized == "mxfp4":
        if problem.quantized_hidden:
            quantisation = "mxfp8_mxfp4"
        elif backend == "cutlass":
            quantisation = "w4a16"
    return Feature(
        "moe",
        backend,
        q_dtype=q_dtype,
        activation="swiglu_oai" if swiglu and problem.swiglu_parameters else problem.activation,
        quantisation=quantisation,
    )
