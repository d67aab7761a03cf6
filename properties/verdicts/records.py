"""Records of inputs, and what calls on them return, looked at without knowing the operation."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ...reference import QuantizedMatrix
from ...reference.formats.kv_format import stored_head_dim
from ...reference.tensors.inputs import Inputs
from ...reference.tensors.moe_inputs import MoEInputs
from .comparison import Result

Buffer = tuple[tuple[int, ...], torch.dtype, torch.device]
"""Shape, dtype and device of an output."""


def tensors_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Give all tensors of a record by name."""
    found: dict[str, torch.Tensor] = {}
    for field in dataclasses.fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, torch.Tensor):
            found[field.name] = value
        elif isinstance(value, QuantizedMatrix):
            parts = zip(("codes", "scales", "global_scale"),
                        (value.codes, value.scales, value.global_scale), strict=True)  # fmt: skip
            found.update(
                {f"{field.name}.{name}": t for name, t in parts if isinstance(t, torch.Tensor)}
            )
        elif field.name == "kv_cache_sf" and value is not None:
            found.update(k_scales=value[0], v_scales=value[1])
        elif field.name == "metadata":
            found.update({f"metadata.{name}": t for name, t in value.tensors().items()})
    return found


def outputs_of(inputs: Any) -> dict[str, Buffer]:  # noqa: ANN401  any record with out
    """Describe the buffers that a call on these inputs may be given for its results."""
    if isinstance(inputs, MoEInputs):
        hidden = inputs.hidden if isinstance(inputs.hidden, torch.Tensor) else inputs.hidden.codes
        weights = inputs.w2 if isinstance(inputs.w2, torch.Tensor) else inputs.w2.codes
        return {"out": ((hidden.shape[0], weights.shape[1]), inputs.out_dtype, hidden.device)}
    source = inputs.q if hasattr(inputs, "q") else inputs.outs[0]
    values = next(
        tensor
        for name in ("v_cache", "v", "outs")
        if (tensor := getattr(inputs, name, None)) is not None
    )
    rows = tuple(source.shape[:2])
    width = stored_head_dim(values, getattr(inputs, "kv_format", None))
    return {
        "out": ((*rows, width), inputs.out_dtype, source.device),
        "lse": (rows, torch.float32, source.device),
    }


def pair_of(operation: str, result: object) -> Result | str:
    """Give a call's result as a pair, or say what it is instead of what it should be.

    (out, lse or None) of attention and merging, (out, None) of ``moe``, (topk_weights, topk_ids)
    of ``route``.
    """
    if operation == "moe":
        if isinstance(result, torch.Tensor):
            return result, None
        return f"{type(result).__name__}, not a tensor"
    expected = "AttentionOutput or a pair (out, lse)"
    if operation == "route":
        expected = "Routing or a pair (topk_ids, topk_weights)"
    if not (isinstance(result, tuple) and len(result) == 2):  # noqa: PLR2004
        return f"{type(result).__name__}, not {expected}"
    first, second = result
    optional = torch.Tensor if operation == "route" else torch.Tensor | None
    if not isinstance(first, torch.Tensor) or not isinstance(second, optional):
        return f"({type(first).__name__}, {type(second).__name__}), not tensors"
    return (second, first) if operation == "route" else (first, second)
