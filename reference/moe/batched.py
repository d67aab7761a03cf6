"""Batched experts: what each expert makes of its own rows, where all have room for as many.

    out[e, r] = expert_e(hidden[e, r])   for r < counts[e]

Rows behind an expert's count hold anything, and nothing is promised of them. This is the layout of
DeepGEMM's masked grouped products and of dispatchers with a fixed capacity (DeepEP's low-latency
mode); vLLM calls it batched experts, SGLang masked ones. Routing weights are the combiner's.
"""

from __future__ import annotations

import torch

from ..formats.arithmetic import Arithmetic
from ..validation import check_same, check_values, host_integers
from .bounds import BoundedMoE, bounded_moe
from .calls import MoECall, MoEOptions, checked_call
from .definition import apply_experts
from .weights import QuantizedMatrix, checked_matrix


def batched_moe(
    hidden: torch.Tensor | QuantizedMatrix,
    w13: torch.Tensor | QuantizedMatrix,
    w2: torch.Tensor | QuantizedMatrix,
    counts: torch.Tensor,
    *,
    activation: str = "swiglu",
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    alpha: float | torch.Tensor | None = None,
    beta: float | torch.Tensor | None = None,
    limit: float | torch.Tensor | None = None,
    interleaved: bool = False,
    intermediate_scale: float | torch.Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Apply each expert to its own rows.

    Args:
        hidden: [experts, most rows, hidden], any floating dtype, or a QuantizedMatrix of that
            shape, whose scales have an entry for each row where those of ``moe`` have one for each
            token.
        w13, w2: the same as in ``moe``, [experts, ...].
        counts: integers [experts]: rows in use, from 0 to most rows. Rows behind them are not read.
        activation, w13_bias, w2_bias, alpha, beta, limit, interleaved: the same as in ``moe``.
        intermediate_scale: the same as in ``moe``.
        compute_dtype: float64 (default) or float32.

    Returns:
        [experts, most rows, hidden] in ``compute_dtype``, zeros behind the counts. Weights of an
        expert without a row are not read.

    Raises:
        ValueError: a count out of range, or what ``moe`` refuses; the argument is named.
    """
    options = MoEOptions(
        activation,
        w13_bias,
        w2_bias,
        alpha,
        beta,
        limit,
        interleaved,
        intermediate_scale=intermediate_scale,
        compute_dtype=compute_dtype,
    )
    with torch.no_grad():
        call, shape = _rows_call(hidden, w13, w2, counts, options)
        return apply_experts(call, compute_dtype).view(shape)


def bounded_batched(
    tensors: tuple[
        torch.Tensor | QuantizedMatrix,
        torch.Tensor | QuantizedMatrix,
        torch.Tensor | QuantizedMatrix,
        torch.Tensor,
    ],
    options: MoEOptions,
    arithmetic: Arithmetic | None,
    out_dtype: torch.dtype,
) -> BoundedMoE:
    """Apply each expert to its own rows, and bound what an honest kernel may differ."""
    call, shape = _rows_call(*tensors, options)
    found = bounded_moe(call, torch.float64, arithmetic, out_dtype)
    return BoundedMoE(found.expected.view(shape), found.bound.view(shape))


def _rows_call(
    hidden: torch.Tensor | QuantizedMatrix,
    w13: torch.Tensor | QuantizedMatrix,
    w2: torch.Tensor | QuantizedMatrix,
    counts: torch.Tensor,
    options: MoEOptions,
) -> tuple[MoECall, tuple[int, int, int]]:
    """Return the call on all rows one after another, and the shape of its result."""
    values = hidden.codes if isinstance(hidden, QuantizedMatrix) else hidden
    if not isinstance(values, torch.Tensor) or values.dim() != 3:  # noqa: PLR2004  its axes
        found = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
        message = f"hidden must be a tensor [experts, rows, hidden], not {found}"
        raise ValueError(message)
    check_values("hidden", values)
    experts, rows = values.shape[:2]
    second = checked_matrix("w2", w2, "experts hidden inter").values
    check_same("w2", "experts", second.shape[0], "hidden", experts)
    listed = host_integers("counts", counts)
    if len(listed) != experts:
        message = f"counts has {len(listed)} entries, but hidden has {experts} experts"
        raise ValueError(message)
    for expert, count in enumerate(listed):
        if not 0 <= count <= rows:
            message = f"counts[{expert}] is {count}; hidden has {rows} rows an expert"
            raise ValueError(message)
    device = values.device
    used = torch.arange(rows, device=device) < torch.tensor(listed, device=device).unsqueeze(1)
    ids = torch.arange(experts, device=device).unsqueeze(1).expand(experts, rows)
    ids = torch.where(used, ids, -1).reshape(-1, 1)
    ones = torch.ones(ids.shape, dtype=torch.float64, device=device)
    call = checked_call(_flat(hidden), w13, w2, ids, ones, options)
    return call, (experts, rows, second.shape[1])


def _flat(hidden: torch.Tensor | QuantizedMatrix) -> torch.Tensor | QuantizedMatrix:
    """Return the rows of all experts one after another."""
    if isinstance(hidden, torch.Tensor):
        return hidden.flatten(0, 1)
    scales = hidden.scales
    return hidden._replace(
        codes=hidden.codes.flatten(0, 1), scales=scales.flatten(0, 1) if scales.dim() else scales
    )
