"""An implementation as a law sees it: something to run, watched while it runs."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from ..impl import Implementation, Target, UnsupportedError
from ..reference import Problem, materialise
from ..reference.allocation import FENCE
from ..reference.inputs import Inputs
from ..reference.kv_format import stored_head_dim
from .comparison import Result, same_bits
from .verdict import Verdict


class Phases(Protocol):
    """Where the worker stands is told to the parent, which watches the clock."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Be in this phase for the length of a with block."""


class Stop(Exception):  # noqa: N818  not an error of ours: it carries a verdict out of a law
    """Ends a law early with a verdict on the implementation."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


SPIN_SECONDS = 1e-3
LAUNCHES = 50
"""Of one problem in the soak, where nothing else is asked for."""
NOT_BUILT = "its module is not among those that were built for this run"


class Subject:
    """Runs one implementation; exceptions of its become verdicts."""

    def __init__(
        self,
        implementation: Implementation,
        target: Target,
        phases: Phases,
        compiled: set[Hashable] | None = None,
        *,
        modules: Collection[str] = (),
        without_rules: Collection[str] = (),
        launches: int = LAUNCHES,
    ) -> None:
        self.implementation = implementation
        self.target = target
        self.launches = launches
        self.seconds = 0.0
        self.calls = 0
        self.buffers: dict[str, torch.Tensor] = {}
        self._phases = phases
        self._compiled = set() if compiled is None else compiled
        self._modules, self._without_rules = frozenset(modules), tuple(without_rules)
        self._waits = True

    def refusal(self, problem: Problem) -> str | None:
        """Give the reason why the implementation does not claim this problem; None if it does.

        Raises:
            Stop: its ``supports`` raised.
        """
        try:
            refusal = self.implementation.refusal(
                problem, self.target, without_rules=self._without_rules
            )
            key = self.implementation.compile_key
            built = not (self._modules and key) or repr(key(problem)) in self._modules
        except Exception as error:
            raise Stop(_crash(error, "supports raised ")) from error
        return refusal if built else refusal or NOT_BUILT

    def supports(self, problem: Problem) -> bool:
        """Tell whether the implementation claims this problem."""
        return self.refusal(problem) is None

    def exact(self, problem: Problem) -> bool:
        """Tell whether the implementation must give the exact grid's values bit by bit."""
        return problem.exact and self.implementation.arithmetic.exponent == "difference"

    def materialise(self, problem: Problem, **options: Any) -> Any:  # noqa: ANN401  any record
        """Make a problem's tensors on the device."""
        with self._phases.phase("materialise"):
            return materialise(problem, self.target.device, **options)

    def call(
        self,
        problem: Problem,
        inputs: Inputs,
        function: Callable[[Any], Any] | None = None,
        *,
        wait: bool = True,
    ) -> Any:  # noqa: ANN401  any result
        """Run the implementation, or a function of its session, and wait for it unless told not to.

        Raises:
            Stop: it raised: REJECTED for UnsupportedError, CRASH for any other exception.
        """
        key = self.implementation.compile_key
        module = ("", key(problem)) if key else None
        phase = "run" if module is None or module in self._compiled else "compile"
        start = time.perf_counter()
        try:
            with self._phases.phase(phase):
                result = (function or self.implementation)(inputs)
            # A kernel that was launched runs by now, whatever came before: a hang of a first call
            # does not last as long as a compiler may.
            if wait:
                self.wait()
        except UnsupportedError as error:
            raise Stop(Verdict("REJECTED", "UnsupportedError", str(error))) from error
        except Exception as error:
            raise Stop(_crash(error)) from error
        if phase == "run" and wait:
            self.seconds += time.perf_counter() - start
            self.calls += 1
        if module is not None:
            self._compiled.add(module)
        return result

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Let the host run ahead of the GPU: calls within are waited for at the end, all at once.

        Raises:
            Stop: as of ``call``; an error of the GPU is told of all of them.
        """
        self._waits = False
        try:
            yield
        finally:
            self._waits = True
        with self._phases.phase("run"):
            try:
                self.wait()
            except Exception as error:
                raise Stop(_crash(error)) from error

    def attend(
        self,
        problem: Problem,
        inputs: Any,  # noqa: ANN401  any record with out
        fill: float = torch.nan,
        function: Callable[[Any], Any] | None = None,
        *,
        wait: bool = True,
    ) -> Result:
        """Run an operation that gives out and lse; given buffers hold ``fill`` before.

        Raises:
            Stop: it raised, or gave something that is not (out, lse).
        """
        if self.implementation.writes_out:
            inputs = self._with_buffers(inputs, fill)
        result = self.call(problem, inputs, function, wait=wait)
        if self.implementation.writes_out:
            return inputs.out, inputs.lse
        if not (isinstance(result, tuple) and len(result) == 2):  # noqa: PLR2004
            message = f"returned {type(result).__name__}, not AttentionOutput or a pair (out, lse)"
            raise Stop(Verdict("FAIL", "shape", message))
        out, lse = result
        if not isinstance(out, torch.Tensor) or not isinstance(lse, torch.Tensor | None):
            message = f"returned ({type(out).__name__}, {type(lse).__name__}), not tensors"
            raise Stop(Verdict("FAIL", "shape", message))
        return out, lse

    def _with_buffers(self, inputs: Any, fill: float) -> Any:  # noqa: ANN401  any record with out
        """Give out and lse as buffers full of ``fill`` between canaries."""
        source = inputs.q if hasattr(inputs, "q") else inputs.outs[0]
        values = next(
            tensor
            for name in ("v_cache", "v", "outs")
            if (tensor := getattr(inputs, name, None)) is not None
        )
        width = stored_head_dim(values, getattr(inputs, "kv_format", None))
        shape = (*source.shape[:2], width)
        self.buffers = {}
        views = {}
        for name, size, dtype in (
            ("out", shape, inputs.out_dtype),
            ("lse", shape[:2], torch.float32),
        ):
            count = int(torch.Size(size).numel())
            storage = source.new_full((count + 2 * FENCE,), torch.nan, dtype=dtype)
            self.buffers[name] = storage
            views[name] = storage[FENCE : FENCE + count].view(size).fill_(fill)
        return dataclasses.replace(inputs, **views)

    def written_outside(self) -> str | None:
        """Name the output buffer whose canaries were overwritten in the last call."""
        for name, storage in self.buffers.items():
            if not (storage[:FENCE].isnan().all() and storage[-FENCE:].isnan().all()):
                return name
        return None

    def device_works(self) -> bool:
        """Tell whether the device can still be used by this process."""
        if self.target.device != "cuda":
            return True
        try:
            torch.ones(1, device=self.target.device).item()
        except RuntimeError:
            return False
        return True

    def wait(self, streams: Sequence[torch.cuda.Stream | None] = (None,)) -> None:
        """Wait for what was launched, on the current stream or on these, in the phase "run"."""
        if self.target.device != "cuda" or not self._waits:
            return
        with self._phases.phase("run"):
            events = [torch.cuda.Event() for _ in streams]
            for event, stream in zip(events, streams, strict=True):
                event.record(stream or torch.cuda.current_stream())
            # Polling keeps the process able to dump its stack: a blocking wait on a kernel that
            # never ends cannot be interrupted.
            started = time.perf_counter()
            while not all(event.query() for event in events):
                # A sleep takes longer than most kernels do: only long ones are slept on.
                if time.perf_counter() - started > SPIN_SECONDS:
                    time.sleep(5e-5)


def _crash(error: BaseException, where: str = "") -> Verdict:
    kind = type(error).__name__
    text = str(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        kind = "out of memory"
    lines = text.strip().splitlines() or [""]
    trace = "".join(traceback.format_exception(error)[-6:])
    message = f"{where}{type(error).__name__}: {lines[0][:500]}"
    return Verdict("CRASH", kind, message, trace=trace[-4000:])


class Snapshot:
    """The bits of a record's tensors and of the storages around them."""

    def __init__(self, inputs: Inputs) -> None:
        self.views = _tensors(inputs)
        self.storages = dict(inputs.storages)
        self._views = {name: tensor.clone() for name, tensor in self.views.items()}
        self._storages = {name: tensor.clone() for name, tensor in self.storages.items()}

    def changed_views(self) -> list[str]:
        """Name the tensors whose values are not what they were."""
        return [
            name for name, tensor in self.views.items() if not same_bits(tensor, self._views[name])
        ]

    def changed_outside(self) -> list[str]:
        """Name the storages that changed outside of their views, and restore the views."""
        for name, tensor in self.views.items():
            tensor.copy_(self._views[name])
        return [
            name
            for name, storage in self.storages.items()
            if not same_bits(storage, self._storages[name])
        ]


def _tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for field in dataclasses.fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, torch.Tensor):
            found[field.name] = value
        elif field.name == "kv_cache_sf" and value is not None:
            found.update(k_scales=value[0], v_scales=value[1])
        elif field.name == "metadata":
            found.update({f"metadata.{name}": t for name, t in value.tensors().items()})
    return found
