"""vLLM's Triton experts on FP8 and int8 weights, and by tensor descriptors: ``fused_moe_kernel``.

Hidden states are of the same format, and the activation's results are quantised again (vLLM does
that by a CUDA operator, torch does it here), or they are numbers beside weights in int8. On Hopper
the kernel swaps its operands where a block of FP8 has few rows (``SWAP_AB``).
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import replace
from typing import cast

import torch

from ....reference import MoEProblem, QuantizedMatrix
from ....reference.tensors.moe_inputs import MoEInputs
from ...features import ALGEBRA
from ...targets.refusal import Refusal, first_reason
from ...targets.target import Target
from ...torch.moe_layouts import codes_of, scales_of
from ..claims import wrong_here
from ..sources import says
from ..vllm_moe import (
    FEATURES,
    FILE,
    IN_GROUPS,
    ROUNDED,
    Form,
    compile_key,
    kernel,
    multiplied,
    refusal,
)
from ..vllm_stubs import stubs_with_descriptors, stubs_with_swapped_operands
from .grouped_weights import FEATURES as GROUP_FEATURES
from .grouped_weights import GROUPED, grouped, not_grouped

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
GROUP = 128
SWAPPED_TOKENS = {"fp8_block": 64, "fp8_tensor": 96, "fp8_channel": 96}
"""Most tokens for which vLLM chooses blocks of fewer than 64 rows."""
HOPPER = 90
GATHERS = 100
"""Compute capabilities, times ten: of Hopper, and the least with ``tile::gather4``."""
OF_CUDA = 6
"""Pairs for each expert up to which vLLM multiplies weights of 4 bits by a CUDA operator."""
TILE = 32
"""Channels of a tile without a GPU: vLLM's own of 128 would leave few problems."""


def _other_weights(problem: MoEProblem, target: Target) -> bool | str:
    if not problem.quantized.startswith("fp8"):
        return "weights are FP8"
    if not problem.quantized_hidden:
        return "FP8 weights are multiplied by FP8 hidden states, which are to be given"
    return wrong_here(target, "float8_e4m3fn") or refusal(problem, target)


def _not_swapped(problem: MoEProblem, target: Target) -> bool | str:
    if target.sm is not None and target.sm // 10 != HOPPER // 10:
        return Refusal("vLLM swaps the operands on Hopper only", "device", "sm_90")
    if problem.quantized and problem.num_tokens > SWAPPED_TOKENS.get(problem.quantized, 0):
        return "vLLM swaps the operands of blocks of fewer than 64 rows only"
    if not says(FILE, "SWAP_AB"):
        return "this release never swaps its operands"
    return _other_weights(problem, target)


FP8 = functools.partial(
    kernel,
    features=(*FEATURES, "fp8_weights", "quantized_hidden", "strided_hidden"),
    arithmetic=replace(ROUNDED, fp8_products="fixed_point"),
)


@FP8(name="vllm-fused-moe-fp8", supports=_other_weights)
def fp8(inputs: MoEInputs) -> torch.Tensor:
    """Multiply FP8 by FP8, with scales of tensors, of rows, or of 128 by 128."""
    return _quantised(inputs, _form(inputs))


@FP8(name="vllm-fused-moe-fp8-swap-ab", supports=_not_swapped)
def fp8_swapped(inputs: MoEInputs) -> torch.Tensor:
    """Do the same with the weights as the first operand."""
    return _quantised(inputs, _form(inputs)._replace(stubs=stubs_with_swapped_operands))


def _other_integers(problem: MoEProblem, target: Target) -> bool | str:
    if not problem.quantized.startswith("int8"):
        return "weights are int8"
    refused = {"int8_tensor": problem.quantized_hidden, "int8_block": not problem.quantized_hidden}
    if refused.get(problem.quantized):
        return "scales are of 128 by 128 beside int8 only, those of tensors beside numbers only"
    return refusal(problem, target)


@kernel(
    name="vllm-fused-moe-int8",
    supports=_other_integers,
    features=(*FEATURES, "int8_weights", "quantized_hidden", "strided_hidden", ALGEBRA),
    arithmetic=ROUNDED,
)
def int8(inputs: MoEInputs) -> torch.Tensor:
    """Multiply int8 by int8 or by numbers."""
    if isinstance(inputs.hidden, torch.Tensor):
        form = Form("int8_w8a16", {"use_int8_w8a16": True}, _weights)
        return multiplied(inputs, inputs.hidden, None, form)
    blocks = cast("QuantizedMatrix", inputs.w13).format.scales == "block"
    flags = {
        "use_int8_w8a8": True,
        "per_channel_quant": not blocks,
        "block_shape": [GROUP, GROUP] if blocks else None,
    }
    rows = functools.partial(quantised_rows, dtype=torch.int8, group=GROUP if blocks else 0)
    return _quantised(inputs, Form("int8_w8a8", flags, _weights, rows))


