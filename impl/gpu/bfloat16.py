# ruff: noqa: ANN401  what the interpreter hands on is of no type that this file could name
"""bfloat16 in Triton's interpreter, which NumPy does not have.

The interpreter keeps bfloat16 as 16-bit integers, and computes with these: ``tl.dot`` multiplies
bit patterns, a sum adds them, and a cast from float32 drops bits where a GPU rounds to nearest.
Here its builder computes in float32, exactly, and rounds each result to bfloat16 once, as the
instructions of compute capability 9.0 do, atomic additions too. What moves numbers without
computing is left as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

HIGH = 16
"""Bits of a float32 that bfloat16 leaves out."""
QUIET = 0x7FC0
"""Bits of a NaN."""


def compute_bfloat16(interpreter: Any) -> None:
    """Let the interpreter, a module, compute with bfloat16 from now on."""
    builder = interpreter.InterpreterBuilder
    for name in ("binary_op", "unary_op", "ternary_op", "create_fma", "create_dot"):
        if hasattr(builder, name):
            setattr(builder, name, _in_float32(interpreter, getattr(builder, name)))
    builder.cast_impl = _cast(interpreter, builder.cast_impl)
    builder.create_fp_to_fp = _to_fp(interpreter, builder.create_fp_to_fp)
    _step_by_step(interpreter)
    builder.create_atomic_rmw = _atomic(interpreter, builder.create_atomic_rmw)


def decoded(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the float32 of bit patterns of bfloat16."""
    return (codes.astype(np.uint32) << HIGH).view(np.float32)


def encoded(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bit patterns of the nearest bfloat16 of float32, ties to even."""
    bits = np.asarray(numbers, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> HIGH) & 1)) >> HIGH
    return np.where(np.isnan(numbers), QUIET, rounded).astype(np.uint16)


def _in_float32(interpreter: Any, operation: Callable[..., Any]) -> Callable[..., Any]:
    bfloat16, float32 = interpreter.tl.bfloat16, interpreter.tl.float32
    handle = interpreter.TensorHandle

    def is_ours(each: Any) -> bool:
        return (
            isinstance(each, handle)
            and each.dtype.scalar == bfloat16
            and each.data.dtype == np.uint16
        )

    def computed(builder: Any, *arguments: Any) -> Any:
        # A choice moves numbers, and a condition is no number.
        if np.where in arguments or not any(map(is_ours, arguments)):
            return operation(builder, *arguments)
        wide = [
            handle(decoded(each.data), float32) if is_ours(each) else each for each in arguments
        ]
        result = operation(builder, *wide)
        if result.dtype.scalar != float32 or operation.__name__ == "create_dot":
            return result
        codes = result.data if result.data.dtype == bool else encoded(result.data)
        return handle(codes, bfloat16)

    return computed


def _cast(interpreter: Any, cast: Callable[..., Any]) -> Callable[..., Any]:
    bfloat16, float32 = interpreter.tl.bfloat16, interpreter.tl.float32
    handle = interpreter.TensorHandle

    def through_float32(builder: Any, source: Any, target: Any) -> Any:
        from_ours = source.dtype.scalar == bfloat16 and source.data.dtype == np.uint16
        if from_ours and target.scalar != bfloat16:
            source = handle(decoded(source.data), float32)
            return source if target.scalar == float32 else cast(builder, source, target)
        if target.scalar == bfloat16 and not from_ours:
            return handle(encoded(source.data.astype(np.float32)), bfloat16)
        return cast(builder, source, target)

    return through_float32


def _to_fp(interpreter: Any, convert: Callable[..., Any]) -> Callable[..., Any]:
    bfloat16, float32 = interpreter.tl.bfloat16, interpreter.tl.float32

    def through_float32(builder: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        kinds = {source.dtype.scalar, target.scalar}
        towards_zero = str(rounding_mode).endswith("RTZ")
        if bfloat16 not in kinds or towards_zero:
            return convert(builder, source, target, rounding_mode)
        if source.dtype.scalar == bfloat16 and target.scalar != float32:
            wide = builder.cast_impl(source, float32)
            return convert(builder, wide, target, rounding_mode)
        if target.scalar == bfloat16 and source.dtype.scalar != float32:
            source = convert(builder, source, float32, None)
        return builder.cast_impl(source, target)

    return through_float32


def _step_by_step(interpreter: Any) -> None:
    """Combine numbers of reductions and scans by the functions given: NumPy's take integers."""
    bfloat16, reduce, scan = interpreter.tl.bfloat16, interpreter.ReduceOps, interpreter.ScanOps

    def generic(usual: Callable[..., Any], name: str, *, several: bool) -> Callable[..., Any]:
        def applied(operation: Any, given: Any) -> Any:
            first = given[0] if several else given
            if first.dtype.scalar != bfloat16:
                return usual(operation, given)
            return getattr(operation, name)(given if several else [given])

        return applied

    reduce.apply_impl = generic(reduce.apply_impl, "generic_reduce", several=True)
    scan.cumsum = generic(scan.cumsum, "generic_scan", several=False)
    scan.cumprod = generic(scan.cumprod, "generic_scan", several=False)


def _atomic(interpreter: Any, change: Callable[..., Any]) -> Callable[..., Any]:
    bfloat16, addition = interpreter.tl.bfloat16, interpreter._ir.ATOMIC_OP.FADD  # noqa: SLF001

    def added(
        builder: Any, operation: Any, pointers: Any, numbers: Any, mask: Any, *order: Any
    ) -> Any:
        if numbers.dtype.scalar != bfloat16 or operation != addition:
            return change(builder, operation, pointers, numbers, mask, *order)
        places, summands, chosen = np.broadcast_arrays(pointers.data, numbers.data, mask.data)
        before = np.zeros(places.shape, dtype=np.uint16)
        for at in np.ndindex(places.shape):  # two of them may be of one place
            if chosen[at]:
                cell = ctypes.c_uint16.from_address(int(places[at]))
                before[at] = cell.value
                cell.value = int(encoded(decoded(before[at]) + decoded(summands[at])))
        return interpreter.TensorHandle(before, bfloat16)

    return added
