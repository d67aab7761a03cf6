"""SGLang's Triton kernel that turns queries and keys and appends keys and values."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ...reference import Arithmetic, RopeAppendProblem
from ...reference.problems.base import is_power_of_two
from ...reference.tensors.rope_append import RopeAppendInputs
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from .claims import by_slots, wrong_here
from .sglang_calls import SGLANG
from .sources import implementation, load, missing_name, unavailable

FILE = "sglang.kernels.ops.attention.fused_qk_rope_reshape_and_cache"
NAME = "fused_qk_rope_reshape_and_cache"
MOST_INTERPRETED = 32
"""Programs of a launch, one for each head of queries of a token, that are interpreted in time."""


def _supports(problem: RopeAppendProblem, target: Target) -> Refusal | str | bool:
    why = missing_name(FILE, NAME) or unavailable(FILE, target) or first_reason(
        (problem.quantised_q, "queries keep their dtype"),
        (problem.latent, "keys do not hold the values"),
        (problem.plain_dim > 0, "all channels turn"),
        (not is_power_of_two(problem.rope_dim), "channels are a power of two"),
        (not is_power_of_two(problem.page_size), "slots of a page are a power of two"),
        (problem.num_qo_heads % problem.num_kv_heads != 0, "each head of keys has as many queries"),
        (not problem.num_tokens, "engines make no call without a token"),
    )  # fmt: skip
    programs = problem.num_tokens * problem.num_qo_heads
    if not why and target.device == "cpu" and programs > MOST_INTERPRETED:
        return "a program for each head takes the interpreter too long"
    return why or wrong_here(target, problem.codes) or True


def _key(problem: RopeAppendProblem) -> Hashable:
    how = problem.codes, problem.interleaved, problem.kv_layout, problem.page_size
    heads = problem.num_qo_heads, problem.num_kv_heads
    given = problem.dtype, problem.index_dtype, problem.strided_kv
    return *given, *how, *heads, problem.rope_dim, problem.spare_channels


@implementation(
    "rope_and_append",
    name="sglang-fused-qk-rope-cache",
    provider=SGLANG,
    supports=_supports,
    # `k_pe * (1 / k_scale)`, and so of v; turned in float32.
    arithmetic=Arithmetic(quotients="reciprocal"),
    compile_key=_key,
    build_ahead="cuda",
    build_minutes=0.03,
    build_compilers=1,
)
def rope_cache(inputs: RopeAppendInputs) -> torch.Tensor:
    """Turn and append by ``fused_qk_rope_reshape_and_cache``, in the layout of flash attention."""
    k_cache, v_cache = (by_slots(each, inputs.kv_layout) for each in inputs.caches)
    scales = [
        torch.tensor([scale], dtype=torch.float32, device=inputs.q.device)
        for scale in (inputs.k_scale, inputs.v_scale)
    ]
    with load(FILE, dict) as kernels:
        found = getattr(kernels, NAME)(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            key_cache=k_cache,
            value_cache=v_cache,
            slot_mapping=inputs.slots,
            pos=inputs.positions,
            cos_sin=inputs.cos_sin,
            k_scale=scales[0],
            v_scale=scales[1],
            is_neox=not inputs.interleaved,
            flash_layout=True,
            apply_scale=k_cache.element_size() == 1,
            output_zeros=False,
        )
    q: torch.Tensor = found[0]
    return q.view(inputs.q.shape)
