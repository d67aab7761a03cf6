"""Where Triton's interpreter differs from the compiled language, made equal.

In a compiled kernel the variable of ``tl.range`` is a scalar tensor, so ``i.to(tl.int64)`` is
ordinary code; the interpreter (triton 3.6 to 3.9) makes it a Python int, and such kernels fail
with AttributeError. Found with FlashInfer's ``variable_length_merge_states_kernel``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


class LoopVariable(int):
    """A loop variable that can be cast: Python integers have every width already."""

    def to(self, dtype: object) -> LoopVariable:
        """Cast to a Triton integer type."""
        del dtype
        return self


def _range(*bounds: int) -> Iterator[LoopVariable]:
    return map(LoopVariable, range(*bounds))


@contextmanager
def castable_loop_variables(tensor: torch.Tensor) -> Iterator[None]:
    """Let loop variables be cast in kernels launched on CPU tensors within this context."""
    if tensor.is_cuda:
        yield
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    # The module looks `range` up as a global before it falls back to the builtin.
    with mock.patch.object(interpreter, "range", _range, create=True):
        yield
