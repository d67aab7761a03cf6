"""Routers and experts that models have, from the table of real values, one row a kind of layer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ....reference.moe.activations import ACTIVATIONS
from ....reference.moe.routing_methods import METHODS
from ....reference.problems.moe import QUANTISED
from ..real_values import read_table

OPERATIONS = ("route", "moe")
"""Operations that have rows of class ``moe``."""
FORMATS = {"bf16": ("",), "fp8_block_ue8m0": ("fp8_block_ue8m0", "fp8_block"),
           "int4": ("int4_g32",)}  # fmt: skip
"""Formats of problems that stand for published ones, the closest first; of a name that is not here,
the one of that name. A format that problems do not have is left out of its row."""
OF_METHOD: dict[str, dict[str, Any]] = {
    "perexpert": {"method": "renormalize_naive", "expert_scales": True},
}
"""Fields of a routing problem by words of the column ``method`` that are no method's name."""
OF_ACTIVATION: dict[str, dict[str, Any]] = {"swiglustep": {"activation": "swiglu_step"}}
"""Fields of a problem of experts by words of ``activation`` that are no activation's name."""
LIMITED = "swiglulim"
"""Kind of experts whose gates and ups have a limit, whether or not it is known."""


@dataclass(frozen=True)
class Layer:
    """What one call of routing, or of experts, has in some models.

    Attributes:
        fields: of a problem.
        options: fields that a problem has besides where an implementation supports them.
        sizes: hidden and inter; (0, 0) of a router.
        families: that have it.
    """

    fields: Mapping[str, Any]
    options: Mapping[str, Any]
    sizes: tuple[int, int]
    families: frozenset[str]

    @property
    def values(self) -> dict[str, Any]:
        """Its value of each axis that it has one of."""
        found = dict(self.fields)
        if "num_groups" in found:
            found["groups"] = (found.pop("num_groups"), found.pop("topk_groups"))
        return found


@functools.cache
def layers_of(operation: str) -> tuple[Layer, ...]:
    """Return the rows that problems of an operation can have, those with most families first."""
    stated: Callable[[Mapping[str, str]], Layer | None] = (
        router_of if operation == "route" else experts_of
    )
    found: dict[tuple[Any, ...], Layer] = {}
    for row in read_table():
        layer = stated(row) if row["class"] == "moe" else None
        if layer is None:
            continue
        key = (tuple(layer.fields.items()), tuple(layer.options.items()), layer.sizes)
        same = found[key].families if key in found else frozenset()
        found[key] = replace(layer, families=layer.families | same)
    return tuple(sorted(found.values(), key=lambda layer: -len(layer.families)))


def layer_axis(operation: str) -> tuple[int, ...]:
    """Return the values of the axis ``real``: 0 for no row, then the number of each."""
    return tuple(range(len(layers_of(operation)) + 1))


def router_of(row: Mapping[str, str]) -> Layer | None:
    """Return the router that a row states; None where problems have no words for it."""
    method = {"method": row["method"]} if row["method"] in METHODS else OF_METHOD.get(row["method"])
    if method is None or not row["experts"]:
        return None
    fields: dict[str, Any] = {
        "num_experts": int(row["experts"]),
        "top_k": int(row["top_k"]),
        "num_groups": int(row["groups"]),
        "topk_groups": int(row["topk_groups"]),
        "bias": row["bias"] == "yes",
        **method,
    }
    if row["scaling_factor"]:
        fields["scaling_factor"] = float(row["scaling_factor"])
    return Layer(fields, {}, (0, 0), frozenset((row["family"],)))


def experts_of(row: Mapping[str, str]) -> Layer | None:
    """Return the experts that a row states; None where problems have no words for them."""
    name = row["activation"]
    activation = {"activation": name} if name in ACTIVATIONS else OF_ACTIVATION.get(name)
    if activation is None or not (row["experts"] and row["hidden"]):
        return None
    fields = {"num_experts": int(row["experts"]), "top_k": int(row["top_k"]), **activation}
    options: dict[str, Any] = {}
    if row["shared_experts"] not in ("", "0"):
        options["shared_experts"] = int(row["shared_experts"])
        options |= {"shared_gate": "logits"} if row["shared_gate"] else {}
    if row["kind"] == LIMITED:
        options["swiglu_parameters"] = "limit"
    known = FORMATS.get(row["weights"], (row["weights"],))
    if form := next((each for each in known if each in QUANTISED), ""):
        options["quantized"] = form
    sizes = (int(row["hidden"]), int(row["inter"]))
    return Layer(fields, options, sizes, frozenset((row["family"],)))
