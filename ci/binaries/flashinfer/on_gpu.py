"""Tensors of this machine that a launcher takes for a GPU's: it checks where they are.

Nothing reads them, so that only what says so is changed, in the DLPack structure that is passed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import tvm_ffi

_CUDA, _FIRST = 2, 0
"""DLPack's number of CUDA, and of the device."""
_DEVICE_OFFSET = ctypes.sizeof(ctypes.c_void_p)
"""Bytes before the kind of device in a ``DLManagedTensor``: a pointer to the data."""
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _OnGpu:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, **_: object) -> object:
        capsule = self._tensor.__dlpack__()
        address = _pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(address + _DEVICE_OFFSET).value = _CUDA
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, _FIRST


class Calls:
    """A loaded launcher, to whose functions tensors are given as a GPU's.

    Args:
        module: the launcher.
        chosen: whether a tensor is given so.
    """

    def __init__(self, module: Any, chosen: Callable[[torch.Tensor], bool]) -> None:  # noqa: ANN401
        self._module, self._chosen = module, chosen

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a function of the launcher."""
        function = getattr(self._module, name)

        def call(*arguments: object) -> Any:  # noqa: ANN401  what the launcher returns
            return function(*map(self._given, arguments))

        return call

    def _given(self, argument: object) -> object:
        if isinstance(argument, torch.Tensor) and self._chosen(argument):
            return tvm_ffi.from_dlpack(_OnGpu(argument))
        return argument
