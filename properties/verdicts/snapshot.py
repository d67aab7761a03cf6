"""The tensors of a record of inputs, and their bits, to see whether a call changed them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from ...reference import QuantizedMatrix
from ...reference.tensors.inputs import Inputs, MergeInputs
from .comparison import same_bits


class Snapshot:
    """The bits of a record's tensors and of the storages around them."""

    def __init__(self, inputs: Inputs) -> None:
        self.views = tensors_of(inputs)
        self.storages = dict(inputs.storages)
        self._views = {name: tensor.clone() for name, tensor in self.views.items()}
        self._storages = {name: tensor.clone() for name, tensor in self.storages.items()}

    def changed_views(self) -> list[str]:
        """Name the tensors whose values are not what they were."""
        return [
            name for name, tensor in self.views.items() if not same_bits(tensor, self._views[name])
        ]

    def changed_outside(self) -> list[str]:
        """Name the storages that changed outside of their views, and restore the views."""
        for name, tensor in self.views.items():
            tensor.copy_(self._views[name])
        return [
            name
            for name, storage in self.storages.items()
            if not same_bits(storage, self._storages[name])
        ]


def readable(inputs: Inputs, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return a record's tensors without what a call may not read: a first state behind its tokens.

    Args:
        inputs: the record.
        tensors: what ``tensors_of`` gives of it.
    """
    tokens = getattr(inputs, "context_tokens", None)
    if not isinstance(inputs, MergeInputs) or tokens is None:
        return tensors
    parts = {"lses": inputs.lses[1:], "lses[0]": inputs.lses[0, :tokens]}
    if inputs.apart is not None:
        parts["states[0]"] = inputs.apart[0][:tokens]
    return {**tensors, **parts}


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
        elif field.name == "buffers":
            found.update({each.name: each.tensor for each in value})
        elif field.name == "metadata":
            found.update({f"metadata.{name}": t for name, t in value.tensors().items()})
    return found
