"""Liger-Kernel's fused experts in Triton, forward: ``LigerFusedMoEFunction``."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from dataclasses import replace
from unittest import mock

import torch

from ....reference import Arithmetic, MoEProblem
from ....reference.tensors.moe_inputs import MoEInputs
from ...gpu.triton_interpreter import scalars_as_bounds
from ...targets.refusal import first_reason
from ...targets.target import Target
from ..claims import refused_experts
from ..sources import implementation, load, unavailable
from ..vllm_stubs import Unused

LIGER = "liger_kernel"
FILE = f"{LIGER}.ops.fused_moe"
UNTUNED = {"LIGER_FUSED_MOE_AUTOTUNE": "0"}
"""Read where the kernels are defined: one configuration, instead of 32 that are timed."""
TILE = 1024
"""Pairs of a token and an expert that one program of the router has at most."""


def _supports(problem: MoEProblem, target: Target) -> bool | str:
    return first_reason(
        (problem.activation != "swiglu", "the activation is SwiGLU"),
        (not problem.num_tokens, "a launch has one program a token, and so at least one"),
    ) or refused_experts(problem, target) or unavailable(FILE, target) or True  # fmt: skip


def _stubs() -> dict[str, dict[str, object]]:
    """Stand in for the helpers of all operations, which ask which kinds of devices there are."""
    return {f"{LIGER}.ops.utils": {"ensure_contiguous": lambda function: function}}


def _tile(problem: MoEProblem) -> int:
    """Return the tokens that one program of the router has."""
    return max(1, TILE >> (problem.top_k - 1).bit_length())


def _compile_key(problem: MoEProblem) -> Hashable:
    tiles = -(-problem.num_tokens // _tile(problem))
    return (
        problem.dtype, problem.hidden, problem.inter, problem.num_experts, problem.top_k,
        problem.num_tokens == 1, problem.num_tokens % 16 == 0,
        problem.num_tokens * problem.top_k % 16 == 0, tiles == 1, tiles % 16 == 0,
    )  # fmt: skip


def _kernels(problem: MoEProblem) -> Iterator[MoEProblem]:
    tile = _tile(problem)
    for tokens in (1, 2, 3, 8, 16, tile + 1, 2 * tile, 16 * tile - 1, 16 * tile):
        yield replace(problem, num_tokens=tokens, token_ids=())


@implementation(
    "moe",
    name="liger-fused-moe",
    provider=LIGER,
    supports=_supports,
    features=("duplicate_ids",),
    arithmetic=Arithmetic(intermediate="inputs", partial_outputs=True),
    compile_key=_compile_key,
    kernels=_kernels,
    build_ahead="cuda",
    build_minutes=0.2,
    build_compilers=1,
)
def experts(inputs: MoEInputs) -> torch.Tensor:
    """Sort pairs by expert, multiply and activate, multiply again, and add up."""
    with (
        mock.patch.dict(os.environ, UNTUNED),
        load(FILE, _stubs) as kernels,
        scalars_as_bounds(inputs.topk_weights),
    ):
        out: torch.Tensor = kernels.LigerFusedMoEFunction.forward(
            Unused(), inputs.hidden, inputs.w13, inputs.w2, inputs.topk_ids, inputs.topk_weights
        )
    return out
