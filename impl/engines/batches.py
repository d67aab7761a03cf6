"""What the adapters to kernels that prepare batches share: what a kernel builds, and of what."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping

import torch

from ...reference import BatchProblem
from ...reference.tensors.preparation import BatchInputs
from ..protocol import Implementation
from ..targets.refusal import Refusal
from ..targets.target import Target
from .sources import Names, implementation, missing_file, says, unavailable

WINDOWED = ("kv_indices", "kv_indptr", "page_indices", "page_table")
"""Outputs that depend on a window."""
More = Callable[[BatchProblem], str | bool]
"""Says of a problem whether a kernel takes it: True, or why not."""


def _everything(_: BatchProblem) -> str | bool:
    return True


def _key(problem: BatchProblem) -> Hashable:
    return problem.page_size, problem.window_left < 0, problem.columns, problem.shape


def builder(
    name: str,
    file: Names,
    kernel: str,
    outputs: Mapping[str, str],
    *,
    windows: bool = False,
    more: More = _everything,
) -> Callable[[Callable[[BatchInputs], None]], Implementation]:
    """Make an implementation of a function that writes ``inputs.buffer``, for use as a decorator.

    Args:
        name: the implementation's name.
        file: the engine's file.
        kernel: the name of what the file must define.
        outputs: what the kernel builds, with what becomes of the buffer behind it.
        windows: whether it knows windows.
        more: says what else it takes.
    """
    provider = (file if isinstance(file, str) else file[0]).partition(".")[0]

    def supports(problem: BatchProblem, target: Target) -> Refusal | str | bool:
        if outputs.get(problem.output) != problem.rest:
            return "builds " + ", ".join(f"{output} ({rest})" for output, rest in outputs.items())
        if problem.window_left >= 0 and problem.output in WINDOWED and not windows:
            return "knows no window"
        if not says(file, kernel):
            return missing_file(file) or f"this release has no {kernel}"
        taken = more(problem)
        return unavailable(file, target) or True if taken is True else taken

    def decorate(function: Callable[[BatchInputs], None]) -> Implementation:
        @functools.wraps(function)  # whose module names the files of the kernels
        def built(inputs: BatchInputs) -> torch.Tensor:
            function(inputs)
            return inputs.buffer

        return implementation(
            "prepare_batch",
            name=name,
            provider=provider,
            supports=supports,
            compile_key=_key,
            build_ahead="cuda",
            build_minutes=0.02,
            build_compilers=1,
        )(built)

    return decorate


def scratch(inputs: BatchInputs, output: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return where a kernel writes an output: the buffer if it is asked for, else other memory."""
    if inputs.output == output:
        return inputs.buffer
    return torch.zeros(size, dtype=dtype, device=inputs.buffer.device)
