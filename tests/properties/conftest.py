"""Problems as the engine draws them, the same in each run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase

from kernelproof.properties.strategies import problems

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernelproof.properties.axes import Axes
    from kernelproof.reference import Problem


@pytest.fixture(scope="session")
def drawn() -> Callable[[Axes, int], list[Any]]:
    """Draw so many problems of these axes."""

    def draw(axes: Axes, count: int) -> list[Any]:
        seen: list[Problem] = []

        @hypothesis.settings(
            max_examples=count, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck), deadline=None,
        )  # fmt: skip
        @hypothesis.given(problems(axes))
        def collect(problem: Problem) -> None:
            seen.append(problem)

        collect()
        return seen

    return draw
