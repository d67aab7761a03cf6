"""Values that models have, from the table ``fixtures/real/values.tsv``: axes draw whole rows of it.

Rows that differ only in what a call of attention does not show, or in how many key-value heads
there are, are one here: ranks share the heads of a layer, and keep the group. Routers and experts
of a row are layers of their own, one for each operation.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...fixtures import read_real_values
from ...reference.moe.activations import ACTIVATIONS
from ...reference.moe.routing_methods import METHODS
from ...reference.problems.mask_fields import PLAIN_MASK
from ...reference.problems.moe import QUANTISED

COLUMNS = (
    "family", "class", "kind", "query_heads", "kv_heads", "head_dim_qk", "head_dim_vo",
    "window_left", "window_right", "soft_cap", "chunk", "page_size", "hidden", "inter", "experts",
    "top_k", "groups", "topk_groups", "shared_experts", "shared_gate", "method", "bias",
    "scaling_factor", "activation", "limit", "weights", "ranks", "source", "date",
)  # fmt: skip
"""Columns of the table. A cell is empty where its figure is not known."""
TABLE = "fixtures/real/values.tsv"
MANY = 10
"""Families from which on a value of theirs is asked for by the floor of a run."""
OF_KIND: dict[str, dict[str, Any]] = {
    "full": {"causal": True},
    "swa": {"causal": True},
    "cap": {"causal": True},
    "chunk": {"causal": True},
    "sink": {"causal": True, "sinks": True},
    "diffkv": {"causal": True, "sinks": True},
    "mla": {"causal": True, "values_in_keys": True},
    "mla_prefill": {"causal": True},
    "dsa": {"causal": True, "values_in_keys": True, "custom_mask": True, "mask_pattern": "sparse"},
    "dsv4": {"values_in_keys": True, "sinks": True, "custom_mask": True, "mask_pattern": "sparse"},
    "enc": {},
    "encwin": {},
    "cross": {},
    "mmprefix": {"causal": True, "spans": "images"},
    "prefixlm": {"causal": True, "spans": "prefix"},
    "relbias": {"logits_bias": "dense"},
    "alibi": {"causal": True, "alibi": True},
    "alibisqrt": {"causal": True, "alibi": True, "alibi_function": "sqrt"},
    "causalreq": {"causal_by_request": True},
    "blk": {"causal": True, "custom_mask": True, "mask_by_head": True, "mask_pattern": "blocks"},
    "staticsink": {"causal": True, "sink_tokens": 16},
    "rswa": {"causal": True, "sink_tokens": 16},
}
"""What a problem has of each kind of row, besides its figures: fields that are not plain."""
WINDOWS = ("swa", "encwin", "causalreq", "staticsink", "rswa")
"""Kinds that say nothing without the number of their windows."""
PLAIN: dict[str, Any] = {
    **PLAIN_MASK, "causal": False, "causal_by_request": False, "sinks": False, "alibi": False,
    "values_in_keys": False, "window_left": -1, "window_right": -1, "logits_soft_cap": 0.0,
    "sm_scale": None,
}  # fmt: skip
NUMBERS = {"window_left": "window_left", "window_right": "window_right", "chunk": "chunk",
           "soft_cap": "logits_soft_cap"}  # fmt: skip
"""Columns of numbers that a mask or the logits have, and their fields."""
LATENT_SCALE = 192**-0.5
"""Scale of latent layers of 512 + 64 channels: that of 128 + 64 before the projections."""
LATENT_DIMS = (576, 512)
OF_LAYERS = ("route", "moe")
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
class Real:
    """What one call of attention has in some models.

    Attributes:
        fields: the fields of a problem, all but the number of key-value heads.
        kv_heads: numbers of them that ranks have, ascending.
        groups: numbers of query heads that a rank has of one key-value head, ascending; one unless
            ranks share a single key-value head.
        page_size: keys a page, 0 if it is an engine's choice.
        families: the families that have it.
    """

    fields: Mapping[str, Any]
    kv_heads: tuple[int, ...]
    groups: tuple[int, ...]
    page_size: int
    families: frozenset[str]

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The value of the axis ``head_dims``."""
        pair = (self.fields["head_dim_qk"], self.fields["head_dim_vo"])
        return (*pair, 0) if self.fields["values_in_keys"] else pair

    def joined(self, other: Real) -> Real:
        """Return what both have, that an operation's problems do not tell apart."""
        return replace(
            self,
            kv_heads=tuple(sorted({*self.kv_heads, *other.kv_heads})),
            groups=tuple(sorted({*self.groups, *other.groups})),
            families=self.families | other.families,
        )

    def values(self, operation: str) -> dict[str, Any]:
        """Return its value of each axis of an operation, those of heads left out."""
        found: dict[str, Any] = {"head_dims": self.head_dims}
        if self.page_size and operation != "ragged_attention":
            found["page_size"] = self.page_size
        if operation == "append_paged_kv":
            return found
        fields = ("head_dim_qk", "head_dim_vo", "values_in_keys", "sm_scale")
        return found | {name: v for name, v in self.fields.items() if name not in fields}

    def problem_fields(self, operation: str) -> dict[str, Any]:
        """Return the fields of a problem, with the fewest heads that a rank has."""
        dims = {name: self.fields[name] for name in ("head_dim_qk", "head_dim_vo")}
        page = {"page_size": self.page_size} if self.page_size else {}
        heads = {"num_kv_heads": self.kv_heads[0], "group_size": self.groups[0]}
        if operation == "append_paged_kv":
            latent = {"values_in_keys": self.fields["values_in_keys"]}
            return {**dims, **latent, **page, "num_kv_heads": self.kv_heads[0]}
        return {**self.fields, **heads, **({} if operation == "ragged_attention" else page)}


