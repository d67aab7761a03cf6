"""The isolated worker: what the code under test does wrong in there is an `Outcome` here.

A `WorkerPool` keeps persistent, spawned processes, each in a session and process group of its own,
that call one handler (see `worker_main.py`) for each request. Each stage of a request has its
deadline. A process that overruns one is killed with its whole group, and one that died is replaced,
from the second time on by a standby that has done its imports already: the next request runs as if
nothing had happened.

    with WorkerPool("package.module:handler") as pool, pool.lease() as worker:
        outcome = worker.run({"case": 1}, Deadlines(run=2.0))

For POSIX systems; on Linux in full (memory limits, workers that die with a killed parent at once).
"""

from __future__ import annotations

import atexit
import dataclasses
import getpass
import json
import os
import socket
import sys
import tempfile
import threading
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .leftovers import Left, Leftovers
from .outcome import Outcome
from .process import Recipe, WorkerProcess, begin_server
from .reads import Read
from .stages import Deadlines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import Self

    from .mps import Client, SharedGpu

__all__ = ["DEFAULT_MEMORY_LIMIT", "Deadlines", "Outcome", "Worker", "WorkerPool"]

# What one case may well need (bytes), with room left for the machine's other work.
DEFAULT_MEMORY_LIMIT: Final = min(
    8 << 30, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
)

# A handler that sets this in its result asks for a fresh process, as this one is of no more use.
LAST_REPLY: Final = "last_reply"
# The field of a request that names whose code it runs; some run nobody's.
TENANT: Final = "implementation"
# The field of a request that a second process, in which nobody's code runs, answers as well: the
# task that it has there. The two are connected, and the second one's answer counts. Where it is
# empty, that process is started only.
SECOND: Final = "second"
_DEFAULT_DEADLINES: Final = Deadlines()
# Several workers share the cores; and one thread always adds in the same order. Set before torch
# or numpy is imported, which is when they read it.
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Workers have folders for temporary files of their own: what these keep there for later processes
# stays where it was.
_CACHES: Final = {
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor_{user}",
    "CUTE_DSL_CACHE_DIR": "{user}/cutlass_python_cache",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "{user}/flash_attention_cute_dsl_cache",
}
# Requests that wait for a busy process at most: one drawn example has two or three problems, and
# the next takes as long to draw as these take to judge.
DEPTH: Final = 4
# Where a request takes longer (seconds), none waits: drawing is no part of its time worth sparing,
# and a search whose time is over would have to wait for all of them.
QUICK_SECONDS: Final = 0.1
# How many processes in a row may be found dead before their request was sent.
_ATTEMPTS: Final = 3
_DEATHS: Final = ("hang", "crash")  # what a fork of the first process may have come to
_EXCUSES: Final = ("starved", "memory")  # what it says of that for itself


