"""An implementation as a law sees it: something to run, watched while it runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter, sleep
from typing import Any, TypeVar

import torch

from ...impl import Implementation, Target, UnsupportedError
from ...impl.features import ALGEBRA, INTERPRETED
from ...impl.gpu.interpreted import interprets
from ...impl.gpu.interpreted import launches as interpreted_launches
from ...impl.gpu.touched_memory import TouchedMemory
from ...impl.gpu.triton_interpreter import hasten
from ...impl.protocol import Session
from ...impl.targets.exceptions import message_of
from ...impl.targets.refusal import Refusal
from ...reference import Arithmetic, Problem
from ...reference.operations import OPERATIONS as ORACLES
from ...reference.operations import operation_of
from ...reference.tensors.allocation import (
    FENCE,
    LEAST_ROWS,
    MOST_SLACK,
    SLACK_ROWS,
    rows_apart,
)
from ...reference.tensors.inputs import Inputs
from .asked import CALLS
from .comparison import Result, fail, unusable
from .contained import Stop, contained, crash, out_of_memory
from .filled_scratch import filled_scratch
from .launches import Launches, Told
from .memory_need import NO_ROOM, call_begins, refusal_of
from .on_host import made_on
from .operations import OPERATIONS
from .peers import as_taken, check_expressible, made, with_defined_rows
from .snapshot import readable, tensors_of
from .specialising import Stages, watched
from .text import compact
from .verdict import Verdict

Read = TypeVar("Read")
SESSION = ("plan", "run")
"""Methods that a session has at least."""
PREPARING = ("plan", "capture", "publish")
"""Steps of a session that answer nothing."""
SPIN_SECONDS = 1e-3
LSE_GAP = 5
"""Numbers between the rows of a buffer for the LSE that is padded."""
LAUNCHES = 50
"""Launches of one problem in the soak, where nothing else is asked for."""
NOT_BUILT = Refusal("its module is not among those that were built for this run", "module")


class Subject:
    """Runs one implementation and turns its exceptions into verdicts.

    With ``explains``, laws say of a wrong answer what explains it, for which they ask the oracle
    many times.

    Attributes:
        kernel_names: names the kernels of calls, where that is asked for.
    """

    kernel_names: Launches | None = None

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
        tight: bool = False,
        explains: bool = True,
    ) -> None:
        self.implementation = implementation
        self.target = target
        self.launches = launches
        self.explains = explains
        self.seconds = 0.0
        self.calls = 0
        self.interpreted = False
        self.buffers: dict[str, torch.Tensor] = {}
        self._ends: dict[str, int] = {}
        self._gaps: list[tuple[str, torch.Tensor]] = []
        self._lse_layout = ""
        self._stages = stages
        self._compiled = set() if compiled is None else compiled
        self._modules, self._without_rules = frozenset(modules), tuple(without_rules)
        self._waits = True
        # What a sanitizer of memory sees: where an input ends, its allocation ends.
        self._usual: dict[str, Any] = {"tight": True} if tight else {}
        self._surroundings: dict[str, Any] = {}
        self._memory: TouchedMemory | None = None

    def refusal(self, problem: Problem) -> Refusal | None:
        """Return the reason why the implementation does not claim this problem; None if it does.

        Raises:
            Stop: its ``supports`` raised.
        """
        with self._stages.stage("supports"), contained("supports raised "):
            refusal = self.implementation.refusal(
                problem, self.target, without_rules=self._without_rules
            )
        if refusal is not None or not self._modules:
            return refusal
        module = self.module_of(problem)
        return None if module in self._modules or not module else NOT_BUILT

    def module_of(self, problem: Problem) -> str:
        """Name the module that this problem needs; empty where no call compiles.

        Raises:
            Stop: its ``compile_key`` or ``kernels`` raised.
        """
        with contained("compile_key raised "):
            return self.implementation.module_of(problem)

    def claims(self, problem: Problem) -> bool:
        """Whether the implementation claims this problem, its module built ahead or not.

        For what no module is built for: a law that asks this waits for compilers.
        """
        refusal = self.refusal(problem)
        return refusal is None or refusal.code == "module"

    @property
    def declares(self) -> frozenset[str]:
        """What the implementation declares; of its algebra only where Triton interprets it."""
        implementation = self.implementation
        if interprets(implementation.function, implementation.compiler, self.target):
            return implementation.declares | {INTERPRETED}
        return implementation.declares - {ALGEBRA}

    def supports(self, problem: Problem) -> bool:
        """Whether the implementation claims this problem."""
        return self.refusal(problem) is None

    def exact(self, problem: Problem) -> bool:
        """Whether the implementation must give the exact grid's values bit by bit."""
        return problem.exact and ORACLES[problem.operation].exact(self.arithmetic_of(problem))

    def arithmetic_of(self, call: Problem | Inputs) -> Arithmetic:
        """Return the arithmetic that the implementation declares for a call."""
        # Kernels of attention differ by the channels of V; other calls have none.
        return self.implementation.arithmetic_of(getattr(call, "head_dim_vo", 0))

    def lse_dtype(self, inputs: Inputs) -> torch.dtype:
        """Return the dtype in which the implementation gives the LSE of a call."""
        q = getattr(inputs, "q", None)  # a merge has none
        name = None if q is None else self.arithmetic_of(inputs).rounded("lse", q.dtype)
        found: torch.dtype = getattr(torch, name or "float32")
        return found

    def materialise(self, problem: Problem, **options: Any) -> Any:  # noqa: ANN401  any record
        """Make a problem's tensors on the device.

        Raises:
            MemoryError: there is no room for them.
        """
        with self._stages.stage("materialise"):
            try:
                every = {**self._usual, **self._surroundings, **options}
                inputs = made_on(problem, self.target.device, **every)
                return made(self.implementation.features, problem, inputs)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                message = f"no room for the tensors of {compact(problem)}: {message_of(error)}"
                raise MemoryError(message) from error

    @contextmanager
    def surrounded(self, **options: Any) -> Iterator[None]:  # noqa: ANN401  of ``materialise``
        """Within a with block, materialise with these options unless others are given."""
        before, self._surroundings = self._surroundings, options
        try:
            yield
        finally:
            self._surroundings = before

    @contextmanager
    def watched_by(self, memory: TouchedMemory) -> Iterator[None]:
        """Within a with block, have what each call touches watched."""
        before, self._memory = self._memory, memory
        try:
            yield
        finally:
            self._memory = before

    def call(
        self,
        problem: Problem,
        inputs: Inputs,
        function: Callable[[Any], Any] | None = None,
        *,
        wait: bool = True,
    ) -> Any:  # noqa: ANN401  any result
        """Run the implementation, or a function of its session, and usually wait for it.

        Raises:
            Stop: it raised: REJECTED for UnsupportedError, CRASH for any other exception. Or it
                did to its inputs what it may not.
        """
        key = self.implementation.compile_key
        # Plan, run and capture of a session may each compile something of their own.
        with contained("compile_key raised "):
            module = (getattr(function, "__name__", ""), key(problem)) if key else None
            stage = "run" if module is None or module in self._compiled else "compile"
        CALLS.note(problem, inputs)
        inputs, wrong = as_taken(self.implementation.features, inputs)
        tensors = tensors_of(inputs)
        before = _frames(tensors)
        held = call_begins(tensors.values())
        hasten()
        launched = interpreted_launches()
        try:
            touched = (
                self._memory.watch(readable(inputs, tensors)) if self._memory else nullcontext()
            )
            made = partial(function or self.implementation, inputs)
            naming = self._naming(getattr(function, "__name__", ""), problem, wait=wait)
            result, seconds = self._timed(made, stage, touched, naming, wait=wait)
        except UnsupportedError as error:
            raise Stop(Verdict("REJECTED", "UnsupportedError", message_of(error))) from error
        except BaseException as error:
            with self._stages.stage("run"):  # its __str__ may not return
                verdict = self._verdict_on(error, tensors.values(), held)
            raise Stop(verdict) from error
        finally:
            self.interpreted = self.interpreted or interpreted_launches() > launched
        try:
            after = _frames(tensors_of(inputs))
        except Exception as error:  # of whatever the call has made of the record
            if out_of_memory(error):
                raise
            after = {}
        if changed := [name for name, frame in before.items() if after.get(name) != frame]:
            named = ", ".join(changed)
            message = (
                f"the call gave its input {named} another shape or other memory, or a gradient"
            )
            raise Stop(fail("mutated_input", message))
        if wait and self._waits and (found := wrong()) is not None:
            raise Stop(found)
        if stage == "run" and wait:
            self.seconds += seconds
            self.calls += 1
        if module is not None:
            self._compiled.add(module)
        return result

    def as_launched(self, verdict: Verdict) -> Verdict:
        """Return a verdict, or a FAIL where a call launched kernels that are not claimed."""
        wrong = self.kernel_names.wrong if self.kernel_names else None
        if wrong is None or verdict.bad:
            return verdict
        return replace(verdict, status="FAIL", kind="backend", message=wrong.message)

    def _naming(self, step: str, problem: Problem, *, wait: bool) -> AbstractContextManager[Told]:
        """Return what names the kernels of a call, where that is asked for and it is waited for."""
        if self.kernel_names is None or step in PREPARING or not (wait and self._waits):
            return nullcontext(lambda _: None)
        return self.kernel_names.of(step, problem)

    def _timed(
        self,
        call: Callable[[], Any],
        stage: str,
        touched: AbstractContextManager[object],
        named: AbstractContextManager[Told],
        *,
        wait: bool,
    ) -> tuple[Any, float]:
        """Make a call, and return its result and the seconds that it ran, compiling apart."""
        with named as tell:
            start = perf_counter()
            with (
                self._stages.stage(stage),
                watched(self._stages) as watch,
                filled_scratch(),
                touched,
            ):
                result = call()
            # A kernel that was launched runs by now, whatever came before: a hang of a first call
            # does not last as long as a compiler may.
            if wait:
                self.wait()
            seconds = perf_counter() - start - watch.seconds
            tell(watch)
        return result, seconds

    def _verdict_on(
        self, error: BaseException, tensors: Iterable[torch.Tensor], held: int
    ) -> Verdict:
        """Return the CRASH of a call; UNSUPPORTED where its worker has too little memory."""
        if self.target.device == "cpu" and out_of_memory(error):
            refusal = refusal_of(error, tensors, held)
            if refusal is not None:
                return Verdict("UNSUPPORTED", NO_ROOM, refusal)
        return crash(error)

    def try_call(self, problem: Problem, function: Callable[[Any], Any] | None = None) -> None:
        """Call the implementation without a look at its answer, in buffers where it writes one.

        Args:
            problem: the problem that it is called on.
            function: the function that is called in its place, if any.

        Raises:
            Stop: as of ``call``.
            MemoryError: there is no room for the tensors.
        """
        inputs = self.materialise(problem)
        if self.implementation.writes_out:
            inputs, _ = self._with_buffers(inputs, torch.nan)
        self.call(problem, inputs, function)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Let the host run ahead of the GPU: calls within are waited for at the end, all at once.

        Raises:
            Stop: as of ``call``; an error of the GPU stands for all of them.
        """
        self._waits = False
        try:
            yield
        finally:
            self._waits = True
        with self._stages.stage("run"), contained(""):
            self.wait()

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
        features, asked_of = self.implementation.features, inputs
        check_expressible(features, inputs)
        if self.implementation.writes_out:
            inputs, views = self._with_buffers(inputs, fill)
        answers = OPERATIONS[problem.operation]
        wanted = answers.outputs(inputs) if answers.has_outputs else {}
        unused = answers.unused(inputs) if answers.unused else None
        result = self.call(problem, inputs, function, wait=wait)
        # The record is the implementation's to spoil: its buffers are known without it.
        pair = (
            (views["out"], self.written_lse(result, views.get("lse"), fill, wait=wait))
            if self.implementation.writes_out
            else self.read(answers.pair, result)
        )
        if isinstance(pair, str):
            raise Stop(fail("shape", f"returned {pair}"))
        named = {
            name: tensor if tensor is None else self.usable(name, tensor)
            for name, tensor in zip(answers.names, pair, strict=True)
        }
        for name, tensor in named.items():
            asked = wanted[name][1] if name in wanted else None
            if tensor is None or tensor.dtype == asked:
                continue
            if tensor.is_floating_point() and tensor.element_size() == 1:
                raise Stop(
                    fail("dtype", f"{name} is {tensor.dtype}, 16 bits and more are asked for")
                )
        for name, (size, _, _) in wanted.items():
            tensor = named[name]
            if tensor is not None and tuple(tensor.shape) != tuple(size):
                shapes = f"{list(tensor.shape)}, not {list(size)}"
                raise Stop(fail("shape", f"{name} has shape {shapes}"))
        first, second = named.values()
        assert first is not None  # noqa: S101  of a pair the second only may be missing
        answer = first if unused is None else first.masked_fill(unused, 0.0), second
        return with_defined_rows(features, asked_of, answer)

    def written_lse(
        self,
        result: object,
        lse: torch.Tensor | None,
        fill: float = torch.nan,
        *,
        wait: bool = True,
    ) -> torch.Tensor | None:
        """Return the buffer of the LSE; None where the call says that it wrote none, and has not.

        Args:
            result: what the call returned: (out, None) says that there is no LSE.
            lse: the buffer, if there is one.
            fill: what it held before.
            wait: the call is over; else the buffer is not looked into.
        """
        says_none = self.read(
            lambda pair: isinstance(pair, tuple) and len(pair) == 2 and pair[1] is None,  # noqa: PLR2004
            result,
        )
        if lse is None or not says_none:
            return lse
        if not (wait and self._waits):
            return None
        untouched = lse.isnan() if math.isnan(fill) else lse == fill
        return None if untouched.all() else lse

    def read(self, reader: Callable[[Any], Read], result: object) -> Read:
        """Read what a call returned, an object of any kind.

        Raises:
            Stop: its own methods raise.
        """
        with contained("its result raised "):
            return reader(result)

    def usable(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of an answer as a plain one, which shares its memory.

        Raises:
            Stop: it cannot be compared.
        """
        with contained("its result raised "):
            wrong = unusable(name, tensor, self.target.device)
            if wrong is not None:
                raise Stop(wrong)
            return tensor.detach().resolve_neg()

    def open_session(self) -> Session:
        """Make a session of the implementation, which must have some.

        Raises:
            Stop: it raised, or made something else.
        """
        with contained("making a session raised "), filled_scratch():
            made: Any = self.implementation.session and self.implementation.session()
            for name in SESSION:
                if not callable(getattr(made, name, None)):
                    message = f"{type(made).__name__} has no method {name}"
                    raise TypeError(message)
        session: Session = made
        return session

    def _with_buffers(self, inputs: Any, fill: float) -> tuple[Any, dict[str, torch.Tensor]]:  # noqa: ANN401
        """Return a record whose outputs are buffers of ``fill`` between canaries, and these."""
        self.buffers, self._gaps = {}, []
        views: dict[str, torch.Tensor] = {}
        for name, (size, usual, device) in OPERATIONS[operation_of(inputs)].outputs(inputs).items():
            count = int(torch.Size(size).numel())
            dtype = self.lse_dtype(inputs) if name == "lse" else usual
            if name == "lse" and self._lse_layout:
                views[name] = self._lse_buffer(size, dtype, device).fill_(fill)
                continue
            if name in self._surroundings.get("apart", {}) and size[0] >= LEAST_ROWS:
                views[name] = rows_apart(size, dtype, device).fill_(fill)
                continue
            behind = FENCE + min(SLACK_ROWS * math.prod(size[1:]), MOST_SLACK)
            storage = torch.full((FENCE + count + behind,), torch.nan, dtype=dtype, device=device)
            self.buffers[name], self._ends[name] = storage, FENCE + count
            views[name] = storage[FENCE : FENCE + count].view(size).fill_(fill)
        return dataclasses.replace(inputs, **views), views

    @contextmanager
    def lse_laid_out(self, layout: str) -> Iterator[None]:
        """Within a with block, lay out buffers for the LSE as one of ``LSE_LAYOUTS``."""
        self._lse_layout = layout
        try:
            yield
        finally:
            self._lse_layout = ""

    def _lse_buffer(
        self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a view [tokens, heads] of a buffer whose gaps are canaries."""
        first = self._lse_layout.endswith("heads_first")
        rows, row = reversed(size) if first else size
        wide = row + (LSE_GAP if self._lse_layout.startswith("padded") else 0)
        storage = torch.full((rows * wide + 2 * FENCE,), torch.nan, dtype=dtype, device=device)
        self.buffers["lse"], self._ends["lse"] = storage, FENCE + rows * wide
        room = storage[FENCE : FENCE + rows * wide].view(rows, wide)
        self._gaps.append(("lse", room[:, row:]))
        return room[:, :row].T if first else room[:, :row]

    def written_outside(self) -> str | None:
        """Name the output buffer whose canaries were overwritten in the last call."""
        for name, gap in self._gaps:
            if not gap.isnan().all():
                return name
        for name, storage in self.buffers.items():
            if not (storage[:FENCE].isnan().all() and storage[self._ends[name] :].isnan().all()):
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
            started = perf_counter()
            while not all(event.query() for event in events):
                # A sleep takes longer than most kernels do: only long ones are slept on.
                if perf_counter() - started > SPIN_SECONDS:
                    sleep(5e-5)


def _frames(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    """Return where each tensor of a record lies and how, by name; laws use the record again."""
    return {
        name: (
            *(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()),
            tensor.requires_grad,
        )
        for name, tensor in tensors.items()
    }
