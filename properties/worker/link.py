"""Records and results between two processes of which one may lie.

Records go to the process of the kernel and may be pickled. What comes back is JSON of a limited
length and bytes of tensors whose sizes it names: reading it executes nothing.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import math
import pickle
import socket
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..laws.metadata.builders import FIELDS
from ..verdicts.comparison import unusable

MOST_CHARACTERS = 1 << 20
"""Characters of JSON in one answer at most."""
MOST_BYTES = 1 << 30
"""Bytes of one result's tensors at most."""
ATTRIBUTES = (*FIELDS, "cum_seq_lens_q", "cum_pages_kv", "page_size", "decodes", "prefills")
"""Attributes that laws read of a result which is no tensor or pair of them."""
_LENGTH = struct.Struct("!Q")


class Link:
    """A connection between the two.

    Raises:
        EOFError: the other side has ended it.
        OSError: the same, in the middle of a message.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, header: bytes, tensors: Iterable[torch.Tensor] = ()) -> None:
        """Send bytes with their length in front, and then those of contiguous host tensors."""
        self._connection.sendall(_LENGTH.pack(len(header)) + header)
        for each in tensors:
            if each.nbytes:
                self._connection.sendall(_memory(each.data_ptr(), each.nbytes))

    def receive(self, most: int | None = None) -> bytes:
        """Return the bytes that the other side sent; ValueError where they are too many."""
        size = bytearray(_LENGTH.size)
        self._fill(memoryview(size))
        (length,) = _LENGTH.unpack(size)
        if most is not None and length > most:
            message = f"{length} bytes came, where {most} are the most"
            raise ValueError(message)
        header = bytearray(length)
        self._fill(memoryview(header))
        return bytes(header)

    def fill(self, tensor: torch.Tensor) -> None:
        """Receive the bytes of a contiguous host tensor."""
        if tensor.nbytes:
            self._fill(memoryview(_memory(tensor.data_ptr(), tensor.nbytes)).cast("B"))

    def end(self) -> None:
        """End the connection for all processes that hold it."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other side was first
            return

    def _fill(self, room: memoryview) -> None:
        while room:
            count = self._connection.recv_into(room)
            if not count:
                raise EOFError
            room = room[count:]


def _memory(address: int, size: int) -> Any:  # noqa: ANN401  a ctypes array
    return (ctypes.c_char * size).from_address(address)


# Records


class Parcel(NamedTuple):
    """A record that travels.

    Attributes:
        record: the object, pickled without the bytes of its tensors.
        memory: bytes, on its device, of this record's memory and of that of all earlier records
            still in use, by number.
        new: what of that the other side does not have so, on the host.
        gone: numbers of memory that is no longer in use.
    """

    record: bytes
    memory: dict[int, torch.Tensor]
    new: dict[int, torch.Tensor]
    gone: list[int]


