"""SGLang's split attention of verified drafts: a prefix in parts, and the drafts by themselves."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import Refusal
from ..targets.target import Target, UnsupportedError
from . import sglang_calls as sglang
from .sources import load, unavailable

FILE = sglang.file_of("verify_splitkv")
GROUPED_FILE = sglang.file_of("verify_mla")
LEAST_SPLIT = 32
"""Keys of the shortest part, ``_MIN_BLOCK_KV``."""
GROUPED_SPLIT = 64
"""Keys of the shortest part of ``verify_mla``, where keys have other channels than 64."""
LEAST_CHANNELS = 9
"""Channels of a part of a head from which on its power of two is one that ``tl.dot`` takes."""
LARGEST_TILE = 2**20
"""Elements of the largest tensor of Triton's: of drafts by drafts by channels."""


def _refusal(problem: AttentionProblem) -> str | None:
    lengths = zip(problem.query_lens, problem.seq_lens, strict=True)
    for holds, why in (
        (problem.empty_batch, "engines make no call without a token"),
        (not problem.uniform_queries, "each request has the same number of drafts"),
        (not problem.causal, "drafts are a chain"),
        (any(t >= s for t, s in lengths), "a verified request has a prefix"),
        (problem.window_left >= 0 or problem.sinks or problem.logits_soft_cap,
         "SGLang takes its extend kernel for windows, sinks and soft caps"),
        (any(scale not in (0.5, 1, 2) for scale in (problem.k_scale, problem.v_scale)),
         "scales are the prefix's: new keys would be rounded by another than a power of two"),
    ):  # fmt: skip
        if holds:
            return why
    return sglang.pool_refusal(problem)


def _supports(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    if problem.head_dim_qk != problem.head_dim_vo:
        return "keys and values have one head dim"
    return _refusal(problem) or unavailable(FILE, target) or True


def _supports_grouped(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    rotary = problem.head_dim_qk - problem.head_dim_vo
    drafts, group = _padded(problem.most_queries), problem.group_size
    for holds, why in (
        (rotary < 0, "values have no more channels than keys"),
        (problem.head_dim_vo < LEAST_CHANNELS or 0 < rotary < LEAST_CHANNELS,
         f"tl.dot takes {LEAST_CHANNELS} channels or more, which are padded to 16"),
        (problem.num_kv_heads > 1 and group != _padded(group),
         "query heads of a key-value head are a power of two where there are several of these"),
        (drafts**2 * _padded(problem.head_dim_qk) > LARGEST_TILE,
         "a tile has drafts by drafts by channels"),
    ):  # fmt: skip
        if holds:
            return why
    return _refusal(problem) or unavailable(GROUPED_FILE, target) or True


def _padded(number: int) -> int:
    """Return the least power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


def _compile_key(problem: AttentionProblem) -> Hashable:
    return *sglang.strides_key(problem), problem.page_size, _padded(problem.most_queries)


@sglang.kernel(
    "paged_attention",
    name="sglang-verify-splitkv",
    supports=_supports,
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32"),
    compile_key=_compile_key,
    tile=32,
    split=LEAST_SPLIT,
)
def verify(inputs: PagedAttentionInputs) -> sglang.Pair:
    """Attend with ``verify_splitkv_fwd``, whose scratch holds NaN before, as it may."""
    call, (requests, heads, kv_heads, head_dim, drafts) = _call(inputs)
    with load(FILE, sglang.stubs) as kernels, scalars_as_bounds(inputs.q):
        # What is read without being written must show: SGLang keeps its buffers from call to call.
        scratch = kernels._get_vk(  # noqa: SLF001  verify_splitkv_fwd makes them so
            requests,
            heads,
            kv_heads,
            head_dim,
            inputs.head_dim_vo,
            drafts,
            inputs.q.device,
            n_splits=kernels.choose_n_splits(len(call["kv_indices"]) / requests),
        )
        scratch.att_out.fill_(torch.nan)
        scratch.att_lse.fill_(torch.nan)
        return _ran(kernels.verify_splitkv_fwd(**call), inputs)


@sglang.kernel(
    "paged_attention",
    name="sglang-verify-mla",
    supports=_supports_grouped,
    features=("mla",),
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32", partial_outputs=True),
    compile_key=_compile_key,
    tile=GROUPED_SPLIT,
    split=GROUPED_SPLIT,
)
def verify_grouped(inputs: PagedAttentionInputs) -> sglang.Pair:
    """Attend with ``verify_shared_kv_fwd``, whose scratch holds NaN before.

    SGLang stores outputs of parts in bfloat16, as its queries are; here in the queries' dtype.
    """
    call, (requests, heads, kv_heads, head_dim, drafts) = _call(inputs)
    with load(GROUPED_FILE, sglang.stubs) as kernels, scalars_as_bounds(inputs.q):
        scratch = kernels._get_vmla(  # noqa: SLF001  verify_shared_kv_fwd makes them so
            requests,
            heads,
            head_dim,
            inputs.head_dim_vo,
            drafts,
            inputs.q.device,
            heads // kv_heads,
        )
        scratch.att_out = torch.full_like(scratch.att_out, torch.nan, dtype=inputs.q.dtype)
        scratch.att_lse.fill_(torch.nan)
        return _ran(kernels.verify_shared_kv_fwd(**call), inputs)


def _call(inputs: PagedAttentionInputs) -> tuple[dict[str, Any], tuple[int, int, int, int, int]]:
    """Return the arguments, and requests, heads, key-value heads, channels and drafts."""
    lengths, queries = inputs.metadata.seq_lens, inputs.metadata.qo_indptr.diff()
    prefix, drafts = lengths - queries, int(queries.max())
    k, v = (sglang.pool(cache, inputs.kv_layout) for cache in (inputs.k_cache, inputs.v_cache))
    new = sglang.slots(inputs, prefix, queries)
    call = {
        "q_extend": inputs.q, "k_extend": k[new] * inputs.k_scale,
        "v_extend": v[new] * inputs.v_scale, "o_extend": inputs.out, "k_buffer": k, "v_buffer": v,
        "qo_indptr": inputs.metadata.qo_indptr, "kv_indptr": sglang.indptr(prefix),
        "kv_indices": sglang.slots(inputs, torch.zeros_like(prefix), prefix), "custom_mask": None,
        "is_causal": True, "mask_indptr": None, "max_len_extend": drafts,
        "k_scale": inputs.k_scale, "v_scale": inputs.v_scale, "sm_scale": inputs.sm_scale,
        "max_bs": len(lengths),
    }  # fmt: skip
    return call, (len(lengths), inputs.q.shape[1], k.shape[1], inputs.q.shape[2], drafts)


def _ran(ran: bool, inputs: PagedAttentionInputs) -> sglang.Pair:  # noqa: FBT001
    """Return what a kernel wrote, which says whether it did."""
    if not ran:
        message = "SGLang took its extend kernel for this call"
        raise UnsupportedError(message)
    return inputs.out, None
