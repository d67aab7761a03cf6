"""What ``batched_moe`` is given, and making it from a problem."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..moe.weights import QuantizedMatrix
from ..problems.batched_moe import BatchedMoEProblem
from .allocation import BYTE_OF_NAN, Allocator
from .moe_materialise import expert_inputs

OPTIONS = (
    "activation",
    "w13_bias",
    "w2_bias",
    "alpha",
    "beta",
    "limit",
    "interleaved",
    "intermediate_scale",
)
"""Keyword arguments of ``batched_moe`` that a record has, all but ``compute_dtype``."""
OF_ROWS = ("hidden", "topk_ids", "topk_weights")
"""Tensors of ``moe`` with a row a token, which are laid out by expert here or do not exist."""


@dataclass(frozen=True, eq=False)
class BatchedMoEInputs:
    """Arguments of ``batched_moe``.

    Attributes:
        counts: int32 [experts].
        out_dtype: dtype of the result.
        out: buffer for the result of implementations with ``writes_out``, else None.
        storages: flat buffers by field name, of which the tensors are views.
    """

    hidden: torch.Tensor | QuantizedMatrix
    w13: torch.Tensor | QuantizedMatrix
    w2: torch.Tensor | QuantizedMatrix
    counts: torch.Tensor
    out_dtype: torch.dtype
    activation: str = "swiglu"
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    alpha: float | torch.Tensor | None = None
    beta: float | torch.Tensor | None = None
    limit: float | torch.Tensor | None = None
    interleaved: bool = False
    intermediate_scale: float | torch.Tensor | None = None
    out: torch.Tensor | None = None
    storages: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self) -> tuple[Any, Any, Any, torch.Tensor]:
        """Return the positional arguments of the oracle."""
        return self.hidden, self.w13, self.w2, self.counts

    def keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments of the oracle."""
        return {name: getattr(self, name) for name in OPTIONS}

    def unused(self) -> torch.Tensor:
        """Return which rows of the result are behind the counts: bool [experts, rows, 1]."""
        values = self.hidden if isinstance(self.hidden, torch.Tensor) else self.hidden.codes
        rows = torch.arange(values.shape[1], device=values.device)
        return (rows >= self.counts.unsqueeze(1)).unsqueeze(2)


def batched_inputs(problem: BatchedMoEProblem, home: Allocator) -> BatchedMoEInputs:
    """Make the tensors of a call of ``batched_moe``: rows behind the counts are unused memory."""
    made = expert_inputs(problem.rows, home)
    for name in list(home.storages):
        if name.partition(".")[0] in OF_ROWS:
            del home.storages[name]
    counts = torch.tensor(problem.counts, dtype=torch.int32)
    used = torch.arange(problem.most_rows) < counts.unsqueeze(1)
    places = used.flatten().nonzero().flatten().to(home.device)
    shape = problem.num_experts, problem.most_rows

    def spread(name: str, rows: torch.Tensor) -> torch.Tensor:
        return _spread(name, rows, places, shape, home)

    hidden = made.hidden
    if isinstance(hidden, torch.Tensor):
        hidden = spread("hidden", hidden)
    else:
        scales = hidden.scales
        placed = spread if scales.dim() else home.place
        hidden = hidden._replace(
            codes=spread("hidden.codes", hidden.codes), scales=placed("hidden.scales", scales)
        )
    return BatchedMoEInputs(
        hidden=hidden,
        counts=home.place("counts", counts),
        out_dtype=made.out_dtype,
        storages=home.storages,
        **{name: getattr(made, name) for name in ("w13", "w2", *OPTIONS)},
    )


def _spread(
    name: str,
    rows: torch.Tensor,
    places: torch.Tensor,
    shape: tuple[int, int],
    home: Allocator,
) -> torch.Tensor:
    """Put rows into their places among those of all experts; the others hold ``home.unused``."""
    dtype, row = rows.dtype, rows.shape[1:]
    if rows.element_size() == 1:
        rows = rows.view(torch.uint8)  # few operations know FP8
    room = home.empty(name, (math.prod(shape), *row), rows.dtype)
    if rows.dtype == torch.uint8 and math.isnan(home.unused):
        room.fill_(BYTE_OF_NAN)
    room[places] = rows
    return room.view(*shape, *row).view(dtype)
