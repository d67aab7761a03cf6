# ruff: noqa: ANN401  what the interpreter hands on is of no type that this file could name
"""Whether kernels ran in Triton's interpreter, and what that does not show of a GPU."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..targets.backends import TRITON
from ..targets.optional import missing
from ..targets.target import Target

INTERPRETER = "triton.runtime.interpreter"
"""Name of the interpreter's module."""
CAVEATS = (
    "programs ran one after another: a race between them, or between threads, does not show",
    "tl.dot summed in float32: TF32, and what tensor cores cut off of FP8, do not show",
    "nothing was compiled: a compiler's faults, and too little shared memory, do not show",
    "exp2, log2 and divisions were NumPy's: what a GPU approximates or flushes does not show",
    "an infinity of float8_e5m2 stayed one in bfloat16, where Triton makes 65536 of it on a GPU",
)
"""What a verdict from the interpreter leaves open, a clause each."""
NOTE = (
    "run by Triton's interpreter on a CPU: races, what a compiler makes of a kernel, and a GPU's "
    "own arithmetic were not judged"
)
"""The caveats in one line."""
CLAIM = f"is interpreted: {NOTE}"
"""What a comparison says of an implementation whose kernels the interpreter ran."""


class _Launches:
    count = 0
    began: Callable[[], None] | None = None


def launches() -> int:
    """Return how many kernels were launched in the interpreter, in this process so far."""
    return _Launches.count


def interprets(function: Callable[..., Any], compiler: str, target: Target) -> bool:
    """Whether Triton's interpreter runs the kernels that a function launches on a machine.

    Args:
        function: what launches them; it counts as Triton's if its module holds anything of Triton.
        compiler: the distribution that is known to compile its kernels; "" if none is.
        target: the machine.
    """
    if target.device != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return False
    names = getattr(inspect.unwrap(function), "__globals__", {}).values()
    modules = (
        each.__name__ if isinstance(each, ModuleType) else type(each).__module__ for each in names
    )
    uses = compiler == TRITON or any(each.partition(".")[0] == TRITON for each in modules)
    return uses and missing(TRITON, TRITON) is None


def at_each_program(began: Callable[[], None] | None) -> None:
    """Have a function called whenever the interpreter begins the next program of a grid."""
    _Launches.began = began


def count_launches(interpreter: Any) -> None:
    """Count what the interpreter, a module, launches from now on, and see its programs begin."""
    executor = interpreter.GridExecutor
    executor.__call__ = _counted(executor.__call__)
    builder = interpreter.interpreter_builder
    builder.set_grid_idx = _seen(builder.set_grid_idx)


def _seen(begin: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(begin)
    def begun(*place: Any) -> Any:
        if _Launches.began is not None:
            _Launches.began()
        return begin(*place)

    return begun


def _counted(launch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(launch)
    def launched(*arguments: Any, **options: Any) -> Any:
        _Launches.count += 1
        return launch(*arguments, **options)

    return launched


@functools.cache
def before_first_launch(
    prepare: Callable[[Any], None], imported: Callable[[Any], None] = lambda _: None
) -> None:
    """Have the interpreter, which is not imported yet, prepared when it first launches a kernel.

    Args:
        prepare: called at that launch, by which the kernel's copy is made.
        imported: called when the interpreter's module has been run, before any copy is made.

    A kernel's file may import Triton as late as in the call. When the interpreter is imported, the
    language that it interprets is not whole yet.
    """
    sys.meta_path.insert(0, _Finder(prepare, imported))


class _Finder:
    """Finds the interpreter's module once, as the import system does without it."""

    def __init__(self, prepare: Callable[[Any], None], imported: Callable[[Any], None]) -> None:
        self._prepare, self._imported = prepare, imported

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how the interpreter is loaded; None for any other module."""
        del path, target
        if name != INTERPRETER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = self._then_prepared(loader.exec_module)
        return spec

    def _then_prepared(self, load: Callable[[Any], None]) -> Callable[[Any], None]:
        def loaded(interpreter: Any) -> None:
            load(interpreter)
            self._imported(interpreter)
            executor = interpreter.GridExecutor
            launch = executor.__call__

            def first(*arguments: Any, **options: Any) -> Any:
                if executor.__call__ is not first:  # it was prepared before, around this function
                    return launch(*arguments, **options)
                executor.__call__ = launch
                self._prepare(interpreter)
                return executor.__call__(*arguments, **options)

            executor.__call__ = first

        return loaded
