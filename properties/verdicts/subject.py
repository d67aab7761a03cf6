"""An implementation as a law sees it: something to run, watched while it runs."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from ...impl import Implementation, Target, UnsupportedError
from ...impl.targets.refusal import Refusal
from ...reference import Arithmetic, Problem, materialise
from ...reference.operations import OPERATIONS as ORACLES
from ...reference.operations import operation_of
from ...reference.tensors.allocation import FENCE
from ...reference.tensors.inputs import Inputs
from .comparison import Result, fail, unusable
from .operations import OPERATIONS
from .text import compact
from .verdict import Verdict


class Stages(Protocol):
    """Where the worker stands is told to the parent, which watches the clock."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Be in this stage for the length of a with block."""


class Stop(Exception):  # noqa: N818  not an error of ours: it carries a verdict out of a law
    """Ends a law early with a verdict on the implementation."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


SPIN_SECONDS = 1e-3
LAUNCHES = 50
"""Of one problem in the soak, where nothing else is asked for."""
OUT_OF_MEMORY = "out of memory"
"""The kind of a CRASH for which the machine was too small, or too full."""
NOT_BUILT = Refusal("its module is not among those that were built for this run", "module")


class Subject:
    """Runs one implementation; exceptions of its become verdicts."""

    def __init__(
        self,
        implementation: Implementation,
        target: Target,
        stages: Stages,
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
        self._stages = stages
        self._compiled = set() if compiled is None else compiled
        self._modules, self._without_rules = frozenset(modules), tuple(without_rules)
        self._waits = True

    def refusal(self, problem: Problem) -> Refusal | None:
        """Return the reason why the implementation does not claim this problem; None if it does.

        Raises:
            Stop: its ``supports`` raised.
        """
        try:
            refusal = self.implementation.refusal(
                problem, self.target, without_rules=self._without_rules
            )
            if refusal is not None or not self._modules:
                return refusal
            module = self.implementation.module_of(problem)
        except BaseException as error:
            raise Stop(_crash(error, "supports raised ")) from error
        return None if module in self._modules or not module else NOT_BUILT

    def claims(self, problem: Problem) -> bool:
        """Whether the implementation claims this problem, its module built ahead or not.

        For what no module is built for: a law that asks this waits for compilers.
        """
        refusal = self.refusal(problem)
        return refusal is None or refusal.code == "module"

    def supports(self, problem: Problem) -> bool:
        """Whether the implementation claims this problem."""
        return self.refusal(problem) is None

    def exact(self, problem: Problem) -> bool:
        """Whether the implementation must give the exact grid's values bit by bit."""
        return problem.exact and ORACLES[problem.operation].exact(self.arithmetic_of(problem))

    def arithmetic_of(self, call: Problem | Inputs) -> Arithmetic:
        """Return what the implementation rounds where in a call, given its problem or inputs."""
        # Kernels of attention differ by the channels of V; other calls have none.
        return self.implementation.arithmetic_of(getattr(call, "head_dim_vo", 0))

    def materialise(self, problem: Problem, **options: Any) -> Any:  # noqa: ANN401  any record
        """Make a problem's tensors on the device.

        Raises:
            MemoryError: there is no room for them.
        """
        with self._stages.stage("materialise"):
            try:
                return materialise(problem, self.target.device, **options)
            except RuntimeError as error:
                if not _out_of_memory(error):
                    raise
                message = f"no room for the tensors of {compact(problem)}: {_first_line(error)}"
                raise MemoryError(message) from error

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
        # A session's plan need not compile what its run launches, nor that what is captured.
        module = (getattr(function, "__name__", ""), key(problem)) if key else None
        stage = "run" if module is None or module in self._compiled else "compile"
        start = time.perf_counter()
        try:
            with self._stages.stage(stage):
                result = (function or self.implementation)(inputs)
            # A kernel that was launched runs by now, whatever came before: a hang of a first call
            # does not last as long as a compiler may.
            if wait:
                self.wait()
        except UnsupportedError as error:
            raise Stop(Verdict("REJECTED", "UnsupportedError", str(error))) from error
        # Not only Exception: nobody else raises KeyboardInterrupt or SystemExit in a worker.
        except BaseException as error:
            raise Stop(_crash(error)) from error
        if stage == "run" and wait:
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
        with self._stages.stage("run"):
            try:
                self.wait()
            except Exception as error:
                raise Stop(_crash(error)) from error

    def run_operation(
        self,
        problem: Problem,
        inputs: Any,  # noqa: ANN401  any record with out
        fill: float = torch.nan,
        function: Callable[[Any], Any] | None = None,
        *,
        wait: bool = True,
    ) -> Result:
        """Run an operation that gives out and lse; given buffers hold ``fill`` before.

        Other operations have other pairs, see ``operations.Answers``.

        Raises:
            Stop: it raised, or gave something else.
        """
        if self.implementation.writes_out:
            inputs = self._with_buffers(inputs, fill)
        result = self.call(problem, inputs, function, wait=wait)
        if self.implementation.writes_out:
            return inputs.out, getattr(inputs, "lse", None)
        answers = OPERATIONS[problem.operation]
        pair = answers.pair(result)
        if isinstance(pair, str):
            raise Stop(Verdict("FAIL", "shape", f"returned {pair}"))
        named = dict(zip(answers.names, pair, strict=True))
        self.check_usable(named)
        for name, tensor in named.items():
            if tensor is not None and tensor.is_floating_point() and tensor.element_size() == 1:
                raise Stop(
                    fail("dtype", f"{name} is {tensor.dtype}, 16 bits and more are asked for")
                )
        if answers.has_outputs:
            for name, (size, _, _) in answers.outputs(inputs).items():
                tensor = named[name]
                if tensor is not None and tuple(tensor.shape) != tuple(size):
                    shapes = f"{list(tensor.shape)}, not {list(size)}"
                    raise Stop(fail("shape", f"{name} has shape {shapes}"))
        return pair

    def check_usable(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """See that tensors of an answer, by name, can be compared at all.

        Raises:
            Stop: one cannot.
        """
        for name, tensor in tensors.items():
            wrong = None if tensor is None else unusable(name, tensor, self.target.device)
            if wrong is not None:
                raise Stop(wrong)

    def _with_buffers(self, inputs: Any, fill: float) -> Any:  # noqa: ANN401  any record with out
        """Return outputs as buffers full of ``fill`` between canaries."""
        self.buffers = {}
        views = {}
        for name, (size, dtype, device) in OPERATIONS[operation_of(inputs)].outputs(inputs).items():
            count = int(torch.Size(size).numel())
            storage = torch.full((count + 2 * FENCE,), torch.nan, dtype=dtype, device=device)
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
        """Whether the device can still be used by this process."""
        if self.target.device != "cuda":
            return True
        try:
            torch.ones(1, device=self.target.device).item()
        except RuntimeError:
            return False
        return True

    def wait(self, streams: Sequence[torch.cuda.Stream | None] = (None,)) -> None:
        """Wait for what was launched, on the current stream or on these, in the stage "run"."""
        if self.target.device != "cuda" or not self._waits:
            return
        with self._stages.stage("run"):
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
    kind = OUT_OF_MEMORY if _out_of_memory(error) else type(error).__name__
    trace = "".join(traceback.format_exception(error)[-6:])
    message = f"{where}{type(error).__name__}: {_first_line(error)[:500]}".removesuffix(": ")
    return Verdict("CRASH", kind, message, trace=trace[-4000:])


def _out_of_memory(error: BaseException) -> bool:
    """Tell an allocation that failed on the host; torch has a type for that on a GPU alone."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
