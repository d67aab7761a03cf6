"""The space of MoE problems: values by axis, simplest first, and the simplest problem of some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...reference import METHODS, BatchedMoEProblem, MoEProblem, RouteProblem
from ...reference.moe.activations import ACTIVATIONS
from ...reference.moe.routing_methods import GROUP_SCORES, RENORMALISE_FLOOR
from ...reference.moe.routing_rules import JITTER, JOINT
from ...reference.moe.weights import SCALE_BLOCK
from ...reference.problems.base import DTYPES
from ...reference.problems.moe import (
    ASSIGNMENTS,
    BIAS_DTYPES,
    BIAS_VALUES,
    MOE_REGIMES,
    MULTIPLES,
    OUTPUT_NORMS,
    PADDED_FORMATS,
    QUANTISED,
    ROUTE_REGIMES,
    SHARED_GATES,
    SWIGLU_PARAMETERS,
    WITHOUT_SHARED,
    takes,
)
from .real_values import layer_axis, layers_of

NUM_TOKENS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256,
              257, 511, 512, 1024, 4096, 4097, 8192, 16411, 0)  # fmt: skip
"""Numbers of tokens at and beside the edges of usual tiles. Zero comes last: other numbers show
more."""
SIZES = (
    (16, 16),
    (32, 32),
    (64, 64),
    (32, 96),
    (64, 32),
    (24, 40),
    (128, 128),
    (80, 48),
    (136, 72),
    (160, 24),
    (16, 144),
    (256, 128),
    (256, 384),
    (512, 256),
    (1024, 768),
    (2048, 768),
    (256, 256),
    (192, 320),
    (264, 136),
    (512, 512),
    (1024, 1024),
    (1056, 352),
    (2048, 1024),
    (2048, 2048),
    (128, 256),
    (256, 512),
    (512, 1024),
    (1024, 512),
)
"""Hidden and inter: multiples of tiles up to 2,048, and numbers that fill none of 128 or of 256."""
LARGE_SIZES, SMALL_SIZES = (2048, 2048), (64, 64)
"""Sizes that are multiples of every tile, and small ones that are multiples of usual ones."""
QUANTISATION = (
    ("", False),
    *((name, hidden) for name in QUANTISED[1:] for hidden in (False, True)),
)
"""Formats of the weights, and whether hidden states are quantised too."""
GROUPS = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 4), (8, 3), (4, 4), (8, 8))
"""Groups of experts, and how many of them a token may use."""
WIDTHS = (
    (0, False),
    *((pad_to, states) for pad_to in (24, 64, 96, 256) for states in (True, False)),
)
"""Multiples that weights are padded to, and whether hidden states are."""
TOGETHER = {
    "sizes": ("hidden", "inter"),
    "quantisation": ("quantized", "quantized_hidden"),
    "groups": ("num_groups", "topk_groups"),
    "widths": ("pad_to", "pad_states"),
}
"""Axes that stand for several fields each."""

ROUTE_AXES: dict[str, tuple[Any, ...]] = {
    "num_tokens": NUM_TOKENS,
    "num_experts": (2, 1, 3, 4, 8, 16, 24, 32, 64, 128, 160, 192, 256, 288, 384, 512, 896),
    "groups": GROUPS,
    "top_k": (1, 2, 3, 4, 6, 8, 10, 12, 16, 22),
    "method": tuple(METHODS),
    "dtype": DTYPES,
    "bias": (False, True),
    "scaling_factor": (1.0, 2.5, 0.5, 16.0),
    "masked_groups": ("-inf", "zero"),
    "regime": ROUTE_REGIMES,
    "real": layer_axis("route"),
    "bias_values": BIAS_VALUES,
    "bias_dtype": BIAS_DTYPES,
    "group_score": ("", *GROUP_SCORES),
    "renormalise_floor": (RENORMALISE_FLOOR, 1e-6, 0.0, 1e-3, 1e-9),
    "expert_scales": (False, True),
    "best_of_each_group": (False, True),
    "shared_experts": (0, 1, 2),
    "hash_vocabulary": (0, 97, 1000, 129_280),
    "jitter": (JITTER, 0.1, 0.5, 0.0),
}
ROUTE_RULES = tuple(ROUTE_AXES)[-6:]
"""Axes of rules that single families of models have, which kernels opt into by features."""
MOE_AXES: dict[str, tuple[Any, ...]] = {
    "num_tokens": NUM_TOKENS,
    "sizes": SIZES,
    "num_experts": (1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 256, 288, 384, 512, 896),
    "top_k": (1, 2, 3, 4, 6, 8, 10, 16, 22),
    "activation": tuple(ACTIVATIONS),
    "dtype": DTYPES,
    "biases": (False, True),
    "interleaved": (False, True),
    "swiglu_parameters": SWIGLU_PARAMETERS,
    "expert_parallel": (False, True),
    "weights_on_input": (False, True),
    "shared_experts": (0, 1, 2),
    "quantisation": QUANTISATION,
    "assignment": ASSIGNMENTS,
    "strided_hidden": (False, True),
    "widths": WIDTHS,
    "regime": MOE_REGIMES,
    "output_norm": OUTPUT_NORMS,
    "routed_scaling_factor": (1.0, 2.5, 0.5),
    "shared_gate": SHARED_GATES,
    "shared_weight": (0.0, 2.5, 1.0),
    "one_product": (False, True),
    "identity_experts": (0, 1, 8, 256),
    "real": layer_axis("moe"),
}


def can_pad(pad_to: int, quantized: str, inter: int) -> bool:
    """Whether weights of a format, and of this inter, are padded to multiples of a number."""
    if not pad_to or not quantized:
        return True
    if quantized == "fp8_block":
        return not (pad_to % SCALE_BLOCK or inter % SCALE_BLOCK)
    return quantized in PADDED_FORMATS and not pad_to % MULTIPLES.get(quantized, 1)


def filled(channels: int, pad_to: int) -> int:
    """Return channels filled up to a multiple."""
    return -(-channels // pad_to) * pad_to if pad_to else channels


def route_example(chosen: Mapping[str, Any]) -> RouteProblem:
    """Return the simplest routing problem with these values."""
    fields = dict(chosen)
    if real := fields.pop("real", 0):
        fields |= layers_of("route")[real - 1].values
    groups, of_groups = fields.pop("groups")
    if fields["best_of_each_group"]:
        groups = of_groups = max(2, groups)
    if (fields["bias_values"], fields["bias_dtype"]) != (BIAS_VALUES[0], BIAS_DTYPES[0]):
        fields["bias"] = True
    if fields["group_score"] and groups == 1:
        groups, of_groups = GROUPS[1]
    if groups > 1 and METHODS[fields["method"]].score == "logit":
        fields["method"] = "deepseek_v3"
    fields |= fitting_rules(fields)
    if _has_no_groups(fields):
        groups = of_groups = 1
    if fields["best_of_each_group"] and fields["top_k"] % groups:
        fields["top_k"] *= groups
    if fields["num_experts"] % groups:
        fields["num_experts"] = 4 * groups
    if fields["top_k"] > of_groups * (fields["num_experts"] // groups):
        fields["num_experts"] = groups * fields["top_k"]
    fields |= {"num_groups": groups, "topk_groups": of_groups}
    return RouteProblem(**{**fields, **_without_lone_values(fields)})


def _without_lone_values(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what has to change of a bias's values, and a groups' score, where there are none."""
    found = {} if fields["num_groups"] > 1 else {"group_score": ""}
    if fields["bias"]:
        return found
    return {**found, "bias_values": BIAS_VALUES[0], "bias_dtype": BIAS_DTYPES[0]}


