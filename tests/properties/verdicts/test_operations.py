"""What laws of several operations know of each stands in one table, which its errors name."""

from __future__ import annotations

import pytest

from kernelproof.properties.laws import find_law
from kernelproof.properties.verdicts.operations import OPERATIONS
from kernelproof.properties.worker.tolerance_baselines import LOW_PRECISION
from kernelproof.reference.operations import OPERATIONS as ORACLES


def test_every_operation_has_an_entry() -> None:
    assert list(OPERATIONS) == list(ORACLES)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_law_that_compares_answers_speaks_of_the_operation(name: str) -> None:
    assert name in find_law(OPERATIONS[name].law).operations


def test_an_unknown_operation_is_an_error_that_names_the_table() -> None:
    for table in (OPERATIONS, LOW_PRECISION):
        with pytest.raises(LookupError, match=rf"{table.name} has no entry for 'sort'; it has"):
            table["sort"]


def test_so_is_a_field_that_an_operation_leaves_out() -> None:
    with pytest.raises(LookupError, match=r"verdicts\.operations\.OPERATIONS leaves this field"):
        OPERATIONS["build_metadata"].pair(())


def test_what_usual_comparisons_measure_has_a_floating_point_answer() -> None:
    assert set(LOW_PRECISION) <= set(ORACLES) - {"append_paged_kv", "build_metadata", "route"}
