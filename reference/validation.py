"""Checks of arguments: each raises one ValueError that names the argument and the position."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch._subclasses.fake_tensor import FakeTensor

INT32_MAX = 2**31 - 1

KVLayout = Literal["NHD", "HND"]
"""Order of the axes of a paged cache after its pages: [page_size, kv_heads, head_dim] is NHD."""


def listed(choices: Iterable[object]) -> str:
    """Return the values that an argument may have, the empty name with what it stands for."""
    return ", ".join("'' (none)" if each == "" else str(each) for each in choices)


def host_integers(name: str, values: torch.Tensor | Sequence[int]) -> list[int]:
    """Bring a one-dimensional integer tensor or sequence to the host.

    Raises:
        ValueError: not one-dimensional, not integers, or an entry beyond int32.
    """
    if isinstance(values, torch.Tensor):
        check_integers(name, values)
        listed = values.tolist()
        if values.dtype == torch.int32:
            return listed
    elif not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
        message = f"{name} is {values!r}; it must be a tensor or a sequence of integers"
        raise ValueError(message)
    else:
        try:
            listed = list(values)
        except TypeError as error:  # an array without an axis
            message = f"{name} is {values!r}; it must be a tensor or a sequence of integers"
            raise ValueError(message) from error
    for position, value in enumerate(listed):
        if isinstance(value, bool) or not isinstance(value, int):
            message = f"{name}[{position}] is {value!r}, not an integer"
            raise ValueError(message)
        if not -INT32_MAX - 1 <= value <= INT32_MAX:
            message = f"{name}[{position}] is {value}, which overflows int32"
            raise ValueError(message)
    return listed


def host_integers_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    """Bring several one-dimensional integer tensors to the host.

    In one transfer where they are int32: reading from a GPU waits for all that runs on it.

    Raises:
        ValueError: as ``host_integers``.
    """
    first = next(iter(tensors.values()))
    alike = all(
        isinstance(each, torch.Tensor)
        and (each.dtype, each.dim(), each.device) == (torch.int32, 1, first.device)
        for each in tensors.values()
    )
    if not alike:
        return {name: host_integers(name, each) for name, each in tensors.items()}
    for name, each in tensors.items():
        check_values(name, each)
    listed = torch.cat(list(tensors.values())).tolist()
    ends = list(accumulate(len(tensor) for tensor in tensors.values()))
    return {
        name: listed[end - len(tensor) : end]
        for (name, tensor), end in zip(tensors.items(), ends, strict=True)
    }


def check_integers(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor is one-dimensional and holds integers."""
    if tensor.dim() != 1:
        message = f"{name} must have one dimension, not shape {tuple(tensor.shape)}"
        raise ValueError(message)
    if tensor.dtype.is_floating_point or tensor.dtype in (torch.bool, torch.complex64):
        message = f"{name} must hold integers, not {tensor.dtype}"
        raise ValueError(message)
    check_values(name, tensor)


def check_lengths(name: str, lengths: list[int]) -> None:
    """Check that lengths are not negative and that their sum fits into int32."""
    total = 0
    for position, value in enumerate(lengths):
        if value < 0:
            message = f"{name}[{position}] is {value}; a length is never negative"
            raise ValueError(message)
        total += value
        if total > INT32_MAX:
            message = f"{name} sums to {total} at position {position}, which overflows int32"
            raise ValueError(message)


def check_indptr(name: str, indptr: list[int], total: int | None, what: str) -> None:
    """Check that an indptr starts at 0, never decreases and ends at the given total."""
    if not indptr:
        message = f"{name} is empty; it needs one entry more than there are requests"
        raise ValueError(message)
    if indptr[0] != 0:
        message = f"{name}[0] is {indptr[0]}; an indptr starts at 0"
        raise ValueError(message)
    for position in range(1, len(indptr)):
        if indptr[position] < indptr[position - 1]:
            message = (
                f"{name} decreases at position {position}: "
                f"{indptr[position - 1]} is followed by {indptr[position]}"
            )
            raise ValueError(message)
    if total is not None and indptr[-1] != total:
        message = (
            f"{name} ends at {indptr[-1]} (position {len(indptr) - 1}), "
            f"but there are {total} {what}"
        )
        raise ValueError(message)


