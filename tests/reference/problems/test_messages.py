"""What constructors say of a value that a field never has: each choice has a name."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kernelproof.properties.space.axes import all_axes, example
from kernelproof.properties.space.operations import OPERATIONS
from kernelproof.reference import KVCacheFormat, MatrixFormat
from kernelproof.reference.formats.cache_elements import CACHE_ELEMENTS
from kernelproof.reference.moe.weights import MATRIX_ELEMENTS


def complaint(make: object, *args: object, **given: object) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011  the text is what is tested
        make(*args, **given)  # type: ignore[operator]
    return str(error.value)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_field_of_names_says_what_the_empty_one_is(operation: str) -> None:
    problem = example(operation, {name: values[0] for name, values in all_axes(operation).items()})
    texts = [each.name for each in fields(problem) if isinstance(getattr(problem, each.name), str)]
    for name in texts:
        said = complaint(replace, problem, **{name: "nonsense"})
        assert "one of ," not in said, said
        assert ", ," not in said, said
        assert "nonsense" in said


@pytest.mark.parametrize("element", CACHE_ELEMENTS)
def test_storages_and_layouts_of_caches_have_names(element: str) -> None:
    said = complaint(KVCacheFormat, element, storage="nonsense")
    assert said.startswith(f"storage is 'nonsense'; {element} may be stored as '' (none)")
    assert "one of linear, interleaved" in complaint(
        KVCacheFormat, element, v_scale_layout="nonsense"
    )


@pytest.mark.parametrize("element", MATRIX_ELEMENTS)
def test_scales_of_matrices_have_names(element: str) -> None:
    said = complaint(MatrixFormat, element, scales="nonsense")
    assert f"{element} may have " in said
    assert "('" not in said
