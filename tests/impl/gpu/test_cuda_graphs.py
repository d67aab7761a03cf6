"""Recorded runs: buffers of their own, padded batches, and the few graphs that are kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernelproof.impl import AttentionOutput
from kernelproof.impl.gpu.cuda_graphs import (
    GRAPHS_KEPT,
    Recorded,
    Replays,
    options_of,
    padded,
    room_for,
    tensors_by_field,
    with_rows,
)
from kernelproof.impl.triton.attention_keys import compile_key
from kernelproof.impl.triton.graphs import Buffers, TritonGraphSession, paged_graph
from kernelproof.properties.isolation.workers import Deadlines, Worker
from kernelproof.properties.worker.requests import verdict_of
from kernelproof.reference import AttentionProblem, build_metadata, materialise, oracle
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

SUBJECTS = Path(__file__).with_name("graph_subjects.py")
PROBLEM = AttentionProblem(query_lens=(2, 1), seq_lens=(5, 3), page_size=2, sinks=True)


def attend(inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    result: AttentionOutput = oracle.attention(inputs)
    return result.out.float(), result.lse.float()


def test_a_replay_reads_the_new_values_and_keeps_nothing_of_the_old() -> None:
    first: Any = materialise(PROBLEM)
    recorded = Recorded(lambda own: attend(replace(own, metadata=first.metadata)), first, tokens=3)
    other: Any = materialise(replace(PROBLEM, seed=9))
    first.q.zero_()
    first.k_cache.zero_()
    out, lse = recorded.replay(other)
    expected = oracle.attention(other)
    torch.testing.assert_close(out.double(), expected.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-5, atol=1e-6)
    given = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    recorded.replay(replace(other, out=given[0], lse=given[1]))
    assert torch.equal(given[0], out)
    assert torch.equal(given[1], lse)


OPTIONAL = AttentionProblem(
    query_lens=(2, 1),
    seq_lens=(5, 3),
    page_size=2,
    sinks=True,
    custom_mask=True,
    alibi=True,
    spans="images",
    logits_bias="dense",
    per_head_scales=True,
    k_scale=0.5,
)


def test_a_replay_reads_the_new_values_of_every_optional_tensor() -> None:
    first: Any = materialise(OPTIONAL)
    recorded = Recorded(lambda own: attend(replace(own, metadata=first.metadata)), first, tokens=3)
    other: Any = materialise(replace(OPTIONAL, seed=9))
    different = {
        name
        for name, tensor in tensors_by_field(other).items()
        if not torch.equal(tensor, tensors_by_field(first)[name])
    }
    assert different >= {"q", "k_cache", "v_cache", "sinks", "custom_mask", "logits_bias"}
    out, lse = recorded.replay(other)
    expected = oracle.attention(other)
    torch.testing.assert_close(out.double(), expected.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-5, atol=1e-6)


@dataclass(frozen=True, eq=False)
class MoreInputs(PagedAttentionInputs):
    """A call with tensors that nobody has thought of yet."""

    one: torch.Tensor | None = None
    two: tuple[torch.Tensor, torch.Tensor] | None = None


def test_a_new_field_is_copied_and_is_part_of_the_options() -> None:
    def made(number: float | None) -> Any:  # noqa: ANN401
        values: dict[str, Any] = dict(vars(materialise(PROBLEM)))
        if number is not None:
            values["one"] = torch.tensor(number)
            values["two"] = (torch.full((2,), number), torch.full((3,), number))
        return MoreInputs(**values)

    read: list[float] = []

    def function(own: Any) -> Any:  # noqa: ANN401
        read[:] = [float(own.one), *own.two[0].tolist(), *own.two[1].tolist()]
        return attend(replace(own, metadata=first.metadata))

    first = made(1.0)
    recorded = Recorded(function, first, tokens=3)
    recorded.replay(made(2.0))
    assert read == [2.0] * 6
    assert options_of(made(1.0)) == options_of(made(2.0)) != options_of(made(None))
    with pytest.raises(ValueError, match=r"which tensors there are: one, two, two\[1\]"):
        recorded.replay(made(None))


def test_nothing_old_is_left_of_a_mask_of_other_lengths() -> None:
    masks: list[torch.Tensor] = []

    def function(own: Any) -> Any:  # noqa: ANN401
        masks.append(own.custom_mask.clone())
        return attend(replace(own, custom_mask=None, metadata=first.metadata))

    masked = replace(PROBLEM, page_size=16, custom_mask=True)
    first: Any = materialise(masked)
    recorded = Recorded(function, first, tokens=3)
    shorter: Any = materialise(replace(masked, seq_lens=(4, 3)))
    recorded.replay(shorter)
    assert torch.equal(masks[-1][:11], shorter.custom_mask)
    assert not masks[-1][11:].any()
    longer: Any = materialise(replace(masked, seq_lens=(9, 3)))
    recorded.replay(longer)
    assert not masks[-1].any(), "a plan holds longer ones"


@pytest.mark.parametrize("stride", [(10**9, 4, 1), (0, 4, 1)])
def test_a_single_row_may_have_any_stride(stride: tuple[int, ...]) -> None:
    one = torch.arange(8.0).as_strided((1, 2, 4), stride)
    more = with_rows(one, 3)
    assert more.untyped_storage().nbytes() == 3 * 8 * 4
    assert torch.equal(more[:1], one)
    assert not more[1:].any()


def test_channels_with_a_stride_are_copied() -> None:
    strided = torch.arange(24.0).view(3, 8)[:, ::2]
    assert torch.equal(with_rows(strided, 4)[:3], strided)


def test_a_copy_with_more_rows_keeps_strides() -> None:
    strided = torch.arange(24.0).view(3, 2, 4)[:, 0]
    more = with_rows(strided, 5)
    assert (more.shape, more.stride()) == ((5, 4), strided.stride())
    assert torch.equal(more[:3], strided)
    assert not more[3:].any()
    assert with_rows(strided, 2).shape == (3, 4)
    codes = torch.ones(2, 3).to(torch.float8_e5m2)
    assert with_rows(codes, 3).float().tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]


def test_padding_requests_have_neither_tokens_nor_keys() -> None:
    batch = build_metadata([2, 1], [5, 3], [[4, 1, 6], [2, 0, 9]], 2)
    more = padded(batch, 4)
    more.validate()
    assert more.qo_indptr.tolist() == [0, 2, 3, 3, 3]
    assert more.paged_kv_indptr.tolist() == [0, 3, 5, 5, 5]
    assert more.seq_lens.tolist() == [5, 3, 0, 0]
    assert more.paged_kv_last_page_len.tolist() == [1, 1, 0, 0]
    owning = padded(batch, 4, tokens=8)
    owning.validate()
    assert owning.qo_indptr.tolist() == [0, 2, 3, 5, 8]
    assert batch.qo_indptr.tolist() == [0, 2, 3]
    assert padded(batch, 2).qo_indptr.tolist() == [0, 2, 3]
    for requests, tokens in ((2, 4), (1, 3), (4, 2)):
        with pytest.raises(ValueError, match="cannot be padded to"):
            padded(batch, requests, tokens)
    assert [room_for(count) for count in (0, 3, 4, 5, 64, 65)] == [4, 4, 4, 8, 64, 128]


def test_a_graph_is_captured_once_a_size_and_few_are_kept() -> None:
    captured: list[int] = []

    class Session:
        def plan(self, inputs: PagedAttentionInputs) -> None:
            self.metadata = inputs.metadata

        def run(self, inputs: PagedAttentionInputs) -> Any:  # noqa: ANN401
            return attend(replace(inputs, metadata=self.metadata))

        def capture(self, inputs: PagedAttentionInputs) -> None:
            captured.append(len(inputs.q))

        replay = run

    replays = Replays(Session)

    def call(**changes: Any) -> None:  # noqa: ANN401
        inputs: Any = materialise(replace(PROBLEM, **changes))
        out, _ = replays(inputs)
        torch.testing.assert_close(out.double(), oracle.attention(inputs).out, rtol=1e-5, atol=1e-6)

    call()
    call(seed=3, seq_lens=(9, 1), page_order=2)
    call(query_lens=(1, 1))
    assert captured == [3], "other lengths, pages and fewer tokens are no other graph"
    call(causal=True)
    call(query_lens=(5, 3))
    assert captured == [3, 3, 8]
    for page_size in range(3, 3 + GRAPHS_KEPT):
        call(page_size=page_size)
    call()
    assert captured == [3, 3, 8, *[3] * GRAPHS_KEPT, 3], "the first one was given up"


def test_a_graph_captured_without_pages_has_room_for_those_of_later_batches() -> None:
    batch = build_metadata([3], [0], torch.zeros(1, 0, dtype=torch.int32), 16)
    buffers = Buffers(batch, 4, torch.device("meta"))
    page_ids = buffers.metadata.paged_kv_indices
    assert len(page_ids) == 4 * room_for(1), "a graph would keep the address of nothing"


def test_exact_lengths_are_those_of_a_captured_launch_too() -> None:
    session = TritonGraphSession()
    inputs: Any = materialise(replace(PROBLEM, seq_lens=(9, 6)))
    with pytest.raises(ValueError, match="publish come after plan"):
        session.publish(torch.tensor([3, 2]))
    session.plan(inputs)
    session.publish(torch.tensor([3, 2], dtype=torch.int32))
    session.capture(inputs)
    assert session._buffers is not None
    assert session._buffers.metadata.seq_lens.tolist() == [3, 2, 0, 0]
    session.publish(torch.tensor([4, 1], dtype=torch.int32))
    assert session._buffers.metadata.seq_lens.tolist() == [4, 1, 0, 0]
    session.plan(inputs)
    assert session._buffers.metadata.seq_lens.tolist() == [9, 6, 0, 0]


@pytest.mark.parametrize("law", ["life_cycle", "parity", "call_order"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_cache": "float8_e4m3fn", "strided_kv": True, "kv_layout": "HND"},
        {"per_head_scales": True, "strided_q": True, "sinks": True},
    ],
    ids=["plain", "fp8", "per-head"],
)
def test_the_triton_kernel_replayed(
    changes: dict[str, Any], law: str, worker: Worker, device: str
) -> None:
    problem = AttentionProblem(
        query_lens=(2, 1), seq_lens=(5, 3), page_size=2, causal=True, dtype="float16", **changes
    )
    payload = {
        "task": "judge",
        "law": law,
        "implementation": f"{SUBJECTS}:replayed",
        "problem": problem.to_json(),
        "device": device,
    }
    verdict = verdict_of(worker.run(payload, Deadlines(run=60.0)))
    assert verdict.status == "PASS", verdict
    assert not verdict.vacuous


def test_what_is_captured_for_more_room_is_a_kernel_of_its_own() -> None:
    key = paged_graph.compile_key
    assert key is not None
    one = AttentionProblem(query_lens=(5,), seq_lens=(5,), group_size=4)
    three = AttentionProblem(query_lens=(6, 6, 5), seq_lens=(6, 6, 5), group_size=4)
    assert compile_key(one) == compile_key(three)
    assert key(one) != key(three)
    assert key(one) == key(AttentionProblem(query_lens=(6,), seq_lens=(9,), group_size=4))
