"""Results are compared bit by bit, whatever record they come in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, implementation
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.worker import recording
from kernelproof.properties.worker.recording import (
    Recorder,
    answer,
    defined,
    difference,
    digest,
    tensors_in,
    timed,
    weighed,
)
from kernelproof.reference import AttentionOutput, AttentionProblem, MoEProblem, oracle
from kernelproof.reference.tensors.inputs import PagedAttentionInputs
from kernelproof.reference.tensors.moe_inputs import MoEInputs


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


class Anywhere:
    """Stages that nobody watches."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Go through one."""
        del name
        yield


class OnScratch:
    """A session that writes a float32 for each output to a workspace of a megabyte."""

    def __init__(self) -> None:
        self.workspace = torch.zeros(1 << 20, dtype=torch.uint8)
        self.planned = 0

    def plan(self, inputs: PagedAttentionInputs) -> None:
        """Plan for so many query tokens."""
        self.planned = int(inputs.metadata.qo_indptr[-1])

    def run(self, inputs: PagedAttentionInputs) -> AttentionOutput:
        """Attend through the workspace."""
        result = oracle.attention(inputs)
        assert len(result.out) == self.planned
        partial = self.workspace.view(torch.float32)[: result.out.numel()].view(result.out.shape)
        partial.copy_(result.out)
        return AttentionOutput(partial.to(inputs.out_dtype), result.lse.float())

    def scratch(self) -> list[torch.Tensor]:
        """Return the workspace."""
        return [self.workspace]


class Fails(OnScratch):
    """It is life_cycle that tells of it."""

    def run(self, inputs: PagedAttentionInputs) -> AttentionOutput:
        """Fail."""
        raise RuntimeError(str(inputs.out_dtype))


@pytest.mark.parametrize(
    ("session", "expected"), [(OnScratch, 3 * 2 * 16 * 4), (Fails, None), (None, None)]
)
def test_what_a_call_needs_of_memory_is_measured(
    session: type[OnScratch] | None, expected: int | None
) -> None:
    @implementation("paged_attention", name="mine", session=session)
    def mine(inputs: PagedAttentionInputs) -> AttentionOutput:
        kept = torch.zeros(250_000)  # a megabyte
        result = oracle.attention(inputs)
        return AttentionOutput((result.out + kept[0]).to(inputs.out_dtype), result.lse.float())

    problem = AttentionProblem(query_lens=(1, 2), seq_lens=(4, 5), num_kv_heads=2)
    subject = Subject(mine, Target.here("cpu"), Anywhere())
    found = weighed(subject, {"problem": problem.to_json()})
    assert found["workspace_bytes"] == expected
    assert 1_000_000 < found["peak_bytes"] < 1_200_000


def test_calls_are_timed_after_a_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    @implementation("paged_attention", name="mine")
    def mine(inputs: PagedAttentionInputs) -> AttentionOutput:
        calls.append(len(calls))
        return oracle.attention(inputs)

    monkeypatch.setattr(recording, "allocated", None)  # no round measures memory
    problem = AttentionProblem(query_lens=(1, 2), seq_lens=(4, 5), num_kv_heads=2)
    found = timed(
        Subject(mine, Target.here("cpu"), Anywhere()), {"problem": problem.to_json(), "calls": 2}
    )
    assert len(found["seconds"]) == 2
    assert len(calls) == 3
    assert found["median"] == sum(found["seconds"]) / 2


def test_what_an_expert_writes_is_compared_though_it_has_no_lse() -> None:
    added = [0.0]

    @implementation("moe", name="mine", writes_out=True)
    def mine(inputs: MoEInputs) -> None:
        assert inputs.out is not None
        inputs.out.copy_(oracle.experts(inputs) + added[0])

    def answers() -> dict[str, Any]:
        subject = Recorder(mine, Target.here("cpu"), Anywhere())
        return answer(subject, {"problem": MoEProblem().to_json()})

    first, second = answers(), answers()
    assert first["verdict"]["status"] == "PASS"
    assert (first["given"], first["gave"]) == (second["given"], second["gave"])
    added[0] = 1.0
    assert answers()["gave"] != first["gave"]
    subject = Subject(mine, Target.here("cpu"), Anywhere())
    assert timed(subject, {"problem": MoEProblem().to_json(), "calls": 1})["median"] > 0


def test_entries_behind_the_last_request_may_hold_anything() -> None:
    built = {"paged_kv_indptr": torch.tensor([0, 1, 3]), "paged_kv_indices": torch.arange(5)}
    other = {**built, "paged_kv_indices": torch.tensor([0, 1, 2, -7, 9])}
    assert digest(defined(built)) == digest(defined(other))
    other["paged_kv_indices"][2] = 8
    assert digest(defined(built)) != digest(defined(other))
    out = {"out": torch.ones(2)}
    assert defined(out) is out
