"""Faults with tensors that are wider than the channels that count, and an honest control."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from ....impl.features import MOE_FEATURES
from ....impl.torch.moe_weights import expert_weights, hidden_states
from ....reference.moe.activations import ACTIVATIONS
from ....reference.tensors.moe_inputs import MoEInputs
from ..catalogue import SeededBug, seeded
from .kernels import apply, changed

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
MOE = "moe"
WIDE = ("padded_widths", "moe_biases", "mxfp4_weights")
Tensor = torch.Tensor


def _in_halves(inputs: MoEInputs) -> bool:
    return ACTIVATIONS[inputs.activation].gated and not inputs.interleaved


@seeded(BUGS, MOE, "parity", features=WIDE)
def result_as_wide_as_weights(inputs: MoEInputs) -> Tensor:
    """Return as many channels as the weights have room for."""
    out, w2 = apply(inputs), inputs.w2
    wide = (w2 if isinstance(w2, Tensor) else w2.codes).shape[1]
    return functional.pad(out, (0, wide - out.shape[1]))


@seeded(BUGS, MOE, "parity", features=WIDE)
def ups_begin_at_true_inter(inputs: MoEInputs) -> Tensor:
    """Take the up rows behind as many gate rows as count, not behind the padded ones."""
    size = inputs.inter_size

    def w13(inputs: MoEInputs, expert: int) -> Tensor:
        rows = expert_weights(inputs.w13, expert)[:, : inputs.hidden_size]
        return rows[: size and (2 * size if ACTIVATIONS[inputs.activation].gated else size)]

    return apply(inputs, changed(w13=w13))


@seeded(BUGS, MOE, "parity", features=WIDE)
def bias_of_ups_at_true_inter(inputs: MoEInputs) -> Tensor:
    """Take the up biases behind as many gate biases as count, where the weights are right."""
    bias, size = inputs.w13_bias, inputs.inter_size
    if bias is None or size is None or not _in_halves(inputs):
        return apply(inputs)
    moved = bias.clone()
    moved[:, bias.shape[1] // 2 :][:, :size] = bias[:, size : 2 * size]
    return apply(replace(inputs, w13_bias=moved))


@seeded(BUGS, MOE, "parity", features=WIDE)
def states_as_if_not_padded(inputs: MoEInputs) -> Tensor:
    """Read hidden states with a stride of the channels that count, though they are padded."""

    def hidden(inputs: MoEInputs) -> Tensor:
        rows = hidden_states(inputs.hidden)
        count, size = len(rows), inputs.hidden_size
        return rows if size is None else rows.flatten()[: count * size].view(count, size)

    return apply(inputs, changed(hidden=hidden))


@seeded(BUGS, MOE, "parity", features=WIDE, writes_out=True)
def rows_of_result_as_wide_as_weights(inputs: MoEInputs) -> Tensor:
    """Write the rows of the result as far apart as the weights have channels."""
    out, w2 = apply(inputs), inputs.w2
    assert inputs.out is not None  # noqa: S101  it declares writes_out
    wide = (w2 if isinstance(w2, Tensor) else w2.codes).shape[1]
    rows = functional.pad(out, (0, wide - out.shape[1])).flatten()
    inputs.out.copy_(rows[: out.numel()].view(out.shape))
    return inputs.out


@seeded(BUGS, MOE, "padding_of_widths", features=(*WIDE, "unread_padding"))
def padding_times_padding(inputs: MoEInputs) -> Tensor:
    """Multiply the padding of hidden states by that of the weights, and add the products up."""

    def padding(matrix: Any, expert: int) -> Tensor:  # noqa: ANN401  numbers or codes
        return expert_weights(matrix, expert)[:, inputs.hidden_size :].sum()

    if inputs.hidden_size is None:
        return apply(inputs)

    def w13(inputs: MoEInputs, expert: int) -> Tensor:
        return honest.w13(inputs, expert) + 0 * padding(inputs.w13, expert)

    honest = changed()
    return apply(inputs, changed(w13=w13))


@seeded(CONTROLS, MOE, control="honest", features=MOE_FEATURES)
def experts_on_padded_widths(inputs: MoEInputs) -> Tensor:
    """Multiply whole tensors, padding too, and return the channels that count."""
    size = inputs.hidden_size
    if size is None or inputs.output_norm_eps is not None:  # norms are of the channels that count
        return apply(inputs)
    w2 = inputs.w2
    wide = (w2 if isinstance(w2, Tensor) else w2.codes).shape[1]

    def hidden(inputs: MoEInputs) -> Tensor:
        rows = hidden_states(inputs.hidden)
        return functional.pad(rows, (0, wide - rows.shape[1]))

    whole = replace(inputs, hidden_size=None, inter_size=None)
    return apply(whole, changed(hidden=hidden))[:, :size]
