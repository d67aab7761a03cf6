"""What torch allocates uninitialised is full of NaN while code under test runs."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelproof.properties.verdicts import filled_scratch as module
from kernelproof.properties.verdicts.filled_scratch import filled_scratch

FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
)
LARGEST = {
    torch.int64: 2**63 - 1, torch.int32: 2**31 - 1, torch.int16: 2**15 - 1, torch.int8: -1,
    torch.uint8: 255, torch.bool: True,
}  # fmt: skip


def allocated(dtype: torch.dtype) -> list[torch.Tensor]:
    like = torch.zeros(3, 2, dtype=dtype)
    with filled_scratch():
        return [
            torch.empty(3, 2, dtype=dtype),
            torch.empty((3, 2), dtype=dtype, device="cpu"),
            torch.empty_like(like),
            torch.empty_strided((3, 2), (4, 2), dtype=dtype),
            torch.empty_permuted((3, 2), (1, 0), dtype=dtype),
            like.new_empty((3, 2)),
            like.new_empty((3, 2), dtype=dtype),
            like.new_empty_strided((3, 2), (1, 5)),
        ]


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_nan(dtype: torch.dtype) -> None:
    for made in allocated(dtype):
        wide = made if dtype.is_complex else made.double()
        assert made.dtype == dtype
        assert made.shape == (3, 2)
        assert wide.isnan().all()


@pytest.mark.parametrize(("dtype", "value"), LARGEST.items())
def test_integers_are_the_largest(dtype: torch.dtype, value: int) -> None:
    for made in allocated(dtype):
        assert (made == value).all()


def test_bytes_are_nan_in_what_they_are_read_as() -> None:
    with filled_scratch():
        room = torch.empty(64, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        assert room.view(dtype).double().isnan().all()


def test_everything_is_as_it_was_behind_it() -> None:
    functions = [getattr(torch, name) for name in module.FUNCTIONS]
    methods = [getattr(torch.Tensor, name) for name in module.METHODS]
    with filled_scratch(), filled_scratch():
        torch.empty(1)
    with pytest.raises(RuntimeError), filled_scratch():  # noqa: PT012
        torch.empty(1)
        raise RuntimeError
    assert [getattr(torch, name) for name in module.FUNCTIONS] == functions
    assert [getattr(torch.Tensor, name) for name in module.METHODS] == methods
    assert not any(name in vars(torch.Tensor) for name in module.METHODS)


def test_what_the_code_replaces_itself_stays_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", torch.empty)  # undone at the end
    with filled_scratch():
        torch.empty = torch.zeros  # type: ignore[assignment]
    assert torch.empty is torch.zeros


def test_memory_of_the_caller_keeps_what_it_holds() -> None:
    mine = torch.ones(4)
    with filled_scratch():
        torch.empty(4, out=mine)
    assert mine.tolist() == [1.0] * 4


def test_what_holds_no_numbers_stays_as_it_is() -> None:
    with filled_scratch(), FakeTensorMode():
        assert torch.empty(3).shape == (3,)
    with filled_scratch():
        assert torch.empty(3, device="meta").is_meta
        assert torch.empty(0).numel() == 0
        assert torch.empty(2, requires_grad=True).requires_grad
        assert torch.empty((2, 2), layout=torch.sparse_coo).is_sparse
        with torch.inference_mode():
            assert torch.empty(2).isnan().all()
        made: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: made.append(torch.empty(2)))
        thread.start()
        thread.join()
        assert made[0].isnan().all()


def test_quantised_tensors_stay_as_they_are() -> None:
    with warnings.catch_warnings(), filled_scratch():
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"scale": 1.0, "zero_point": 0, "dtype": torch.quint8}
        torch._empty_affine_quantized((2,), **options)
        torch.empty_like(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8))


def test_only_the_beginning_of_much_memory_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 64)
    with filled_scratch():
        made = torch.empty(4, 8)
    assert made.flatten()[:16].isnan().all()
    assert not made.flatten()[16:].isnan().all()


def test_views_and_strides_are_those_that_torch_gives() -> None:
    like = torch.zeros(4, 6).T
    with filled_scratch():
        assert torch.empty_like(like).stride() == torch.zeros_like(like).stride()
        assert torch.empty(2, 3, 4, 5, memory_format=torch.channels_last).stride() == (60, 1, 15, 3)


def of_scratch(x: torch.Tensor) -> torch.Tensor:
    """Return x by way of scratch that is written."""
    y = torch.empty(x.shape[0], dtype=x.dtype)
    z = torch.empty_like(x)
    y.copy_(x)
    z.copy_(y)
    return x.new_empty([3]).copy_(z)


@pytest.mark.filterwarnings("ignore")
def test_what_is_compiled_during_a_call_compiles() -> None:
    with filled_scratch():
        assert torch.jit.script(of_scratch)(torch.ones(3)).tolist() == [1.0] * 3
        compiled: Any = torch.compile(of_scratch, backend="eager", fullgraph=True)
        assert compiled(torch.ones(3)).tolist() == [1.0] * 3
