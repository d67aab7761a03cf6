"""SGLang's prefill attention without a cache: each request's tokens attend to each other."""

from __future__ import annotations

from collections.abc import Hashable

from ...reference import Arithmetic, AttentionProblem
from ...reference.tensors.inputs import RaggedAttentionInputs
from ..gating.rules import provider_matches
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.refusal import Refusal
from ..targets.target import Target
from .sglang_calls import SGLANG, Pair, file_of, kernel, strides_key, stubs
from .sources import known, load, unavailable

FILE = file_of("prefill_attention")
SCALED = ">=0.5.23"
"""Releases whose kernel takes ``sm_scale``; others multiply by 1 / sqrt(head_dim)."""


def _supports(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    usual = problem.scale == problem.head_dim_qk**-0.5
    for holds, why in (
        (problem.empty_batch, "engines make no call without a token"),
        (problem.query_lens != problem.seq_lens, "each request has as many queries as keys"),
        (problem.head_dim_qk != problem.head_dim_vo, "queries and values have the same channels"),
        (problem.window_left >= 0 or problem.logits_soft_cap or problem.sinks,
         "it has no window, no soft cap and no sinks"),
        (problem.k_scale != 1 or problem.v_scale != 1, "it has no scales of keys and values"),
        (not usual and not provider_matches(target, SGLANG, SCALED),
         f"a release that is not {SCALED} has no sm_scale"),
    ):  # fmt: skip
        if holds:
            return why
    return unavailable(FILE, target) or True


def _compile_key(problem: AttentionProblem) -> Hashable:
    return *strides_key(problem), problem.causal


@kernel(
    "ragged_attention",
    name="sglang-prefill",
    supports=_supports,
    features=("host_bounds",),
    arithmetic=Arithmetic(probabilities="inputs", operands="tfloat32"),
    compile_key=_compile_key,
    tile=128,
)
def prefill(inputs: RaggedAttentionInputs) -> Pair:
    """Attend with ``context_attention_fwd``."""
    lengths = inputs.qo_indptr.diff()
    with load(FILE, stubs) as kernels, scalars_as_bounds(inputs.q):
        attend = kernels.context_attention_fwd
        attend(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            o=inputs.out,
            b_start_loc=inputs.qo_indptr[:-1],
            b_seq_len=lengths,
            max_input_len=inputs.max_q_len,
            is_causal=inputs.causal,
            **known(attend, sm_scale=inputs.sm_scale),
        )
    return inputs.out, None
