"""SGLang's decode attention: requests of one query, whose keys are split and merged again."""

from __future__ import annotations

import functools
from collections.abc import Hashable

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs
from ..features import ALGEBRA
from ..gating.rules import provider_matches
from ..gpu.triton_interpreter import scalars_as_bounds
from ..gpu.workspaces import one_each, workspace
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from . import sglang_calls as sglang
from .sources import known, load, unavailable

FILE = sglang.file_of("decode_attention")
SPLITS = 4
"""Most parts of a request. SGLang's default is 8; interpreted, an idle part takes its time, too."""
LEAST_SPLIT = 32
"""Keys of the shortest part, ``_MIN_BLOCK_KV``."""
WIDE_SUMS = ">=0.5.22"
"""Releases known to sum a logit's products in float32, whatever the products are rounded to."""
LATENT = (288, 576)
"""Channels of keys for which ``has_mla`` reads values as the first channels of the keys."""


def _refusal(problem: AttentionProblem, target: Target) -> Refusal | str | None:
    return first_reason(
        (any(t != 1 for t in problem.query_lens), "decoding has one query a request"),
        (problem.empty_requests, "a request without keys is NaN: the new token is one"),
        (problem.empty_batch, "engines make no call without a token"),
        (problem.window_left >= 0, "SGLang gives the kernel the window's keys only"),
    ) or sglang.bias_refusal(problem, FILE) or sglang.pool_refusal(problem) \
        or unavailable(FILE, target)  # fmt: skip


def _alone(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    if problem.group_size > 1:
        return "several query heads of a key-value head are sglang-decode-grouped"
    if problem.dtype != "float32" and not provider_matches(target, sglang.SGLANG, WIDE_SUMS):
        return "before 0.5.22 logits are summed in 16 bits, for which Arithmetic has no word"
    return _refusal(problem, target) or True


def _grouped(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    if problem.group_size == 1:
        return "one query head of a key-value head is sglang-decode"
    return _refusal(problem, target) or True


def _compile_key(problem: AttentionProblem) -> Hashable:
    options = problem.page_size, problem.logits_soft_cap, problem.sinks, problem.logits_bias
    return *sglang.strides_key(problem), *options


decode = functools.partial(
    sglang.kernel, "paged_attention",
    features=("mla", "logits_bias", "large_tensors", "large_workspaces", ALGEBRA),
    compile_key=_compile_key, split=LEAST_SPLIT,
)  # fmt: skip


def _attend(inputs: PagedAttentionInputs) -> sglang.Pair:
    """Call the kernel; the LSE is that of its parts, as SGLang's context parallelism takes it."""
    lengths, q = inputs.metadata.seq_lens, inputs.q
    room = (*q.shape[:2], SPLITS)
    # What is read without being written must show: SGLang's own buffers are not cleared either.
    parts = workspace(q, (*room, inputs.head_dim_vo), torch.nan)
    lses = one_each(parts, -torch.inf)
    k, v = (sglang.pool(cache, inputs.kv_layout) for cache in (inputs.k_cache, inputs.v_cache))
    with load(FILE, sglang.stubs) as kernels, scalars_as_bounds(q):
        attend = kernels.decode_attention_fwd
        latent = inputs.v_cache.data_ptr() == inputs.k_cache.data_ptr()
        attend(
            q=q,
            k_buffer=k,
            v_buffer=v,
            o=inputs.out,
            kv_indptr=sglang.indptr(lengths),
            kv_indices=sglang.slots(inputs, torch.zeros_like(lengths), lengths),
            attn_logits=parts,
            attn_lse=lses,
            num_kv_splits=torch.full_like(lengths, SPLITS),
            max_kv_splits=SPLITS,
            sm_scale=inputs.sm_scale,
            k_scale=inputs.k_scale,
            v_scale=inputs.v_scale,
            logit_cap=inputs.logits_soft_cap,
            sinks=inputs.sinks,
            **sglang.bias_arguments(inputs),
            **known(
                attend,
                page_size=inputs.metadata.page_size,
                has_mla=latent and k.shape[-1] in LATENT,
            ),
        )
    if inputs.sinks is not None:  # the sums of parts leave the sink out
        return inputs.out, None
    if inputs.lse is not None:
        inputs.lse.copy_(lses.logsumexp(-1))
    return inputs.out, inputs.lse


@decode(
    name="sglang-decode",
    supports=_alone,
    arithmetic=Arithmetic(products="inputs", tanh="sigmoid"),
    tile=64,
)
def alone(inputs: PagedAttentionInputs) -> sglang.Pair:
    """Decode where each query head has keys of its own (``_fwd_kernel_stage1``)."""
    return _attend(inputs)


@decode(
    name="sglang-decode-grouped",
    supports=_grouped,
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32", tanh="sigmoid"),
    tile=32,
)
def grouped(inputs: PagedAttentionInputs) -> sglang.Pair:
    """Decode where query heads share keys (``_fwd_grouped_kernel_stage1``), by tensor cores."""
    return _attend(inputs)