def check_tensor(
    name: str, tensor: torch.Tensor, axes: str, *, codes: Collection[torch.dtype] = ()
) -> None:
    """Check the number of axes (``"tokens heads dim"``) and the dtype: floating, or of codes."""
    expected = axes.split()
    if not isinstance(tensor, torch.Tensor):
        message = f"{name} must be a torch.Tensor [{', '.join(expected)}], not {type(tensor)}"
        raise ValueError(message)
    if tensor.dim() != len(expected):
        message = f"{name} must be [{', '.join(expected)}], not shape {tuple(tensor.shape)}"
        raise ValueError(message)
    check_values(name, tensor)
    if expected[-1] not in ("heads", "top_k") and not tensor.shape[-1]:
        message = f"{name} has no channels: its shape is {tuple(tensor.shape)}"
        raise ValueError(message)
    if not (tensor.dtype.is_floating_point or tensor.dtype in codes):
        message = f"{name} must have a floating dtype, not {tensor.dtype}"
        raise ValueError(message)


def check_values(name: str, tensor: torch.Tensor) -> None:
    """Check that there are values to read, by strides."""
    if tensor.is_meta:
        message = f"{name} is on the device 'meta', where a tensor has no values"
        raise ValueError(message)
    if isinstance(tensor, FakeTensor):
        message = f"{name} is a FakeTensor, which has no values (torch.compile traces with them)"
        raise ValueError(message)
    if tensor.layout != torch.strided:
        message = f"{name} has the layout {tensor.layout}; it must be strided"
        raise ValueError(message)


def check_index_tensor(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor holds integers, of any shape."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        message = f"{name} must hold integers, not {tensor.dtype}"
        raise ValueError(message)
    check_values(name, tensor)


def checked_number(name: str, value: float) -> float:
    """Return an option as a float; a string is no number."""
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of several values
        pass
    message = f"{name} is {value!r}, not a number"
    raise ValueError(message)


def checked_integer(name: str, value: int) -> int:
    """Return an option as an integer; a float is none."""
    try:
        return operator.index(int(value) if _is_numpy_bool(value) else value)
    except (TypeError, RuntimeError) as error:  # the latter of a tensor without values
        message = f"{name} is {value!r}, not an integer"
        raise ValueError(message) from error


def flag_of(value: object) -> bool | None:
    """Return a flag as a bool, such as numpy's, 0 and 1; None of what is no flag."""
    try:
        number = checked_integer("flag", value)  # type: ignore[arg-type]
    except ValueError:
        return None
    return bool(number) if number in (0, 1) else None


def _is_numpy_bool(value: object) -> bool:
    # By its name, for the oracle imports no numpy. Only this integer of numpy's is no index.
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")


def check_same(name: str, axis: str, actual: int, other: str, expected: int) -> None:
    """Check that two arguments agree on the size of an axis."""
    if actual != expected:
        message = f"{name} has {actual} {axis}, but {other} has {expected}"
        raise ValueError(message)


def check_kv_layout(kv_layout: str) -> None:
    """Check that the layout is NHD or HND."""
    if kv_layout not in get_args(KVLayout):
        message = f"kv_layout is {kv_layout!r}; it must be 'NHD' or 'HND'"
        raise ValueError(message)


def check_heads(num_qo_heads: int, num_kv_heads: int) -> None:
    """Check that the query heads divide into groups, one a key-value head."""
    if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        message = f"q has {num_qo_heads} heads, not a multiple of the {num_kv_heads} of k and v"
        raise ValueError(message)