def _has_no_groups(fields: Mapping[str, Any]) -> bool:
    alone = fields["shared_experts"] or fields["hash_vocabulary"]
    return bool(alone) or METHODS[fields["method"]].score == "logit"


def fitting_rules(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what has to change of a routing problem's fields, for its rules to go together."""
    changed = dict(fields)
    if changed["shared_experts"]:
        changed |= {"hash_vocabulary": 0, "best_of_each_group": False, "expert_scales": False}
    if changed["hash_vocabulary"]:
        changed |= {"best_of_each_group": False, "bias": False}
    if any(changed[name] for name in ("shared_experts", "hash_vocabulary", "best_of_each_group")):
        changed["jitter"] = JITTER
    if changed["jitter"] != JITTER:
        changed["renormalise_floor"] = RENORMALISE_FLOOR
    if not method_fits(changed):
        other = changed["jitter"] != JITTER
        changed["method"] = "sparsemixer" if other else "sigmoid_renorm"
    if changed["method"] == "sparsemixer":
        changed["bias"] = False
    usual = changed["renormalise_floor"] == RENORMALISE_FLOOR
    if changed["shared_experts"] and METHODS[changed["method"]].weight == "renormalize" and usual:
        changed["renormalise_floor"] = 0.0
    return {name: value for name, value in changed.items() if value != fields.get(name)}


def method_fits(fields: Mapping[str, Any]) -> bool:
    """Whether a routing problem's method has what its rules speak of."""
    how = METHODS[fields["method"]]
    floor = fields["renormalise_floor"] != RENORMALISE_FLOOR
    table = bool(fields["hash_vocabulary"])
    return not (
        (fields["shared_experts"] and how.weight not in JOINT)
        or (fields["best_of_each_group"] and how.score == "logit")
        or (table and how.weight == "sparsemixer")
        or (floor and how.weight != "renormalize")
        or (fields["jitter"] != JITTER and how.weight != "sparsemixer")
    )


def _sizes_and_format(fields: dict[str, Any]) -> dict[str, Any]:
    """Take sizes and a format out of chosen values, and return fields that go together."""
    hidden, inter = fields.pop("sizes")
    quantized, quantized_hidden = fields.pop("quantisation")
    multiple = MULTIPLES.get(quantized, 1)
    if not can_pad(fields["pad_to"], quantized, inter):
        hidden, inter, quantized, quantized_hidden = 64, 64, "", False
    if hidden % multiple or inter % multiple:
        hidden, inter = 64, 64
    return {
        "hidden": hidden,
        "inter": inter,
        "quantized": quantized,
        "quantized_hidden": quantized_hidden,
    }


def moe_example(chosen: Mapping[str, Any]) -> MoEProblem:
    """Return the simplest problem of experts with these values."""
    fields = dict(chosen)
    if real := fields.pop("real", 0):
        fields |= layers_of("moe")[real - 1].values
    sharded = fields.pop("expert_parallel")
    fields["pad_to"], fields["pad_states"] = fields.pop("widths")
    fields |= _sizes_and_format(fields)
    if fields["num_experts"] < (2 if sharded else 1) or fields["top_k"] > fields["num_experts"]:
        fields["num_experts"] = 2 * max(fields["top_k"], fields["num_experts"])
    half = fields["num_experts"] // 2
    activation = ACTIVATIONS[fields["activation"]]
    if (fields["interleaved"] and not activation.gated) or not takes(
        fields["activation"], fields["swiglu_parameters"]
    ):
        fields["activation"] = "swiglu"
    if fields["swiglu_parameters"].startswith("each"):
        fields |= WITHOUT_SHARED
    if fields["output_norm"]:
        fields["weights_on_input"] = False
    if fields["shared_gate"] or fields["shared_weight"]:
        fields["shared_experts"] = max(fields["shared_experts"], 1)
    if fields["one_product"]:
        fields |= {"output_norm": "", "pad_to": 0, "pad_states": False, **WITHOUT_SHARED}
    if fields["identity_experts"]:
        sharded = fields["quantized_hidden"] = fields["one_product"] = False
    return MoEProblem(
        local_experts=half if sharded else 0,
        expert_offset=half if sharded else 0,
        **fields,
    )


BATCHED_AXES: dict[str, tuple[Any, ...]] = {
    "most_rows": (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256),
    "sizes": SIZES,
    "activation": tuple(ACTIVATIONS),
    "dtype": DTYPES,
    "biases": (False, True),
    "interleaved": (False, True),
    "swiglu_parameters": SWIGLU_PARAMETERS,
    "quantisation": QUANTISATION,
    "regime": ("iid", "outlier_channels", "saturated", "exact_grid"),
}


def batched_example(chosen: Mapping[str, Any]) -> BatchedMoEProblem:
    """Return the simplest problem with these values."""
    fields = dict(chosen)
    hidden, inter = fields.pop("sizes")
    quantized, quantized_hidden = fields.pop("quantisation")
    multiple = MULTIPLES.get(quantized, 1)
    if hidden % multiple or inter % multiple:
        hidden, inter = 64, 64
    activation = ACTIVATIONS[fields["activation"]]
    if (fields["interleaved"] and not activation.gated) or (
        fields["swiglu_parameters"] and activation.alpha is None
    ):
        fields["activation"] = "swiglu"
    most = fields["most_rows"]
    return BatchedMoEProblem(
        counts=(most, most // 2),
        hidden=hidden,
        inter=inter,
        quantized=quantized,
        quantized_hidden=quantized_hidden,
        **fields,
    )
