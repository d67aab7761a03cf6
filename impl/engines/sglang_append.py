"""SGLang's Triton kernels that append: keys turned on the way, and latent attention's."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import SimpleNamespace

import torch

from ...reference import Arithmetic, AttentionProblem, RopeAppendProblem
from ...reference.problems.base import is_power_of_two
from ...reference.tensors.inputs import AppendInputs
from ...reference.tensors.rope_append import RopeAppendInputs
from ..gpu.triton_interpreter import scalar_conditions
from ..targets.refusal import Refusal, first_reason
from ..targets.target import Target
from .claims import by_slots, wrong_here
from .sglang_calls import SGLANG, pool, pool_refusal
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


MLA_FILE = "sglang.kernels.ops.kvcache.mla_buffer"
MLA_NAME, MLA_FP8_NAME = "set_mla_kv_buffer_triton", "set_mla_kv_buffer_triton_fp8_quant"
FP8 = "float8_e4m3fn"


def mla_stubs() -> Mapping[str, Mapping[str, object]]:
    """Stand in for a machine below SM90, on which SGLang writes with its Triton kernel."""
    capabilities = SimpleNamespace(supports_triton=True)
    never = {"can_use_set_mla_kv_buffer": lambda *_: False, "set_mla_kv_buffer": None}
    return {
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: False},
        "sglang.kernels.ops.kvcache.set_mla_kv_buffer": never,
        "sglang.srt.platforms": {"current_platform": SimpleNamespace(capabilities=capabilities)},
        "sglang.srt.runtime_context": {"get_parallel": None},
    }


def _writes_latents(problem: AttentionProblem, target: Target) -> Refusal | str | bool:
    name = MLA_FP8_NAME if problem.kv_cache else MLA_NAME
    return first_reason(
        (not problem.values_in_keys, "caches of latent attention only"),
        (problem.head_dim_qk == problem.head_dim_vo, "keys have rotary channels"),
        (not problem.num_tokens, "engines make no call without a token"),
        (problem.kv_cache not in ("", FP8), f"caches hold {FP8} where they are FP8"),
        (problem.k_scale != 1, "nothing divides keys before they are FP8"),
        (bool(problem.kv_cache) and problem.dtype == "float32", "FP8 is made of 16 bits"),
    ) or pool_refusal(problem) or wrong_here(target, problem.kv_cache) or missing_name(
        MLA_FILE, name
    ) or unavailable(MLA_FILE, target) or True  # fmt: skip


def _latent_key(problem: AttentionProblem) -> Hashable:
    dims = problem.head_dim_qk, problem.head_dim_vo
    return problem.dtype, problem.kv_cache, *dims, problem.strided_q, problem.strided_kv


@implementation(
    "append_paged_kv",
    name="sglang-set-mla-kv-buffer",
    provider=SGLANG,
    supports=_writes_latents,
    features=("mla", "fp8_kv", "slot_mapping"),
    compile_key=_latent_key,
    build_ahead="cuda",
    build_minutes=0.02,
    build_compilers=1,
)
def append_latents(inputs: AppendInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Write compressed and rotary channels by ``set_mla_kv_buffer_triton``, or in FP8.

    From SM90 on SGLang takes a CUDA kernel for plain rows, which is not judged here.
    """
    k_cache = inputs.k_cache if inputs.in_place else inputs.k_cache.clone()
    width = inputs.v.shape[2]
    given = {
        "kv_buffer": pool(k_cache, inputs.kv_layout),
        "loc": inputs.slot_mapping,
        "cache_k_nope": inputs.k[..., :width],
        "cache_k_rope": inputs.k[..., width:],
        "reserved_skip_index": -1,
    }
    with load(MLA_FILE, mla_stubs) as kernels, scalar_conditions(k_cache):
        if inputs.kv_format is None:
            getattr(kernels, MLA_NAME)(**given)
        else:
            getattr(kernels, MLA_FP8_NAME)(**given, fp8_dtype=inputs.kv_format.entry.dtype)
    return k_cache, k_cache[..., :width]
