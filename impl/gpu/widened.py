# ruff: noqa: ANN401  what the interpreter hands on is of no type that this file could name
"""Kernels in Triton's interpreter with every float in float64, whatever its dtype says.

Arrays of float16, bfloat16 and float32 tensors are float64: loads widen, casts among these dtypes
and to float64 change nothing, literals stay doubles, and what is stored is kept beside the memory
in ``WideMemory``. Type checks of the language see the declared dtypes.

Casts to FP8 and to integers, and bits taken of floats, are done as declared: a kernel rounds there
on purpose, and ``WideMemory.rounded`` says so. A literal that is the float32 nearest to a known
constant stands for that constant: compiled, both are the same number.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from .bfloat16 import decoded, encoded
from .interpreted import INTERPRETER
from .triton_interpreter import hasten
from .wide_memory import WideMemory

NAMES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""Dtypes that are widened, by their names in Triton."""
STORED = {"fp16": np.float16, "bf16": np.uint16, "fp32": np.float32}
"""NumPy's dtypes of their elements in memory."""
KNOWN = (
    math.log2(math.e), math.log(2), math.log10(2), math.log2(10), math.e, math.pi, 1 / math.pi,
    math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi), 2 / math.sqrt(math.pi), 1 / 3, 1 / 6,
)  # fmt: skip
"""Constants that kernels write with as many digits as float32 has."""
EXACT = {float(np.float32(sign * each)): sign * each for each in KNOWN for sign in (1, -1)}


@contextmanager
def widened() -> Iterator[WideMemory]:
    """Within a with block, compute in float64 what torch and Triton's interpreter compute."""
    interpreter = importlib.import_module(INTERPRETER)
    hasten()
    memory = WideMemory()
    with ExitStack() as stack, np.errstate(all="ignore"):
        for place, name, replace in _Patches(interpreter, memory, stack).all():
            usual = getattr(place, name, None)
            if usual is not None:  # before 3.9 Triton has not all of them
                stack.enter_context(mock.patch.object(place, name, replace(usual)))
        stack.enter_context(memory)
        yield memory


def exact(value: float) -> float:
    """Return the constant that a number stands for; itself, if for none."""
    return EXACT.get(float(np.float32(value)), value)


def _name(dtype: Any) -> str:
    """Return the name of the elements of a tensor's dtype; "" of pointers."""
    return str(getattr(dtype.scalar, "name", ""))


