"""A value of a wrong kind, an empty or an unknown name: one sentence that names the argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernelproof.impl import implementation
from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    BatchedMoEProblem,
    BatchProblem,
    ContextParallelProblem,
    KVCacheFormat,
    MatrixFormat,
    MergeProblem,
    MetadataProblem,
    MoEProblem,
    NormQuantizeProblem,
    PlanProblem,
    QuantizedFormat,
    QuantizeProblem,
    RearrangeProblem,
    RopeAppendProblem,
    RouteProblem,
    SlotsProblem,
    StepsProblem,
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
    True,
    1,
    np.bool_(1),
    np.int32(2),
    np.float32(1.5),
    np.array(1),
    torch.ones((), dtype=torch.bool),
    torch.tensor(1.5),
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
            Arithmetic, AttentionProblem, BatchProblem, BatchedMoEProblem, ContextParallelProblem,
            MergeProblem, MetadataProblem, MoEProblem, NormQuantizeProblem, PlanProblem,
            QuantizedFormat, QuantizeProblem, RearrangeProblem, RopeAppendProblem, RouteProblem,
            SlotsProblem,
            StepsProblem,
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


TWO = build_metadata([2], [3], [[0]], 4)
BATCH: dict[str, Any] = {
    "q": torch.ones(2, 1, 16), "k_cache": torch.randn(1, 4, 1, 16),
    "v_cache": torch.randn(1, 4, 1, 16), "metadata": TWO,
}  # fmt: skip


@pytest.mark.parametrize("value", [True, 1, np.bool_(1), np.int64(1), False, 0, np.bool_(0)])
def test_a_flag_may_be_numpys_or_a_number(value: object) -> None:
    attended, expected = (
        paged_attention(**{**BATCH, "causal": each}).out for each in (value, bool(value))
    )
    assert torch.equal(attended, expected)
    flag: Any = value
    arithmetic = Arithmetic(partial_outputs=flag)
    assert type(arithmetic.partial_outputs) is bool
    assert arithmetic == Arithmetic(partial_outputs=bool(value))


@pytest.mark.parametrize("value", [2, 1.0, "yes", None, np.float32(1), [True]])
def test_what_is_no_flag_is_refused_by_what_it_may_be(value: object) -> None:
    wanted = r"causal must be True, False or a bool tensor \[requests\], not "
    with pytest.raises(ValueError, match=wanted):
        paged_attention(**{**BATCH, "causal": value})


@pytest.mark.parametrize("name", ["window_left", "window_right"])
@pytest.mark.parametrize("value", [True, np.bool_(0), 2.0])
def test_a_window_is_an_integer(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name} is .* must be an integer, -1 "):
        paged_attention(**{**BATCH, name: value})


def test_whole_numbers_of_other_types_are_numbers() -> None:
    for value in (2, 2.0, np.int32(2), np.float64(2), torch.tensor(2.0)):
        found = split_decodes_and_prefills([2, 3], decode_threshold=value)  # type: ignore[arg-type]
        assert found == (1, 1, 2, 3)
    with pytest.raises(ValueError, match=r"decode_threshold is 1\.5"):
        split_decodes_and_prefills([2, 3], decode_threshold=1.5)  # type: ignore[arg-type]
    merged = Arithmetic(partial_outputs=True, merged_outputs=np.int64(3))
    assert type(merged.merged_outputs) is int


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
        ("writes_out", 2, "writes_out is 2; it must be True or False"),
        ("tile", True, "tile is True; it must be int"),
        ("backend", 0, "backend is 0; it must be str"),
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


def test_options_of_an_implementation_may_be_of_other_types_that_mean_the_same() -> None:
    class Own(Arithmetic):
        """Arithmetic that an engine adds to."""

    wide = {128: Own(), np.int64(256): Arithmetic()}
    other: Any = {
        "writes_out": np.bool_(1), "decodes": 0, "backend": None, "tile": np.int32(64),
        "split": np.int64(128), "build_compilers": np.int64(2), "build_minutes": np.float32(1.5),
        "arithmetic": Own(), "features": ["alibi"], "wide_arithmetic": wide.items(),
    }  # fmt: skip
    made = implementation("paged_attention", name="mine", **other)(print)
    assert made.writes_out is True
    assert made.decodes is False
    assert (made.backend, made.tile, made.split) == ("", 64, 128)
    assert (made.build_compilers, made.build_minutes) == (2, 1.5)
    assert {*map(type, (made.tile, made.split, made.build_compilers))} == {int}
    assert made.wide_arithmetic == ((128, Own()), (256, Arithmetic()))
    lists: Any = [[128, Own()]]
    made = implementation("moe", name="mine", wide_arithmetic=lists)(print)
    assert made.wide_arithmetic == ((128, Own()),)
