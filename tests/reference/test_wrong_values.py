"""A value of a wrong kind, an empty or an unknown name: one sentence that names the argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernelproof.impl import implementation
from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    BatchedMoEProblem,
    ContextParallelProblem,
    KVCacheFormat,
    MatrixFormat,
    MergeProblem,
    MetadataProblem,
    MoEProblem,
    RouteProblem,
    append_paged_kv,
    build_metadata,
    paged_attention,
    ragged_attention,
    route,
    slice_phases,
    split_decodes_and_prefills,
)

WRONG: tuple[Any, ...] = (
    "",
    "nonsense",
    None,
    3.5,
    -1,
    [],
    {},
    object(),
    float("nan"),
    ("nonsense",),
    b"x",
)
METADATA = build_metadata([1], [1], [[0]], 1)
ROWS, CACHE = torch.ones(1, 1, 16), torch.ones(1, 1, 1, 16)
CACHES = {"k_cache": CACHE, "v_cache": CACHE, "metadata": METADATA}
RAGGED = {"qo_indptr": torch.tensor([0, 1]), "kv_indptr": torch.tensor([0, 1])}
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "implementation": (implementation, {"operation": "moe", "name": "mine"}),
    "paged_attention": (paged_attention, {"q": ROWS, **CACHES}),
    "ragged_attention": (ragged_attention, {"q": ROWS, "k": ROWS, "v": ROWS, **RAGGED}),
    "append_paged_kv": (append_paged_kv, {"k": ROWS, "v": ROWS, **CACHES}),
    "build_metadata": (
        build_metadata,
        {"query_lens": [1], "seq_lens": [1], "block_table": [[0]], "page_size": 1},
    ),
    "slice_phases": (slice_phases, {"metadata": METADATA, "num_decodes": 1}),
    "split_decodes_and_prefills": (split_decodes_and_prefills, {"query_lens": [1]}),
    "route": (route, {"logits": torch.ones(2, 8), "top_k": 2}),
    "KVCacheFormat": (KVCacheFormat, {"element": "nvfp4"}),
    "MatrixFormat": (MatrixFormat, {"element": "nvfp4"}),
    **{
        kind.__name__: (kind, {})
        for kind in (
            Arithmetic, AttentionProblem, BatchedMoEProblem, ContextParallelProblem, MergeProblem,
            MetadataProblem, MoEProblem, RouteProblem,
        )
    },
}  # fmt: skip


def refusal(made: Callable[..., Any], given: dict[str, Any]) -> str:
    try:
        made(**given)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_value_is_accepted_or_refused_by_the_name_of_its_argument(call: str) -> None:
    made, given = CALLS[call]
    arguments = inspect.signature(made).parameters
    said = {
        (name, number): refusal(made, {**given, name: value})
        for name in arguments
        for number, value in enumerate(WRONG)
    }
    refused = {each: text for each, text in said.items() if text}
    assert len(refused) > len(arguments)
    assert not {each: text for each, text in refused.items() if each[0] not in text}
    assert not [text for text in refused.values() if re.search(r"\b(of|is|are) ?,|, ,", text)]


@pytest.mark.parametrize("kind", [AttentionProblem, MergeProblem, MoEProblem, RouteProblem])
def test_a_field_takes_its_own_type_only(kind: type[Any]) -> None:
    plain = kind()
    for name, default in vars(plain).items():
        for value in (True, 3, 3.5, "nonsense"):
            right = type(value) is type(default) or default is None
            right |= isinstance(default, float) and type(value) is int
            if not right:
                with pytest.raises(ValueError, match=rf"problem field {name}\b"):
                    kind(**{name: value})


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("name", " ", "must not be empty"),
        ("features", "alibi", "a collection of names"),
        ("supports", "no", "must be callable"),
        ("writes_out", 1, "True or False"),
        ("build_minutes", float("nan"), "above 0"),
        ("wide_arithmetic", [(128, "float16")], "pairs of a number of channels"),
    ],
)
def test_options_of_an_implementation_say_what_they_must_be(
    option: str, value: object, said: str
) -> None:
    given: Any = {"name": "mine", option: value}
    with pytest.raises((TypeError, ValueError), match=said):
        implementation("moe", **given)
