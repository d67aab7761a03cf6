"""Masks as bits, element by element."""

from __future__ import annotations

import torch

from kernelproof.impl.flashinfer.calls import draft_words, packed_bytes


def test_a_request_begins_with_a_byte() -> None:
    mask = torch.tensor([True, False, True] + [False] * 6 + [True, True])
    assert packed_bytes(mask, [9, 2]).tolist() == [5, 0, 3]
    assert packed_bytes(mask[:0], []).tolist() == []
    assert packed_bytes(torch.ones(16, dtype=torch.bool), [16]).tolist() == [255, 255]


def test_rows_of_draft_words_are_aligned_to_32_bits() -> None:
    words = draft_words([0, 2, 19], None, torch.device("cpu"))
    assert words.dtype == torch.uint16
    assert words.shape == (19, 2)
    assert words[:4].tolist() == [[1, 0], [3, 0], [1, 0], [3, 0]]
    assert words[17:].tolist() == [[65535, 0], [65535, 1]]


def test_draft_words_of_a_tree() -> None:
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    both = torch.cat([torch.ones(1, dtype=torch.bool), mask.flatten()])
    words = draft_words([0, 1, 4], both, torch.device("cpu"))
    assert words.tolist() == [[1, 0], [1, 0], [3, 0], [5, 0]]
