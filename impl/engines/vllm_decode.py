"""vLLM's split decode attention, ``triton_decode_attention``: MLA's, and that of grouped heads."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs
from ..features import ALGEBRA
from ..gpu.triton_interpreter import scalars_as_bounds
from ..gpu.workspaces import workspace
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from .claims import LEAST_CHANNELS, by_slots, wrong_here
from .sources import implementation, known, load, unavailable
from .vllm_stubs import stubs

NAME = "ops.triton_decode_attention"
FILE = (f"vllm.v1.attention.{NAME}", f"vllm.attention.{NAME}")
SPLITS = 4
"""Parts of each request, vLLM's default."""

Pair = tuple[torch.Tensor | None, torch.Tensor | None]


def _refusal(problem: AttentionProblem, target: Target) -> Refusal | str | None:
    rotary = problem.head_dim_qk - problem.head_dim_vo if problem.values_in_keys else LEAST_CHANNELS
    of_a_tensor = bool(problem.kv_cache)
    return first_reason(
        (any(t != 1 for t in problem.query_lens), "decoding has one query a request"),
        (problem.empty_requests, "a request without keys is NaN: the new token is one"),
        (problem.window_left >= 0 or problem.sinks, "it has no windows and no sinks"),
        (not of_a_tensor and (problem.k_scale != 1 or problem.v_scale != 1),
         "scales belong to FP8 caches"),
        (problem.values_in_keys and problem.k_scale != problem.v_scale,
         "values in keys have their scale"),
        (min(problem.head_dim_qk, problem.head_dim_vo, rotary) < LEAST_CHANNELS,
         f"tl.dot takes {LEAST_CHANNELS} channels or more"),
    ) or wrong_here(target, problem.kv_cache) or unavailable(FILE, target)  # fmt: skip


def _alone(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    if problem.group_size > 1:
        return "several query heads of a key-value head are vllm-decode-grouped"
    if problem.dtype != "float32":
        return "logits are summed in 16 bits, for which Arithmetic has no word"
    return _refusal(problem, target) or True


def _grouped(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    if problem.group_size == 1:
        return "one query head of a key-value head is vllm-decode"
    return _refusal(problem, target) or True


def _compile_key(problem: AttentionProblem) -> Hashable:
    return (
        problem.dtype, problem.kv_cache, problem.num_kv_heads, problem.group_size,
        problem.head_dim_qk, problem.head_dim_vo, problem.values_in_keys, problem.strided_q,
        problem.strided_kv, problem.different_kv_strides, problem.kv_layout, problem.page_size,
        problem.logits_soft_cap,
    )  # fmt: skip


decode = functools.partial(
    implementation,
    "paged_attention",
    provider="vllm",
    features=("mla", "fp8_kv", "different_kv_strides", "large_caches", "large_workspaces", ALGEBRA),
    writes_out=True,
    compile_key=_compile_key,
    split=16,
    build_ahead="cuda",
    build_minutes=0.05,
    build_compilers=1,
)


def _attend(inputs: PagedAttentionInputs) -> Pair:
    caches = [by_slots(each, inputs.kv_layout) for each in (inputs.k_cache, inputs.v_cache)]
    more: dict[str, Any] = {}
    if inputs.kv_format is not None:
        caches = [inputs.kv_format.view(each) for each in caches]
        for name in ("k_scale", "v_scale"):
            more[name] = inputs.q.new_tensor(getattr(inputs, name), dtype=torch.float32)
    tokens, heads, _ = inputs.q.shape
    # The last channel holds the LSE. What is read without being written must show.
    shape = tokens, heads, SPLITS, inputs.head_dim_vo + 1
    scratch = workspace(inputs.q, shape, torch.nan)
    lse = inputs.q.new_full((tokens, heads), torch.nan, dtype=torch.float32)
    with load(FILE, stubs) as kernels, scalars_as_bounds(inputs.q):
        attend = kernels.decode_attention_fwd
        latent = inputs.v_cache.data_ptr() == inputs.k_cache.data_ptr()
        attend(
            q=inputs.q,
            k_buffer=caches[0],
            v_buffer=caches[1],
            o=inputs.out,
            req_to_token=inputs.block_table,
            b_seq_len=inputs.metadata.seq_lens,
            attn_logits=scratch,
            num_kv_splits=SPLITS,
            sm_scale=inputs.sm_scale,
            page_size=inputs.metadata.page_size,
            logit_cap=inputs.logits_soft_cap,
            **more,
            **known(attend, lse=lse, is_mla=latent),
        )
    if inputs.lse is not None:
        inputs.lse.copy_(lse)
    return inputs.out, inputs.lse


@decode(
    name="vllm-decode", supports=_alone,
    arithmetic=Arithmetic(dequantized="inputs", tanh="sigmoid"), tile=64,
)  # fmt: skip
def alone(inputs: PagedAttentionInputs) -> Pair:
    """Decode where each query head has keys of its own (``_fwd_kernel_stage1``)."""
    return _attend(inputs)


@decode(
    name="vllm-decode-grouped", supports=_grouped, tile=32,
    arithmetic=Arithmetic(
        probabilities="inputs", operands="tfloat32", dequantized="inputs", tanh="sigmoid"
    ),
)  # fmt: skip
def grouped(inputs: PagedAttentionInputs) -> Pair:
    """Decode where query heads share keys (``_fwd_grouped_kernel_stage1``), MLA among them."""
    return _attend(inputs)
