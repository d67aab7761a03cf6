"""Calls of routing and experts by which the support table is tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...reference import METHODS, MoEProblem, RouteProblem
from ...reference.activations import ACTIVATIONS
from ...reference.problem_base import DTYPES
from ..moe_axes import QUANTISATION

Change = tuple[str, str, Mapping[str, Any]]
SIZE = 256
"""Of hidden and inter: divisible by whatever tiles and blocks of scales ask for."""


def simple_routes() -> Iterator[RouteProblem]:
    """Give simple calls of ``route``, of which an implementation may have one."""
    for dtype in DTYPES:
        for method in METHODS:
            yield RouteProblem(num_tokens=9, num_experts=32, top_k=4, method=method, dtype=dtype)


def simple_experts() -> Iterator[MoEProblem]:
    """Give simple calls of ``moe``."""
    for pair in QUANTISATION:
        for dtype in ("bfloat16", "float16", "float32"):
            for activation in ACTIVATIONS:
                yield MoEProblem(
                    num_tokens=9, num_experts=8, top_k=2, dtype=dtype, activation=activation,
                    quantized=pair[0], quantized_hidden=pair[1], hidden=SIZE, inter=SIZE,
                )  # fmt: skip


def changes_of_routes() -> list[Change]:
    """Give everything that may be changed about a call of ``route``."""
    return [
        *(("dtype", each, {"dtype": each}) for each in DTYPES),
        *(("method", each, {"method": each}) for each in METHODS),
    ]


def changes_of_experts() -> list[Change]:
    """Give everything that may be changed about a call of ``moe``."""
    return [
        *(("dtype", each, {"dtype": each}) for each in DTYPES),
        *(("activation", each, {"activation": each}) for each in ACTIVATIONS),
        *(
            (
                "weights",
                f"weights in {name or 'the dtype'}{', hidden states too' if hidden else ''}",
                {"quantized": name, "quantized_hidden": hidden},
            )
            for name, hidden in QUANTISATION
        ),
    ]
