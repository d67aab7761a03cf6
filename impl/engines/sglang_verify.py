"""SGLang's split attention of verified drafts: a prefix in parts, and the drafts by themselves."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import Refusal
from ..targets.target import Target, UnsupportedError
from . import sglang_calls as sglang
from .sources import load

FILE = sglang.file_of("verify_splitkv")
LEAST_SPLIT = 32
"""Keys of the shortest part, ``_MIN_BLOCK_KV``."""


def _supports(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    lengths = zip(problem.query_lens, problem.seq_lens, strict=True)
    for holds, why in (
        (problem.empty_batch, "engines make no call without a token"),
        (not problem.uniform_queries, "each request has the same number of drafts"),
        (not problem.causal, "drafts are a chain"),
        (any(t >= s for t, s in lengths), "a verified request has a prefix"),
        (problem.window_left >= 0 or problem.sinks or problem.logits_soft_cap,
         "SGLang takes its extend kernel for windows, sinks and soft caps"),
        (problem.head_dim_qk != problem.head_dim_vo, "keys and values have one head dim"),
        (any(scale not in (0.5, 1, 2) for scale in (problem.k_scale, problem.v_scale)),
         "scales are the prefix's: new keys would be rounded by another than a power of two"),
    ):  # fmt: skip
        if holds:
            return why
    return sglang.pool_refusal(problem) or sglang.cannot_run(FILE, problem, target) or True


def _compile_key(problem: AttentionProblem) -> Hashable:
    drafts = (problem.most_queries - 1).bit_length()
    return *sglang.strides_key(problem), problem.page_size, drafts


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
    lengths, queries = inputs.metadata.seq_lens, inputs.metadata.qo_indptr.diff()
    prefix, drafts = lengths - queries, int(queries.max())
    k, v = (sglang.pool(cache, inputs.kv_layout) for cache in (inputs.k_cache, inputs.v_cache))
    new = sglang.slots(inputs, prefix, queries)
    indices = sglang.slots(inputs, torch.zeros_like(prefix), prefix)
    heads, head_dim = inputs.q.shape[1:]
    with load(FILE, sglang.stubs) as kernels, scalars_as_bounds(inputs.q):
        # What is read without being written must show: SGLang keeps its buffers from call to call.
        scratch = kernels._get_vk(  # noqa: SLF001  verify_splitkv_fwd makes them so
            len(lengths), heads, k.shape[1], head_dim, v.shape[2], drafts, inputs.q.device,
            n_splits=kernels.choose_n_splits(len(indices) / len(lengths)),
        )  # fmt: skip
        scratch.att_out.fill_(torch.nan)
        scratch.att_lse.fill_(torch.nan)
        ran = kernels.verify_splitkv_fwd(
            q_extend=inputs.q, k_extend=k[new] * inputs.k_scale, v_extend=v[new] * inputs.v_scale,
            o_extend=inputs.out, k_buffer=k, v_buffer=v, qo_indptr=inputs.metadata.qo_indptr,
            kv_indptr=sglang.indptr(prefix), kv_indices=indices, custom_mask=None, is_causal=True,
            mask_indptr=None, max_len_extend=drafts, k_scale=inputs.k_scale,
            v_scale=inputs.v_scale, sm_scale=inputs.sm_scale, max_bs=len(lengths),
        )  # fmt: skip
    if not ran:
        message = "SGLang took its extend kernel for this call"
        raise UnsupportedError(message)
    return inputs.out, None
