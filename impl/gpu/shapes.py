# ruff: noqa: ANN401  what Triton's language is made of is of no type that this file could name
"""Shapes of Triton's tensors, made once: a quarter of the interpreter's time went into them.

Each operation makes a tensor, and of the same few integers each makes a tuple of the language's,
its type, and a constexpr for each size. All tensors of a shape have the first one's here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

OF_A_TENSOR = {"handle", "shape", "numel", "type", "dtype"}
OF_A_BLOCK = {"element_ty", "shape", "numel", "name"}
"""Attributes that the constructors are known to set; where they set others, nothing is changed."""

INTEGERS = frozenset({int})
"""The type of sizes."""


def remember_shapes(core: Any) -> None:
    """Let tensors and block types share what is made of their shapes.

    Args:
        core: the module ``triton.language.core``.
    """
    core.tensor.__init__ = _of_tensors(core.tensor.__init__, core.constexpr)
    core.block_type.__init__ = _of_blocks(core.block_type.__init__, core.constexpr)


def _sizes(shape: Any, constexpr: type[Any]) -> tuple[int, ...] | None:
    """Return the integers of a shape; None where it has others, which the language may refuse."""
    sizes = tuple([each.value if isinstance(each, constexpr) else each for each in shape])
    return sizes if INTEGERS.issuperset(map(type, sizes)) else None


def _of_tensors(make: Callable[..., None], constexpr: type[Any]) -> Callable[..., None]:
    known: dict[tuple[int, ...] | None, tuple[Any, Any]] = {}

    @functools.wraps(make)
    def made(tensor: Any, handle: Any, type: Any) -> None:  # noqa: A002  its name there
        sizes = _sizes(type.shape, constexpr) if type.is_block() else ()
        if sizes in known:
            tensor.shape, tensor.numel = known[sizes]
            tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
            return
        make(tensor, handle, type)
        if sizes is not None and vars(tensor).keys() == OF_A_TENSOR:
            known[sizes] = tensor.shape, tensor.numel

    return made


def _of_blocks(make: Callable[..., None], constexpr: type[Any]) -> Callable[..., None]:
    known: dict[tuple[int, ...] | None, tuple[Any, Any]] = {}

    @functools.wraps(make)
    def made(block: Any, element_ty: Any, shape: Any) -> None:
        sizes = None if isinstance(shape, constexpr) else _sizes(shape, constexpr)
        if sizes in known:
            block.shape, block.numel = known[sizes]
            block.element_ty, block.name = element_ty, f"<{block.shape}, {element_ty}>"
            return
        make(block, element_ty, shape)
        is_usual = vars(block).keys() == OF_A_BLOCK
        if is_usual and sizes is not None and block.name == f"<{block.shape}, {element_ty}>":
            known[sizes] = block.shape, block.numel

    return made
