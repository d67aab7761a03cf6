"""Simple calls of experts and of routing, and what may be changed about them, for the cells."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ...reference import METHODS, MoEProblem, Problem, RouteProblem
from ...reference.moe.activations import ACTIVATIONS
from ...reference.moe.weights import WEIGHT_FORMATS
from ..space.moe_axes import QUANTISATION

DTYPES = ("bfloat16", "float16", "float32")
GROUPED = "deepseek_v3"
Change = tuple[str, str, Mapping[str, Any]]
"""What a change is about, its name, and the fields that it sets."""


def routing_calls(_: object) -> dict[str, list[Problem]]:
    """Return simple calls of routing by title, the most usual first."""
    return {
        "routing": [
            RouteProblem(num_tokens=9, num_experts=16, top_k=top_k, method=method, dtype=dtype)
            for method, top_k, dtype in itertools.product(
                METHODS, (4, 1), ("float32", "bfloat16", "float16")
            )
        ]
    }


def expert_calls(_: object) -> dict[str, list[Problem]]:
    """Return simple calls of experts by title, the most usual first."""
    sizes: dict[str, Any] = {
        "num_tokens": 9,
        "hidden": 256,
        "inter": 128,
        "num_experts": 4,
        "top_k": 2,
    }
    return {
        "experts": [
            MoEProblem(**sizes, activation=activation, dtype=dtype, **fields)
            for activation in ACTIVATIONS
            for fields in map(_fields, QUANTISATION)
            for dtype in DTYPES
        ]
    }


def routing_changes(_: object) -> list[Change]:
    """Return what rules of routing speak of: dtypes and methods."""
    groups = {"num_groups": 4, "topk_groups": 2, "bias": True, "method": GROUPED}
    return [
        *(("dtype", each, {"dtype": each}) for each in DTYPES),
        *(("method", each, {"method": each}) for each in METHODS),
        *(("method", f"{each}, one expert", {"method": each, "top_k": 1}) for each in METHODS),
        ("method", f"{GROUPED}, groups and bias", groups),
    ]


def expert_changes(_: object) -> list[Change]:
    """Return what rules of experts speak of: dtypes, activations and quantisation."""
    return [
        *(("dtype", each, {"dtype": each}) for each in DTYPES),
        *(("activation", each, {"activation": each}) for each in ACTIVATIONS),
        ("activation", "swiglu with numbers", {"swiglu_parameters": "one"}),
        *(("weights", _title(pair), _fields(pair)) for pair in QUANTISATION),
    ]


def _title(pair: tuple[str, bool]) -> str:
    quantized, hidden = pair
    if not quantized:
        return "16-bit weights"
    return f"weights {quantized}" + (", hidden states too" if hidden else "")


def _fields(pair: tuple[str, bool]) -> dict[str, Any]:
    """Return the fields of a format; the grid is what a kernel's own quantising does not change."""
    quantized, hidden = pair
    grid = bool(quantized) and not WEIGHT_FORMATS[quantized].weights.entry.block
    return {
        "quantized": quantized,
        "quantized_hidden": hidden,
        "regime": "exact_grid" if grid else "iid",
    }
