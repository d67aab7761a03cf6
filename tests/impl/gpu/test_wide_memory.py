"""What torch computes of 16- and 32-bit floats is kept in float64 beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernelproof.impl.gpu.wide_memory import WideMemory

THIRD = 1 / 3


def numbers(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(1.0, 9.0).to(dtype).reshape(2, 4)


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a new tensor": lambda x: x * THIRD,
    "another dtype": lambda x: (x.float() * THIRD).to(torch.float16),
    "a number alone": lambda x: torch.full((2, 4), THIRD, dtype=x.dtype) * x,
    "in place": lambda x: torch.zeros_like(x).add_(x).mul_(THIRD),
    "into another": lambda x: torch.zeros(2, 4, dtype=x.dtype).copy_(x.float() * THIRD),
    "by a view": lambda x: torch.zeros(4, 2, dtype=x.dtype).T.copy_(x * THIRD),
    "into a buffer": lambda x: torch.mul(x, THIRD, out=torch.empty(2, 4, dtype=x.dtype)),
    "a product": lambda x: torch.nn.functional.linear(x, torch.eye(4, dtype=x.dtype) * THIRD),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_result_of_torch_is_kept_in_float64(name: str, dtype: torch.dtype) -> None:
    given = numbers(dtype)
    with WideMemory() as memory:
        made = CALLS[name](given)
        wide = memory.wide(made)
    assert made.dtype != torch.float64
    torch.testing.assert_close(wide, given.double() * THIRD, rtol=1e-15, atol=0.0)
    assert not torch.equal(made.double(), wide)
    assert not memory.rounded


def test_a_view_shows_what_is_kept_of_its_storage() -> None:
    with WideMemory() as memory:
        made = numbers() * THIRD
        row = memory.wide(made.T[2])
    assert torch.equal(row, numbers().double()[:, 2] * THIRD)


def test_what_was_written_by_nobody_is_what_memory_holds() -> None:
    given = numbers(torch.float32) / 3
    with WideMemory() as memory:
        assert torch.equal(memory.wide(given), given.double())


def test_codes_are_rounded_on_purpose() -> None:
    with WideMemory() as memory:
        memory.wide(numbers().to(torch.float8_e4m3fn))
    assert memory.rounded


def test_codes_that_are_widened_lose_nothing() -> None:
    codes = numbers().to(torch.float8_e4m3fn)
    with WideMemory() as memory:
        assert torch.equal(memory.wide(codes.to(torch.bfloat16)), codes.double())
    assert not memory.rounded


def test_an_operation_that_float64_lacks_may_have_rounded() -> None:
    with WideMemory() as memory:
        made = torch.rand(4)
        assert torch.equal(memory.wide(made), made.double())
    assert memory.rounded


def test_integers_over_floats_end_what_is_kept() -> None:
    with WideMemory() as memory:
        made = numbers() * THIRD
        made.view(torch.int16).zero_()
        assert not memory.wide(made).any()


def test_inputs_that_are_made_again_are_rounded_as_before() -> None:
    with WideMemory() as memory:
        first = numbers() * THIRD
        with memory.anew():
            again = numbers() * THIRD
        assert torch.equal(memory.wide(first), first.double())
        assert torch.equal(memory.wide(again), again.double())
    assert not memory.rounded


def test_whole_numbers_of_floats_are_rounded_on_purpose() -> None:
    for rounds in (True, False):
        with WideMemory() as memory:
            made = torch.arange(4) // 3
            memory.wide((numbers() * THIRD).round() if rounds else made)
        assert memory.rounded == rounds