class Worker:
    """One process at a time that answers requests. A pool lends it to one thread at a time."""

    def __init__(self, supply: _Supply, *, started: bool) -> None:
        self._supply = supply
        self._process: WorkerProcess | None = supply.start() if started else None
        self._asked: deque[tuple[Mapping[str, object], Deadlines]] = deque()
        self._second: WorkerProcess | None = None  # see SECOND
        self._client: Client | None = None  # what makes the process share the GPU
        self._alone = False  # the process does not share it, whether others do or not
        self._kept = False  # nor does it when it is lent to its owner again
        self._sent = 0  # of the process's requests, those without an answer
        self._quick = False  # the last answer came soon
        self._note = ""
        self.owner = ""
        """Owner of the code that ran in the process last."""
        self.owners: set[str] = set()
        """Owners of all code that has run in the worker's processes."""

    @property
    def busy(self) -> bool:
        """Whether the process has requests of `ask` whose answers were not taken."""
        return self._sent > 0

    @property
    def full(self) -> bool:
        """Whether an answer is to be taken before more is asked: a few wait where they are quick.

        None waits under a tool, whose log does not say where one request ends.
        """
        waits = self._quick and not self._supply.recipe.under
        return len(self._asked) > (DEPTH if waits else 0)

    def run(
        self, payload: Mapping[str, object], deadlines: Deadlines = _DEFAULT_DEADLINES
    ) -> Outcome:
        """Have the handler answer `payload` and return what became of it.

        After a hang or a crash another process stands by when this returns. What is raised here
        (KeyboardInterrupt, TypeError for a payload that JSON cannot hold, RuntimeError while `busy`
        or once the pool is closed) ends the process, in which the request may be going on.
        """
        with self._ended_by_errors():
            if self.busy:
                msg = "the worker has requests whose answers were not taken"
                raise RuntimeError(msg)
            return self._send(payload, deadlines) or self._received(payload, deadlines)

    def run_once(
        self, payload: Mapping[str, object], deadlines: Deadlines = _DEFAULT_DEADLINES
    ) -> Outcome | None:
        """Do as `run` does; return None at once where the process has answered the same before."""
        key = json.dumps(payload, sort_keys=True)
        process = self._process
        if process is not None and key in process.answered and not process.exited():
            return None
        outcome = self.run(payload, deadlines)
        if outcome.status == "done" and self._process is not None and self._process.has_answered:
            self._process.answered.add(key)
        return outcome

    def ask(self, payload: Mapping[str, object], deadlines: Deadlines = _DEFAULT_DEADLINES) -> None:
        """Have the handler answer `payload` after what it was asked before; see `answer`.

        The process goes from one request to the next without this side: the deadlines of each begin
        when it does. What is raised is as in `run`.
        """
        with self._ended_by_errors():
            self._asked.append((payload, deadlines))
            self._send_asked()

    def answer(self) -> Outcome:
        """Return what became of the oldest request of `ask` that was not answered.

        After a hang or a crash the later ones are sent to the process that took its place, at the
        next `ask` or `answer`: `run` may come first. What is raised is as in `run`.
        """
        with self._ended_by_errors():
            failure = self._send_asked()
            asked = self._asked.popleft()
            outcome = failure or self._received(*asked)
            self._quick = outcome.seconds < QUICK_SECONDS
            return outcome

    def forget(self) -> None:
        """Drop the requests of `ask` that were not answered, and the process if it has some."""
        self._asked.clear()
        self._quick = False
        if self.busy:
            self._end()

    def begin(self, owner: str) -> None:
        """Run the code of another, in a fresh process if the last one's has started something."""
        if owner != self.owner and self._process is not None and self._process.has_children():
            self.renew()
        kept = self._kept and owner == self.owner
        if self._alone and not kept and self._supply.client() is not None:
            if self._process is not None and not self._process.unused:
                self._end()
            self._alone = False
        self.owner = owner
        self.owners.add(owner)

    @property
    def shares_gpu(self) -> bool:
        """Whether the process shares its GPU, or will from its first request on."""
        if self._client is not None:
            return True
        unused = self._process is None or self._process.unused
        return unused and not self._alone and self._supply.client() is not None

    def shared_with_others(self, tenant: object) -> bool:
        """Whether code of others than a tenant has run in the process, or runs on its GPU."""
        has_run = self._process is not None and bool(self._process.tenants - {tenant})
        return has_run or self.shares_gpu

    def renew(self, *, keep: bool = False) -> None:
        """Replace the process by a fresh one, in which no earlier case has left anything.

        It does not share its GPU either, until the worker is lent again.

        Args:
            keep: nor then, where the worker is lent to the same owner.
        """
        self._end()
        self._alone, self._kept = True, keep
        self._process = self._supply.replace()

    def drop(self) -> None:
        """End the process; the next request takes another."""
        self._asked.clear()
        self._end_second()
        self._end()

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.drop()
            raise

    def _end(self) -> None:
        self._sent, self._client = 0, None
        if self._process is not None:
            self._supply.end(self._process, self.owner)
            self._process = None
        # What the second process still waits for has ended: its answers come at once.
        while self._second is not None and self._second.waiting:
            self._second_answer()

    def _end_second(self) -> None:
        if self._second is not None:
            self._supply.end(self._second, "")
            self._second = None

    def _second_answer(self) -> Outcome:
        """Wait for what comes of the oldest request that the second process has."""
        assert self._second is not None  # noqa: S101  it was sent to one
        outcome = self._second.answer()
        if self._second.ended:
            self._end_second()
        return outcome

    def _send_asked(self) -> Outcome | None:
        """Send what waits to be sent; return why if no process takes it."""
        while self._sent < len(self._asked):
            failure = self._send(*self._asked[self._sent])
            if failure is not None:
                return failure
        return None

    def _send(self, payload: Mapping[str, object], deadlines: Deadlines) -> Outcome | None:
        failure = None if self.busy else self._get_ready(payload, deadlines)
        if failure is None and self._process is not None:
            if payload.get(SECOND):
                assert self._second is not None  # noqa: S101  no process judges itself
                ours, theirs = socket.socketpair()
                with ours, theirs:
                    self._second.send({**payload, "task": payload[SECOND]}, deadlines, ours)
                    self._process.send(payload, deadlines, theirs)
            else:
                self._process.send(payload, deadlines)
            if payload.get(TENANT):
                self._process.tenants.add(payload[TENANT])
            self._sent += 1
        return failure

    def _get_ready(self, payload: Mapping[str, object], deadlines: Deadlines) -> Outcome | None:
        """Have processes that take a request; return why if there are none."""
        self._note = ""
        failure = self._get_second_ready(deadlines) if SECOND in payload else None
        if failure is not None:
            return failure
        if self._client is not None and not self._supply.serves(self._client):
            self.renew()  # another process's fault has ended its context
        for _ in range(_ATTEMPTS):
            if self._process is None:
                self._process = self._supply.replace()
            failure = self._process.start_up(deadlines)
            if failure is not None:
                self._end()
                self._supply.check_open()  # a process that close() killed has not failed
                return failure
            if not self._process.exited():
                self._share(self._process)
                return None
            # Nothing was asked of it: its death is an earlier case's doing, not this one's.
            self._note = "the process before this one died after its last reply"
            self._end()
        return Outcome("error", kind="start", detail="the workers die before any request")

    def _share(self, process: WorkerProcess) -> None:
        """Let a process share the GPU, which it does from its first request on or never."""
        if process.unused and not self._alone:
            self._client = self._supply.client()
            process.variables = self._client.environment if self._client else {}

    def _get_second_ready(self, deadlines: Deadlines) -> Outcome | None:
        # Before it is needed: no law's time goes by while it starts.
        if self._second is None or self._second.exited():
            self._end_second()
            self._second = self._supply.start(under=())
        failure = self._second.start_up(deadlines)
        if failure is not None:
            self._end_second()
        return failure

    def _received(self, payload: Mapping[str, object], deadlines: Deadlines) -> Outcome:
        """Wait for the answer to a request that was sent; an error is no other tenant's doing."""
        outcome = self._receive(payload)
        if outcome.status == "error" and outcome.shared:
            self.renew()
            outcome = self._send(payload, deadlines) or self._receive(payload)
        return outcome

    def _receive(self, payload: Mapping[str, object]) -> Outcome:
        """Wait for the answer to the oldest request that was sent."""
        assert self._process is not None  # noqa: S101  it was sent to one
        outcome = self._process.answer()
        if tenant := payload.get(TENANT):
            self._supply.read.setdefault(tenant, set()).update(self._process.read)
        if payload.get(SECOND):
            outcome = self._of_both(outcome)
        if self.shared_with_others(payload.get(TENANT)):
            outcome = dataclasses.replace(outcome, shared=True)
        self._sent -= 1
        last = (outcome.result or {}).pop(LAST_REPLY, False)  # also where the process has ended
        # Not only a fault: the end of a process amid its work may end the others' contexts too.
        if self._client is not None and (last or outcome.died):
            self._supply.note_fault(self._client)
            outcome = dataclasses.replace(outcome, faulted=True)
        if self._process.ended or last:
            self.renew()  # raises once the pool is closed: then close() was what killed it
        else:
            self._supply.stand_by()
        if self._note:
            detail, self._note = f"{outcome.detail}\n{self._note}".strip(), ""
            return dataclasses.replace(outcome, detail=detail)
        return outcome

    def _of_both(self, first: Outcome) -> Outcome:
        """Return what became of a request that two processes were given.

        Of the first one only a failure counts, whatever else it says; it may lie.
        """
        assert self._process is not None  # noqa: S101  it was sent to both
        second = self._second_answer()
        said, answer = first.result or {}, second.result or {}
        if self._second is None or answer.get(LAST_REPLY):
            self._end_second()
            self._process.end()  # the connections of later requests have ended
        if first.status != "done":
            return first
        if "ended" in said:  # which comes before a status wherever a verdict is read
            if isinstance(ended := said["ended"], dict) and ended.get("status") in _DEATHS:
                known = {name: each for name, each in ended.items() if name not in _EXCUSES}
                return dataclasses.replace(first, result={**said, "ended": known})
        elif said.get("status") == "CRASH":
            return first
        if second.status == "done":
            last = {LAST_REPLY: True} if said.get(LAST_REPLY) else {}
            return dataclasses.replace(first, result={**answer, **last})
        if second.status == "hang":  # the first one said that it was done, and did not answer
            return second
        detail = f"the process that judges: {second.kind}: {second.detail}\n{second.stderr}".strip()
        return dataclasses.replace(second, status="error", detail=detail)


