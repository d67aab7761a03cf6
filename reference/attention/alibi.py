"""What slopes of ALiBi multiply, by name, and ranges of positions."""

from __future__ import annotations

from collections.abc import Callable

import torch

Span = tuple[int, int]
"""A range [start, stop) of positions."""
ALIBI_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda distance: distance,
    "sqrt": lambda distance: -torch.sqrt((-distance).clamp(min=0).double()),
}
"""What ALiBi's slope multiplies, by name: functions of a key's position less the query's.

``linear`` is the paper's (arXiv:2108.12409). ``sqrt`` is that of vLLM's unified attention
(``use_alibi_sqrt``): less the root of the distance to keys before the query, 0 to those behind."""
ALIBI_REACH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda keys: keys,
    "sqrt": lambda keys: keys.double().sqrt(),
}
"""The largest absolute value of each on a request of this number of keys."""
