# ruff: noqa: ANN401  what the interpreter hands on is of no type that this file could name
"""Block pointers, which triton 3.9 has removed, for kernels that were written for an older one.

An engine's kernel is judged with the triton of this machine, which may be newer than what the
engine asks for. In the interpreter a block pointer is no more than pointers and a mask.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from ..targets.refusal import Refusal
from ..targets.target import Target


@dataclass(frozen=True)
class BlockPointer:
    """What ``tl.make_block_ptr`` returns; lengths, strides and offsets are tensors or integers."""

    language: Any
    base: Any
    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offsets: tuple[Any, ...]
    block_shape: tuple[int, ...]

    def advance(self, offsets: tuple[Any, ...]) -> BlockPointer:
        """Return the block that lies this many elements further in each dimension."""
        moved = zip(self.offsets, offsets, strict=True)
        return replace(self, offsets=tuple(old + new for old, new in moved))

    def pointers(self, checked: tuple[int, ...]) -> tuple[Any, Any]:
        """Return the elements' pointers, and which lie inside of the checked dimensions."""
        pointer, mask = self.base, None
        for dim, size in enumerate(self.block_shape):
            index = self.language.arange(0, size) + self.offsets[dim]
            index = index[
                tuple(slice(None) if each == dim else None for each in range(len(self.block_shape)))
            ]
            pointer = pointer + index * self.strides[dim]
            if dim in checked:
                inside = (index >= 0) & (index < self.shape[dim])
                mask = inside if mask is None else mask & inside
        return pointer, mask


@functools.cache
def removed() -> bool:
    """Whether this triton has no block pointers; asked while no kernel runs."""
    language = importlib.import_module("triton.language")
    return "NotImplementedError" in inspect.getsource(language.make_block_ptr)


def needs_older_triton(target: Target) -> Refusal | None:
    """Return why a kernel with block pointers does not compile; None if it does, or on a CPU."""
    if target.device == "cpu" or not removed():
        return None
    return Refusal("this triton has no block pointers", "package", "triton")


@contextmanager
def block_pointers(tensor: torch.Tensor) -> Iterator[None]:
    """Let kernels launched on CPU tensors within this context use block pointers."""
    if tensor.is_cuda or not removed():
        yield
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    patch, original = interpreter._patch_lang, language.make_block_ptr  # noqa: SLF001

    def patched(fn: Any) -> Any:
        outermost = language.make_block_ptr is original
        scope = patch(fn)
        if outermost:
            for name, function in _functions(language).items():
                scope.set_attr(language, name, function)
        return scope

    with mock.patch.object(interpreter, "_patch_lang", patched):
        yield


def _functions(language: Any) -> dict[str, Callable[..., Any]]:
    read, write = language.load, language.store

    def make(base: Any, shape: Any, strides: Any, offsets: Any, block_shape: Any, **_: Any) -> Any:
        lengths = tuple(getattr(each, "value", each) for each in block_shape)
        return BlockPointer(language, base, tuple(shape), tuple(strides), tuple(offsets), lengths)

    def load(pointer: Any, *args: Any, **more: Any) -> Any:
        if not isinstance(pointer, BlockPointer):
            return read(pointer, *args, **more)
        pointers, mask = pointer.pointers(_dimensions(more.pop("boundary_check", ())))
        padding = float("nan") if more.pop("padding_option", "") == "nan" else 0
        return read(pointers, mask=mask, other=None if mask is None else padding, **more)

    def store(pointer: Any, value: Any, *args: Any, **more: Any) -> Any:
        if not isinstance(pointer, BlockPointer):
            return write(pointer, value, *args, **more)
        pointers, mask = pointer.pointers(_dimensions(more.pop("boundary_check", ())))
        return write(pointers, value, mask=mask, **more)

    def advance(base: BlockPointer, offsets: Any) -> BlockPointer:
        return base.advance(tuple(offsets))

    return {"make_block_ptr": make, "advance": advance, "load": load, "store": store}


def _dimensions(boundary_check: Any) -> tuple[int, ...]:
    return tuple(getattr(boundary_check, "value", boundary_check) or ())
