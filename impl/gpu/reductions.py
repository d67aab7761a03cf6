# ruff: noqa: ANN401  what the interpreter hands on is of no type that this file could name
"""Reductions of Triton's interpreter by slices, where it goes element by element.

The interpreter knows sums, and the largest and smallest numbers. For any other function it calls it
once for every element: ``tl.sort`` and ``tl.topk``, whose steps are such reductions of pairs, took
40 s of a router's 1,024 keys. The function is elementwise, or it would not compile, so that a
slice is combined with the next one in the same order by one call, with the same bits.

``tl.argmax`` beside NaN is another one compiled: a number is kept only if it is larger than the
next, so that a later element takes the place of NaN, and NaN that of an earlier element. NumPy's
functions, which the interpreter calls, pass NaN, and refuse NaN alone. Compiled, the order depends
on the layout; from first to last is what an H100 has answered with triton 3.6, by one and by four
warps, for 8 to 512 elements of NaN, and for the first choice among numbers and NaN (2026-11-28).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np


def by_slices(interpreter: Any) -> None:
    """Let the interpreter, a module, reduce and scan by slices from now on.

    Scans of integers double the distance at each step: sums of integers are associative.
    """
    operations = interpreter.ReduceOps, interpreter.ScanOps
    if all(hasattr(each, name) for each, name in zip(operations, GENERIC, strict=True)):
        interpreter.ReduceOps.generic_reduce = _reduce
        interpreter.ReduceOps.min_max = _min_max_of(interpreter.ReduceOps.min_max)
        interpreter.ScanOps.generic_scan = _scan_of(interpreter.ScanOps.generic_scan)


GENERIC = ("generic_reduce", "generic_scan")
PASSING_NAN = {
    np.max: np.nanmax,
    np.min: np.nanmin,
    np.argmax: np.nanargmax,
    np.argmin: np.nanargmin,
}
"""NumPy's functions that later interpreters call, by what that of triton 3.6 calls."""


def _reduce(operation: Any, given: Any) -> Any:
    whole = operation.axis is None
    arrays = [each.handle.data.reshape(-1) if whole else each.handle.data for each in given]
    axis = 0 if whole else operation.axis
    dtypes = [each.dtype for each in given]
    found = _slices(operation, arrays, dtypes, axis, 0)
    for position in range(1, arrays[0].shape[axis]):
        found = _combined(operation, found, _slices(operation, arrays, dtypes, axis, position))
    shape = given[0].handle.data.shape
    results = [each.handle.data for each in found]
    if operation.keep_dims:
        kept = [1 if whole or dim == axis else size for dim, size in enumerate(shape)]
        results = [each.reshape(kept) for each in results]
    elif whole or len(shape) == 1:
        results = [each.reshape(-1)[0] for each in results]
    return [operation.to_tensor(each, dtype) for each, dtype in zip(results, dtypes, strict=True)]


def _min_max_of(usual: Any) -> Any:
    def min_max(operation: Any, given: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        value, index = (PASSING_NAN.get(each, each) for each in (val_reduce_op, idx_reduce_op))
        data = (given[0] if isinstance(given, tuple) else given).handle.data
        if index and np.issubdtype(data.dtype, np.floating) and np.isnan(data).any():
            better = np.greater if index is np.nanargmax else np.less
            value = value and partial(_best_beside_nan, better, 0)
            index = partial(_best_beside_nan, better, 1)
        return usual(operation, given, value, index)

    return min_max


def _best_beside_nan(
    better: Any, which: int, data: Any, *, axis: int | None, keepdims: bool
) -> Any:
    """Return the best elements (0), or their indices (1), where an earlier one must be better."""
    rows = data.reshape(-1) if axis is None else np.moveaxis(data, axis, 0)
    found, places = rows[0], np.zeros(rows.shape[1:], np.int32)
    for position, row in enumerate(rows[1:], 1):
        kept = better(found, row) | (found == row)
        found, places = np.where(kept, found, row), np.where(kept, places, position)
    result = (found, places)[which]
    if keepdims:
        return result.reshape([1] * data.ndim) if axis is None else np.expand_dims(result, axis)
    return result


def _scan_of(element_by_element: Any) -> Any:
    def scan(operation: Any, given: Any) -> Any:
        if not all(np.issubdtype(each.handle.data.dtype, np.integer) for each in given):
            return element_by_element(operation, given)
        arrays, axis = [each.handle.data for each in given], operation.axis
        dtypes = [each.dtype for each in given]
        distance = 1
        while distance < arrays[0].shape[axis]:
            before = [np.roll(each, distance, axis) for each in arrays]
            pairs = (map(operation.to_tensor, each, dtypes) for each in (before, arrays))
            made = [each.handle.data for each in _combined(operation, *map(list, pairs))]
            first = _at(axis, slice(distance))
            for new, old in zip(made, arrays, strict=True):
                new[first] = old[first]
            arrays, distance = made, 2 * distance
        return [operation.to_tensor(a, dtype) for a, dtype in zip(arrays, dtypes, strict=True)]

    return scan


def _at(axis: int, index: int | slice) -> tuple[int | slice, ...]:
    return (*[slice(None)] * axis, index)


def _slices(
    operation: Any, arrays: list[Any], dtypes: list[Any], axis: int, index: int
) -> list[Any]:
    """Return the parts of arrays at an index of an axis as Triton's tensors."""
    parts = (each[_at(axis, index)] for each in arrays)
    return [operation.to_tensor(each, dtype) for each, dtype in zip(parts, dtypes, strict=True)]


def _combined(operation: Any, first: list[Any], second: list[Any]) -> list[Any]:
    made = operation.combine_fn.fn(*first, *second)
    return list(made) if isinstance(made, tuple) else [made]
