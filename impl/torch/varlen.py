"""torch's ``varlen_attn`` as an implementation: FlashAttention over requests one after another."""

from __future__ import annotations

import inspect

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import RaggedAttentionInputs
from ..protocol import implementation
from ..targets.backends import TORCH
from ..targets.optional import missing, require
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from .rounding import rounds_twice

MODULE = "torch.nn.attention.varlen"
CHANNELS, MOST_CHANNELS = 8, 256
"""Channels that FlashAttention's head dims are multiples of, and the most."""


def _supports(problem: AttentionProblem, target: Target) -> Refusal | bool | str:
    if target.device != "cuda":
        return Refusal("varlen_attn is FlashAttention, which runs on a GPU only", "device", "a GPU")
    absent = missing(MODULE, "torch")
    if absent is not None or "scale" not in _parameters():
        return absent or "varlen_attn of this torch takes no scale"
    return first_reason(
        (problem.dtype == "float32", "FlashAttention takes 16 bits only"),
        (problem.head_dim_qk != problem.head_dim_vo, "keys and values have one head dim"),
        (problem.head_dim_qk % CHANNELS, f"head dims are multiples of {CHANNELS}"),
        (problem.head_dim_qk > MOST_CHANNELS, f"head dims are at most {MOST_CHANNELS}"),
        (problem.logits_soft_cap, "varlen_attn has no logits soft cap"),
        (problem.sinks, "varlen_attn has no attention sinks"),
        (rounds_twice(problem.v_scale, problem.dtype), "another v_scale would round out twice"),
        (problem.empty_batch, "engines make no call without a token"),
        (problem.more_queries_than_keys, "FlashAttention's LSE of a row without keys is +inf"),
    ) or True  # fmt: skip


def _parameters() -> frozenset[str]:
    return frozenset(inspect.signature(require(MODULE, "torch").varlen_attn).parameters)


@implementation(
    "ragged_attention",
    name="torch-varlen-attn",
    provider=TORCH,
    supports=_supports,
    features=("different_kv_strides", "window_right", "host_bounds"),
    arithmetic=Arithmetic(probabilities="inputs"),
)
def ragged(inputs: RaggedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend under a window that has no right side where the batch is causal."""
    varlen = require(MODULE, "torch")
    grouped = {"enable_gqa": True} if "enable_gqa" in _parameters() else {}
    out, lse = varlen.varlen_attn(
        query=inputs.q,
        key=inputs.k,
        value=inputs.v,
        cu_seq_q=inputs.qo_indptr,
        cu_seq_k=inputs.kv_indptr,
        max_q=inputs.max_q_len,
        max_k=inputs.max_kv_len,
        scale=inputs.sm_scale * float(inputs.k_scale),
        window_size=(inputs.window_left, 0 if inputs.causal else inputs.window_right),
        return_aux=varlen.AuxRequest(lse=True),
        **grouped,
    )
    return out * float(inputs.v_scale), lse.T  # the LSE is [heads, tokens], whatever its page says
