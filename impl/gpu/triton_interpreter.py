"""Where Triton's interpreter differs from the compiled language, made equal.

In a compiled kernel the variable of ``tl.range`` is a scalar tensor, so ``i.to(tl.int64)`` is
ordinary code; the interpreter (triton 3.6 to 3.9) makes it a Python int, and such kernels fail
with AttributeError. Found with FlashInfer's ``variable_length_merge_states_kernel``.

A scalar that a kernel takes or loads bounds a loop, compiled; to the interpreter it is an array of
shape [1], which up to triton 3.6 it hands to ``int``. NumPy 2.4 refuses that with TypeError.

A comparison of scalars is a condition, compiled; the interpreter's loses its dtype when it is
broadcast (found with lmdeploy's ``fused_moe_blocked_fp8_kernel``).

A launch replaces the attributes of ``triton.language``, and not what a module bound when it was
imported: ``log2 = tl.log2`` and ``from triton.language import log2`` then fail for want of a
``_semantic``, where they compile. ``bound_names.py`` replaces those globals too.

What is changed is changed while a kernel runs, and no longer: were it for the rest of the process,
whether a user's kernel fails would depend on what ran before it. ``hasten`` alone lasts: it leaves
out work of the interpreter's that has no effect, more than half of its time, and lets each launch
reach bound names.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from ..targets.refusal import Refusal
from ..targets.target import Target
from .annotated import keep_annotations
from .bfloat16 import compute_bfloat16
from .bound_names import reach_bound_names
from .conjunctions import join_blocks
from .float8 import convert_float8
from .interpreted import INTERPRETER, before_first_launch, count_launches
from .kernel_lines import mark_lines, watch_launches
from .reductions import by_slices
from .shapes import remember_shapes

FIRST_THAT_INDEXES = (3, 7)
"""The first triton whose interpreter makes an integer of an array of shape [1] itself."""


def uninterpreted(target: Target) -> Refusal | None:
    """Return why Triton does not run on a CPU; None if it does, and for a GPU."""
    if target.device != "cpu" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    reason = "Triton runs on a CPU only under TRITON_INTERPRET=1, set before it is imported"
    return Refusal(reason, "device", "TRITON_INTERPRET=1")


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


@contextmanager
def scalars_as_bounds(tensor: torch.Tensor) -> Iterator[None]:
    """Let scalars bound loops in kernels launched on CPU tensors within this context."""
    if tensor.is_cuda or _indexes():
        yield
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    # Every launch, and every call of a jitted helper, gives Triton's tensors their methods anew.
    patch = interpreter._patch_lang_tensor  # noqa: SLF001  there is no public way to them
    with mock.patch.object(interpreter, "_patch_lang_tensor", _then_index(patch)):
        yield


def _indexes() -> bool:
    version = importlib.import_module("triton").__version__
    return tuple(map(int, version.split(".")[:2])) >= FIRST_THAT_INDEXES


def _then_index(patch: Callable[..., None]) -> Callable[..., None]:
    def patched(tensor: Any, *scope: Any) -> None:  # noqa: ANN401  the scope came with triton 3.6
        patch(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    return patched


@contextmanager
def scalar_conditions(tensor: torch.Tensor) -> Iterator[None]:
    """Let comparisons of scalars join masks in kernels launched on CPU tensors within this context.

    The interpreter makes a block of such a comparison in the dtype of what it compared, and then
    refuses ``mask & (start < size)`` as the mask of a load.
    """
    if tensor.is_cuda:
        yield
        return
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    with mock.patch.object(builder, "create_splat", _splat_conditions(builder.create_splat)):
        yield


def _splat_conditions(splat: Callable[..., Any]) -> Callable[..., Any]:
    def patched(builder: Any, block: Any, scalar: Any) -> Any:  # noqa: ANN401  of the interpreter
        made = splat(builder, block, scalar)
        if scalar.data.dtype == bool:
            made.data = made.data.astype(bool)
        return made

    return patched


@contextmanager
def rounding_away(tensor: torch.Tensor) -> Iterator[None]:
    """Let kernels launched on CPU tensors within this context call CUDA's ``libdevice.round``.

    It rounds halves away from zero; the interpreter has none of libdevice's functions.
    """
    if tensor.is_cuda:
        yield
        return
    libdevice = importlib.import_module("triton.language.extra.cuda.libdevice")
    with mock.patch.object(libdevice, "round", _rounded_away):
        yield


def _rounded_away(number: Any) -> Any:  # noqa: ANN401  a tensor of the interpreter's
    tl = importlib.import_module("triton.language")
    size = tl.abs(number)
    whole = tl.floor(size)
    whole = tl.where(size - whole >= 0.5, whole + 1.0, whole)  # noqa: PLR2004
    return tl.where(number < 0, -whole, whole)


def hasten() -> None:
    """Let Triton's interpreter work less, reach bound names, and compute as a GPU does.

    Where it is not imported yet, that is done at its first launch. Lines that run, and launches on
    a GPU, are recorded from then on, see ``kernel_lines``.
    """
    watch_launches()
    if (interpreter := sys.modules.get(INTERPRETER)) is not None:
        _hasten(interpreter)
    elif os.environ.get("TRITON_INTERPRET") == "1":
        before_first_launch(_hasten, mark_lines)


@functools.cache
def _hasten(interpreter: Any) -> None:  # noqa: ANN401  a module
    builder = interpreter.interpreter_builder
    options: Any = getattr(builder, "options", None)
    # Each integer operation is done again in 64 bits, for an assertion that only debug makes.
    if getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True):
        builder.options = replace(options, sanitize_overflow=False)
    interpreter._get_np_dtype = _remembered(interpreter)  # noqa: SLF001  there is no public way
    remember_shapes(importlib.import_module("triton.language.core"))
    keep_annotations(interpreter)
    join_blocks(interpreter)
    count_launches(interpreter)
    mark_lines(interpreter)
    by_slices(interpreter)
    compute_bfloat16(interpreter)
    convert_float8(interpreter)
    if hasattr(interpreter, "_LangPatchScope"):
        patch = interpreter._patch_lang  # noqa: SLF001  there is no public way to it
        once = _once(patch, interpreter)
        interpreter._patch_lang = reach_bound_names(once, interpreter)  # noqa: SLF001


def _remembered(interpreter: Any) -> Callable[[Any], Any]:  # noqa: ANN401  a module
    """Return NumPy's dtype of one of Triton's, for which a table is made anew at each operation."""
    make, language = interpreter._get_np_dtype, interpreter.tl  # noqa: SLF001
    pointer, block = language.pointer_type, language.block_type
    known: dict[str, Any] = {}

    def numpy_dtype(dtype: Any) -> Any:  # noqa: ANN401  of Triton
        scalar = dtype.element_ty if isinstance(dtype, block) else dtype
        name = "pointer" if isinstance(scalar, pointer) else scalar.name
        if name not in known:
            known[name] = make(dtype)
        return known[name]

    return numpy_dtype


def _once(patch: Callable[[Any], Any], interpreter: Any) -> Callable[[Any], Any]:  # noqa: ANN401
    """Patch the language at a launch, but not again at each call of a jitted helper in it."""
    language, core = map(importlib.import_module, ("triton.language", "triton.language.core"))
    places = language, core

    def patched(fn: Any) -> Any:  # noqa: ANN401  a kernel or a helper
        named = [each for each in fn.__globals__.values() if isinstance(each, ModuleType)]
        used = [place for place in places if place in named]
        originals = [each for place in used for each in (place.add, place.tensor.__add__)]
        if not originals or any(map(core.is_builtin, originals)):
            return patch(fn)
        return interpreter._LangPatchScope()  # noqa: SLF001

    return patched
