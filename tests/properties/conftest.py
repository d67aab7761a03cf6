"""Problems as the engine draws them, the same in each run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kernelproof.properties.space.profiles import PROFILES
from kernelproof.properties.space.rounds import draw_problems

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernelproof.properties.space.axes import Axes


@pytest.fixture(scope="session")
def drawn() -> Callable[[Axes, int], list[Any]]:
    """Draw so many problems of these axes."""

    def draw(axes: Axes, count: int) -> list[Any]:
        return list(draw_problems(axes, PROFILES["gate"], 0, count))

    return draw
