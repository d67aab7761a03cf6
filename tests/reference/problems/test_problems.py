"""Problems: JSON and back, a validated schema, stable ids, and what their properties say."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelproof.impl import OPERATIONS
from kernelproof.properties.space.rounds import problems
from kernelproof.reference import (
    AttentionProblem,
    MergeProblem,
    MetadataProblem,
    Problem,
    problem_from_json,
)
from kernelproof.reference.problems import MAX_REQUESTS, MAX_SEQ_LEN
from kernelproof.reference.problems.base import SCHEMA

ATTENTION = AttentionProblem(query_lens=(2, 1), seq_lens=(5, 3), page_size=4)
MERGE = MergeProblem(num_states=3, empty="some")
METADATA = MetadataProblem(steps=(((1, 2), (3, 4)), ((), ())), page_size=2)
EACH = (ATTENTION, MERGE, METADATA)
any_problem: st.SearchStrategy[Problem] = st.sampled_from(OPERATIONS).flatmap(
    lambda operation: problems(operation=operation, max_work=20_000)
)


def refusal(data: Any) -> str:  # noqa: ANN401  whatever a file may hold
    """Return the message of the one error that reading this raises."""
    with pytest.raises(ValueError, match=r".") as caught:
        problem_from_json(data)
    assert type(caught.value) is ValueError
    assert "\n" not in str(caught.value)
    return str(caught.value)


@settings(max_examples=200)
@given(any_problem)
def test_json_and_back(problem: Problem) -> None:
    text = json.dumps(problem.to_json(), allow_nan=False)
    again = problem_from_json(json.loads(text))
    assert again == problem
    assert type(again) is type(problem)
    assert again.id == problem.id
    assert hash(again) == hash(problem)
    assert json.dumps(again.to_json()) == text


@pytest.mark.parametrize("problem", EACH)
def test_json_says_its_schema_and_type_first(problem: Problem) -> None:
    data = problem.to_json()
    assert list(data)[:2] == ["schema", "type"]
    assert data["schema"] == SCHEMA == "kernelproof/problem/1"
    assert data["type"] == problem.kind


@pytest.mark.parametrize("kind", ["attention", "merge", "metadata"])
def test_fields_that_are_left_out_have_their_simplest_value(kind: str) -> None:
    problem = problem_from_json({"schema": SCHEMA, "type": kind})
    assert problem in (AttentionProblem(), MergeProblem(), MetadataProblem())


def test_a_whole_number_is_a_float_too() -> None:
    problem = problem_from_json({"schema": SCHEMA, "type": "attention", "k_scale": 2})
    assert isinstance(problem, AttentionProblem)
    assert repr(problem.k_scale) == "2.0"


@pytest.mark.parametrize("data", [None, [], "problem", 3, True])
def test_a_problem_is_an_object(data: object) -> None:
    assert f"not {type(data).__name__}" in refusal(data)


@pytest.mark.parametrize("schema", [None, "", "kernelproof/problem/0", "kernelproof/problem/2", 1])
def test_another_schema_is_refused(schema: object) -> None:
    said = refusal({**ATTENTION.to_json(), "schema": schema})
    assert "field schema" in said
    assert SCHEMA in said


@pytest.mark.parametrize("kind", [None, "rout", 1, ["attention"], {}])
def test_an_unknown_type_is_refused(kind: object) -> None:
    said = refusal({"schema": SCHEMA, "type": kind})
    assert "field type" in said
    assert "one of ['attention', 'batch', 'batched_moe', 'context_parallel', " in said


@pytest.mark.parametrize("problem", EACH)
@pytest.mark.parametrize("name", ["kind", "id", "work", "page_sizes", "exact"])
def test_an_unknown_field_is_refused(problem: Problem, name: str) -> None:
    assert f"field {name} is 1" in refusal({**problem.to_json(), name: 1})


def test_a_field_of_another_type_of_problem_is_unknown() -> None:
    assert "merge problems have no such field" in refusal({**MERGE.to_json(), "page_size": 1})
    # merge_state and build_metadata are the only operations of their types.
    assert "field operation" in refusal({**MERGE.to_json(), "operation": "merge_state"})


WRONG_TYPES: list[tuple[Problem, str, object, str]] = [
    (ATTENTION, "operation", 1, "operation"),
    (ATTENTION, "query_lens", 1, "query_lens"),
    (ATTENTION, "query_lens", "12", "query_lens"),
    (ATTENTION, "query_lens", {"0": 1}, "query_lens"),
    (ATTENTION, "query_lens", [1, "1"], "query_lens[1]"),
    (ATTENTION, "seq_lens", [1, 2.0], "seq_lens[1]"),
    (ATTENTION, "seq_lens", [True, 1], "seq_lens[0]"),
    (ATTENTION, "num_kv_heads", 1.0, "num_kv_heads"),
    (ATTENTION, "num_kv_heads", True, "num_kv_heads"),
    (ATTENTION, "num_kv_heads", None, "num_kv_heads"),
    (ATTENTION, "causal", 1, "causal"),
    (ATTENTION, "causal", "true", "causal"),
    (ATTENTION, "sm_scale", "0.1", "sm_scale"),
    (ATTENTION, "sm_scale", True, "sm_scale"),
    (ATTENTION, "sm_scale", 10**400, "sm_scale"),
    (ATTENTION, "k_scale", None, "k_scale"),
    (ATTENTION, "request_ids", [1, None], "request_ids[1]"),
    (MERGE, "num_states", "2", "num_states"),
    (MERGE, "empty", None, "empty"),
    (METADATA, "steps", 1, "steps"),
    (METADATA, "steps", [[[1], [1], [1]]], "steps[0]"),
    (METADATA, "steps", [[[1], [1]], [[1], ["1"]]], "steps[1][1][0]"),
    (METADATA, "steps", [[[1], 1]], "steps[0][1]"),
]


@pytest.mark.parametrize(("problem", "name", "value", "named"), WRONG_TYPES)
def test_a_value_of_the_wrong_type_is_refused(
    problem: Problem, name: str, value: object, named: str
) -> None:
    assert f"problem field {named} is " in refusal({**problem.to_json(), name: value})


OUT_OF_RANGE: list[tuple[Problem, str, object, str]] = [
    (ATTENTION, "operation", "merge_state", "operation"),
    (ATTENTION, "dtype", "float64", "dtype"),
    (ATTENTION, "kv_layout", "nhd", "kv_layout"),
    (ATTENTION, "regime", "randn", "regime"),
    (ATTENTION, "query_lens", [2, -1], "query_lens[1]"),
    (ATTENTION, "seq_lens", [MAX_SEQ_LEN + 1, 3], "seq_lens[0]"),
    (ATTENTION, "seq_lens", [5], "seq_lens"),
    (ATTENTION, "num_kv_heads", 0, "num_kv_heads"),
    (ATTENTION, "group_size", 0, "group_size"),
    (ATTENTION, "head_dim_qk", 1, "head_dim_qk"),
    (ATTENTION, "head_dim_vo", 0, "head_dim_vo"),
    (ATTENTION, "page_size", 0, "page_size"),
    (ATTENTION, "page_order", -1, "page_order"),
    (ATTENTION, "shared_prefix_pages", -1, "shared_prefix_pages"),
    (ATTENTION, "window_left", -2, "window_left"),
    (ATTENTION, "seed", -1, "seed"),
    (ATTENTION, "logits_soft_cap", -1.0, "logits_soft_cap"),
    (ATTENTION, "logits_soft_cap", math.inf, "logits_soft_cap"),
    (ATTENTION, "k_scale", math.nan, "k_scale"),
    (ATTENTION, "v_scale", -0.5, "v_scale"),
    (ATTENTION, "sm_scale", math.nan, "sm_scale"),
    (ATTENTION, "sm_scale", -math.inf, "sm_scale"),
    (ATTENTION, "request_ids", [0], "request_ids"),
    (ATTENTION, "request_ids", [0, -1], "request_ids[1]"),
    (ATTENTION, "request_ids", [MAX_REQUESTS, 0], "request_ids[0]"),
    (MERGE, "dtype", "int8", "dtype"),
    (MERGE, "empty", "most", "empty"),
    (MERGE, "regime", "dominant_key", "regime"),
    (MERGE, "num_states", 0, "num_states"),
    (MERGE, "num_tokens", -1, "num_tokens"),
    (MERGE, "num_heads", 0, "num_heads"),
    (MERGE, "head_dim", 0, "head_dim"),
    (MERGE, "seed", -1, "seed"),
    (METADATA, "steps", [[[1], [1]], [[1], []]], "steps[1]"),
    (METADATA, "steps", [[[1], [-1]]], "steps[0][0]"),
    (METADATA, "page_size", 0, "page_size"),
    (METADATA, "spare_columns", -1, "spare_columns"),
    (METADATA, "seed", -1, "seed"),
]


@pytest.mark.parametrize(("problem", "name", "value", "named"), OUT_OF_RANGE)
def test_a_value_outside_its_range_is_refused(
    problem: Problem, name: str, value: object, named: str
) -> None:
    said = refusal({**problem.to_json(), name: value})
    assert f"problem field {named} is " in said
    assert " it must be " in said


@pytest.mark.parametrize(
    "options",
    [
        {"logits_soft_cap": 5.0},
        {"v_scale": 1.25},
        {"v_scale": 0.0},
        {"k_scale": 0.0},
        {"sm_scale": 0.0},
        {"sm_scale": -0.5},
        {"sm_scale": 2.0**-8},
    ],
)
def test_the_exact_grid_is_refused_where_it_would_not_be_exact(options: dict[str, Any]) -> None:
    replace(ATTENTION, **options)
    said = refusal({**replace(ATTENTION, **options).to_json(), "regime": "exact_grid"})
    assert "problem field regime is 'exact_grid'" in said


def test_appending_more_than_there_is_or_into_a_shared_page_is_refused() -> None:
    append = replace(ATTENTION, operation="append_paged_kv").to_json()
    assert "query_lens[1] is 4" in refusal({**append, "query_lens": [2, 4]})
    assert "shared_prefix_pages is 1" in refusal({**append, "shared_prefix_pages": 1})


def test_ids_are_stable() -> None:
    # A change here makes every recorded case, seed and report unrecognisable.
    assert AttentionProblem().id == "e9d98f6df760"
    assert MergeProblem().id == "63ef7af72bcd"
    assert MetadataProblem().id == "061ce4e0888b"
    assert ATTENTION.id == "fe25956f6679"


def test_an_id_is_the_same_in_another_process() -> None:
    code = (
        "from kernelproof.reference import AttentionProblem;"
        "print(AttentionProblem(query_lens=(2, 1), seq_lens=(5, 3), page_size=4).id)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == ATTENTION.id


@settings(max_examples=100)
@given(any_problem, any_problem)
def test_ids_are_different_where_problems_are(first: Problem, second: Problem) -> None:
    assert (first.id == second.id) == (first == second)
    assert len(first.id) == 12
    assert int(first.id, 16) >= 0


@pytest.mark.parametrize("problem", EACH)
def test_problems_are_frozen(problem: Problem) -> None:
    with pytest.raises(FrozenInstanceError):
        problem.seed = 1  # type: ignore[misc]


def test_what_the_properties_say() -> None:
    problem = AttentionProblem(query_lens=(1, 0, 3), seq_lens=(4, 3, 2), page_size=2, group_size=3)
    assert (problem.num_qo_heads, problem.num_tokens, problem.ids) == (3, 4, (0, 1, 2))
    assert problem.scale == 0.25
    assert not problem.partial_last_page  # the only rest is in a request without queries
    assert replace(problem, seq_lens=(3, 3, 2)).partial_last_page
    assert not problem.rows_without_keys
    assert replace(problem, causal=True).rows_without_keys
    assert not problem.empty_requests
    assert replace(problem, seq_lens=(4, 3, 0)).empty_requests
    assert not problem.empty_batch
    assert replace(problem, query_lens=(0, 0, 0)).empty_batch
    assert AttentionProblem(query_lens=(), seq_lens=()).empty_batch
    assert replace(problem, request_ids=(7, 5, 3)).ids == (7, 5, 3)


@settings(max_examples=100)
@given(any_problem)
def test_work_is_positive_and_does_not_shrink_with_the_batch(problem: Problem) -> None:
    assert problem.work >= 0
    if isinstance(problem, AttentionProblem) and not problem.request_ids:
        more = replace(
            problem, query_lens=(*problem.query_lens, 1), seq_lens=(*problem.seq_lens, 1)
        )
        assert more.work > problem.work


LATENT: dict[str, Any] = {"values_in_keys": True, "head_dim_qk": 24, "head_dim_vo": 16}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("operation", {"operation": "ragged_attention"}),
        ("num_kv_heads", {"num_kv_heads": 2}),
        ("head_dim_vo", {"head_dim_vo": 25}),
        ("kv_cache", {"kv_cache": "nvfp4", "head_dim_qk": 32}),
    ],
)
def test_what_latent_attention_cannot_be(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"field {field} is .* with values_in_keys"):
        AttentionProblem(**{**LATENT, **fields})


def test_a_later_field_changes_no_id() -> None:
    assert "values_in_keys" not in AttentionProblem().to_json()
    latent = AttentionProblem(**LATENT)
    assert latent.to_json()["values_in_keys"] is True
    assert problem_from_json(latent.to_json()) == latent
