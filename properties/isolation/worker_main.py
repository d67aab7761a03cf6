"""The child side of an isolated worker: it calls a handler for each request and replies.

The parent (`isolation.py`) starts this module in a process of its own session, so that whatever a
kernel does (hang, abort, exit) ends this process and nothing else. It knows nothing of laws: a
handler is any function that takes a JSON object and a `Monitor` and returns a JSON object.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from os import _exit, getpid  # what the code under test puts there is not called
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NoReturn

from . import reads
from .memory_use import KEPT_BYTES
from .stages import LINK, SPECIALISE, VARIABLES, Board, FrameReader, WorkerOptions, frame

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Handler = Callable[[dict[str, object], "Monitor"], dict[str, object]]

_STDERR = 2
_IOLBF = 1  # stdio.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_ALLOCATION = 32 << 20  # the most that mallopt allows


class Monitor:
    """Shows the parent the stage of a case; each stage has a deadline of its own."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.memory = [0, 0]
        """A call's need and what earlier requests had left in the process, in bytes."""
        self.enter("load")

    def enter(self, stage: str) -> None:
        """Begin `stage` ("load", "materialise", "compile", "run" or "judge") now."""
        self._specialised = 0
        self._note(stage, monotonic_ns())

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Enter a stage and, on leaving, return to the one before.

        The clock of the one before stood still meanwhile: a "compile" inside a "run" is not counted
        as running, and a "run" does not start afresh after each of many of them. "specialise" goes
        on where it ended in the same case: a loop that compiles without end overruns its deadline.
        """
        outer, spent = self._stage, monotonic_ns() - self._started
        began = monotonic_ns()
        before = self._specialised if name == SPECIALISE else 0
        self._note(name, began - before)
        try:
            yield
        except SystemExit:  # the process ends here, and this is where it stood
            outer, spent = self._stage, monotonic_ns() - self._started
            raise
        finally:
            if name == SPECIALISE:
                self._specialised = before + monotonic_ns() - began
            self._note(outer, monotonic_ns() - spent)

    def advance(self) -> None:
        """Count what the stage has taken since it began, or since the last such call, a tenth.

        For whoever has done one of a known number of steps: a slow call that goes on is not stuck,
        and a step that never ends has the deadline itself.
        """
        now = monotonic_ns()
        self._note(self._stage, self._started + (now - self._since) * 9 // 10)

    def note_memory(self, *, limit: int, room: int, need: int, held: int, left: int) -> None:
        """Have the parent know of this process's memory, should it die in the call that begins."""
        self.memory = [need, left]
        self._board.note_memory(limit=limit, room=room, need=need, held=held, left=left)

    def _note(self, stage: str, started: int) -> None:
        self._board.note(stage, started)
        self._stage, self._started, self._since = stage, started, monotonic_ns()


def main(options: str) -> NoReturn:
    """Serve requests until the parent closes the connection; `options` are `WorkerOptions` as JSON.

    Every way out is `os._exit`: a normal end of the interpreter would wait for the threads and run
    the exit handlers of the code under test.
    """
    status = 1
    try:
        _serve(WorkerOptions(**json.loads(options)))
        status = 0
    except SystemExit as leaving:
        status = _exit_status(leaving)
    except BaseException:  # noqa: BLE001 - this is the outermost frame of the process
        traceback.print_exc()
    finally:
        _flush()
        _exit(status)


def _serve(options: WorkerOptions) -> None:
    process = getpid()
    _prepare_process(options)
    connection = socket.socket(fileno=options.connection)
    output = os.dup(_STDERR)  # the code under test may close or redirect the stream itself
    monitor = Monitor(Board(options.board))
    try:
        handler = _load(options)
    except Exception:  # noqa: BLE001 - whatever keeps a handler from loading is told to the parent
        connection.sendall(frame({"unable": traceback.format_exc()}))
        return
    connection.sendall(frame({"ready": process}))
    reads.watch()
    requests = FrameReader(connection, links=True)
    while (request := requests.read()) is not None:
        link = requests.links.popleft() if request.get(LINK) else None
        if isinstance(variables := request.get(VARIABLES), dict):
            os.environ.update(variables)
        reply = _answer(handler, request, monitor, link, output)
        if getpid() != process:
            # The code under test forked and its child came back here: it must not answer as well.
            return
        monitor.enter("judge")  # sending is no part of a run that the handler did not leave
        connection.sendall(reply)


