"""What the adapters to engines' quantisers claim alike."""

from __future__ import annotations

import pytest

from kernelproof.impl.engines.quantisers import refused_groups
from kernelproof.reference import QuantizeProblem


@pytest.mark.parametrize(
    ("channels", "block", "why"),
    [
        (40, 16, "a row is whole groups"),  # the engines' kernels raise an AssertionError
        (15, 16, "a row is whole groups"),
        (48, 16, None),
        (15, 0, None),
    ],
)
def test_a_group_that_is_cut_is_refused(channels: int, block: int, why: str | None) -> None:
    problem = QuantizeProblem(2, channels, block_rows=1, block_channels=block)
    assert refused_groups(problem) == why