class Packer:
    """Pickles records, and keeps the memory of their tensors the same in both processes.

    Whoever keeps tensors of an earlier call finds in them what stands there now, as in one process.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, StorageWeakRef]] = {}
        self._numbers = itertools.count()
        self.there: dict[int, torch.Tensor] = {}
        """What the other side has, by number, on the host."""

    def number_of(self, storage: torch.UntypedStorage) -> int:
        """Return the number of memory, a new one where it has none."""
        # A weak reference keeps this address from being used again, but not the memory.
        key = storage._cdata  # noqa: SLF001
        if key not in self._held:
            self._held[key] = next(self._numbers), StorageWeakRef(storage)
        return self._held[key][0]

    def pack(self, record: object) -> Parcel:
        """Return a record with what the other side needs beside it."""
        file = io.BytesIO()
        _Pickler(file, self).dump(record)
        memory: dict[int, torch.Tensor] = {}
        gone: list[int] = []
        for key, (number, reference) in list(self._held.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # noqa: SLF001
            if storage is None:
                gone.append(number)
                del self._held[key], self.there[number]
            else:
                memory[number] = view(storage, torch.uint8, 0, (storage.nbytes(),), (1,))
        new = {
            number: each.cpu().clone()
            for number, each in memory.items()
            if number not in self.there or not torch.equal(each.cpu(), self.there[number])
        }
        self.there |= new
        return Parcel(file.getvalue(), memory, new, gone)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, packer: Packer) -> None:
        super().__init__(file)
        self._packer = packer

    def persistent_id(self, value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return None
        number = self._packer.number_of(value.untyped_storage())
        return number, value.dtype, value.storage_offset(), tuple(value.shape), value.stride()


Tensors = dict[tuple[Any, ...], torch.Tensor]
"""Those that were made of memory, by its number and their place in it."""


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, memory: Mapping[int, torch.Tensor], tensors: Tensors
    ) -> None:
        super().__init__(file)
        self._memory, self._tensors = memory, tensors

    def persistent_load(self, pid: Any) -> torch.Tensor:  # noqa: ANN401
        number, *place = pid
        if pid not in self._tensors:
            self._tensors[pid] = view(self._memory[number].untyped_storage(), *place)
        return self._tensors[pid]


def unpack(record: bytes, memory: Mapping[int, torch.Tensor], tensors: Tensors) -> Any:  # noqa: ANN401
    """Return the record that ``Packer.pack`` has packed, in this memory.

    Args:
        record: the record of ``Parcel``.
        memory: the shared memory blocks by number.
        tensors: the tensors of earlier records: the same tensor is the same object again. It is
            added to.
    """
    return _Unpickler(io.BytesIO(record), memory, tensors).load()


def view(storage: torch.UntypedStorage, dtype: torch.dtype, *place: Any) -> torch.Tensor:  # noqa: ANN401
    """Return a tensor in this memory, by its offset, shape and stride in elements.

    Raises:
        RuntimeError: it would reach beyond the memory, which torch would make larger.
    """
    offset, shape, stride = place
    end = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1
    if min((offset, *shape, *stride)) < 0 or (
        0 not in shape and end * dtype.itemsize > storage.nbytes()
    ):
        message = f"offset {offset}, shape {shape}, stride {stride} in {storage.nbytes()} bytes"
        raise RuntimeError(message)
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)


# Results


class Unusable(torch.Tensor):
    """Stands for a tensor that cannot be compared; ``why`` is the kind and the end of a message."""

    why: tuple[str, str]


Unusable.__name__ = torch.Tensor.__name__  # in messages


def encode(
    value: object, device: str, memory: Mapping[int, int]
) -> tuple[object, list[torch.Tensor]]:
    """Return what a call gave as JSON, and the tensors that it names, on the host.

    Args:
        value: an object of any type; only what laws read of it is kept.
        device: type of the device of the call's inputs.
        memory: numbers of the inputs' memory by its address: a tensor in it is named by its place.
    """
    tensors: list[torch.Tensor] = []
    left = MOST_BYTES

    def told(value: Any, depth: int = 0, name: str = "") -> object:  # noqa: ANN401
        if value is None:
            return value
        if name == "page_size":  # the only number that laws read
            with suppress(Exception):
                return int(value)
        if isinstance(value, torch.Tensor):
            return tensor(value)
        if isinstance(value, tuple) and len(value) == 2:  # noqa: PLR2004  the pairs of `Answers`
            return {"pair": [told(each, depth + 1) for each in value]}
        parts = _parts(value) if depth < 2 else {}  # noqa: PLR2004
        fields = {name: told(part, depth + 1, name) for name, part in parts.items()}
        return {"type": type(value).__name__, "fields": fields}

    def tensor(value: torch.Tensor) -> object:
        nonlocal left
        wrong = unusable("", value, device)
        if wrong is not None:
            return {"unusable": [wrong.kind, wrong.message]}
        plain = value.detach().resolve_neg()
        left -= plain.nbytes
        if left < 0:  # of little memory, perhaps, which contiguous() would make large
            message = f" has shape {list(plain.shape)}: results of more than {MOST_BYTES:,} bytes"
            return {"unusable": ["shape", f"{message} are not compared with --distrust"]}
        number = memory.get(plain.untyped_storage().data_ptr())
        about = {"dtype": str(plain.dtype).rpartition(".")[2], "shape": list(plain.shape)}
        if number is not None and plain.numel():
            place = {"offset": plain.storage_offset(), "stride": plain.stride()}
            return {"input": number, **about, **place}
        tensors.append(plain.contiguous().cpu())
        return {"new": True, **about}

    return told(value), tensors


def _parts(value: object) -> dict[str, object]:
    """Return what laws read of an answer: attributes, or the tensors of an engine's steps."""
    if isinstance(value, dict):
        return {str(name): part for name, part in value.items()}
    return {name: getattr(value, name) for name in ATTRIBUTES if hasattr(value, name)}


def decode(
    told: Any,  # noqa: ANN401  whatever came as JSON
    link: Link,
    device: str,
    memory: Mapping[int, torch.Tensor],
) -> Any:  # noqa: ANN401  a result
    """Return the result that ``encode`` has encoded, if it is one; any exception where it is not.

    Args:
        told: the message of a process that may lie.
        link: the connection on which its tensors follow.
        device: type of the device that they are put on.
        memory: the memory of the call's inputs, by its number.
    """
    left = MOST_BYTES  # a tensor in little memory may have many elements, too

    def made(told: Any) -> Any:  # noqa: ANN401
        if not isinstance(told, dict):
            return told
        if "pair" in told:
            first, second = told["pair"]
            return made(first), made(second)
        if "fields" in told:
            fields = {name: made(told["fields"][name]) for name in told["fields"]}
            return type(str(told["type"]), (SimpleNamespace,), {})(**fields)
        if "unusable" in told:
            stand_in = torch.empty(0).as_subclass(Unusable)
            stand_in.why = (str(told["unusable"][0]), str(told["unusable"][1]))
            return stand_in
        return tensor(told)

    def tensor(told: dict[str, Any]) -> torch.Tensor:
        nonlocal left
        dtype, shape = getattr(torch, told["dtype"]), tuple(map(int, told["shape"]))
        left -= dtype.itemsize * math.prod(shape)
        if left < 0:
            message = f"a result of more than {MOST_BYTES} bytes"
            raise ValueError(message)
        if "input" in told:
            storage = memory[told["input"]].untyped_storage()
            return view(storage, dtype, int(told["offset"]), shape, tuple(told["stride"]))
        new = torch.empty(shape, dtype=dtype)
        link.fill(new)
        return new.to(device)

    return made(told)
