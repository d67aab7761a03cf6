"""A kernel for experts in stages, of which each seeded bug replaces one: pairs by expert, tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....impl.torch.moe import (
    LARGEST_FP8,
    activated,
    gate_of_shared,
    identities,
    normalised,
    of_expert,
)
from ....impl.torch.moe_weights import (
    first_weights,
    hidden_states,
    second_weights,
    true_rows,
)
from ....reference import QuantizedMatrix
from ....reference.tensors.moe_inputs import MoEInputs

TILE = 8
"""Rows of an expert that a program computes."""
PLAIN = ("moe_biases", "swiglu_parameters", "interleaved_w13")


def true_states(inputs: MoEInputs) -> torch.Tensor:
    """Return the hidden states in float32 without padding."""
    return hidden_states(inputs.hidden)[:, : inputs.hidden_size]


def local_ids(inputs: MoEInputs) -> torch.Tensor:
    """Return the ids [tokens, top_k] by their place on this rank; -1 for those of others."""
    ids = inputs.topk_ids.long() - inputs.expert_offset
    return ids.masked_fill((ids < 0) | (ids >= count_of(inputs)), -1)


def count_of(inputs: MoEInputs) -> int:
    """Count the experts of this rank."""
    return len(inputs.w13 if isinstance(inputs.w13, torch.Tensor) else inputs.w13.codes)


def weigh(inputs: MoEInputs, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply an expert's outputs by routing weights [rows, 1]; a weight of 0 leaves nothing."""
    return y if inputs.weights_on_input else torch.where(weights == 0, 0.0, y * weights)


def add(out: torch.Tensor, tokens: torch.Tensor, y: torch.Tensor) -> None:
    """Add an expert's outputs to their tokens'."""
    out.index_add_(0, tokens, y)


def biased(y: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
    """Add an expert's bias, if there is one."""
    return y if bias is None else y + bias[expert].float()


def finished(
    inputs: MoEInputs, y: torch.Tensor, weights: torch.Tensor, expert: int
) -> torch.Tensor:
    """Add the second product's bias, normalise where that is asked, and weigh."""
    bias = None if inputs.w2_bias is None else inputs.w2_bias[:, : inputs.hidden_size]
    return weigh(inputs, normalised(inputs, biased(y, bias, expert)), weights)


def shared(inputs: MoEInputs, hidden: torch.Tensor) -> torch.Tensor | float:
    """Return what the shared experts add to every token."""
    if inputs.shared_w13 is None or inputs.shared_w2 is None:
        return 0.0
    first = inputs.shared_w13
    total = torch.zeros_like(hidden)
    for expert in range(len(first if isinstance(first, torch.Tensor) else first.codes)):
        middle = activated(inputs, hidden @ first_weights(inputs, first, expert).T, expert)
        out = middle @ second_weights(inputs, inputs.shared_w2, expert).T
        total += out * gate_of_shared(inputs, expert)
    return total * inputs.shared_weight


Pairs = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Stages:
    """The parts of the kernel."""

    hidden: Callable[[MoEInputs], torch.Tensor] = true_states
    w13: Callable[[MoEInputs, int], torch.Tensor] = lambda i, e: first_weights(i, i.w13, e)
    w2: Callable[[MoEInputs, int], torch.Tensor] = lambda i, e: second_weights(i, i.w2, e)
    ids: Callable[[MoEInputs], torch.Tensor] = local_ids
    weights: Callable[[MoEInputs], torch.Tensor] = lambda inputs: inputs.topk_weights
    identities: Callable[[MoEInputs, torch.Tensor], torch.Tensor | float] = identities
    schedule: Callable[[torch.Tensor, torch.Tensor], Pairs] = lambda tokens, slots: (tokens, slots)
    projected: Callable[[torch.Tensor], torch.Tensor] = lambda projected: projected
    activate: Callable[[MoEInputs, torch.Tensor, int], torch.Tensor] = activated
    middle: Callable[[torch.Tensor], torch.Tensor] = lambda middle: middle
    finish: Callable[[MoEInputs, torch.Tensor, torch.Tensor, int], torch.Tensor] = finished
    combine: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = add
    scaled: Callable[[MoEInputs, torch.Tensor], torch.Tensor] = lambda inputs, out: (
        out * inputs.routed_scaling_factor
    )
    shared: Callable[[MoEInputs, torch.Tensor], torch.Tensor | float] = shared


HONEST = Stages()


def apply(inputs: MoEInputs, stages: Stages = HONEST) -> torch.Tensor:
    """Compute the experts one after another, and add up what they give."""
    hidden, ids, weights = stages.hidden(inputs), stages.ids(inputs), stages.weights(inputs)
    out = torch.zeros_like(hidden)
    if inputs.one_product and isinstance(inputs.w2, torch.Tensor):
        out = hidden.new_zeros((len(hidden), inputs.w2.shape[1]))
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        tokens, slots = stages.schedule(*(ids == expert).nonzero(as_tuple=True))
        if len(tokens):
            scale = weights[tokens, slots].unsqueeze(1)
            stages.combine(out, tokens, _expert(inputs, stages, hidden[tokens], scale, expert))
    same = stages.identities(inputs, hidden)
    out += same.sum(dim=1) if isinstance(same, torch.Tensor) else same
    out = stages.scaled(inputs, out)
    return (out + stages.shared(inputs, hidden)).to(inputs.out_dtype)


def _expert(
    inputs: MoEInputs, stages: Stages, x: torch.Tensor, weights: torch.Tensor, expert: int
) -> torch.Tensor:
    if inputs.weights_on_input:
        x = x * weights
    bias = inputs.w13_bias
    bias = None if bias is None else true_rows(inputs, bias.transpose(0, 1)).transpose(0, 1)
    projected = biased(x @ stages.w13(inputs, expert).T, bias, expert)
    middle = stages.activate(inputs, stages.projected(projected), expert)
    if inputs.intermediate_scale is not None:
        largest = LARGEST_FP8 * of_expert(inputs.intermediate_scale, expert)
        middle = middle.clamp(-largest, largest)
    y = stages.middle(middle)
    if not inputs.one_product:
        y = y @ stages.w2(inputs, expert).T
    return stages.finish(inputs, y, weights, expert)


def changed(**stages: Callable[..., object]) -> Stages:
    """Return the honest stages with some of them replaced."""
    return replace(HONEST, **stages)  # type: ignore[arg-type]  # by name


def read_as(
    inputs: MoEInputs, change: Callable[[QuantizedMatrix], QuantizedMatrix], *names: str
) -> torch.Tensor:
    """Apply the experts with the codes of these matrices read in another way.

    Args:
        inputs: the inputs of the call.
        change: returns a matrix as it is read.
        names: the names of the matrices; those of both products if none is named.
    """
    given = {name: getattr(inputs, name) for name in names or ("w13", "w2")}
    read: dict[str, Any] = {
        name: change(matrix)
        for name, matrix in given.items()
        if isinstance(matrix, QuantizedMatrix)
    }
    return apply(replace(inputs, **read))
