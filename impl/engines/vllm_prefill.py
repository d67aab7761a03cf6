"""vLLM's prefill attention without a cache, which its encoders take (``context_attention_fwd``)."""

from __future__ import annotations

from collections.abc import Hashable

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import RaggedAttentionInputs
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import Refusal
from ..targets.target import Target
from .claims import refused_attention
from .sources import implementation, load, says, unavailable
from .vllm_stubs import stubs

NAME = "ops.triton_prefill_attention"
FILE = (f"vllm.v1.attention.{NAME}", f"vllm.attention.{NAME}")


def _supports(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    for holds, why in (
        (problem.empty_batch, "engines make no call without a token"),
        (problem.query_lens != problem.seq_lens, "each request has as many queries as keys"),
        (0 in (problem.window_left, problem.window_right), "a window of 0 stands for none"),
        (problem.logits_soft_cap, "it has no soft cap"),
        (problem.sinks and not says(FILE, "USE_SINKS"), "this release has no sinks"),
    ):
        if holds:
            return why
    wrong = refused_attention(problem)
    return wrong or unavailable(FILE, target) or True


def _compile_key(problem: AttentionProblem) -> Hashable:
    return (
        problem.dtype, problem.num_kv_heads, problem.group_size, problem.head_dim_qk,
        problem.strided_q, problem.strided_kv, problem.causal, problem.window_left,
        problem.window_right, problem.sinks,
    )  # fmt: skip


@implementation(
    "ragged_attention", name="vllm-prefill", provider="vllm", supports=_supports,
    features=("host_bounds", "window_right"), writes_out=True, compile_key=_compile_key,
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32"), tile=32,
    build_ahead="cuda", build_minutes=0.05, build_compilers=1,
)  # fmt: skip
def prefill(inputs: RaggedAttentionInputs) -> tuple[object, None]:
    """Attend each request's tokens to each other."""
    sinks = {} if inputs.sinks is None else {"sinks": inputs.sinks}
    with load(FILE, stubs) as kernels, scalars_as_bounds(inputs.q):
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
