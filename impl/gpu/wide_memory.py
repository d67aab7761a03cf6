# ruff: noqa: ANN401  what torch hands on is of no type that this file could name
"""The float64 behind 16- and 32-bit floats of memory, kept beside it while a call runs.

Each storage that something writes floats to gets a second one of float64. Triton's interpreter
reads and writes both (``widened``), and so does torch here: an operation on such floats is done
twice, the second time in float64 on what is kept. Views need nothing, since storages are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NARROW = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes whose elements are kept in float64."""
ROUNDING = ("aten::round", "aten::floor", "aten::ceil", "aten::trunc")
"""Names of operations that make whole numbers of floats."""
EMPTY = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::set_")
"""Beginnings of the names of operations whose result holds nothing yet, or is other memory."""


class WideMemory(TorchDispatchMode):
    """What is kept of the storages of one call, from entering it as a context to leaving it.

    Attributes:
        rounded: whether something rounded a number on purpose (to codes, integers or bits), or may
            have: then the answer is not that of exact algebra.
        launching: whether a kernel runs, whose launch moves tensors that hold nothing new.
        launches: kernels that were launched.
        outdated: whether constants that the call had used already were made exact since: only the
            next call has them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounded = self.launching = self.outdated = False
        self.launches = 0
        # A storage stays alive: other memory at its address would be taken for it.
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._kept: dict[int, tuple[torch.dtype, torch.Tensor]] = {}

    @contextmanager
    def anew(self) -> Iterator[None]:
        """Forget what is kept, and keep nothing within a with block that makes inputs again."""
        self._kept.clear()
        self.launching = True
        try:
            yield
        finally:
            self.launching = False

    def know(self, tensor: torch.Tensor) -> None:
        """Note the storage of a tensor that a kernel is given."""
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage

    def wide(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's elements in float64: what is kept of them, or what they are."""
        dtype, kept = self._kept.get(tensor.untyped_storage().data_ptr(), (None, None))
        if kept is None or dtype != tensor.dtype:
            return tensor.double()
        return kept.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def parts(
        self, addresses: np.ndarray[Any, Any], dtype: torch.dtype, *, writes: bool = False
    ) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Yield what is kept of elements that a kernel reads or writes.

        Args:
            addresses: uint64 addresses of any shape.
            dtype: the dtype of the elements there.
            writes: the elements are written: where nothing is kept yet, it begins now.

        Yields:
            Which addresses lie in a storage, its float64, and the place of each of them in that.
        """
        if not addresses.size:
            return
        low, high = int(addresses.min()), int(addresses.max())
        for base, storage in list(self._storages.items()):
            if high < base or low >= base + storage.nbytes():
                continue
            if writes and (base not in self._kept or self._kept[base][0] != dtype):
                self._begin(storage, dtype)
            if base in self._kept and self._kept[base][0] == dtype:
                inside = (addresses >= base) & (addresses < base + storage.nbytes())
                places = (addresses[inside] - np.uint64(base)) // np.uint64(dtype.itemsize)
                yield inside, self._kept[base][1].numpy(), places

    def forget(self, addresses: np.ndarray[Any, Any]) -> None:
        """Forget what is kept where a kernel writes something else than floats."""
        for base in [each for each in self._kept if addresses.size]:
            end = base + self._storages[base].nbytes()
            if ((addresses >= base) & (addresses < end)).any():
                self._lose(base)

    def _lose(self, base: int) -> None:
        """Forget what is kept of a storage: from here on it has what its own dtype holds."""
        if self._kept.pop(base, None) is not None:
            self.rounded = True

    def _begin(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.Tensor:
        if self._kept.get(storage.data_ptr(), (dtype,))[0] != dtype:
            self._lose(storage.data_ptr())
        count = storage.nbytes() // dtype.itemsize
        whole = torch.empty(0, dtype=dtype).set_(storage, 0, (count,), (1,))
        wide = whole.double()
        self._storages[storage.data_ptr()] = storage
        self._kept[storage.data_ptr()] = dtype, wide
        return wide

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Do an operation of torch, and again in float64 where it makes floats."""
        del types
        kwargs = kwargs or {}
        schema = func._schema  # noqa: SLF001  torch has no other name for it
        aliases = [each.alias_info for each in schema.returns]
        is_view = bool(aliases) and all(each is not None and not each.is_write for each in aliases)
        if self.launching or is_view or schema.name.startswith(EMPTY):
            return func(*args, **kwargs)
        written = [
            given
            for number, each in enumerate(schema.arguments)
            if each.alias_info is not None and each.alias_info.is_write
            for given in tree_leaves(args[number] if number < len(args) else kwargs.get(each.name))
            if isinstance(given, torch.Tensor)
        ]
        read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if any(each.device.type != "cpu" for each in read):
            return func(*args, **kwargs)
        if func.namespace not in ("aten", "prims"):
            # Within an operator of somebody's own nothing of torch is seen.
            self.rounded = True
            return func(*args, **kwargs)
        for each in written:
            self._before_write(each)
        wide_args, wide_kwargs = tree_map(self._widened, (args, kwargs))
        if not read and any(each.name == "dtype" for each in schema.arguments):
            given = wide_kwargs.get("dtype")
            wide_kwargs["dtype"] = torch.float64 if given is None else given
        result = func(*args, **kwargs)
        made = [
            each
            for each in tree_leaves(result)
            if isinstance(each, torch.Tensor) and not any(each is other for other in written)
        ]
        if self._leaves(read, made + written) or schema.name.rstrip("_") in ROUNDING:
            self.rounded = True
        new = [each for each in made if each.dtype in NARROW and each.numel()]
        if any(each.dtype.itemsize == 1 and each.is_floating_point() for each in made + written):
            self.rounded = self.rounded or any(each.dtype in NARROW for each in read)
        if new or any(each.dtype in NARROW for each in written):
            self._again(func, wide_args, wide_kwargs, new, written)
        return result

    def _leaves(self, read: list[torch.Tensor], result: list[torch.Tensor]) -> bool:
        """Whether kept numbers are read as what they are stored as: as bits, or into a double."""
        kept = [
            (self._kept[base][0], each.dtype)
            for each in read
            if (base := each.untyped_storage().data_ptr()) in self._kept
        ]
        doubled = any(each.dtype == torch.float64 for each in result)
        return any(own != dtype or doubled for own, dtype in kept)

    def _again(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        new: list[torch.Tensor],
        written: Any,
    ) -> None:
        try:
            if torch.Tag.nondeterministic_seeded in func.tags:
                message = "it draws other numbers the second time"
                raise RuntimeError(message)  # noqa: TRY301  as what has no float64
            again = [each for each in tree_leaves(func(*args, **kwargs))
                     if isinstance(each, torch.Tensor)]  # fmt: skip
        except (RuntimeError, NotImplementedError):
            self.rounded = True
            for each in written:
                self._lose(each.untyped_storage().data_ptr())
            return
        if not new:
            return
        floats = [each for each in again if each.is_floating_point()][: len(new)]
        for narrow, wide in zip(new, floats, strict=False):
            self._begin(narrow.untyped_storage(), narrow.dtype)
            self.wide(narrow).copy_(wide)

    def _before_write(self, tensor: torch.Tensor) -> None:
        """Begin to keep what torch writes to, or forget it where it is no float."""
        base = tensor.untyped_storage().data_ptr()
        kept = self._kept.get(base)
        if tensor.dtype in NARROW and (kept is None or kept[0] != tensor.dtype):
            self._begin(tensor.untyped_storage(), tensor.dtype)
        elif tensor.dtype not in NARROW:
            self._lose(base)

    def _widened(self, given: Any) -> Any:
        if isinstance(given, torch.dtype):
            return torch.float64 if given in NARROW else given
        if isinstance(given, torch.Tensor) and given.dtype in NARROW:
            return self.wide(given)
        return given
