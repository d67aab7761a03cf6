# ruff: noqa: ANN401  what the interpreter and torch hand on is of no type that this file could name
"""The memory that kernels touch in Triton's interpreter, and what no load defines.

A GPU lets a kernel read behind a tensor until an allocation ends, and a load leaves its masked
lanes undefined where no ``other`` is given; the interpreter makes zeros of them. Here every lane of
a load, a store and an atomic operation must lie in memory that the call was given or has allocated,
and undefined lanes hold what no kernel can use: NaN, or a number far outside of any tensor.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .interpreted import INTERPRETER
from .triton_interpreter import hasten
from .widened import tensors_in

GARBAGE = {"fp16": 0x7E00, "bf16": 0x7FC0, "fp32": 0x7FC00000, "fp64": 0x7FF8000000000000}
"""Bits of NaN in the dtypes that have no byte pattern of their own below."""
GARBAGE_BYTE = 0x7F
"""Each byte of an undefined lane of another dtype: NaN in both FP8 types, and a large integer."""
MASKS = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}
"""Functions of the interpreter that take pointers, and the place of their mask behind it."""
SEMANTIC = "triton.language.semantic"
SWAP = "create_atomic_cas"
"""The one that takes no mask."""
READS, CHANGES = "reads", "changes"
MADE = "a tensor that the call made"
"""What memory is called that has no other name."""
NEAR = 1 << 12
"""Bytes from a tensor within which it is named: what lies further is some other memory."""


class TouchedMemory:
    """What calls may touch, and what they touched besides.

    Attributes:
        launches: kernels that were launched.
        outside: what the first access outside of that memory was, in words; empty without one.
        wrote: whether it wrote.
        fills: whether the latest load says what its masked lanes hold.
    """

    def __init__(self) -> None:
        self.launches, self.outside, self.wrote = 0, "", False
        self.fills = False
        self._kernel: Any = None
        # A storage stays alive: other memory at its address would be taken for it.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._given: set[int] = set()
        self._names: dict[tuple[int, int], str] = {}
        self._sorted: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None

    @contextmanager
    def watch(self, inputs: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Within a with block, watch what kernels of a call touch in Triton's interpreter.

        Args:
            inputs: what it is given; of each it may touch what lies between its first and its last
                element. All else that it has or makes it may touch whole.
        """
        interpreter = importlib.import_module(INTERPRETER)
        hasten()
        self._give(inputs)
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        with ExitStack() as stack:
            replaced = _launch(self, executor.__call__)
            stack.enter_context(mock.patch.object(executor, "__call__", replaced))
            semantic = importlib.import_module(SEMANTIC).TritonSemantic
            loaded = _noted(self, semantic.load)
            stack.enter_context(mock.patch.object(semantic, "load", loaded))
            for name in (*MASKS, SWAP):
                watch = _watched_swap if name == SWAP else partial(_watched, name=name)
                watched = watch(self, interpreter, usual=getattr(builder, name))
                stack.enter_context(mock.patch.object(builder, name, watched))
            stack.enter_context(_Allocations(self))
            yield

    def _give(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr()] = storage
            self._given.add(storage.data_ptr())
            if tensor.numel() and tensor.device.type == "cpu":
                span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
                first = tensor.data_ptr()
                self._names[first, first + (span + 1) * tensor.element_size()] = f"the input {name}"
        self._sorted = None

    def launch(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        """Note a launch, whose arguments it may touch whole where they are no inputs.

        Args:
            kernel: the Python function.
            arguments: what it is given, by name.
        """
        self.launches += 1
        self._kernel = kernel
        for name, given in arguments.items():
            for each in tensors_in([given]):
                self.allow(each, f"the argument {name}")

    def inside(self, addresses: Any, mask: Any, size: int, verb: str) -> Any:
        """Return the mask without the lanes that lie outside, which are noted.

        Args:
            addresses: uint64, of any shape.
            mask: the lanes that are touched, of this shape.
            size: bytes of an element.
            verb: what is done with them.
        """
        touched = addresses[mask]
        if not touched.size:
            return mask
        right = self._right(touched, size)
        if not right.all() and self._find_living():
            right = self._right(touched, size)
        if right.all():
            return mask
        if not self.outside:
            self.outside = self._said(touched[~right], verb)
            self.wrote = verb != READS
        left = mask.copy()
        left[mask] = right
        return left

    def _right(self, touched: Any, size: int) -> Any:
        """Return which addresses lie in memory that may be touched."""
        firsts, ends = self._memory()
        places = np.maximum(np.searchsorted(firsts, touched, side="right") - 1, 0)
        # Differences: a sum wraps around at an address before the memory's beginning.
        left = ends[places] - np.minimum(touched, ends[places])
        return (touched >= firsts[places]) & (left >= np.uint64(size))

    def _find_living(self) -> bool:
        """Allow tensors that earlier calls keep, which a kernel may know by their addresses.

        It takes as long as Python has objects, so that only an access outside asks for it.
        """
        before = len(self._names)
        for each in gc.get_objects():
            if isinstance(each, torch.Tensor):
                self.allow(each)
        return len(self._names) > before

    def _said(self, touched: Any, verb: str) -> str:
        first = int(touched[0])
        lanes = "1 element" if touched.size == 1 else f"{touched.size} elements at once"
        code = self._kernel.__code__
        frame = inspect.currentframe()
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        line = f" in line {frame.f_lineno}" if frame else ""
        said = f"{code.co_name}{line} {verb} {lanes} outside of what the call was given or has made"
        where = [
            (first - end, "behind", name) if end <= first else (begin - first, "before", name)
            for (begin, end), name in self._names.items()
            if begin - NEAR < first < end + NEAR and not begin <= first < end
        ]
        if not where:
            return said
        distance, side, name = min(where)
        return f"{said}, the first {distance} bytes {side} {name}"

    def _memory(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the first and the last addresses of what may be touched, without overlaps."""
        if self._sorted is None:
            joined: list[list[int]] = []
            for first, end in sorted(self._names):
                if joined and first < joined[-1][1]:
                    joined[-1][1] = max(joined[-1][1], end)
                else:
                    joined.append([first, end])
            table = np.array(joined or [[0, 0]], np.uint64)
            self._sorted = table[:, 0].copy(), table[:, 1].copy()
        return self._sorted

    def allow(self, tensor: torch.Tensor, name: str = MADE) -> None:
        """Let a call touch the memory of a tensor that is no view of an input."""
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        span = base, base + storage.nbytes()
        if base in self._given or self._names.get(span) == name:
            return
        if span not in self._names:
            self._storages[base], self._sorted = storage, None
        if span not in self._names or name != MADE:
            self._names[span] = name


class _Allocations(TorchDispatchMode):
    """Notes the memory of all that torch makes."""

    def __init__(self, memory: TouchedMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    # Else torch imports its compiler at the first operation, for 3 s, so as not to compile it.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do an operation of torch, and note the memory of its results."""
        del types
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._memory.allow(each)
        return result


def _launch(memory: TouchedMemory, usual: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(usual)
    def launched(executor: Any, *arguments: Any, **options: Any) -> Any:
        named = dict(zip(executor.arg_names, arguments, strict=False)) | options
        memory.launch(executor.fn, named)
        return usual(executor, *arguments, **options)

    return launched


def _noted(memory: TouchedMemory, usual: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(usual)
    def load(semantic: Any, ptr: Any, mask: Any, other: Any, *more: Any, **named: Any) -> Any:
        memory.fills = other is not None
        return usual(semantic, ptr, mask, other, *more, **named)

    return load


def _watched(
    memory: TouchedMemory, interpreter: Any, usual: Callable[..., Any], name: str
) -> Callable[..., Any]:
    """Return a function of the interpreter that touches no memory outside.

    Args:
        memory: what the lanes may touch, which notes those that lie outside.
        interpreter: the module.
        usual: the function. Its pointers are the first argument behind the builder, or stand
            behind the operation.
        name: the name of the function, one of ``MASKS``.
    """
    loads, changes, place = name.endswith("load"), name.endswith("rmw"), MASKS[name]
    verb = READS if loads else CHANGES if changes else "writes"
    handle, boolean = interpreter.TensorHandle, interpreter.tl.int1
    bind = inspect.signature(usual).bind  # once: it takes longer than the access itself

    @functools.wraps(usual)
    def touched(builder: Any, *given: Any, **named: Any) -> Any:
        arguments = list(bind(builder, *given, **named).args)[1:]
        pointers = arguments[1 if changes else 0]
        lanes = np.broadcast_to(arguments[place].data.astype(bool), pointers.data.shape)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        arguments[place] = handle(memory.inside(pointers.data, lanes, size, verb), boolean)
        result = usual(builder, *arguments)
        # Triton hands on no ``other`` that is false, as a block of one zero is.
        if loads and arguments[2] is None and not memory.fills:
            _spoil(result, pointers.get_element_ty(), ~lanes)
        return result

    return touched


def _watched_swap(
    memory: TouchedMemory, interpreter: Any, usual: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the compare-and-swap that works on spare memory in the lanes that lie outside."""

    @functools.wraps(usual)
    def touched(builder: Any, pointers: Any, *given: Any) -> Any:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        everywhere = np.ones(pointers.data.shape, bool)
        left = memory.inside(pointers.data, everywhere, size, CHANGES)
        spare = np.zeros(1, np.uint64)
        addresses = np.where(left, pointers.data, np.uint64(spare.ctypes.data))
        return usual(builder, interpreter.TensorHandle(addresses, pointers.dtype), *given)

    return touched


def _spoil(result: Any, dtype: Any, lanes: Any) -> None:
    """Fill undefined lanes of what was loaded."""
    if not lanes.any():
        return
    data = result.data = np.array(result.data)
    if data.dtype == bool:
        data[lanes] = True
        return
    pattern = GARBAGE.get(
        str(dtype), int.from_bytes(bytes([GARBAGE_BYTE]) * data.itemsize, "little")
    )
    data.view(f"u{data.itemsize}")[lanes] = pattern
