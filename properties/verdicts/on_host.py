"""What the host does of a small problem beside a GPU: make its tensors, and ask the oracle.

Both are hundreds of small operations of torch. On a GPU each of them costs the host a launch,
whatever its size, and processes that share the GPU wait for each other; on the host a small one
costs less than its launch. The bits are the same on both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ...reference import AttentionOutput, AttentionProblem, MergeProblem, MoEProblem, Problem
from ...reference.attention.bounds import Bounded
from ...reference.formats.arithmetic import Arithmetic
from ...reference.operations import bounded_answer, materialise
from ...reference.tensors.inputs import Inputs
from .snapshot import tensors_of

MOST_WORK = 4_000_000
"""Most work of a problem for the host. Of a GPU gate's problems of attention, merging and experts,
12 workers on an H200 with 16 cores judged 1.2 to 1.6 times as many a second up to 10^6 of work
where the host answered, and 1.7 times where it made their tensors too; 1.2 times from there to
4 * 10^6, and as many from there to 2 * 10^7."""
MADE = (AttentionProblem, MergeProblem, MoEProblem)
"""Problems whose records hold nothing but tensors on their device."""
ELSEWHERE = ("tight", "apart")
"""Options of memory that is allocated in a way of its own."""


def answered(problem: Problem, inputs: Inputs, arithmetic: Arithmetic) -> Bounded:
    """Return the oracle's answer with its bounds, on the device of the inputs.

    Args:
        problem: the problem that the inputs are of, by whose work the place is chosen.
        inputs: the record of a call.
        arithmetic: see ``bounded_answer``.
    """
    device = next(iter(tensors_of(inputs).values())).device.type
    if device == "cpu" or problem.work > MOST_WORK:
        return bounded_answer(inputs, arithmetic)
    bare = dataclasses.replace(inputs, storages={})
    found = bounded_answer(_with_tensors(bare, torch.Tensor.cpu), arithmetic)
    return Bounded(*(
        AttentionOutput(*(each.to(device, non_blocking=True) for each in answer))
        for answer in found
    ))  # fmt: skip


def made_on(problem: Problem, device: str, **options: Any) -> Any:  # noqa: ANN401  any record
    """Make a problem's tensors on a device, as ``materialise`` does."""
    elsewhere = any(options.get(name) for name in ELSEWHERE)
    if device == "cpu" or elsewhere or not isinstance(problem, MADE) or problem.work > MOST_WORK:
        return materialise(problem, device, **options)
    return moved(materialise(problem, **options), device)


def moved(inputs: Any, device: str) -> Any:  # noqa: ANN401  any record
    """Copy a record with the storages around its tensors; what lies in one storage still does."""
    storages: dict[int, tuple[torch.Tensor, torch.UntypedStorage]] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place not in storages:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            # The storage is kept: its place is no other's as long as it lives.
            copy = whole.to(device, non_blocking=True, copy=True)
            storages[place] = copy, storage
        there = storages[place][0].untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype, device=device)
        return made.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())

    return _with_tensors(inputs, move)


def _with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:  # noqa: ANN401
    """Return a record, or a part of one, with each tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            each.name: _with_tensors(getattr(value, each.name), change)
            for each in dataclasses.fields(value)
            if each.init
        }
        return dataclasses.replace(value, **fields)
    if isinstance(value, dict):
        return {name: _with_tensors(each, change) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [_with_tensors(each, change) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