def real_axis(operation: str) -> tuple[int, ...]:
    """Return the values of the axis ``real``: 0 for no row, then the number of each."""
    rows = rows_of(operation)
    return tuple(range(len(rows) + 1))


@functools.cache
def rows_of(operation: str) -> tuple[Real, ...]:
    """Return the rows that an operation's problems can have, none of which is another's double."""
    found: dict[tuple[Any, ...], Real] = {}
    for real in rows_of_attention():
        if operation == "ragged_attention" and real.fields["values_in_keys"]:
            continue
        # Rows that differ only in what an operation does not have are one row of it. Whether a
        # rank's group can be split (one key-value head) is part of the key.
        key: tuple[Any, ...] = (
            tuple(real.values(operation).items()),
            len(real.groups),
            real.groups[0],
        )
        if operation == "append_paged_kv":
            key = key[:1]
        found[key] = found[key].joined(real) if key in found else real
    return tuple(found.values())


def fields_of_row(row: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a problem that a row of attention states, with all heads of the layer.

    Raises:
        KeyError: problems have no words for its kind.
    """
    found = {**PLAIN, **OF_KIND[row["kind"]]}
    for column, name in NUMBERS.items():
        if row.get(column):
            found[name] = float(row[column]) if column == "soft_cap" else int(row[column])
    heads, kv_heads = int(row["query_heads"]), int(row["kv_heads"])
    found |= {"head_dim_qk": int(row["head_dim_qk"]), "head_dim_vo": int(row["head_dim_vo"])}
    found |= {"num_kv_heads": kv_heads, "group_size": heads // kv_heads}
    if (found["head_dim_qk"], found["head_dim_vo"]) == LATENT_DIMS and found["values_in_keys"]:
        found["sm_scale"] = LATENT_SCALE
    return found


@functools.cache
def rows_of_attention() -> tuple[Real, ...]:
    """Read what models have, those with most families first."""
    merged: dict[tuple[Any, ...], list[tuple[str, int, int]]] = defaultdict(list)
    for row in read_real_values():
        if row["class"] != "attention" or (row["kind"] in WINDOWS and not row["window_left"]):
            continue
        fields = fields_of_row(row)
        kv_heads, group = fields.pop("num_kv_heads"), fields.pop("group_size")
        page = int(row["page_size"] or 0)
        # With several key-value heads, ranks share these and keep the group; a single one is
        # copied, and the query heads of its group are shared instead.
        alone = group if kv_heads > 1 else 0
        key = (tuple(fields.items()), page, alone)
        merged[key].append((row["family"], kv_heads, group))
    found = []
    for (fields, page, _), several in merged.items():
        shares = {n for _, kv, _ in several for n in _shares(kv)}
        groups = {n for _, kv, group in several for n in (_shares(group) if kv == 1 else [group])}
        families = frozenset(family for family, _, _ in several)
        found.append(
            Real(dict(fields), tuple(sorted(shares)), tuple(sorted(groups)), page, families)
        )
    return tuple(sorted(found, key=lambda real: -len(real.families)))


def _shares(heads: int) -> list[int]:
    """Return how many of these heads a rank has, of up to eight ranks."""
    return [heads // n for n in (1, 2, 4, 8) if heads % n == 0]


@dataclass(frozen=True)
class Layer:
    """What one call of routing, or of experts, has in some models.

    Attributes:
        fields: the fields of a problem.
        options: fields that a problem has besides where an implementation supports them.
        sizes: hidden and inter; (0, 0) of a router.
        families: the families that have it.
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
    for row in read_real_values():
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
    # A name of the table may stand for several formats; the first that is known here is taken.
    known = FORMATS.get(row["weights"], (row["weights"],))
    if form := next((each for each in known if each in QUANTISED), ""):
        options["quantized"] = form
    sizes = (int(row["hidden"]), int(row["inter"]))
    return Layer(fields, options, sizes, frozenset((row["family"],)))
