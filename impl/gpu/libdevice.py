"""Functions of CUDA's libdevice, which Triton's interpreter cannot call, by NumPy.

They are computed in the argument's format, as exactly as NumPy does: a compiled ``fast_`` function
may differ by more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

MODULES = tuple(
    f"triton.language.extra.{name}"
    for name in ("libdevice", "cuda.libdevice", "hip.libdevice", "intel.libdevice")
)
"""Modules from which kernels import libdevice's functions."""
SAME = (
    *("tanh", "sinh", "cosh", "tan", "sin", "cos", "exp", "exp2", "expm1", "log", "log2"),
    *("log10", "log1p", "sqrt", "cbrt", "floor", "ceil", "trunc", "rint", "hypot", "fmod"),
    *("copysign",),
)
"""Those that NumPy has by the same name."""
OTHERS = {
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh",
    "atanh": "arctanh", "atan2": "arctan2", "pow": "power", "nearbyint": "rint",
    "fast_expf": "exp", "fast_logf": "log", "fast_log2f": "log2", "fast_log10f": "log10",
    "fast_sinf": "sin", "fast_cosf": "cos", "fast_tanf": "tan", "fast_tanhf": "tanh",
    "fast_powf": "power", "fast_dividef": "divide",
}  # fmt: skip
"""Those that NumPy has by another name."""


def modules() -> list[ModuleType]:
    """Return the modules of libdevice that are imported."""
    return [sys.modules[name] for name in MODULES if name in sys.modules]


def replacements(interpreter: Any) -> dict[str, Callable[..., Any]]:  # noqa: ANN401  a module
    """Return a function of Triton's tensors by each name that NumPy can stand in for."""
    names = {**dict(zip(SAME, SAME, strict=True)), **OTHERS}
    found = {
        name: _elementwise(getattr(interpreter.np, np), interpreter) for name, np in names.items()
    }
    return {**found, "rsqrt": _elementwise(lambda x: 1 / interpreter.np.sqrt(x), interpreter)}


def _elementwise(function: Callable[..., Any], interpreter: Any) -> Callable[..., Any]:  # noqa: ANN401
    def called(*arguments: Any, **_: object) -> Any:  # noqa: ANN401  tensors of Triton's
        semantic, tensor = interpreter.interpreter_semantic, interpreter.tl.tensor
        tensors = [semantic.to_tensor(each) for each in arguments]
        if len(tensors) > 1:
            tensors = list(semantic.broadcast_impl_value(*tensors))
        first = tensors[0]
        with interpreter.np.errstate(all="ignore"):
            data = function(*(each.handle.data for each in tensors))
        handle = interpreter.TensorHandle(data.astype(first.handle.data.dtype), first.handle.dtype)
        return tensor(handle, first.type)

    return called
