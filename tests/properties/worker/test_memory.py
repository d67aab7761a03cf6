"""What calls need of memory: allocations are counted, and the end of what is written found."""

from __future__ import annotations

import pytest
import torch

from kernelproof.properties.worker import recording
from kernelproof.properties.worker.recording import PATTERN, allocated, written


def test_a_tensor_more_is_seen() -> None:
    def call(number: int) -> None:
        kept = [torch.zeros(1000) for _ in range(number)]
        del kept

    assert allocated(lambda: call(3)) == 3 * 4000
    assert allocated(lambda: call(4)) == 4 * 4000
    assert allocated(lambda: None) == 0


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_the_end_of_what_is_written_is_found(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "CHUNK_BYTES", chunk)
    first, second = torch.zeros(100), torch.zeros(2, 30, dtype=torch.float16)

    def write(number: int) -> None:
        first[:number] = 1.0
        second[0, 2] = 5.0

    assert written([first], lambda: None) == 0
    assert written([first, second], lambda: write(3)) == 12 + 6
    assert written([first, second], lambda: write(100)) == 400 + 6
    assert written([], lambda: write(1)) == 0


def test_what_looks_like_the_pattern_is_not_counted_where_it_ends() -> None:
    """A byte in 256: too few by some bytes, never too many."""
    space = torch.zeros(8, dtype=torch.uint8)

    def write() -> None:
        space[:4] = 1
        space[4] = PATTERN

    assert written([space], write) == 4
