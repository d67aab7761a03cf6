"""The bits of a record's tensors, to see whether a call changed them."""

from __future__ import annotations

from ...reference.tensors.inputs import Inputs
from .comparison import same_bits
from .records import tensors_of


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
