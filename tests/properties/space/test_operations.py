"""Drawing knows every operation that the oracle knows, from one table that its errors name."""

from __future__ import annotations

import pytest

from kernelproof.properties.space.axes import Axes, all_axes, example
from kernelproof.properties.space.operations import OPERATIONS
from kernelproof.properties.space.rounds import problems
from kernelproof.properties.space.surveying.examples import EXAMPLES
from kernelproof.reference.operations import OPERATIONS as ORACLES


def test_every_operation_has_an_entry() -> None:
    assert list(OPERATIONS) == list(EXAMPLES) == list(ORACLES)


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_an_entry_makes_is_of_its_operation(name: str) -> None:
    space = OPERATIONS[name]
    simplest = example(name, {axis: values[0] for axis, values in all_axes(name).items()})
    assert isinstance(simplest, ORACLES[name].problem)
    assert simplest.operation == name
    assert space.size(simplest)
    timed = space.timed(simplest)
    larger = space.larger(timed)
    assert larger is None or larger.work > timed.work
    axes = Axes(name, all_axes(name), 1)
    assert space.simplify(simplest, axes, lambda _: False, lambda: True) == simplest


def test_an_unknown_operation_is_an_error_that_names_the_table() -> None:
    with pytest.raises(LookupError, match=rf"{EXAMPLES.name} has no entry for 'sort'; it has"):
        problems(operation="sort")
