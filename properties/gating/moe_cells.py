"""Simple calls of experts and of routing, and what may be changed about them, for the cells."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from ...impl.features import QUANTISED_WEIGHTS
from ...reference import METHODS, MoEProblem, Problem, RouteProblem
from ...reference.moe.activations import ACTIVATIONS
from ..space.moe_axes import QUANTISATION

DTYPES = ("bfloat16", "float16", "float32")
GROUPED = "deepseek_v3"


def simple_calls(operation: str) -> Iterator[tuple[str, list[Problem]]]:
    """Give simple calls by title, the most usual first."""
    if operation == "route":
        yield (
            "routing",
            [
                RouteProblem(num_tokens=9, num_experts=16, top_k=top_k, method=method, dtype=dtype)
                for method, top_k, dtype in itertools.product(
                    METHODS, (4, 1), ("float32", "bfloat16", "float16")
                )
            ],
        )
        return
    yield (
        "experts",
        [
            MoEProblem(
                num_tokens=9,
                hidden=256,
                inter=128,
                num_experts=4,
                top_k=2,
                activation=activation,
                dtype=dtype,
                **fields,
            )
            for activation in ACTIVATIONS
            for fields in map(_fields, QUANTISATION)
            for dtype in DTYPES
        ],
    )


def changes(operation: str) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Give what rules speak of: dtypes, activations and quantisation, or methods of routing."""
    found: list[tuple[str, str, Mapping[str, Any]]] = [
        ("dtype", each, {"dtype": each}) for each in DTYPES
    ]
    if operation == "route":
        groups = {"num_groups": 4, "topk_groups": 2, "bias": True, "method": GROUPED}
        return [
            *found,
            *(("method", each, {"method": each}) for each in METHODS),
            *(("method", f"{each}, one expert", {"method": each, "top_k": 1}) for each in METHODS),
            ("method", f"{GROUPED}, groups and bias", groups),
        ]
    return [
        *found,
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
    """Give the fields of a format; the grid is what a kernel's own quantising leaves alone."""
    quantized, hidden = pair
    grid = bool(quantized) and quantized not in QUANTISED_WEIGHTS
    return {
        "quantized": quantized,
        "quantized_hidden": hidden,
        "regime": "exact_grid" if grid else "iid",
    }
