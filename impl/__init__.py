"""What is under test, behind one small protocol: ``@implementation("paged_attention", name=...)``.

Plug in your own kernel with the decorator, and find it again by ``MODULE:NAME``. What may run
where is decided in ``kernelproof.impl.gating``, which needs no torch: names here are imported when
they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..reference import Arithmetic, AttentionOutput
    from ..reference.tensors.batched_moe import BatchedMoEInputs
    from ..reference.tensors.context_parallel import ContextParallelInputs
    from ..reference.tensors.inputs import (
        AppendInputs,
        MergeInputs,
        MetadataInputs,
        PagedAttentionInputs,
        RaggedAttentionInputs,
    )
    from ..reference.tensors.moe_inputs import MoEInputs, RouteInputs
    from .protocol import OPERATIONS, Implementation, Operation, implementation
    from .registry import BUILT_IN, ImplementationNotFoundError, find_implementation
    from .targets.target import Target, UnsupportedError

__all__ = [
    "BUILT_IN",
    "OPERATIONS",
    "AppendInputs",
    "Arithmetic",
    "AttentionOutput",
    "BatchInputs",
    "BatchedMoEInputs",
    "ContextParallelInputs",
    "Implementation",
    "ImplementationNotFoundError",
    "MergeInputs",
    "MetadataInputs",
    "MoEInputs",
    "Operation",
    "PagedAttentionInputs",
    "PlanInputs",
    "QuantizeInputs",
    "RaggedAttentionInputs",
    "RouteInputs",
    "SlotInputs",
    "StepsInputs",
    "Target",
    "UnsupportedError",
    "find_implementation",
    "implementation",
]
_HOMES = {
    "Arithmetic": "..reference",
    "AttentionOutput": "..reference",
    "AppendInputs": "..reference.tensors.inputs",
    "BatchedMoEInputs": "..reference.tensors.batched_moe",
    "ContextParallelInputs": "..reference.tensors.context_parallel",
    "MergeInputs": "..reference.tensors.inputs",
    "MetadataInputs": "..reference.tensors.inputs",
    "MoEInputs": "..reference.tensors.moe_inputs",
    "PagedAttentionInputs": "..reference.tensors.inputs",
    "RaggedAttentionInputs": "..reference.tensors.inputs",
    "PlanInputs": "..reference.tensors.plan",
    "RouteInputs": "..reference.tensors.moe_inputs",
    "BatchInputs": "..reference.tensors.preparation",
    "QuantizeInputs": "..reference.tensors.quantize",
    "SlotInputs": "..reference.tensors.slots",
    "StepsInputs": "..reference.tensors.steps",
    "OPERATIONS": ".protocol",
    "Operation": ".protocol",
    "Implementation": ".protocol",
    "implementation": ".protocol",
    "BUILT_IN": ".registry",
    "ImplementationNotFoundError": ".registry",
    "find_implementation": ".registry",
    "Target": ".targets.target",
    "UnsupportedError": ".targets.target",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401  whatever the name stands for
    """Import a public name at its first use."""
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List public names, imported or not."""
    return __all__
