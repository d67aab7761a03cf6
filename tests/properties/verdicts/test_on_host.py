"""What the host makes and answers beside a GPU is what the GPU would."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelproof.properties.verdicts import on_host
from kernelproof.properties.verdicts.snapshot import tensors_of
from kernelproof.reference import (
    Arithmetic,
    AttentionProblem,
    MergeProblem,
    MoEProblem,
    Problem,
    materialise,
)
from kernelproof.reference.operations import bounded_answer
from kernelproof.reference.problems import KV_VIEWS

PROBLEMS = (
    AttentionProblem(
        query_lens=(1, 3), seq_lens=(5, 9), strided_q=True, kv_views=KV_VIEWS[1], seed=3
    ),
    AttentionProblem(
        query_lens=(2, 1),
        seq_lens=(4, 7),
        kv_cache="nvfp4",
        head_dim_qk=64,
        head_dim_vo=64,
        sinks=True,
    ),
    AttentionProblem("ragged_attention", query_lens=(2, 3), seq_lens=(4, 7), strided_q=True),
    MergeProblem(num_tokens=3, strides="different"),
    MoEProblem(num_tokens=3, quantized="fp8_tensor"),
)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda each: f"{each.operation}-{each.seed}")
def test_a_moved_record_has_the_same_bits_in_the_same_places(problem: Problem) -> None:
    before = materialise(problem, unused=torch.nan, garbage=7)
    after = on_host.moved(before, "cpu")
    then, now = tensors_of(before), tensors_of(after)
    assert list(then) == list(now)
    for name, tensor in then.items():
        assert tensor.dtype == now[name].dtype
        assert tensor.stride() == now[name].stride()
        assert tensor.storage_offset() == now[name].storage_offset()
        assert torch.equal(tensor.view(torch.uint8), now[name].view(torch.uint8))
    assert list(before.storages) == list(after.storages)
    for name, storage in before.storages.items():
        assert torch.equal(
            storage.contiguous().view(torch.uint8),
            after.storages[name].contiguous().view(torch.uint8),
        )


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda each: f"{each.operation}-{each.seed}")
def test_tensors_that_shared_memory_share_it_after_they_were_moved(problem: Problem) -> None:
    after = on_host.moved(materialise(problem), "meta")
    assert {each.device.type for each in tensors_of(after).values()} == {"meta"}

    before = materialise(problem)
    here = on_host.moved(before, "cpu")
    for name, tensor in tensors_of(here).items():
        other = tensors_of(before)[name]
        for place, storage in before.storages.items():
            assert _shares(storage, other) == _shares(here.storages[place], tensor)


def _shares(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_large_problems_and_memory_of_their_own_stay_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(on_host, "materialise", lambda *given, **_: asked.append(given[1:]))
    monkeypatch.setattr(on_host, "moved", lambda record, device: (record, device))
    small = AttentionProblem(query_lens=(1,), seq_lens=(5,))
    large = replace(small, query_lens=(900,), seq_lens=(900,))
    assert small.work <= on_host.MOST_WORK < large.work
    on_host.made_on(small, "cuda")
    for problem, options in ((large, {}), (small, {"tight": True}), (small, {"apart": {"q": 1}})):
        on_host.made_on(problem, "cuda", **options)
    assert asked == [(), ("cuda",), ("cuda",), ("cuda",)]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda each: f"{each.operation}-{each.seed}")
def test_the_host_answers_what_lies_elsewhere(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = materialise(problem)
    wanted = bounded_answer(inputs, Arithmetic())
    found = on_host.answered(problem, inputs, Arithmetic())
    for a, b in zip(wanted, found, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    there = on_host.moved(inputs, "meta")
    monkeypatch.setattr(on_host, "_with_tensors", lambda *_: inputs)
    elsewhere = on_host.answered(problem, there, Arithmetic())
    assert {each.device.type for answer in elsewhere for each in answer} == {"meta"}