class WorkerPool:
    """Workers that call one handler, at most `size` of them at once, for any number of threads.

    handler: "module:function", a function of a JSON object and a `Monitor` that returns a JSON
        object; it is imported in the workers only.
    preload: modules that each process imports at its start. One that fails is passed over.
    memory_limit: bytes of private memory that a process may have (Linux, RLIMIT_DATA); an
        allocation beyond raises MemoryError, or what the code under test makes of it. None: no
        limit, for drivers that reserve address space by the terabyte.
    environment: variables for the workers, on top of this process's.
    sys_path: the workers' sys.path, by default this process's.
    standby: once a process was replaced, keep one more ready for the next that dies.
    under: a program and its options that the processes run under; the path of a log file follows,
        and what is written there in a case is its outcome's ``log``.
    executable: the interpreter, by default this process's; another needs its own `sys_path`.
    forks: let the processes be forks of one that has imported `preload` (Linux, without `under`):
        a process starts in hundredths of a second then, and not in the time that torch takes.
    started: whether processes start before they are asked.
    gpu: what processes share a GPU through; it outlives the pool. A process that takes the place of
        another shares nothing until its worker is lent again.

    The processes start at once and in the background; the first request waits for its own.
    """

    def __init__(
        self,
        handler: str,
        *,
        size: int = 1,
        preload: Sequence[str] = ("torch",),
        memory_limit: int | None = DEFAULT_MEMORY_LIMIT,
        environment: Mapping[str, str] | None = None,
        sys_path: Sequence[str] | None = None,
        standby: bool = True,
        under: Sequence[str] = (),
        executable: str = sys.executable,
        forks: bool = True,
        started: bool = True,
        gpu: SharedGpu | None = None,
    ) -> None:
        if not all(handler.partition(":")):
            msg = f"handler must be 'module:function', not {handler!r}"
            raise ValueError(msg)
        if size < 1:
            msg = f"size must be at least 1, not {size}"
            raise ValueError(msg)
        recipe = Recipe(
            handler=handler,
            preload=tuple(preload),
            memory_limit=memory_limit,
            under=tuple(under),
            executable=executable,
            forks=forks,
            environment={**_caches(), **os.environ, **_ONE_THREAD, **(environment or {})},
            # '' stands for the current folder, which the code under test may change.
            sys_path=tuple(
                entry or str(Path.cwd()) for entry in (sys.path if sys_path is None else sys_path)
            ),
        )
        self._supply = _Supply(recipe, standby=standby, gpu=gpu)
        self._freed = threading.Condition()
        self._owner = os.getpid()
        atexit.register(self.close)
        self._workers = [Worker(self._supply, started=started) for _ in range(size)]
        self._idle = [*self._workers]
        self._line: list[object] = []

    def preload(self) -> None:
        """Begin the imports of processes that are forks: another pool starts them sooner then."""
        begin_server(self._supply.recipe)

    @property
    def respawns(self) -> int:
        """How many processes took another's place, those of `renew` included."""
        return self._supply.replaced

    def __enter__(self) -> Self:
        """Return the pool itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    def left(self, owner: str | None) -> list[Left]:
        """Return what the code of an owner has left behind; all of it is known after `close`.

        Args:
            owner: None for what is left of which it is not known whose it is.
        """
        return self._supply.leftovers.of(owner)

    def read(self, owner: str) -> set[Read]:
        """Return what processes had read in which an owner's code ran, that of others included."""
        return set(self._supply.read.get(owner, ()))

    @contextmanager
    def lease(self, owner: str = "", patience: float = 0.0) -> Iterator[Worker]:
        """Yield a worker for the calling thread only, waiting in line until one is free.

        Args:
            owner: the owner whose code is to run in it, for `left`.
            patience: seconds to wait before that for a worker in which it has run.
        """
        turn = object()
        with self._freed:
            self._freed.wait_for(lambda: not self._has_run_elsewhere(owner), patience)
            # Without a line, a thread that has just given a worker back takes it again at once.
            self._line.append(turn)
            try:
                self._freed.wait_for(
                    lambda: self._supply.closed or (self._idle and self._line[0] is turn)
                )
            finally:
                self._line.remove(turn)
                self._freed.notify_all()
            self._supply.check_open()
            # Best is the worker that ran this owner last, then one that ever did, then the one that
            # knows fewest: what others have loaded stays warm for them.
            worker = max(
                reversed(self._idle),  # of several, the one that was given back last
                key=lambda each: (each.owner == owner, owner in each.owners, -len(each.owners)),
            )
            self._idle.remove(worker)
        self._supply.leftovers.begin(owner)
        try:
            worker.begin(owner)
            yield worker
        finally:
            worker.forget()
            self._supply.leftovers.end(owner)
            with self._freed:
                if self._supply.closed:
                    worker.drop()
                self._idle.append(worker)
                self._freed.notify_all()

    def _has_run_elsewhere(self, owner: str) -> bool:
        """Whether an owner's code has run in busy workers only."""
        knowing = [each for each in self._workers if owner in each.owners]
        return bool(knowing) and not (self._supply.closed or {*knowing} & {*self._idle})

    def close(self) -> None:
        """End all processes. A request that is going on in another thread raises RuntimeError."""
        atexit.unregister(self.close)
        if os.getpid() != self._owner:  # a fork of the owner, whose children these are
            return
        self._supply.close()
        with self._freed:
            self._freed.notify_all()
            for worker in self._idle:
                worker.drop()