def _not_in_groups(problem: MoEProblem, target: Target) -> bool | str:
    few = problem.num_tokens * problem.top_k <= OF_CUDA * problem.here
    return first_reason(
        (not says(FILE, IN_GROUPS), "this release has no launcher of groups by itself"),
        (problem.quantized.startswith("int4") and few and target.device != "cpu",
         "vLLM multiplies few tokens of an expert by a CUDA operator"),
    ) or not_grouped(problem) or refusal(problem, target)  # fmt: skip


def _group_key(problem: MoEProblem) -> Hashable:
    """Name the kernel's constants, sizes among them."""
    odd = problem.quantized == "int8_block" and problem.here % 2
    return compile_key(problem), problem.hidden, problem.inter, odd


@kernel(
    name="vllm-fused-moe-wna16",
    supports=_not_in_groups,
    compile_key=_group_key,
    features=(*GROUP_FEATURES, ALGEBRA),
    arithmetic=GROUPED,
)
def in_groups(inputs: MoEInputs) -> torch.Tensor:
    """Multiply numbers by weights of 4 or 8 bits with a scale for each row and group."""
    given, flags = grouped(inputs)
    name = "int4_w4a16" if flags["use_int4_w4a16"] else "int8_w8a16"
    return multiplied(given, codes_of(inputs.hidden), None, Form(name, flags, scales_of))


def _quantised(inputs: MoEInputs, form: Form) -> torch.Tensor:
    scale = scales_of(inputs.hidden)
    scale = scale.unsqueeze(1) if scale.dim() == 1 else scale
    return multiplied(inputs, codes_of(inputs.hidden), scale, form)


def _form(inputs: MoEInputs) -> Form:
    scales = cast("QuantizedMatrix", inputs.w13).format.scales
    flags = {
        "use_fp8_w8a8": True,
        "per_channel_quant": scales == "channel",
        "block_shape": [GROUP, GROUP] if scales == "block" else None,
    }
    given = inputs.intermediate_scale if scales == "tensor" else None
    group = GROUP if scales == "block" else 0
    rows = functools.partial(quantised_rows, dtype=torch.float8_e4m3fn, group=group, given=given)
    return Form("fp8_w8a8", flags, _weights, rows)


def _weights(matrix: torch.Tensor | QuantizedMatrix) -> torch.Tensor:
    """Return scales [experts], or with an axis of channels or blocks for each of a matrix's."""
    scales = scales_of(matrix)
    return scales.unsqueeze(-1) if scales.dim() == 2 else scales  # noqa: PLR2004  [experts, rows]


def quantised_rows(
    x: torch.Tensor,
    *,
    dtype: torch.dtype,
    group: int = 0,
    given: float | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows [n, columns] with a scale for each, for each of its groups, or for all.

    Args:
        x: the rows.
        dtype: the dtype of the codes.
        group: columns that share a scale; 0 for all of a row.
        given: the scale of all rows, beforehand.

    Returns:
        Codes, and scales [n, groups] or [1].
    """
    wide, largest = x.float(), LARGEST[dtype]
    if given is not None:
        scale = torch.as_tensor(given, dtype=torch.float32, device=x.device).reshape(1)
        spread = scale
    else:
        parts = wide.split(group or wide.shape[1], dim=1)
        scale = torch.cat([part.abs().amax(dim=1, keepdim=True) for part in parts], dim=1) / largest
        scale = torch.where(scale > 0, scale, 1.0)
        spread = scale.repeat_interleave(group or wide.shape[1], dim=1)[:, : wide.shape[1]]
    codes = (wide / spread).clamp(-largest, largest)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale


def _no_whole_tiles(problem: MoEProblem, target: Target) -> bool | str:
    if target.sm is not None and target.sm < GATHERS:
        return Refusal("tile::gather4 needs sm_100 or newer", "device", "sm_100")
    if not says(FILE, "USE_TD"):
        return "this release has no tensor descriptors for experts"
    tile = TILE if target.device == "cpu" else GROUP
    if problem.hidden % tile or problem.inter % tile:
        return f"vLLM reads by pointers where rows are no whole tiles of {tile} channels"
    return refusal(problem, target)


@kernel(
    name="vllm-fused-moe-td",
    supports=_no_whole_tiles,
    features=(*FEATURES, ALGEBRA),
    arithmetic=ROUNDED,
)
def descriptors(inputs: MoEInputs) -> torch.Tensor:
    """Read hidden states and weights by tensor descriptors."""
    hidden = codes_of(inputs.hidden)
    small = {} if hidden.is_cuda else {"BLOCK_SIZE_K": TILE, "BLOCK_SIZE_N": TILE}
    return multiplied(inputs, hidden, None, Form(stubs=stubs_with_descriptors, blocks=small))
