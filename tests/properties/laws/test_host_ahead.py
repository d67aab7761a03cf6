"""The law of the host that runs ahead, on a device whose work is queued until it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, implementation
from kernelproof.properties.laws import find_law, host_ahead
from kernelproof.properties.seeded.kernels import attend
from kernelproof.properties.verdicts.subject import Subject
from kernelproof.properties.verdicts.verdict import Verdict
from kernelproof.reference import AttentionProblem, BatchMetadata, materialise
from kernelproof.reference.tensors.inputs import PagedAttentionInputs

PROBLEM = AttentionProblem(query_lens=(2, 1), seq_lens=(5, 3), page_size=2, causal=True)
QUEUE: list[Callable[[], None]] = []


class QueuedSubject(Subject):
    """A subject on a device that does nothing before it is waited for."""

    def materialise(self, problem: Any, **options: Any) -> Any:  # noqa: ANN401
        return materialise(problem, **options)

    def usable(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Take tensors of the CPU: this target only says that it is a GPU."""
        del name
        return tensor

    def wait(self, streams: Sequence[torch.cuda.Stream | None] = (None,)) -> None:
        del streams
        while self._waits and QUEUE:
            QUEUE.pop(0)()


class Anywhere:
    def stage(self, name: str) -> AbstractContextManager[None]:
        del name
        return nullcontext()


class Session:
    """Copies plans to the device out of a buffer of its own."""

    def __init__(self) -> None:
        self.on_device: dict[str, torch.Tensor] = {}
        self.page_size = 1

    def staged(self, inputs: PagedAttentionInputs) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in inputs.metadata.tensors().items()}

    def plan(self, inputs: PagedAttentionInputs) -> None:
        staged, self.page_size = self.staged(inputs), inputs.metadata.page_size
        device = self.on_device
        QUEUE.append(
            lambda: device.update({name: tensor.clone() for name, tensor in staged.items()})
        )

    def run(self, inputs: PagedAttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full((*inputs.q.shape[:2], inputs.v_cache.shape[-1]), torch.nan)
        lse = torch.full(inputs.q.shape[:2], torch.nan)

        def launch() -> None:
            metadata = BatchMetadata(**self.on_device, page_size=self.page_size)
            result = attend(replace(inputs, metadata=metadata))
            out.copy_(result[0])
            lse.copy_(result[1])

        QUEUE.append(launch)
        return out, lse


class OneBuffer(Session):
    """Stages each plan in the same buffer, whose copy may not have begun yet: FlashInfer's way."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: dict[str, torch.Tensor] = {}

    def staged(self, inputs: PagedAttentionInputs) -> dict[str, torch.Tensor]:
        self.buffer.update(super().staged(inputs))
        return self.buffer


class CopiesLater(Session):
    """Copies from the engine's own buffers without waiting."""

    def staged(self, inputs: PagedAttentionInputs) -> dict[str, torch.Tensor]:
        return inputs.metadata.tensors()


@pytest.fixture(autouse=True)
def _queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_ahead, "_fall_behind", lambda: None)
    QUEUE.clear()


def judge(session: Callable[[], Session], device: str = "cuda") -> Verdict:
    def function(inputs: PagedAttentionInputs) -> Any:  # noqa: ANN401
        return attend(inputs)

    made = implementation("paged_attention", name="queued", session=session)(function)
    target = Target(device=device, sm=90 if device == "cuda" else None)
    return find_law("host_runs_ahead").check(QueuedSubject(made, target, Anywhere()), PROBLEM)


def test_plans_that_are_staged_apart_are_right() -> None:
    verdict = judge(Session)
    assert (verdict.status, verdict.vacuous) == ("PASS", False)


def test_a_plan_that_overwrites_the_one_under_way_is_found() -> None:
    verdict = judge(OneBuffer)
    assert verdict.status != "PASS"
    said = "while the GPU is busy, plan the batch; run; plan another batch; run: run 1: "
    assert verdict.message.startswith(said), verdict


def test_a_plan_that_reads_the_engines_buffers_late_is_found() -> None:
    verdict = judge(CopiesLater)
    assert verdict.status != "PASS"
    said = "while the GPU is busy, plan the batch; run, overwriting what was planned from at once: "
    assert verdict.message.startswith(said), verdict


def test_a_cpu_is_never_behind() -> None:
    assert judge(OneBuffer, "cpu").vacuous
