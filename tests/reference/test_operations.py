"""One table of operations on the oracle's side: whoever asks for another is told which table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest

from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    Problem,
    materialise,
    problem_from_json,
)
from kernelproof.reference.operations import OPERATIONS, PROBLEM_TYPES, bounded_answer, operation_of
from kernelproof.reference.problems import BaseProblem


def problem_of(name: str) -> Any:  # noqa: ANN401  of any type
    problem: Any = OPERATIONS[name].problem
    # One type of problem has three operations.
    return problem(operation=name) if issubclass(problem, AttentionProblem) else problem()


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_a_problem_a_record_and_an_answer(name: str) -> None:
    problem = problem_of(name)
    assert isinstance(problem, BaseProblem)
    assert problem_from_json(problem.to_json()) == problem
    inputs = materialise(problem)
    assert operation_of(inputs) == name
    assert OPERATIONS[name].answer(inputs) is not None


def test_no_two_operations_share_a_record() -> None:
    records = [each.inputs for each in OPERATIONS.values()]
    assert len(set(records)) == len(records)


def test_json_knows_the_problems_that_there_are() -> None:
    assert set(PROBLEM_TYPES.values()) == set(get_args(Problem))


class TestAnUnknownOperationIsAnErrorThatNamesTheTable:
    def test_by_name(self) -> None:
        with pytest.raises(LookupError, match=rf"{OPERATIONS.name} has no entry for 'sort'.*, moe"):
            OPERATIONS["sort"]

    def test_by_problem(self) -> None:
        problem: Any = SimpleNamespace(operation="sort")
        with pytest.raises(LookupError, match=OPERATIONS.name):
            materialise(problem)

    def test_by_record(self) -> None:
        record: Any = SimpleNamespace()
        with pytest.raises(LookupError, match=rf"{OPERATIONS.name} has inputs of type Simple"):
            operation_of(record)


def test_answers_that_are_compared_bitwise_have_no_bound() -> None:
    with pytest.raises(LookupError, match="no bound for 'build_metadata'"):
        bounded_answer(materialise(problem_of("build_metadata")), Arithmetic())
