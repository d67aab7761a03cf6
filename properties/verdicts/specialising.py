"""What a call compiles, tunes, fetches or imports by itself is a stage of its own, no running.

An implementation names what its first call compiles (``compile_key``), and no law can know all the
rest: Triton compiles anew for an argument that is 1, a multiple of 16 or beyond 2**31, for another
constexpr and for a kernel that a larger bound of lengths chooses; autotuners compile and time every
configuration when a key is new; TorchDynamo compiles again for another shape; a module is imported
where it is first needed. Each of these goes through one function of its library, which is watched
while a call under test runs in this thread. It then has the deadline of a compilation, all of
those in one case together.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

STAGE = "specialise"
"""The stage of a worker while a call compiles, tunes or imports."""
WATCHED = (
    ("triton.runtime.jit", "JITFunction._do_compile"),
    ("triton.compiler", "compile"),  # up to triton 3.3, and whoever compiles ahead of a launch
    ("triton.runtime.autotuner", "Autotuner._bench"),
    ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner.precompile"),
    ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner.autotune_to_one_config"),
    ("torch.utils.cpp_extension", "_jit_compile"),
    ("flashinfer.jit.core", "JitSpec.build_and_load"),
    ("flashinfer.jit.cubin_loader", "download_file"),
)
"""Functions that compile, tune or fetch, by module and name; those of a release without them are
not watched."""
TUNING = ("Autotuner._bench", "CachingAutotuner.autotune_to_one_config")
"""Those of them that launch kernels, which are no part of the call."""
DYNAMO = "torch._dynamo.callback"
"""The module that calls back when TorchDynamo begins and ends to compile."""
MARK = "_kernelproof_watched"


class Stages(Protocol):
    """Shows the parent, which watches the clock, the stage of the worker."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Be in this stage for the length of a with block."""


@dataclass
class Call:
    """A call under test, and what it compiles.

    Attributes:
        stages: the stages of the worker.
        seconds: the seconds in which it compiled, tuned or imported.
        tuned: whether it launched kernels to choose among them.
    """

    stages: Stages
    seconds: float = 0.0
    tuned: bool = False
    _thread: int = field(default_factory=threading.get_ident)
    _depth: int = 0

    @contextmanager
    def specialising(self) -> Iterator[None]:
        """Be in the stage; within another one, and in another thread, nothing changes."""
        if self._depth or threading.get_ident() != self._thread:
            yield
            return
        self._depth, started = 1, perf_counter()
        try:
            with self.stages.stage(STAGE):
                yield
        finally:
            self._depth = 0
            self.seconds += perf_counter() - started
            _watch_functions()  # of what was imported now


_calls: list[Call] = []
"""The calls under test in progress, the innermost last."""


@contextmanager
def watched(stages: Stages) -> Iterator[Call]:
    """Within a with block, show what compiles, tunes or imports as a stage of its own."""
    call = Call(stages)
    _watch_functions()
    bootstrap: Any = importlib._bootstrap  # noqa: SLF001
    before = bootstrap._find_and_load  # noqa: SLF001  only what is not imported yet comes here
    during = _shown(before)
    bootstrap._find_and_load = during  # noqa: SLF001
    _calls.append(call)
    try:
        yield call
    finally:
        _calls.remove(call)
        if bootstrap._find_and_load is during:  # noqa: SLF001  else the code under test did that
            bootstrap._find_and_load = before  # noqa: SLF001


def _shown(function: Callable[..., Any], *, tunes: bool = False) -> Callable[..., Any]:
    """Return a function that is in the stage while it runs during a call under test."""

    @functools.wraps(function)
    def shown(*args: Any, **options: Any) -> Any:  # noqa: ANN401  whatever it takes and gives
        if not _calls:
            return function(*args, **options)
        _calls[-1].tuned |= tunes
        with _calls[-1].specialising():
            return function(*args, **options)

    setattr(shown, MARK, True)
    return shown


def _watch_functions() -> None:
    """Watch those functions whose modules are imported by now."""
    for module, name in WATCHED:
        if (home := sys.modules.get(module)) is None:
            continue
        *classes, last = name.split(".")
        owner: Any = home
        for each in classes:
            owner = getattr(owner, each, None)
        function = getattr(owner, last, None)
        if callable(function) and not hasattr(function, MARK):
            setattr(owner, last, _shown(function, tunes=name in TUNING))
    handler = getattr(sys.modules.get(DYNAMO), "callback_handler", None)
    starts = getattr(handler, "start_callbacks", None)
    if starts is not None and _dynamo_begins not in starts:
        handler.register_start_callback(_dynamo_begins)  # type: ignore[union-attr]
        handler.register_end_callback(_dynamo_ends)  # type: ignore[union-attr]


_compiling = ExitStack()


def _dynamo_begins(*_: object) -> None:
    if _calls:
        _compiling.enter_context(_calls[-1].specialising())


def _dynamo_ends(*_: object) -> None:
    _compiling.close()
