"""``kernelproof.strategies``: problems of an operation, for people's own ``@given``."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernelproof import strategies
from kernelproof.impl import OPERATIONS, Operation
from kernelproof.impl.features import drawn_features
from kernelproof.reference import Problem, materialise


def drawn(strategy: st.SearchStrategy[Problem]) -> list[Any]:
    found: list[Problem] = []

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def look(problem: Problem) -> None:
        found.append(problem)

    look()
    return found


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_operation_has_problems_without_optional_features(operation: Operation) -> None:
    found = drawn(strategies.problems(operation))
    assert {each.operation for each in found} == {operation}
    assert len({each.id for each in found}) > 10
    assert {name for each in found for name in drawn_features(each)} == set()


def test_restrictions_hold_in_every_problem() -> None:
    found = drawn(strategies.problems(dtype=("bfloat16", "float16"), page_size=16, sinks=[True]))
    assert {each.dtype for each in found} == {"bfloat16", "float16"}
    assert {(each.page_size, each.sinks) for each in found} == {(16, True)}
    (pair,) = {
        (each.head_dim_qk, each.head_dim_vo)
        for each in drawn(strategies.problems("ragged_attention", head_dims=[(192, 128)]))
    }
    assert pair == (192, 128)


def test_lengths_are_those_of_a_batch() -> None:
    found = drawn(strategies.problems("paged_attention", seq_lens=(40, 7), kv_layout="HND"))
    assert {each.seq_lens for each in found} == {(40, 7)}


def test_a_restriction_or_a_name_brings_an_optional_feature() -> None:
    found = drawn(strategies.problems("paged_attention", kv_cache="float8_e4m3fn"))
    assert {each.kv_cache for each in found} == {"float8_e4m3fn"}
    named = drawn(strategies.problems("paged_attention", features="custom_mask"))
    assert {name for each in named for name in drawn_features(each)} == {"custom_mask"}


def test_a_torch_dtype_is_a_value() -> None:
    import torch

    (found, *_) = drawn(strategies.problems("merge_state", dtype=torch.float16, max_work=1000))
    assert materialise(found).outs.dtype == torch.float16  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("operation", "given", "message"),
    [
        ("paged", {}, "operation is 'paged'; did you mean append_paged_kv or paged_attention"),
        ("merge_state", {"features": "fp8"}, r"features names \['fp8'\]; did you mean"),
        ("paged_attention", {"dtyp": "float16"}, "'dtyp' is no field of a problem; did you mean"),
        ("paged_attention", {"dtype": "bf16"}, "dtype=bf16 is no value of it; did you mean bfloat"),
        ("merge_state", {"page_size": 16}, "problems of merge_state have no page_size"),
        ("paged_attention", {"page_size": ()}, r"page_size is \(\), which holds no value"),
        ("paged_attention", {"page_size": range(3)}, "page_size=0 is no value of it"),
        ("merge_state", {"max_work": 0}, "max_work is 0; it must be a number from 1 on"),
        ("merge_state", {"max_work": "9"}, "max_work is '9'; it must be a number from 1 on"),
        ("paged_attention", {"kv_cache": "nvfp4", "head_dims": 40}, "no cache of nvfp4 has head_d"),
    ],
)
def test_what_does_not_exist_is_named(
    operation: Operation, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        strategies.problems(operation, **given)


def test_it_is_imported_as_a_module_too() -> None:
    code = """
import inspect, sys, kernelproof
exec("def made(): ...", made := {})
inspect.getmodule(made["made"])
assert "hypothesis" not in sys.modules
from kernelproof.strategies import problems
import kernelproof.strategies
assert kernelproof.strategies.problems is problems
"""
    subprocess.run([sys.executable, "-c", code], check=True)