def _wide(stored: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    return (decoded(stored) if name == "bf16" else stored).astype(np.float64)


def _narrow(numbers: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    if name == "bf16":
        return encoded(np.asarray(numbers).astype(np.float32))
    return np.asarray(numbers).astype(STORED[name])


class _Patches:
    """Replacements of the interpreter's functions, which share a memory."""

    def __init__(self, interpreter: Any, memory: WideMemory, stack: ExitStack) -> None:
        self._interpreter, self._memory, self._stack = interpreter, memory, stack
        self._builder = interpreter.InterpreterBuilder
        self._handle, self._language = interpreter.TensorHandle, interpreter.tl

    def all(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        """Yield the place and the name of each, and what makes its replacement of it."""
        interpreter, builder = self._interpreter, self._builder
        yield interpreter, "_get_np_dtype", self._numpy_dtype
        yield interpreter, "_validate_np_data_size", self._fits
        yield interpreter, "_implicit_cvt", self._argument
        yield interpreter.GridExecutor, "__call__", self._launch
        for name in NAMES:
            yield builder, f"get_{name}", functools.partial(self._constant, name)
        for name in (
            "create_masked_load", "create_masked_store", "cast_impl", "create_fp_to_fp",
            "create_bitcast", "create_fabs", "create_atomic_rmw", "create_dot_scaled",
        ):  # fmt: skip
            yield builder, name, getattr(self, f"_{name}")
        for name in ("create_int_to_ptr", "create_ptr_to_int"):
            yield builder, name, self._create_bitcast

    @staticmethod
    def _numpy_dtype(usual: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def dtype(of: Any) -> Any:
            return np.dtype(np.float64) if _name(of) in NAMES else usual(of)

        return dtype

    @staticmethod
    def _fits(usual: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        def fits(array: Any, dtype: Any) -> bool:
            return _name(dtype) in NAMES or usual(array, dtype)

        return fits

    def _argument(self, usual: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Make a tensor of a float that a kernel takes, as compiled: literals meet a tensor."""
        float32 = self._language.float32

        def converted(given: Any) -> Any:
            if type(given) is not float:
                return usual(given)
            handle = self._handle(np.array([exact(given)], np.float64), float32)
            return self._language.tensor(handle, float32)

        return converted

    def _launch(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(usual)
        def launched(*arguments: Any, **options: Any) -> Any:
            self._memory.launches += 1
            self._replace_constants(arguments[0].fn.__globals__)
            for each in tensors_in([*arguments, *options.values()]):
                self._memory.know(each)
            self._memory.launching = True
            try:
                return usual(*arguments, **options)
            finally:
                self._memory.launching = False

        return launched

    def _replace_constants(self, names: dict[str, Any]) -> None:
        """Let a kernel's module, whose host code may use them too, have its constants exactly."""
        found = {
            name: exact(value)
            for name, value in names.items()
            if type(value) is float and exact(value) != value
        }
        if found:
            self._stack.enter_context(mock.patch.dict(names, found))
            self._memory.outdated = True

    def _constant(self, name: str, usual: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        del usual
        dtype = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}[name]

        def constant(builder: Any, value: Any) -> Any:
            del builder
            return self._handle(
                np.array([exact(value)], np.float64), getattr(self._language, dtype)
            )

        return constant

    def _create_masked_load(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        load = self._interpreter._interpreter.load  # noqa: SLF001

        def loaded(
            builder: Any, pointers: Any, mask: Any, other: Any, *how: Any, **named: Any
        ) -> Any:
            dtype = pointers.get_element_ty()
            name = _name(dtype)
            if name not in NAMES:
                return usual(builder, pointers, mask, other, *how, **named)
            stored = np.dtype(STORED[name])
            nothing = np.zeros(pointers.data.shape, stored)
            chosen = mask.data
            numbers = _wide(load(pointers.data, chosen, nothing, stored), name)
            where = np.broadcast_to(chosen, numbers.shape)
            for inside, kept, places in self._memory.parts(pointers.data[where], NAMES[name]):
                found = numbers[where]
                found[inside] = kept[places]
                numbers[where] = found
            if other is not None:
                numbers = np.where(where, numbers, other.data)
            return self._handle(numbers, dtype)

        return loaded

    def _create_masked_store(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(usual)
        def stored(builder: Any, pointers: Any, value: Any, mask: Any, *how: Any) -> Any:
            name = _name(pointers.get_element_ty())
            where = np.broadcast_to(mask.data, pointers.data.shape)
            if name not in NAMES:
                self._memory.forget(pointers.data[where])
                return usual(builder, pointers, value, mask, *how)
            numbers = np.broadcast_to(value.data, pointers.data.shape)
            # What was there is widened before it is overwritten.
            parts = [*self._memory.parts(pointers.data[where], NAMES[name], writes=True)]
            for inside, kept, places in parts:
                kept[places] = numbers[where][inside]
            narrow = self._handle(_narrow(numbers, name), value.dtype)
            return usual(builder, pointers, narrow, mask, *how)

        return stored

    def _cast_impl(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def cast(builder: Any, source: Any, target: Any) -> Any:
            before, after = _name(source.dtype), _name(target)
            if after in NAMES or (before in NAMES and after == "fp64"):
                return self._handle(source.data.astype(np.float64), target.scalar)
            made = usual(builder, source, target)
            if before in NAMES:
                self._note(source.data, made.data)
            return made

        return cast

    def _create_fp_to_fp(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        float32 = self._language.float32

        def converted(builder: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
            convert = self._interpreter._convert_float  # noqa: SLF001
            before, after = _name(source.dtype), _name(target)
            if before in NAMES and after in NAMES:
                return self._handle(source.data, target.scalar)
            if after in NAMES:
                numbers = convert(source.data, source.dtype.scalar, float32, rounding_mode)
                return self._handle(_wide(numbers.view(np.float32), "fp32"), target.scalar)
            if before in NAMES:
                single = _narrow(source.data, "fp32")
                codes = convert(single, float32, target.scalar, rounding_mode).view(np.uint8)
                # What a mask leaves out of a load of codes is a number too: 0, which stays 0.
                read = convert(codes, target.scalar, float32, rounding_mode)
                self._note(source.data, read.view(np.float32))
                return self._handle(codes, target.scalar)
            return usual(builder, source, target, rounding_mode)

        return converted

    def _create_bitcast(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def cast(builder: Any, source: Any, target: Any) -> Any:
            before, after = _name(source.dtype), _name(target)
            if before not in NAMES and after not in NAMES:
                return usual(builder, source, target)
            bits = source.data
            if before in NAMES:
                bits = _narrow(bits, before)
                self._note(source.data, _wide(bits, before))
            if after in NAMES:
                return self._handle(_wide(bits.view(STORED[after]), after), target.scalar)
            return usual(builder, self._handle(bits, source.dtype), target)

        return cast

    def _create_fabs(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def absolute(builder: Any, given: Any) -> Any:
            if _name(given.dtype) not in NAMES:
                return usual(builder, given)
            return self._handle(np.abs(given.data), given.dtype.scalar)

        return absolute

    def _create_atomic_rmw(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        addition = self._interpreter._ir.ATOMIC_OP.FADD  # noqa: SLF001
        # A release has one argument on caches behind the mask, or two.
        how = [None] * (len(inspect.signature(self._builder.create_masked_store).parameters) - 4)

        def changed(
            builder: Any, operation: Any, pointers: Any, numbers: Any, mask: Any, *order: Any
        ) -> Any:
            name = _name(numbers.dtype)
            if name not in NAMES:
                self._memory.forget(pointers.data)
                return usual(builder, operation, pointers, numbers, mask, *order)
            before = builder.create_masked_load(pointers, mask, None, None, False)  # noqa: FBT003
            after = before.data + numbers.data if operation == addition else numbers.data
            chosen = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
            if len(np.unique(chosen)) < chosen.size:
                self._memory.rounded = True  # one of several summands of a place would count
            value = self._handle(after, numbers.dtype)
            builder.create_masked_store(pointers, value, mask, *how)
            return before

        return changed

    def _create_dot_scaled(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def multiplied(builder: Any, *given: Any) -> Any:
            self._memory.rounded = True  # float32 throughout
            narrowed = [
                self._handle(_narrow(each.data, _name(each.dtype)), each.dtype)
                if isinstance(each, self._handle) and _name(each.dtype) in NAMES
                else each
                for each in given
            ]
            made = usual(builder, *narrowed)
            return self._handle(made.data.astype(np.float64), made.dtype)

        return multiplied

    def _note(self, numbers: Any, made: Any) -> None:
        """Note whether a cast that a kernel makes on purpose changed numbers."""
        if not self._memory.rounded:
            same = (made == numbers) | ~np.isfinite(numbers)
            self._memory.rounded = not bool(np.all(same))


def tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among a launch's arguments: alone, in tuples, wrapped or described."""
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (tuple, list)):
            yield from tensors_in(each)
        elif isinstance(base := getattr(each, "base", None), torch.Tensor):
            yield base
