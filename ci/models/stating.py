"""Which rows of facts of models are problems: each is made of its words, and the oracle answers.

A row counts where its problem can be made and the oracle's answer is a number everywhere.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...properties.space.real_values import (
    OF_KIND,
    OF_METHOD,
    WINDOWS,
    fields_of_row,
    router_of,
)
from ...reference import AttentionProblem, MoEProblem, Problem, RouteProblem
from ...reference.attention.definition import AttentionOutput
from ...reference.moe.activations import ACTIVATIONS
from ...reference.moe.routing import Routing
from ...reference.operations import OPERATIONS, materialise
from .table import Row, figures

LENGTHS: dict[str, Any] = {"query_lens": (3, 1), "seq_lens": (5, 9), "page_size": 4}
"""A small batch: a chunk and a decode on pages that are not full."""
SMALL_WINDOW = 4
"""Window, or chunk, of the small call of a row whose words have none."""
UNNUMBERED = {"chunk": {"chunk": SMALL_WINDOW}, "encwin": {"window_right": 2}}
"""Fields of problems by the kind of layer whose words have no numbers."""
EXPERTS: dict[str, dict[str, Any]] = {
    "weights on input": {"weights_on_input": True},
    "experts swiglu, limit": {"swiglu_parameters": "limit"},
    "experts: gelu(g) (up + 1)": {"activation": "geglu1"},
    "experts: beta tanh(g / beta) sigmoid(g), up soft-capped": {"activation": "situ"},
    "experts: silu(gate) clamped after the activation, up clamped": {"activation": "swiglu_step"},
    "experts: RMS norm of each expert's output before its weight": {"output_norm": "gain"},
    "shared expert times sigmoid of a gate": {"shared_experts": 1, "shared_gate": "logits"},
    "experts: routed value projections: one product an expert, no activation": {
        "activation": "identity",
        "one_product": True,
    },
    "experts: identity experts (zero computation)": {"identity_experts": 2},
}
"""Fields of problems by the words for experts that stand for them."""
ROUTES: dict[str, dict[str, Any]] = {
    "route: softmax, top-k, renormalised, times a scale of each expert": OF_METHOD["perexpert"],
    "route: softmax, the best of each group": {
        "method": "renormalize_naive", "num_groups": 4, "topk_groups": 4, "top_k": 4,
        "best_of_each_group": True,
    },
    "route: sigmoids of routed and shared experts normalised together": {
        "method": "sigmoid_renorm", "shared_experts": 2, "renormalise_floor": 0.0,
    },
    "route: experts by a table of token ids, weights by scores": {
        "method": "deepseek_v4", "hash_vocabulary": 97,
    },
    "route: sparsemixer: softmax over what is near the best, twice": {"method": "sparsemixer"},
}  # fmt: skip
"""Fields of problems by the words for routers without figures."""
FEW_EXPERTS: dict[str, int] = {"num_tokens": 3, "num_experts": 16, "top_k": 2}
"""Fields of the small call of a router whose words have no figures."""


@dataclass(frozen=True)
class Count:
    """How many rows and families can be stated.

    Attributes:
        attention, of_attention: rows of attention that are problems, and all of them.
        experts, of_experts: rows of class ``moe``, routers and experts, likewise.
        families, of_families: families all of whose rows are problems, and all of them.
        not_stated: the rows that are none, and why.
    """

    attention: int
    of_attention: int
    families: int
    of_families: int
    not_stated: tuple[tuple[Row, str], ...]
    experts: int = 0
    of_experts: int = 0


def counted(rows: Sequence[Row]) -> Count:
    """Return how many rows, and how many whole families, can be stated as problems."""
    families: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        families[row["family"]].append(row)
    why = {id(row): why_not(row, families[row["family"]]) for row in rows}
    attention = [row for row in rows if row["class"] == "attention"]
    experts = [row for row in rows if row["class"] == "moe"]
    return Count(
        sum(not why[id(row)] for row in attention),
        len(attention),
        sum(not any(why[id(row)] for row in each) for each in families.values()),
        len(families),
        tuple((row, reason) for row in rows if (reason := why[id(row)])),
        sum(not why[id(row)] for row in experts),
        len(experts),
    )


def why_not(row: Row, family: Iterable[Row]) -> str:
    """Return why a row is no problem; empty if it is one, and the oracle answers it."""
    try:
        problems = stated(row, family)
    except ValueError as error:
        return str(error)
    if not problems:
        return "no words"
    return next((f"{each!r}: {said}" for each in problems if (said := _unanswered(each))), "")


def stated(row: Row, family: Iterable[Row]) -> list[Problem]:
    """Return a row's calls as problems, with all of its heads; none where there are no words.

    Args:
        row: a row of facts.
        family: its rows: layers with an indexer have the heads of the others.

    Raises:
        ValueError: there is no such problem.
    """
    if row["class"] == "attention":
        return list(_attention(row, family))
    if row["class"] != "moe":
        return []
    return _routed(row)


def _routed(row: Row) -> list[Problem]:
    """Return a router, or an expert's activation, as a small problem; none without words for it."""
    words = row["parameters"]
    for given in figures(row):
        router = router_of({**given, "family": row["family"], "scaling_factor": ""})
        return [RouteProblem(num_tokens=3, **router.fields)] if router else []
    if words in ROUTES:
        return [RouteProblem(**{**FEW_EXPERTS, **ROUTES[words]})]
    activation = words.removeprefix("experts ")
    fields = {"activation": activation} if activation in ACTIVATIONS else EXPERTS.get(words)
    if not fields or fields.keys() - {each.name for each in dataclasses.fields(MoEProblem)}:
        return []
    return [MoEProblem(num_tokens=3, num_experts=4, top_k=2, **fields)]


def _attention(row: Row, family: Iterable[Row]) -> Iterable[AttentionProblem]:
    latent = OF_KIND.get(row["kind"], {}).get("values_in_keys", False)
    others = [
        each
        for other in family
        if other["class"] == "attention"
        for each in figures(other)
        if (each.get("kind") == "mla") == latent
    ]
    several = figures(row) or others[-1:]
    for each in several:
        kind = each["kind"] if row["kind"] == "mla" else row["kind"]
        if kind not in OF_KIND:
            continue
        fields = fields_of_row({**each, "kind": kind})
        if kind in WINDOWS and fields["window_left"] < 0:
            fields["window_left"] = SMALL_WINDOW
        yield AttentionProblem(**LENGTHS, **{**fields, **UNNUMBERED.get(kind, {})})


def _unanswered(problem: Problem) -> str:
    """Return what the oracle fails to say of a problem; empty if it answers."""
    answer = OPERATIONS[problem.operation].answer(materialise(problem))
    found: Mapping[str, torch.Tensor] = {"result": answer}
    if isinstance(answer, AttentionOutput):
        found = {"out": answer.out}
    elif isinstance(answer, Routing):
        found = {"weights": answer.topk_weights}
    return next(
        (f"{name} is no number" for name, each in found.items() if not torch.isfinite(each).all()),
        "",
    )
