"""What is around a grouped product: tokens sorted by their expert, the activation, the sum.

For experts whose two products alone are a kernel's. Whatever nobody selected, and slots of weight
0, are never given to it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...reference.tensors.moe_inputs import MoEInputs
from .moe import GATES, PLAIN, SWIGLU
from .moe_layouts import codes_of


class Rows(NamedTuple):
    """Pairs of a token and its expert, sorted by expert.

    Attributes:
        tokens, slots: int64 [rows]: where they come from.
        experts: int64 [rows]: on this rank.
        weights: float32 [rows, 1].
        indptr: int64 [experts + 1]: where each expert's rows begin.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    indptr: torch.Tensor


def sorted_rows(inputs: MoEInputs) -> Rows:
    """Sort the pairs of a call by expert; those of other ranks and of weight 0 are left out."""
    experts = codes_of(inputs.w13).shape[0]
    ids = inputs.topk_ids.long() - inputs.expert_offset
    here = (ids >= 0) & (ids < experts) & (inputs.topk_weights != 0)
    tokens, slots = here.nonzero(as_tuple=True)
    order = ids[tokens, slots].argsort(stable=True)
    tokens, slots = tokens[order], slots[order]
    chosen = ids[tokens, slots]
    counts = torch.bincount(chosen, minlength=experts)
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return Rows(tokens, slots, chosen, inputs.topk_weights[tokens, slots].unsqueeze(1), indptr)


def of_rows(given: torch.Tensor | None, rows: Rows) -> torch.Tensor | float:
    """Return a bias of each row [rows, n], float32, or 0."""
    return 0.0 if given is None else given[rows.experts].float()


def activated(inputs: MoEInputs, projected: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Apply the activation to float32 rows [rows, inter], or [rows, 2 inter] of gates and ups."""
    if inputs.activation in PLAIN:
        return PLAIN[inputs.activation](projected)
    if inputs.interleaved:
        gate, up = projected[:, 0::2], projected[:, 1::2]
    else:
        gate, up = projected.chunk(2, dim=1)
    if inputs.activation in GATES:
        return GATES[inputs.activation](gate) * up
    alpha, beta, limit = (
        _number(usual if given is None else given, gate, rows)
        for given, usual in zip(
            (inputs.alpha, inputs.beta, inputs.limit), SWIGLU[inputs.activation], strict=True
        )
    )
    gate, up = torch.minimum(gate, limit), torch.clamp(up, -limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def _number(given: float | torch.Tensor, like: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return a number of each row's expert, [rows, 1] or one for all."""
    if isinstance(given, torch.Tensor) and given.numel() > 1:
        return given[rows.experts].to(like.dtype).unsqueeze(1)
    if isinstance(given, torch.Tensor):
        return given.to(like.dtype)
    # as_tensor would round it beforehand, also where numbers of torch are widened.
    return torch.full((), given, dtype=like.dtype, device=like.device)


def combined(inputs: MoEInputs, y: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Weigh the experts' float32 outputs [rows, hidden] and add up each token's, slot by slot."""
    tokens, top_k = inputs.topk_ids.shape
    slots = y.new_zeros((tokens, top_k, y.shape[1]))
    slots[rows.tokens, rows.slots] = y * rows.weights
    return slots.sum(dim=1).to(inputs.out_dtype)
