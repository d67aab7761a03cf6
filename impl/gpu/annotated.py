# ruff: noqa: ANN401  what the interpreter hands on is of no type that this file could name
"""Integers of the width that a kernel declares for them, in Triton's interpreter.

``stride: tl.int64`` makes an argument of 64 bits, compiled, whatever its value is. The interpreter
takes the width that its value needs, so that an offset wraps around which does not on a GPU: found
with the strides of vLLM's ``kernel_paged_attention_2d``.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

WIDE = re.compile(r"(?:tl\.)?(u?)(?:i|int|(?<=u))(8|16|32|64)")
"""Annotations that declare a width to Triton, as text or by the name of a dtype."""


def keep_annotations(interpreter: Any) -> None:
    """Let the interpreter, a module, give integers the width that their annotation says."""
    executor = interpreter.GridExecutor
    executor.__call__ = _with_widths(executor.__call__, interpreter)


def _with_widths(launch: Callable[..., Any], interpreter: Any) -> Callable[..., Any]:
    language, handle = interpreter.tl, interpreter.TensorHandle

    def given(name: str, value: Any, widths: Mapping[str, str]) -> Any:
        width = widths.get(name)
        if width is None or type(value) is not int:
            return value
        dtype = getattr(language, width)
        return language.tensor(handle(np.array([value], np.dtype(width)), dtype), dtype)

    @functools.wraps(launch)
    def launched(executor: Any, *arguments: Any, **options: Any) -> Any:
        if widths := declared_widths(executor.fn):
            pairs = zip(executor.arg_names, arguments, strict=False)
            arguments = (
                *(given(name, value, widths) for name, value in pairs),
                *arguments[len(executor.arg_names) :],
            )
            named = executor.arg_names[: len(arguments)]
            left = {
                n: v for n, v in defaults(executor.fn).items() if n in widths and n not in named
            }
            options = {n: given(n, value, widths) for n, value in (left | options).items()}
        return launch(executor, *arguments, **options)

    return launched


@functools.cache
def defaults(kernel: Callable[..., Any]) -> dict[str, Any]:
    """Return the default of each parameter of a kernel that has one."""
    parameters = inspect.signature(kernel).parameters.items()
    return {name: each.default for name, each in parameters if each.default is not each.empty}


@functools.cache
def declared_widths(kernel: Callable[..., Any]) -> dict[str, str]:
    """Return the integer dtype that a kernel declares for a parameter, by the parameter's name."""
    found = {}
    for name, annotation in inspect.get_annotations(kernel).items():
        wide = WIDE.fullmatch(str(getattr(annotation, "name", annotation)).strip())
        if wide is not None:
            found[name] = f"{wide[1]}int{wide[2]}"
    return found
