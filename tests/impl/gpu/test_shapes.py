"""Shapes of Triton's tensors that are made once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kernelproof.impl.gpu.shapes import remember_shapes


@pytest.fixture
def core() -> Any:  # noqa: ANN401  as Triton's module
    """The language's module as far as shapes go, by which a constructor is seen to be called."""
    made: list[object] = []

    class Constexpr:
        def __init__(self, value: object) -> None:
            self.value = value

    class Block:
        def __init__(self, element_ty: str, shape: Any) -> None:  # noqa: ANN401
            made.append("block")
            self.element_ty = element_ty
            self.shape = tuple(getattr(each, "value", each) for each in shape)
            if any(not isinstance(each, int) for each in self.shape):
                raise TypeError
            self.numel, self.name = len(self.shape), f"<{self.shape}, {element_ty}>"

        def is_block(self) -> bool:
            return True

        @property
        def scalar(self) -> str:
            return self.element_ty

    class Tensor:
        def __init__(self, handle: object, type: Any) -> None:  # noqa: A002, ANN401
            made.append("tensor")
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = type.shape, Constexpr(type.numel)

    return SimpleNamespace(constexpr=Constexpr, block_type=Block, tensor=Tensor, made=made)


def test_tensors_of_one_shape_share_it(core: Any) -> None:  # noqa: ANN401
    remember_shapes(core)
    first = core.tensor("a", core.block_type("int32", [2, 4]))
    second = core.tensor("b", core.block_type("int64", (core.constexpr(2), 4)))
    assert second.shape is first.shape
    assert second.numel is first.numel
    assert (second.handle, second.dtype, second.type.name) == ("b", "int64", "<(2, 4), int64>")
    core.block_type("int32", [4, 2])
    assert core.made == ["block", "tensor", "block"]


def test_a_size_that_is_no_integer_is_refused_after_its_equal(core: Any) -> None:  # noqa: ANN401
    remember_shapes(core)
    core.block_type("int32", [2])
    with pytest.raises(TypeError):
        core.block_type("int32", [2.0])


def test_a_tensor_with_further_attributes_is_made_each_time(core: Any) -> None:  # noqa: ANN401
    class More(core.tensor):  # type: ignore[misc]
        def __init__(self, handle: object, type: Any) -> None:  # noqa: A002, ANN401
            super().__init__(handle, type)
            self.more = len(core.made)

    core.tensor = More
    remember_shapes(core)
    block = core.block_type("int32", [2])
    assert core.tensor("a", block).more < core.tensor("b", block).more


def test_the_language_has_the_attributes_that_are_known() -> None:
    language = pytest.importorskip("triton.language.core")
    block = language.block_type(language.int32, [2, 4])
    tensor = language.tensor(None, block)
    fresh = vars(tensor).keys(), vars(block).keys()
    assert tuple(map(set, fresh)) == (
        {"handle", "shape", "numel", "type", "dtype"},
        {"element_ty", "shape", "numel", "name"},
    )
    assert [each.value for each in tensor.shape] == [2, 4]
