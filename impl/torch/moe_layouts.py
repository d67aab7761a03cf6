"""How the weights of experts are laid out elsewhere: which half of the rows is the gate.

The oracle's w13 has the gate rows first (or gate 0, up 0, gate 1, ...). FlashInfer's CUTLASS,
trtllm-gen and CuTe DSL MoE and its published references take the gate from the *second* half, with
the biases and scales that belong to the rows; its Triton ``silu_and_mul`` takes it from the first.
"""

from __future__ import annotations

import torch

from ...reference import QuantizedMatrix
from ...reference.moe.activations import ACTIVATIONS
from ...reference.tensors.moe_inputs import MoEInputs

SWIGLU_NAMES = ("alpha", "beta", "limit")


def codes_of(matrix: torch.Tensor | QuantizedMatrix) -> torch.Tensor:
    """Return the codes of a matrix, or its numbers."""
    return matrix if isinstance(matrix, torch.Tensor) else matrix.codes


def zero_points_of(matrix: torch.Tensor | QuantizedMatrix) -> torch.Tensor | None:
    """Return the zero points of a quantised matrix, if it has any."""
    return None if isinstance(matrix, torch.Tensor) else matrix.zero_points


def scales_of(matrix: torch.Tensor | QuantizedMatrix) -> torch.Tensor:
    """Return the scales of a quantised matrix.

    Raises:
        TypeError: it holds numbers.
    """
    if isinstance(matrix, torch.Tensor):
        message = f"{matrix.dtype} numbers have no scales"
        raise TypeError(message)
    return matrix.scales


def up_first(rows: torch.Tensor, *, gated: bool, interleaved: bool = False) -> torch.Tensor:
    """Bring rows [experts, 2 * inter, ...] into FlashInfer's order: all ups, then all gates.

    Args:
        rows: weights, biases, or the scales of rows or of blocks of rows, in the oracle's order.
        gated: whether there is a gate; without one there is one order only.
        interleaved: the oracle's order is gate 0, up 0, gate 1, up 1, ...
    """
    if not gated:
        return rows
    gates, ups = _halves(rows, interleaved=interleaved)
    return torch.cat((ups, gates), dim=1)


def gate_first(rows: torch.Tensor, *, gated: bool, interleaved: bool = False) -> torch.Tensor:
    """Bring rows [experts, 2 * inter, ...] into the order: all gates, then all ups."""
    if not gated or not interleaved:
        return rows
    return torch.cat(_halves(rows, interleaved=interleaved), dim=1)


def _halves(rows: torch.Tensor, *, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return rows[:, 0::2], rows[:, 1::2]
    gates, ups = rows.chunk(2, dim=1)
    return gates, ups


def rows_up_first(inputs: MoEInputs, rows: torch.Tensor) -> torch.Tensor:
    """Bring rows that belong to a call's w13 into FlashInfer's order."""
    gated = ACTIVATIONS[inputs.activation].gated
    return up_first(rows, gated=gated, interleaved=inputs.interleaved)


def bias_up_first(inputs: MoEInputs) -> torch.Tensor | None:
    """Return w13's bias in FlashInfer's order, if there is one."""
    return None if inputs.w13_bias is None else rows_up_first(inputs, inputs.w13_bias)


def both_biases(inputs: MoEInputs) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return both biases in FlashInfer's order, or none: ``cutlass_fused_moe`` reads both or none.

    A rank of tensor parallelism has w13's alone where another one adds w2's: zeros stand for it.
    """
    first, second = bias_up_first(inputs), inputs.w2_bias
    if first is None and second is not None:
        first = second.new_zeros(codes_of(inputs.w13).shape[:2])
    if first is not None and second is None:
        second = first.new_zeros(codes_of(inputs.w2).shape[:2])
    return first, second


def swiglu_numbers(inputs: MoEInputs) -> dict[str, torch.Tensor]:
    """Return alpha, beta and limit of each expert, float32 [experts], where a call needs them.

    Nothing for plain SwiGLU and for what has no such numbers, so that the kernel's own fast path
    is called; so is the limit of swiglu where none is set.
    """
    usual = ACTIVATIONS[inputs.activation]
    given = {name: getattr(inputs, name) for name in SWIGLU_NAMES}
    plain = inputs.activation != "swiglu_oai" and all(each is None for each in given.values())
    if plain or usual.alpha is None:
        return {}
    codes = codes_of(inputs.w13)
    found = {}
    for name, value in given.items():
        number = getattr(usual, name) if value is None else value
        if name == "limit" and value is None and inputs.activation == "swiglu":
            continue
        each = torch.as_tensor(number, dtype=torch.float32, device=codes.device)
        found[name] = each.expand(codes.shape[0]).contiguous()
    return found


def numbers_of(matrix: torch.Tensor | QuantizedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Return what the codes of hidden states [tokens, hidden] stand for, in a dtype that holds it.

    FP8 only, with one scale, one a token, or one for 128 columns.
    """
    if isinstance(matrix, torch.Tensor):
        return matrix
    scales = matrix.scales
    if matrix.format.scales == "channel":
        scales = scales.unsqueeze(1)
    elif matrix.format.in_blocks:
        scales = scales.repeat_interleave(128, dim=1)[:, : matrix.codes.shape[1]]
    return (matrix.codes.float() * scales).to(dtype)