def _caches() -> dict[str, str]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # it has a number only
        user = f"uid_{os.getuid()}"
    folder = Path(tempfile.gettempdir())
    return {name: str(folder / path.format(user=user)) for name, path in _CACHES.items()}


class _Supply:
    """The processes of one pool: the ones at work, and the standby that replaces them."""

    def __init__(self, recipe: Recipe, *, standby: bool, gpu: SharedGpu | None) -> None:
        self.closed = False
        self._gpu = gpu
        self.replaced = 0
        self.recipe = recipe
        self.leftovers = Leftovers()
        self.read: dict[object, set[Read]] = {}
        self._wants_standby = standby
        self._standby: WorkerProcess | None = None
        self._processes: set[WorkerProcess] = set()
        self._lock = threading.RLock()

    def start(self, **options: Any) -> WorkerProcess:  # noqa: ANN401
        """Start a process, with these fields of the recipe replaced; it is not waited for."""
        with self._lock:
            self.check_open()
            process = WorkerProcess(dataclasses.replace(self.recipe, **options))
            self._processes.add(process)
            return process

    def replace(self) -> WorkerProcess:
        """Return a process to work in another's place: the standby if there is one."""
        with self._lock:
            self.check_open()
            self.replaced += 1
            process, self._standby = self._standby, None
            if process is not None:
                self.stand_by()
            return process or self.start()

    def stand_by(self) -> None:
        """Start the standby unless there is one, or no process has needed another yet.

        In most runs none does. Not while the second imports either, which it would only slow.
        """
        with self._lock:
            if self._standby is None and self._wants_standby and self.replaced and not self.closed:
                self._standby = self.start()

    def client(self) -> Client | None:
        """Return what makes a process share its GPU; None where none does."""
        return None if self._gpu is None else self._gpu.client()

    def serves(self, client: Client) -> bool:
        """Whether no fault has ended what a process shares."""
        return self._gpu is not None and self._gpu.serves(client)

    def note_fault(self, client: Client) -> None:
        """Note that a fault has ended what a process shares, of this process or another."""
        if self._gpu is not None:
            self._gpu.note_fault(client)

    def end(self, process: WorkerProcess, owner: str) -> None:
        """End a process for good, in which the code of this owner ran last."""
        process.end()
        self.leftovers.note(owner, process.left)
        with self._lock:
            self._processes.discard(process)

    def check_open(self) -> None:
        """Raise RuntimeError once the supply is closed."""
        if self.closed:
            msg = "the worker pool is closed"
            raise RuntimeError(msg)

    def close(self) -> None:
        """Kill every process; whoever holds one still has to end it."""
        with self._lock:
            self.closed = True
            for process in self._processes:
                process.kill()
            if self._standby is not None:
                self._standby.end()
                self._standby = None
