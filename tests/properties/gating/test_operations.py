"""Cells are made of what one table says of each operation."""

from __future__ import annotations

import pytest

from kernelproof.impl import Target
from kernelproof.impl.gating import load_rules
from kernelproof.impl.gating.of_problem import feature_of
from kernelproof.properties.gating.cells import cells_of
from kernelproof.properties.gating.operations import LENGTHS, OPERATIONS
from kernelproof.reference.operations import OPERATIONS as ORACLES


def test_it_has_no_operation_that_the_oracle_lacks() -> None:
    assert set(OPERATIONS) <= set(ORACLES)


@pytest.mark.parametrize("name", OPERATIONS)
def test_simple_calls_and_the_smallest_are_of_the_operation(name: str) -> None:
    calls = OPERATIONS[name]
    first = next(iter(calls.simple(LENGTHS).values()))[0]
    assert first.operation == name
    smallest = calls.smallest(first, feature_of(first, "triton").phase)
    assert smallest.operation == name
    assert smallest.work <= first.work
    assert all(about and title for about, title, _ in calls.changes(first))


def test_an_operation_that_is_unknown_is_an_error_that_names_the_table() -> None:
    with pytest.raises(LookupError, match=rf"{OPERATIONS.name} has no entry for 'sort'; it has"):
        cells_of("sort", "triton", Target(), load_rules(), lambda _: [])
