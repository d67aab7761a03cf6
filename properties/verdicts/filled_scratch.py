"""Uninitialised memory that is full of NaN while code under test runs.

Scratch that a kernel never writes shows only so: a fresh allocation is mostly zeros. torch has
``fill_uninitialized_memory`` for that, but only together with deterministic algorithms, and these
are other kernels.

Not reached: a module that bound a name at its import (``from torch import empty``), memory that
C++ code allocates by itself, ``resize_``, and ``torch.Tensor(size)``. With ``out=`` the memory is
the caller's and keeps what it holds. In a CUDA graph's capture, the filling is recorded as one more
kernel: each replay finds NaN again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

FUNCTIONS = ("empty", "empty_like", "empty_strided", "empty_permuted")
METHODS = ("new_empty", "new_empty_strided")
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their width in bytes, as which numbers of any dtype are filled."""
MOST_BYTES = 2**26
"""Bytes from the beginning of an allocation that are filled on a CPU, where pages that nobody
touches take no memory; a GPU has all of its memory anyway."""


@contextmanager
def filled_scratch() -> Iterator[None]:
    """Fill what torch allocates uninitialised: floats with NaN, integers with the largest one.

    Bytes are 0xFF, since they mostly hold something else, in which that is NaN; bools are True.
    """
    before = {name: getattr(torch, name) for name in _FILLED if hasattr(torch, name)}
    methods = {name: vars(torch.Tensor).get(name) for name in METHODS}
    for name in before:
        setattr(torch, name, _FILLED[name])
    for name in METHODS:
        setattr(torch.Tensor, name, _FILLED_METHODS[name])
    try:
        yield
    finally:
        # What the code under test has replaced itself stays: that is found elsewhere.
        for name, function in before.items():
            if getattr(torch, name) is _FILLED[name]:
                setattr(torch, name, function)
        for name, method in methods.items():
            if vars(torch.Tensor).get(name) is not _FILLED_METHODS[name]:
                continue
            if method is None:  # it was inherited
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)


def _filling(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def filled(*args: Any, **options: Any) -> Any:  # noqa: ANN401  whatever torch takes and gives
        made = function(*args, **options)
        if options.get("out") is None and not torch.compiler.is_compiling():
            fill(made)
        return made

    return filled


def fill(tensor: torch.Tensor) -> None:
    """Fill a fresh tensor; one without plain numbers in memory of its own stays as it is."""
    dtype = tensor.dtype
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter)  # a fake one, or of a library
        or tensor.is_meta
        or tensor.layout != torch.strided
        or tensor.is_quantized
        or not tensor.numel()
    ):
        return
    with torch.no_grad():
        plain = _in_reach(tensor.detach())
        if dtype == torch.bool:
            plain.fill_(1)
        elif dtype.is_complex:
            plain.fill_(torch.nan)
        else:
            _fill_numbers(plain)


def _fill_numbers(tensor: torch.Tensor) -> None:
    """Fill with bits that are all set, which every float reads as NaN, or the largest integer."""
    size = tensor.element_size()
    floating = tensor.dtype.is_floating_point or tensor.dtype not in _WIDE
    if size not in INTEGERS:
        return
    value = -1 if floating else torch.iinfo(tensor.dtype).max
    tensor.view(INTEGERS[size]).fill_(value)


_WIDE = (torch.int16, torch.int32, torch.int64)


def _in_reach(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that is filled: all of it, or the beginning of its memory."""
    most = MOST_BYTES // tensor.element_size()
    if tensor.device.type != "cpu" or tensor.untyped_storage().nbytes() <= MOST_BYTES:
        return tensor
    return tensor.as_strided((most,), (1,), 0)


def _known_to_torchscript(function: Callable[..., Any], filled: Callable[..., Any]) -> None:
    """Let scripts that are compiled during a call know ``filled`` for the function of torch."""
    from torch.jit import _builtins

    find, register = (
        getattr(_builtins, name, None) for name in ("_find_builtin", "_register_builtin")
    )
    operator = find(function) if find else None
    if operator and register:
        register(filled, operator)


_FILLED = {name: _filling(getattr(torch, name)) for name in FUNCTIONS if hasattr(torch, name)}
_FILLED_METHODS = {name: _filling(getattr(torch.Tensor, name)) for name in METHODS}
for _name, _function in _FILLED.items():
    _known_to_torchscript(getattr(torch, _name), _function)
