"""Modules that calls of FlashInfer compile: those that exist are judged before others are built."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class NotCompiledError(BaseException):
    """A module that a call would compile; no Exception, as releases have handlers of those.

    Attributes:
        module: its name.
    """

    def __init__(self, module: str) -> None:
        super().__init__(f"module {module} is not compiled")
        self.module = module


@contextmanager
def compiled_only() -> Iterator[None]:
    """Within a with block, let a call that would compile a module raise NotCompiledError."""
    try:
        spec_class = importlib.import_module("flashinfer.jit.core").JitSpec
    except (ImportError, AttributeError):  # a release that compiles nothing
        yield
        return
    build = spec_class.build_and_load

    @functools.wraps(build)
    def load(spec: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401  a release's own
        if not spec.is_compiled:
            raise NotCompiledError(spec.name)
        return build(spec, *args, **options)

    spec_class.build_and_load = load
    try:
        yield
    finally:
        spec_class.build_and_load = build