def _answer(
    handler: Handler,
    request: dict[str, Any],
    monitor: Monitor,
    link: socket.socket | None,
    output: int,
) -> bytes:
    """Return the frame that answers `request`; the link ends with it, whoever else holds it."""
    number = request["id"]
    monitor.enter("load")
    try:
        payload = request["payload"] if link is None else {**request["payload"], LINK: link}
        result = handler(payload, monitor)
        answer = {"id": number, "result": result, "printed": _printed(output)}
        read = {"read": new} if (new := reads.taken()) else {}
        return frame(
            {**answer, **read, **({"memory": monitor.memory} if monitor.memory[1] else {})}
        )
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - no other exception may end the worker
        raised = {"raised": type(error).__name__, "traceback": traceback.format_exc()}
        return frame({"id": number, **raised, "printed": _printed(output)})
    finally:
        if link is not None:
            with contextlib.suppress(OSError):  # the other side was first
                link.shutdown(socket.SHUT_RDWR)
            link.close()


def _prepare_process(options: WorkerOptions) -> None:
    """Make the end of this process informative and contained."""
    # Ctrl-C is the parent's: it decides what becomes of a running case.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for fd in (options.connection, options.board, options.dumps):
        os.set_inheritable(fd, False)  # noqa: FBT003 - not for the programs that the code under test starts
    # Dumps go to a file of their own: the code under test may close or redirect stderr.
    faulthandler.enable(file=options.dumps)
    faulthandler.register(signal.SIGUSR1, file=options.dumps, all_threads=True)
    # What was printed before an abort must be in the file, not in a buffer.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    with contextlib.suppress(OSError, AttributeError, ValueError):  # C's stdout, a GPU's printf
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)
    _keep_freed_memory()
    _limit_memory(options.memory_limit)


def _keep_freed_memory() -> None:
    """Have malloc hand out freed memory again before it asks for more (glibc).

    Fresh pages cost more than the arithmetic in them: four small decodes were materialised in 2.1
    ms of processor time in the place of 3.1 ms, and the oracle took 2.0 ms in the place of 3.2 ms.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_ALLOCATION)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def _limit_memory(limit: int | None) -> None:
    """Let an allocation too many fail here, where it is one case's verdict, and not the machine."""
    with contextlib.suppress(OSError):
        # If memory runs out all the same, this process is the one to go.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with contextlib.suppress(OSError, ValueError):  # ValueError: a stricter limit is in force
        # An expected death leaves no core file.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit is not None:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _load(options: WorkerOptions) -> Handler:
    """Import what is asked for and return the handler."""
    gc.disable()  # it finds nothing among what is imported, in a fifth of the imports' time
    import_all(options.preload)
    module, _, function = options.handler.partition(":")
    handler: Handler = getattr(importlib.import_module(module), function)
    if "torch" in sys.modules:
        # Several workers share the machine's cores, and one thread sums in the same order always.
        sys.modules["torch"].set_num_threads(1)
    gc.freeze()
    gc.enable()
    return handler


def import_all(names: Sequence[str]) -> None:
    """Import modules; one that fails is imported again, and reported, by what needs it."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _exit_status(leaving: SystemExit) -> int:
    """Return the status that the interpreter would have left with."""
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def _printed(output: int) -> int:
    """Return where the output of this request ends: that of the next one may follow at once."""
    _flush()
    try:
        return os.fstat(output).st_size
    except OSError:  # the code under test has closed it
        return 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the code under test may have closed it
            stream.flush()
