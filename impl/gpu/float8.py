# ruff: noqa: ANN401  what the interpreter hands on is of no type that this file could name
"""FP8 in Triton's interpreter, which NumPy does not have.

The interpreter's casts lose a carry (1.97 becomes 1 in ``float8e4nv``, where 2 is nearest), round
ties up, overflow into other numbers, read a NaN as 480, and flush subnormals of ``float8e5`` that
it widens to float16, as ``tl.dot`` does. Here a cast rounds to the nearest, ties to even, and
saturates, infinities too, as ``cvt.rn.satfinite`` of compute capability 8.9 does; ``rtz`` cuts.
A GPU computes nothing else in FP8: what adds or compares codes does not compile for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .bfloat16 import decoded as of_bfloat16
from .bfloat16 import encoded as to_bfloat16

NAN = 0x7F
"""Code of the NaN that a cast makes, in both formats."""


@dataclass(frozen=True)
class Format:
    """One format of FP8: its numbers by their codes, and its dtype in torch.

    Attributes:
        numbers: float32 of each of the 256 codes.
        dtype: torch's dtype of the same codes.
        largest: the largest finite number.
    """

    numbers: np.ndarray[Any, Any]
    dtype: torch.dtype
    largest: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Format:
        """Return the format of one of torch's dtypes."""
        codes = torch.arange(256, dtype=torch.uint8)
        return cls(codes.view(dtype).float().numpy(), dtype, torch.finfo(dtype).max)

    def encoded(self, numbers: np.ndarray[Any, Any], *, cut: bool) -> np.ndarray[Any, Any]:
        """Return the codes of float32: of the nearest number, or cut towards zero."""
        # A copy: torch would warn of an array that cannot be written to.
        held = torch.from_numpy(np.array(numbers, dtype=np.float32))
        codes = held.clamp(-self.largest, self.largest).to(self.dtype).view(torch.uint8).numpy()
        if cut:  # codes of one sign are in the order of their magnitudes
            codes = codes - (np.abs(self.numbers[codes]) > np.abs(numbers)).astype(np.uint8)
        return np.where(np.isnan(numbers), NAN, codes).astype(np.uint8)


def convert_float8(interpreter: Any) -> None:
    """Let the interpreter, a module, cast FP8 as a GPU does from now on."""
    language = interpreter.tl
    formats = {
        language.float8e4nv: Format.of(torch.float8_e4m3fn),
        language.float8e5: Format.of(torch.float8_e5m2),
    }
    # `tl.dot` and casts look it up as a global of the module.
    interpreter._convert_float = _conversion(interpreter, formats)  # noqa: SLF001  it is private


def _conversion(interpreter: Any, formats: dict[Any, Format]) -> Callable[..., Any]:
    bfloat16 = interpreter.tl.bfloat16
    convert, numpy_dtype = interpreter._convert_float, interpreter._get_np_dtype  # noqa: SLF001
    cutting = interpreter._ir.ROUNDING_MODE.RTZ  # noqa: SLF001

    def conversion(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source not in formats and target not in formats:
            return convert(data, source, target, rounding_mode)
        if source in formats:
            numbers = formats[source].numbers[data]
        else:
            numbers = of_bfloat16(data) if source == bfloat16 else np.float32(data)
        if target in formats:
            return formats[target].encoded(numbers, cut=rounding_mode == cutting)
        return to_bfloat16(numbers) if target == bfloat16 else numbers.astype(numpy_dtype(target))

    return conversion
