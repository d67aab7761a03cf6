"""What the adapters to kernels that prepare batches share: what a kernel builds, and of what."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping

import torch

from ....reference import BatchProblem
from ....reference.tensors.preparation import BatchInputs
from ...features import INT64_INPUTS
from ...gpu.triton_interpreter import scalars_as_bounds
from ...protocol import Implementation
from ...targets.refusal import Refusal
from ...targets.target import Target
from ..sources import Names, implementation, missing_name, unavailable

WINDOWED = ("kv_indices", "kv_indptr", "page_indices", "page_table")
"""Outputs that depend on a window."""
MOST_DECODED = 9
"""Most new tokens of a request that is decoded, its drafts included."""
NO_COLUMN = "a block table has a column"
"""Reason against a table without columns."""
More = Callable[[BatchProblem], str | bool]
"""Says of a problem whether a kernel takes it: True, or why not."""


launched = functools.partial(
    implementation, build_ahead="cuda", build_minutes=0.02, build_compilers=1
)
"""``implementation``, with what it takes to compile one small kernel."""


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a number; 1 for zero."""
    return 1 << max(number - 1, 0).bit_length()


def _everything(_: BatchProblem) -> str | bool:
    return True


def _key(problem: BatchProblem) -> tuple[Hashable, ...]:
    return problem.page_size, problem.window_left < 0


def _key_with_sizes(problem: BatchProblem) -> Hashable:
    sizes = problem.columns, problem.shape, problem.max_model_len, problem.branches
    return *_key(problem), *sizes


def builder(
    name: str,
    file: Names,
    kernel: str,
    outputs: Mapping[str, str],
    *,
    windows: bool = False,
    sized: bool = False,
    more: More = _everything,
    features: tuple[str, ...] = (INT64_INPUTS,),
) -> Callable[[Callable[[BatchInputs], None]], Implementation]:
    """Make an implementation of a function that writes ``inputs.buffer``, for use as a decorator.

    Args:
        name: the implementation's name.
        file: the engine's file.
        kernel: the name of what the file must define.
        outputs: what the kernel builds, with what becomes of the buffer behind it.
        windows: whether it knows windows.
        sized: whether sizes of tables and buffers are constants of the kernel.
        more: says what else it takes.
        features: what it opts into; nearly all take integers of any width.
    """
    provider = (file if isinstance(file, str) else file[0]).partition(".")[0]

    def supports(problem: BatchProblem, target: Target) -> Refusal | str | bool:
        # First, so that a release's lack is the reason, of whatever problem.
        if lacking := lacks({kernel: file}, target):
            return lacking
        if outputs.get(problem.output) != problem.rest:
            return "builds " + ", ".join(f"{output} ({rest})" for output, rest in outputs.items())
        if problem.window_left >= 0 and problem.output in WINDOWED and not windows:
            return "knows no window"
        return more(problem)

    def decorate(function: Callable[[BatchInputs], None]) -> Implementation:
        @functools.wraps(function)  # whose module names the files of the kernels
        def built(inputs: BatchInputs) -> torch.Tensor:
            with scalars_as_bounds(inputs.buffer):
                function(inputs)
            return inputs.buffer

        key = _key_with_sizes if sized else _key
        declared = launched(
            "prepare_batch",
            name=name,
            provider=provider,
            supports=supports,
            features=features,
            compile_key=key,
        )
        return declared(built)

    return decorate


def keeps_tokens(problem: BatchProblem) -> str | bool:
    """Whether each request with new tokens keeps one, or a reason: a target samples one."""
    for step, (news, _) in enumerate(problem.steps):
        if any(0 < new == out for new, out in zip(news, problem.rejected_in(step), strict=True)):
            return "a request keeps one of its new tokens"
    return True


def every_request_drafts(problem: BatchProblem) -> str | bool:
    """Whether each request has new tokens and drafts others; a reason where not."""
    if not problem.drafts or not all(new for news, _ in problem.steps for new in news):
        return "each request has a new token, and drafts another"
    return keeps_tokens(problem)


def few_tokens(problem: BatchProblem) -> str | bool:
    """Whether new tokens are few, as those that are verified; a reason where not."""
    if any(tokens > MOST_DECODED for new, _ in problem.steps for tokens in new):
        return f"a decode has at most {MOST_DECODED} new tokens"
    return True


def has_columns(problem: BatchProblem) -> str | bool:
    """Whether there is room in a block table; a reason where not."""
    return problem.columns > 0 or NO_COLUMN


def lacks(kernels: Mapping[str, Names], target: Target) -> Refusal | None:
    """Return why kernels of an engine cannot run, named with their files; None if they can."""
    absent = next(filter(None, (missing_name(file, name) for name, file in kernels.items())), None)
    return absent or next(
        filter(None, (unavailable(each, target) for each in kernels.values())), None
    )


def scratch(inputs: BatchInputs, output: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return where a kernel writes an output: the buffer if it is asked for, else other memory."""
    if inputs.output == output:
        return inputs.buffer
    return torch.zeros(size, dtype=dtype, device=inputs.buffer.device)
