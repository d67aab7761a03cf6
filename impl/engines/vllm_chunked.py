"""vLLM's attention of prefills: ``chunked_prefill_paged_decode``, and without a cache.

The former has a prefill kernel, and one for requests of one query. Its cache has the channels of a
key in parts of 16 bytes, [pages, heads, parts, slots, channels], and values by channel, [pages,
heads, channels, slots]. Both kernels take every stride, so that the adapter gives them views.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import PagedAttentionInputs, RaggedAttentionInputs
from ..features import ALGEBRA
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from .claims import by_slots, refused_attention
from .sources import implementation, known, load, says, unavailable
from .vllm_stubs import stubs

NAME = "ops.chunked_prefill_paged_decode"
FILE = (f"vllm.v1.attention.{NAME}", f"vllm.attention.{NAME}")
PART = 16
"""Bytes of a key's channels that lie side by side, and the least keys of a page."""
COLUMNS = 128
"""Fewest columns behind a request's pages: the kernel reads whole tiles of a table."""


def _supports(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    size = 4 if problem.dtype == "float32" else 2
    return first_reason(
        (problem.empty_batch, "engines make no call without a token"),
        (problem.more_queries_than_keys,
         "every query is one of the keys: a request has no more queries than keys"),
        (not problem.causal, "engines call it with a causal mask"),
        (problem.logits_soft_cap, "it has no soft cap"),
        (problem.page_size % PART, f"pages are multiples of {PART} keys"),
        (problem.head_dim_qk * size % PART, f"keys are parts of {PART} bytes"),
        (0 in problem.query_lens,
         "a request without queries is written as one with a query, into its neighbour's row"),
        (problem.alibi and (problem.sinks or problem.window_left >= 0),
         "it has no sinks and no windows beside ALiBi"),
    ) or refused_attention(problem) or unavailable(FILE, target) or True  # fmt: skip


def _compile_key(problem: AttentionProblem) -> Hashable:
    return (
        problem.dtype, problem.num_kv_heads, problem.group_size, problem.head_dim_qk,
        problem.page_size, problem.window_left, problem.alibi, problem.sinks, problem.strided_q,
        problem.strided_kv, problem.kv_layout, problem.most_queries > 1,
    )  # fmt: skip


@implementation(
    "paged_attention", name="vllm-chunked-prefill-paged-decode", provider="vllm",
    supports=_supports, features=("host_bounds", "alibi", "large_caches"),
    writes_out=True,
    hidden_keys="finite",  # its kernel for one query reads every page, and multiplies V by 0
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32"),
    compile_key=_compile_key, tile=32,
    build_ahead="cuda", build_minutes=0.1, build_compilers=1,
)  # fmt: skip
def attend(inputs: PagedAttentionInputs) -> tuple[torch.Tensor | None, None]:
    """Attend with both kernels; the new keys and values are given besides the cache, too."""
    metadata = inputs.metadata
    k, v = (by_slots(each, inputs.kv_layout) for each in (inputs.k_cache, inputs.v_cache))
    new = [_new_rows(inputs, each) for each in (k, v)]
    part = PART // k.element_size()
    # Of a width that is a multiple of 16, always: Triton compiles for others again.
    spare = COLUMNS + -inputs.block_table.shape[1] % COLUMNS
    table = torch.nn.functional.pad(inputs.block_table, (0, spare), value=-1)
    one = inputs.q.new_ones(1, dtype=torch.float32)
    with load(FILE, stubs) as kernels, scalars_as_bounds(inputs.q):
        run = kernels.chunked_prefill_paged_decode
        run(
            query=inputs.q,
            key=new[0],
            value=new[1],
            output=inputs.out,
            kv_cache_dtype="auto",
            key_cache=k.unflatten(3, (-1, part)).permute(0, 2, 3, 1, 4),
            value_cache=v.permute(0, 2, 3, 1),
            block_table=table,
            query_start_loc=metadata.qo_indptr,
            seq_lens=metadata.seq_lens,
            max_seq_len=inputs.max_kv_len,
            max_query_len=inputs.max_q_len,
            k_scale=one,
            v_scale=one,
            alibi_slopes=inputs.alibi_slopes,
            sliding_window=1 + inputs.window_left,
            sm_scale=inputs.sm_scale,
            **known(run, sinks=inputs.sinks),
        )
    return inputs.out, None


def _new_rows(inputs: PagedAttentionInputs, cache: torch.Tensor) -> torch.Tensor:
    """Return [tokens, heads, channels], what the cache holds of the new tokens."""
    queries, keys = inputs.lengths()
    request = torch.arange(len(keys), device=keys.device).repeat_interleave(queries)
    token = torch.arange(len(request), device=keys.device) - inputs.metadata.qo_indptr[request]
    position = (keys - queries)[request] + token
    size = inputs.metadata.page_size
    return cache[inputs.block_table[request, position // size].long(), position % size]


PREFILL_NAME = "ops.triton_prefill_attention"
PREFILL = (f"vllm.v1.attention.{PREFILL_NAME}", f"vllm.attention.{PREFILL_NAME}")


def _prefills(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    return first_reason(
        (problem.empty_batch, "engines make no call without a token"),
        (problem.query_lens != problem.seq_lens, "each request has as many queries as keys"),
        (0 in (problem.window_left, problem.window_right), "a window of 0 stands for none"),
        (problem.logits_soft_cap, "it has no soft cap"),
        (problem.sinks and not says(PREFILL, "USE_SINKS"), "this release has no sinks"),
    ) or refused_attention(problem) or unavailable(PREFILL, target) or True  # fmt: skip


def _prefill_key(problem: AttentionProblem) -> Hashable:
    return (
        problem.dtype, problem.num_kv_heads, problem.group_size, problem.head_dim_qk,
        problem.strided_q, problem.strided_kv, problem.causal, problem.window_left,
        problem.window_right, problem.sinks,
    )  # fmt: skip


@implementation(
    "ragged_attention", name="vllm-prefill", provider="vllm", supports=_prefills,
    features=("host_bounds", "window_right", ALGEBRA), writes_out=True, compile_key=_prefill_key,
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32"), tile=32,
    build_ahead="cuda", build_minutes=0.05, build_compilers=1,
)  # fmt: skip
def prefill(inputs: RaggedAttentionInputs) -> tuple[object, None]:
    """Attend each request's tokens to each other."""
    sinks = {} if inputs.sinks is None else {"sinks": inputs.sinks}
    with load(PREFILL, stubs) as kernels, scalars_as_bounds(inputs.q):
        kernels.context_attention_fwd(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            o=inputs.out,
            b_start_loc=inputs.qo_indptr[:-1],
            b_seq_len=inputs.qo_indptr.diff(),
            max_input_len=inputs.max_q_len,
            is_causal=inputs.causal,
            softmax_scale=inputs.sm_scale,
            sliding_window_q=inputs.window_left if inputs.window_left > 0 else None,
            sliding_window_k=inputs.window_right if inputs.window_right > 0 else None,
            **sinks,
        )
    return inputs.out, None
