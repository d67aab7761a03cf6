"""The tensors of a record of inputs, whatever its operation."""

from __future__ import annotations

import dataclasses

import torch

from ...reference import QuantizedMatrix
from ...reference.tensors.inputs import Inputs


def tensors_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Return all tensors of a record by name."""
    found: dict[str, torch.Tensor] = {}
    for field in dataclasses.fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, torch.Tensor):
            found[field.name] = value
        elif isinstance(value, QuantizedMatrix):
            parts = zip(
                ("codes", "scales", "global_scale"),
                (value.codes, value.scales, value.global_scale),
                strict=True,
            )
            found.update(
                {f"{field.name}.{name}": t for name, t in parts if isinstance(t, torch.Tensor)}
            )
        elif field.name == "kv_cache_sf" and value is not None:
            found.update(k_scales=value[0], v_scales=value[1])
        elif field.name == "apart" and value is not None:
            found.update({f"states[{number}]": state for number, state in enumerate(value)})
        elif field.name == "metadata":
            found.update({f"metadata.{name}": t for name, t in value.tensors().items()})
    return found
