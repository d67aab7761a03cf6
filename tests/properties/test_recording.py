"""Results are compared bit by bit, whatever record they come in."""

from __future__ import annotations

import torch

from kernelproof.properties.recording import difference, digest, tensors_in
from kernelproof.reference import AttentionOutput


def test_tensors_are_found_in_any_record() -> None:
    ones, zeros = torch.ones(2), torch.zeros(3)
    assert dict(tensors_in(ones)) == {"result": ones}
    assert set(dict(tensors_in((ones, {"a": zeros, "n": 1}, None)))) == {"0", "1.a"}
    # An adapter may give either: what it is called makes no difference.
    assert list(dict(tensors_in(AttentionOutput(ones, zeros)))) == ["0", "1"]
    assert list(dict(tensors_in((ones, zeros)))) == ["0", "1"]


def test_a_digest_is_of_bits_names_dtypes_and_shapes() -> None:
    plain = {"out": torch.tensor([1.0, 2.0])}
    assert digest(plain) == digest({"out": torch.tensor([1.0, 9.0, 2.0])[::2]})
    others = [
        {"lse": torch.tensor([1.0, 2.0])},
        {"out": torch.tensor([[1.0, 2.0]])},
        {"out": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"out": torch.tensor([1.0, -2.0])},
        {"out": torch.empty(0)},
    ]
    assert len({digest(plain), *map(digest, others)}) == 1 + len(others)


def test_a_difference_says_how_many_and_how_far() -> None:
    one = {"out": torch.tensor([1.0, torch.nan, -torch.inf]), "lse": torch.zeros(2)}
    assert difference(one, {name: each.clone() for name, each in one.items()}) is None
    other = {"out": torch.tensor([1.25, torch.nan, -torch.inf]), "lse": torch.zeros(2)}
    assert difference(one, other) == {"elements": 1, "of": 5, "largest": 0.25, "where": "out"}
    other["lse"] = torch.tensor([0.0, torch.nan])
    found = difference(one, other)
    assert found is not None
    assert (found["elements"], found["largest"], found["where"]) == (2, torch.inf, "lse")
    assert difference(one, {"out": one["out"]}) is not None
    half = {**one, "out": one["out"].half()}
    assert difference(one, half) == {
        "elements": 0,
        "of": 0,
        "largest": None,
        "where": "shape or dtype of out",
    }
