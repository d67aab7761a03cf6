"""Misbehaving kernels as data: what each does, where, and what must come of it.

Read by the harness, and by the worker processes that call the kernels (``make`` is how the files of
a run are made of a row).
"""

from __future__ import annotations

import _thread
import builtins
import contextlib
import ctypes
import gc
import hashlib
import itertools
import json
import locale
import multiprocessing
import os
import queue
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from kernelproof.impl import UnsupportedError, implementation
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.isolation import worker_main
from kernelproof.properties.isolation.stages import frame
from kernelproof.properties.laws import general
from kernelproof.properties.verdicts import comparison
from kernelproof.properties.verdicts.verdict import PASS, Verdict
from kernelproof.reference import AttentionOutput, AttentionProblem, MergeProblem, MoEProblem
from kernelproof.reference.attention.bounds import Bounded
from kernelproof.reference.operations import OPERATIONS, bounded_answer

POINTS = ("import", "supports", "call", "third", "after", "exit")
"""Where an effect can be: third: in the third call of each process and all later ones; after: in a
thread, shortly after each call; exit: when the interpreter would leave."""
LONG = 600.0
"""Seconds that whatever sleeps sleeps: longer than any run."""
LATER_SECONDS = 0.02
"""Seconds between the return of a call and what a thread of it does."""


def tag() -> str:
    """Return what stands in the name of whatever a kernel leaves, so that it can be found."""
    return os.environ.get("KERNELPROOF_FAULT_RUN", "kernelproof-fault-none")


Effect = Callable[[], object]
Change = Callable[[Any, Any], Any]
"""Makes a wrong result of the inputs and the right result."""


@dataclass(frozen=True)
class Fault:
    """One misbehaving kernel.

    Attributes:
        name: of the row.
        effect: what it does at ``at``; its result is not used.
        change: what it makes of its inputs and its right result.
        at: one of ``POINTS``.
        operation: that it implements.
        must: statuses that its finding may have, separated by ``|``: PASS for none, ERROR for a
            kernel that cannot be imported (exit 2), ANY for whatever accuses nobody else.
        kind: regular expression that the kind of the finding matches, from its beginning.
        says: words of the message, the trace or the error; of a child or a file that was left
            too, which must be named in the report.
        laws: under which it is judged.
        options: of the decorator.
        sample: whether it belongs to the fast part.
        distrust: whether it runs with ``--distrust``.
    """

    name: str
    effect: Effect | None = None
    change: Change | None = None
    at: str = "call"
    operation: str = "paged_attention"
    must: str = "CRASH"
    kind: str = ""
    says: str = ""
    laws: tuple[str, ...] = ()
    options: dict[str, Any] | None = None
    sample: bool = False
    distrust: bool = False


# What any operation's kernel needs


def small(problem: Any, target: object) -> bool | str:  # noqa: ANN401  any operation's
    """Claim small problems only: they are drawn and judged in no time."""
    del target
    if isinstance(problem, AttentionProblem):
        large = problem.head_dim_qk > 32 or problem.num_qo_heads > 8 or problem.page_size > 16
        return "only small problems" if large else True
    if isinstance(problem, MergeProblem) and problem.head_dim > 16:
        return "only small problems"
    if isinstance(problem, MoEProblem) and problem.hidden > 64:
        return "only small problems"
    return True


def right(operation: str, inputs: Any) -> Any:  # noqa: ANN401  any operation's
    """Return the oracle's answer as a kernel gives it."""
    answer = OPERATIONS[operation].answer(inputs)
    if operation == "moe":
        return answer.to(inputs.out_dtype)
    if operation == "route":
        return answer.topk_ids.int(), answer.topk_weights.float()
    if operation in ("paged_attention", "ragged_attention", "merge_state"):
        return answer.out.to(inputs.out_dtype), answer.lse.float()
    return answer


def first_of(answer: Any, change: Callable[[torch.Tensor], Any]) -> Any:  # noqa: ANN401
    """Change the first tensor of an answer."""
    if isinstance(answer, torch.Tensor):
        return change(answer)
    if hasattr(answer, "qo_indptr"):
        fields = {**answer.tensors(), "qo_indptr": change(answer.qo_indptr)}
        return SimpleNamespace(page_size=answer.page_size, **fields)
    return change(answer[0]), answer[1]


def honest(operation: Any) -> Any:  # noqa: ANN401  an implementation
    """Return a kernel that is right."""
    return implementation(operation, name="bystander", supports=small)(
        lambda inputs: right(operation, inputs)
    )


def make(name: str, at: str = "", operation: str = "") -> Any:  # noqa: ANN401  an implementation
    """Return the kernel of a row, or do at once what it does when it is imported.

    Args:
        name: of the row; two joined by ``+`` are the effect of one and the change of the other.
        at: point instead of the row's.
        operation: instead of the row's.
    """
    fault = find(name, at, operation)
    if fault.at == "import" and fault.effect is not None:
        fault.effect()
    if fault.at == "exit" and fault.effect is not None:
        import atexit

        atexit.register(fault.effect)
    calls = itertools.count(1)

    def run(inputs: Any) -> Any:  # noqa: ANN401
        number = next(calls)
        if fault.effect is not None:
            if fault.at == "call" or (fault.at == "third" and number >= 3):
                fault.effect()
            elif fault.at == "after":
                threading.Timer(LATER_SECONDS, fault.effect).start()
        answer = right(fault.operation, inputs)
        return answer if fault.change is None else fault.change(inputs, answer)

    def supports(problem: object, target: object) -> Any:  # noqa: ANN401
        if fault.at == "supports" and fault.effect is not None:
            given = fault.effect()
            if given is not None:
                return given
        return small(problem, target)

    options = {"name": "subject", "supports": supports, **(fault.options or {})}
    operation_: Any = fault.operation
    return implementation(operation_, **options)(run)


def find(name: str, at: str = "", operation: str = "") -> Fault:
    """Return a row, or the combination of two, at a point."""
    effect, _, change = name.partition("+")
    fault = BY_NAME[effect]
    if change:
        other = BY_NAME[change]
        fault = replace(
            fault, name=name, change=other.change, must="FAIL|FLAKY|CRASH|HANG", kind="", says=""
        )
    if at and at != fault.at:  # it is seen elsewhere, or not in each process's first calls
        fault = replace(fault, must=f"{fault.must}|{ELSEWHERE_TOO.get(at, 'FLAKY')}", kind="")
    return replace(fault, at=at or fault.at, operation=operation or fault.operation)


ELSEWHERE_TOO = {"import": "ERROR", "supports": "CRASH"}
"""What may come of a fault at another point, besides what must come of it at its own."""


# Exceptions


def raises(error: Any) -> Effect:  # noqa: ANN401  an exception, or a function that makes one
    """Return an effect that raises."""

    def effect() -> NoReturn:
        raise error if isinstance(error, BaseException | type) else error()

    return effect


GROUP: Any = getattr(builtins, "BaseExceptionGroup", lambda _, errors: errors[0])
"""The exception of several; their first one before Python 3.11."""


class Skipped(BaseException):
    """What pytest.skip raises is no Exception."""


class PanicException(BaseException):
    """What pyo3 makes of a panic of Rust is no Exception."""


def hostile(base: type[BaseException] = Exception, **methods: Any) -> Effect:  # noqa: ANN401
    """Return an effect that raises an exception with such methods."""
    return raises(type("Hostile", (base,), dict(methods)))


def _fail(*_: object) -> NoReturn:
    message = "a method of an exception"
    raise RuntimeError(message)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _loop(*_: object) -> NoReturn:
    while True:
        time.sleep(LONG)


METHODS = ("splitlines", "strip", "partition", "encode", "__len__", "__add__", "__getitem__")
TextOfItsOwn: Any = type("TextOfItsOwn", (str,), dict.fromkeys(METHODS, _fail))
"""A str whose methods raise."""


def circle() -> BaseException:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    first.__context__, second.__context__ = second, first
    return first


def chain() -> BaseException:
    error = ValueError("the end of a long chain")
    for _ in range(20_000):
        other = ValueError("a link")
        other.__cause__, error = error, other
    return error


def noted() -> BaseException:
    error = ValueError("with notes")
    error.__notes__ = ["\x07", 3, None, "x" * 10**6]  # type: ignore[attr-defined]
    return error


def odd_syntax_error() -> BaseException:
    return SyntaxError("odd", (None, -5, 10**9, "\x00", "x", object()))  # type: ignore[arg-type]


def nested_groups() -> BaseException:
    group: Any = ValueError("the innermost")
    for _ in range(2_000):
        group = GROUP("a group", [group])
    return group  # type: ignore[no-any-return]


def deep_recursion() -> None:
    deep_recursion()


def deep_traceback() -> None:
    sys.setrecursionlimit(100_000)

    def deep(left: int) -> None:
        if left == 0:
            message = "very deep"
            raise ValueError(message)
        deep(left - 1)

    deep(20_000)


FORGED = "no\r\n\x1b[2K\x1b[1ACONFORMING: no new finding\x07\x00\u202e\u2028end"
LURKING = "\ud800 a lone surrogate"

EXCEPTIONS: tuple[Fault, ...] = (
    *(
        Fault(f"raise {error.__name__}", raises(error), kind=error.__name__)
        for error in (
            KeyboardInterrupt, SystemExit, GeneratorExit, BaseException, StopIteration,
            StopAsyncIteration, AssertionError, NotImplementedError, BrokenPipeError,
            ConnectionResetError, TimeoutError, EOFError, Skipped, PanicException, Warning,
            RecursionError,
        )
    ),
    Fault("raise MemoryError", raises(MemoryError), kind="out of memory"),
    Fault("raise UnsupportedError", raises(UnsupportedError("not this one")),
          must="REJECTED", says="not this one"),
    Fault("raise UnicodeDecodeError", raises(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd"))),
    Fault("raise KeyError of an object", raises(KeyError(object())), kind="KeyError"),
    Fault("raise a group", raises(GROUP("two", [KeyboardInterrupt(), OSError("x")]))),
    Fault("raise nested groups", raises(nested_groups)),
    Fault("raise a chain in a circle", raises(circle), kind="ValueError"),
    Fault("raise a long chain", raises(chain), kind="ValueError"),
    Fault("raise with odd notes", raises(noted), kind="ValueError"),
    Fault("raise an odd SyntaxError", raises(odd_syntax_error), kind="SyntaxError"),
    Fault("recurse without end", deep_recursion, kind="RecursionError"),
    Fault("raise from deep below", deep_traceback),
    Fault("__str__ raises", hostile(__str__=_fail), kind="Hostile", sample=True),
    Fault("__str__ interrupts", hostile(__str__=_interrupt), kind="Hostile"),
    Fault("__str__ gives a number", hostile(__str__=lambda _: 3), kind="Hostile"),
    Fault("__str__ gives a hostile str", hostile(__str__=lambda _: TextOfItsOwn("odd")),
          kind="Hostile"),
    Fault("__str__ hangs", hostile(__str__=_loop), must="CRASH|HANG"),
    Fault("__repr__ raises", hostile(__repr__=_fail), kind="Hostile"),
    Fault("__eq__ raises", hostile(__eq__=_fail, __hash__=_fail), kind="Hostile"),
    Fault("__bool__ and __len__ raise", hostile(__bool__=_fail, __len__=_fail), kind="Hostile"),
    Fault("__reduce__ raises", hostile(__reduce__=_fail, __reduce_ex__=_fail), kind="Hostile"),
    Fault("__getattribute__ raises", hostile(__getattribute__=_fail)),
    Fault("__class__ lies", hostile(__class__=property(lambda _: int)), kind="Hostile"),
    Fault("UnsupportedError whose __str__ raises", hostile(UnsupportedError, __str__=_fail),
          must="REJECTED|CRASH"),
    Fault("MemoryError whose __str__ raises", hostile(MemoryError, __str__=_fail)),
    Fault("a name of a megabyte", raises(type("X" * 10**6, (Exception,), {}))),
    Fault("a name with a newline", raises(type("A\nCONFORMING\x1b[1m", (Exception,), {}))),
    Fault("a message of 10 MB", raises(ValueError("x" * 10_000_000)), kind="ValueError"),
    Fault("a message of a million lines", raises(ValueError("x\n" * 10**6)), kind="ValueError"),
    Fault("a message that forges a verdict", raises(ValueError(FORGED)), kind="ValueError",
          sample=True),
    Fault("a lone surrogate", raises(ValueError(LURKING)), kind="ValueError"),
    Fault("a message in markup", raises(ValueError("[/bold] [red]x[/nothing] <b>&amp;")),
          kind="ValueError", says="[/bold]"),
)  # fmt: skip


# Ends of the process, and what never ends


def send(number: int) -> Effect:
    """Return an effect that sends a signal to its own process."""

    def effect() -> None:
        signal.signal(number, signal.SIG_DFL) if number not in (
            signal.SIGKILL,
            signal.SIGSTOP,
        ) else None
        os.kill(os.getpid(), number)

    return effect


def _read_null() -> None:
    ctypes.string_at(0)


def _cpu_limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    while True:
        pass


def _become(*command: str) -> Effect:
    return lambda: os.execvp(command[0], command)  # noqa: S606


def _exit_in_thread(status: int) -> Effect:
    def effect() -> None:
        threading.Thread(target=os._exit, args=(status,)).start()
        time.sleep(LONG)

    return effect


class HostileStatus:
    """A status of an exit that cannot be written."""

    __str__ = __repr__ = __int__ = _fail


DEATHS: tuple[Fault, ...] = (
    Fault("read address 0", _read_null, kind="SIGSEGV", sample=True),
    Fault("abort", os.abort, kind="SIGABRT"),
    *(
        Fault(f"die of {number.name}", send(number), kind=number.name)
        for number in (
            signal.SIGTERM, signal.SIGFPE, signal.SIGILL, signal.SIGBUS, signal.SIGHUP,
            signal.SIGINT, signal.SIGPIPE, signal.SIGALRM, signal.SIGUSR2, signal.SIGQUIT,
        )
    ),
    Fault("die of SIGKILL", send(signal.SIGKILL), kind="SIGKILL"),
    Fault("kill its group", lambda: os.killpg(0, signal.SIGKILL), kind="SIGKILL"),
    Fault("use up its processor time", _cpu_limit, must="CRASH|HANG"),
    Fault("os._exit(0)", lambda: os._exit(0), kind="exit|closed"),
    Fault("os._exit(3)", lambda: os._exit(3), kind="exit", says="3"),
    Fault("sys.exit()", sys.exit, kind="SystemExit"),
    Fault("sys.exit(2)", lambda: sys.exit(2), kind="SystemExit", sample=True),
    Fault("sys.exit of a text", lambda: sys.exit("farewell"), kind="SystemExit"),
    Fault("sys.exit of what cannot be written", lambda: sys.exit(HostileStatus()), kind="SystemExit"),  # type: ignore[arg-type]  # noqa: E501
    Fault("exit in a thread", _exit_in_thread(5), kind="exit"),
    Fault("interrupt the main thread", _thread.interrupt_main, must="ANY"),
    Fault("become another program", _become("true")),
    Fault("become a program that sleeps", _become("sleep", str(LONG)), must="CRASH|HANG"),
)  # fmt: skip


def _spin() -> NoReturn:
    while True:
        pass


def _sleep() -> None:
    time.sleep(LONG)


def _sleep_whatever_comes() -> NoReturn:
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(LONG)


def _deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _pause_with_the_interpreter_lock() -> NoReturn:
    while True:
        ctypes.PyDLL(None).pause()


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    time.sleep(LONG)


def _ignore_signals() -> None:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    time.sleep(LONG)


def _print_without_end() -> NoReturn:
    while True:
        os.write(1, b"more and more\n" * 4096)


def _wait_for_child() -> None:
    subprocess.run(["sleep", str(LONG)], check=False)  # noqa: S607


HANGS: tuple[Fault, ...] = tuple(
    Fault(name, effect, must="HANG", kind="run", sample=name == "sleep")
    for name, effect in {
        "spin": _spin,
        "sleep": _sleep,
        "sleep whatever comes": _sleep_whatever_comes,
        "search a regular expression": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),
        "derive a key": lambda: hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2**31 - 1),
        "add without end": lambda: sum(itertools.count()),
        "wait for itself": _deadlock,
        "wait for a queue": lambda: queue.Queue[int]().get(),
        "wait for an event": lambda: threading.Event().wait(),
        "wait for a pipe": lambda: os.read(os.pipe()[0], 1),
        "wait for nothing": lambda: select.select([], [], []),
        "wait for a child": _wait_for_child,
        "pause with the interpreter's lock": _pause_with_the_interpreter_lock,
        "block all signals": _block_signals,
        "ignore all signals": _ignore_signals,
        "stop itself": send(signal.SIGSTOP),
        "print without end": _print_without_end,
    }.items()
)


def _grow() -> None:
    kept = []
    while True:
        kept.append(torch.empty(256 << 20, dtype=torch.uint8))


def _allocate(size: int) -> Effect:
    return lambda: torch.empty(size, dtype=torch.uint8)


MEMORY: tuple[Fault, ...] = (
    Fault("allocate without end", _grow, kind="out of memory|SIGKILL"),
    Fault("allocate a petabyte", _allocate(10**15), kind="out of memory", sample=True),
    Fault("allocate more than there is", lambda: bytearray(1 << 50), kind="out of memory"),
    Fault("allocate a negative size", _allocate(-1), kind="RuntimeError"),
)


# What is left running or lying about, beside a right answer


def _threads(target: Effect, *, daemon: bool) -> Effect:
    return lambda: threading.Thread(target=target, daemon=daemon).start()


def _fork(*, sessions: int = 0, then: Effect = _sleep) -> Effect:
    def effect() -> None:
        if os.fork() == 0:
            for _ in range(sessions):
                os.setsid()
                if sessions > 1 and os.fork():
                    os._exit(0)
            then()
            os._exit(0)

    return effect


def _fork_and_return() -> None:
    os.fork()


def _popen(**options: Any) -> Effect:  # noqa: ANN401
    return lambda: subprocess.Popen(["sleep", str(LONG)], **options)  # noqa: S607


def _stubborn() -> None:
    command = ["sh", "-c", f"trap '' TERM HUP INT; sleep {LONG}"]
    subprocess.Popen(command, start_new_session=True)


def _many_children() -> None:
    for _ in range(20):
        subprocess.Popen(["sleep", str(LONG)], start_new_session=True)  # noqa: S607


def _other_group() -> None:
    subprocess.Popen(["sleep", str(LONG)], preexec_fn=os.setpgrp)  # noqa: S607, PLW1509


def _leave_session() -> None:
    with contextlib.suppress(OSError):
        os.setsid()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)


def _pool() -> None:
    pool = multiprocessing.get_context("fork").Pool(2)
    pool.apply_async(_sleep)
    KEPT.append(pool)


KEPT: list[Any] = []


def _shared_memory() -> None:
    with contextlib.suppress(FileExistsError):
        KEPT.append(shared_memory.SharedMemory(f"{tag()}-shm", create=True, size=4096))


def _shm_file() -> None:
    Path(f"/dev/shm/{tag()}-file").write_bytes(b"x" * 4096)  # noqa: S108


def _temporary_files() -> None:
    handle, _ = tempfile.mkstemp(prefix=tag())
    os.close(handle)
    (Path(tempfile.mkdtemp(prefix=tag())) / "file").write_text("left")


def _file_in_tmp() -> None:
    Path(f"/tmp/{tag()}-file").write_text("left")  # noqa: S108


def _socket_file() -> None:
    end = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):
        end.bind(f"{tempfile.gettempdir()}/s")
    KEPT.append(end)


def _listen() -> None:
    KEPT.append(socket.create_server(("127.0.0.1", 0)))


def _tensor_in_shared_memory() -> None:
    KEPT.append(torch.zeros(16).share_memory_())


def _lose_folder() -> None:
    folder = tempfile.mkdtemp(prefix=tag())
    os.chdir(folder)
    shutil.rmtree(folder)


def _close(*fds: int) -> Effect:
    def effect() -> None:
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)

    return effect


def _print(size: int, fd: int = 1) -> Effect:
    def effect() -> None:
        for _ in range(size >> 16):
            os.write(fd, b"0123456789abcde\n" * 4096)

    return effect


def _to_sockets() -> None:
    import stat

    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, b'\x00\x00\x00\x02{}"garbage in the protocol"')


def _to_files() -> None:
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            if not os.isatty(fd):
                os.pwrite(fd, b"\xff" * 64, 0)


def _exhaust_descriptors() -> None:
    with contextlib.suppress(OSError):
        while True:
            KEPT.append(os.open("/dev/null", os.O_RDONLY))


def _many_threads() -> None:
    for _ in range(100):
        threading.Thread(target=_sleep, daemon=True).start()


LEFT: tuple[Fault, ...] = tuple(
    Fault(name, effect, must=must, says=says, sample=sample)
    for name, effect, must, says, sample in (
        ("a daemon thread sleeps", _threads(_sleep, daemon=True), "PASS", "", False),
        ("a thread sleeps", _threads(_sleep, daemon=False), "PASS", "", False),
        ("a thread raises", _threads(raises(KeyError), daemon=True), "PASS", "", True),
        ("a thread exits", _threads(sys.exit, daemon=True), "PASS", "", False),
        ("a hundred threads", _many_threads, "ANY", "", False),
        ("a child sleeps", _fork(), "PASS", "", False),
        ("a child returns", _fork_and_return, "ANY", "", False),
        ("a child in its own session", _fork(sessions=1), "PASS", "", True),
        ("a daemon", _fork(sessions=2), "PASS", "", False),
        ("a program", _popen(), "PASS", "", False),
        ("a program in its own session", _popen(start_new_session=True), "PASS", "sleep", True),
        ("a program in its own group", _other_group, "PASS", "", False),
        ("a stubborn program", _stubborn, "PASS", "", False),
        ("twenty programs", _many_children, "PASS", "", False),
        ("it leaves its session", _leave_session, "PASS", "", False),
        ("a pool of processes", _pool, "PASS", "", False),
        ("shared memory", _shared_memory, "PASS", "", True),
        ("a file in shared memory", _shm_file, "PASS", "{TAG}-file", False),
        ("a tensor in shared memory", _tensor_in_shared_memory, "PASS", "", False),
        ("temporary files", _temporary_files, "PASS", "", True),
        ("a file in /tmp", _file_in_tmp, "ANY", "", False),
        ("the file of a socket", _socket_file, "PASS", "", False),
        ("an open port", _listen, "PASS", "", False),
        ("a working directory that is gone", _lose_folder, "PASS", "", True),
        ("standard input closed", _close(0), "PASS", "", False),
        ("standard output closed", _close(1), "PASS", "", False),
        ("standard error closed", _close(2), "PASS", "", False),
        ("all three closed", _close(0, 1, 2), "PASS", "", True),
        ("all descriptors closed", lambda: os.closerange(0, 1024), "CRASH", "", False),
        ("no descriptor is free", _exhaust_descriptors, "ANY", "", False),
        ("100 MB printed", _print(100 << 20), "PASS|HANG", "", False),
        ("100 MB of errors printed", _print(100 << 20, 2), "PASS|HANG", "", False),
        ("garbage in the connection", _to_sockets, "CRASH|HANG", "", True),
        ("garbage in all files", _to_files, "ANY", "", False),
    )
)


# What is patched in its process, beside a right answer


def patch(target: object, name: str, value: object) -> Effect:
    """Return an effect that sets an attribute for good."""
    return lambda: setattr(target, name, value)


def _set_default_dtype() -> None:
    torch.set_default_dtype(torch.float16)


def _deterministic() -> None:
    torch.use_deterministic_algorithms(mode=True)


def _warnings_as_errors() -> None:
    warnings.simplefilter("error")


def _trace() -> None:
    sys.settrace(lambda *_: _fail())


def _seed() -> None:
    import random

    random.seed(0)
    torch.manual_seed(0)


def _clear_environment() -> None:
    os.environ.clear()


def _signal_handlers() -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)


def _locale() -> None:
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, "C.UTF-8")
    os.environ["LC_ALL"] = "xx_YY"


def _forget_modules() -> None:
    for name in [name for name in sys.modules if name.startswith("kernelproof")]:
        del sys.modules[name]


def _hostile_path() -> None:
    sys.path[:] = [3, None, object()]  # type: ignore[list-item]


def _small_recursion_limit() -> None:
    import inspect

    sys.setrecursionlimit(len(inspect.stack()) + 40)


def _meta_path() -> None:
    class Finder:
        find_spec = staticmethod(_fail)

    sys.meta_path.insert(0, Finder())


def _freeze_time() -> None:
    time.monotonic_ns = lambda: 0
    time.monotonic = time.perf_counter = time.time = lambda: 0.0


def _default_device() -> None:
    torch.set_default_device("meta")


PATCHES: tuple[Fault, ...] = tuple(
    Fault(f"patch {name}", effect, must="ANY", sample=name in SAMPLED)
    for SAMPLED in [("time.monotonic_ns", "torch.Tensor.to", "sys.modules['torch']")]
    for name, effect in {
        "time.monotonic_ns": patch(time, "monotonic_ns", _fail),
        "time.monotonic_ns to 0": patch(time, "monotonic_ns", lambda: 0),
        "all clocks to 0": _freeze_time,
        "time.sleep": patch(time, "sleep", _fail),
        "time.perf_counter": patch(time, "perf_counter", _fail),
        "torch.Tensor.to": patch(torch.Tensor, "to", _fail),
        "torch.Tensor.item": patch(torch.Tensor, "item", _fail),
        "torch.Tensor.tolist": patch(torch.Tensor, "tolist", _fail),
        "torch.Tensor.clone": patch(torch.Tensor, "clone", _fail),
        "torch.Tensor.__eq__": patch(torch.Tensor, "__eq__", _fail),
        "torch.empty": patch(torch, "empty", _fail),
        "torch.stack": patch(torch, "stack", _fail),
        "torch.equal": patch(torch, "equal", _fail),
        "torch.isnan": patch(torch, "isnan", _fail),
        "torch.allclose": patch(torch, "allclose", _fail),
        "torch.where": patch(torch, "where", _fail),
        "sys.modules['torch']": lambda: vars(sys)["modules"].update(torch=None),
        "sys.modules of kernelproof": _forget_modules,
        "sys.path": _hostile_path,
        "sys.meta_path": _meta_path,
        "sys.stdout": patch(sys, "stdout", None),
        "sys.stdout with a hostile one": patch(sys, "stdout", object()),
        "sys.excepthook": patch(sys, "excepthook", _fail),
        "sys.settrace": _trace,
        "sys.exc_info": patch(sys, "exc_info", _fail),
        "builtins.open": patch(builtins, "open", _fail),
        "builtins.isinstance": patch(builtins, "isinstance", _fail),
        "builtins.print": patch(builtins, "print", _fail),
        "builtins.__import__": patch(builtins, "__import__", _fail),
        "builtins.Exception": patch(builtins, "Exception", KeyError),
        "json.dumps": patch(json, "dumps", _fail),
        "json.loads": patch(json, "loads", _fail),
        "json.JSONEncoder": patch(json.JSONEncoder, "default", _fail),
        "traceback.format_exception": patch(traceback, "format_exception", _fail),
        "os.getpid": patch(os, "getpid", lambda: 1),
        "os.environ": _clear_environment,
        "socket.socket": patch(socket, "socket", None),
        "threading.Thread": patch(threading, "Thread", None),
        "gc off": gc.disable,
        "gc thresholds": lambda: gc.set_threshold(1),
        "the recursion limit": _small_recursion_limit,
        "warnings as errors": _warnings_as_errors,
        "random states": _seed,
        "the default dtype": _set_default_dtype,
        "the default device": _default_device,
        "the number of threads": lambda: torch.set_num_threads(7),
        "deterministic algorithms": _deterministic,
        "the grad mode": lambda: torch.set_grad_enabled(mode=False),
        "inference mode": lambda: KEPT.append(torch.inference_mode().__enter__()),  # type: ignore[func-returns-value]
        "signal handlers": _signal_handlers,
        "an alarm": lambda: signal.setitimer(signal.ITIMER_REAL, 0.05),
        "the locale": _locale,
        "the umask": lambda: os.umask(0o777),
        "the limit of files": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8)),
        "the limit of a file's size": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    }.items()
)


# Results


class HostileTensor(torch.Tensor):
    """A tensor whose every function raises."""

    @classmethod
    def __torch_function__(cls, *_: object, **__: object) -> NoReturn:
        message = "__torch_function__ of a result"
        raise RuntimeError(message)


class LyingTensor(torch.Tensor):
    """A tensor that says of every comparison that it holds."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        plainly: Any = super().__torch_function__
        result = plainly(func, types, args, kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("eq", "__eq__", "le", "__le__", "all", "equal", "isnan", "sub", "__sub__"):
            plain = torch.Tensor.as_subclass(result, torch.Tensor)
            return torch.ones_like(plain) if plain.dtype == torch.bool else torch.zeros_like(plain)
        return result


HostileTuple: Any = type("HostileTuple", (tuple,), {"__len__": _fail})
"""A pair whose length cannot be asked."""


class LazyPair:
    """Two results that raise when they are looked at."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        _fail()
        yield torch.zeros(1)

    __len__ = __getitem__ = __getattr__ = _fail


class HostileClass:
    """A result whose class cannot be asked."""

    __class__ = property(_fail)
    __repr__ = _fail


def out(change: Callable[[torch.Tensor], Any]) -> Change:
    """Return a change of the first tensor of a result."""
    return lambda _, answer: first_of(answer, change)


def lse(change: Callable[[torch.Tensor], Any]) -> Change:
    """Return a change of the second tensor of a result."""
    return lambda _, answer: (answer[0], change(answer[1]))


def result(value: object) -> Change:
    """Return a change to something else."""
    return lambda _, __: value


def _quantised(t: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)


def _overlapping(t: torch.Tensor) -> torch.Tensor:
    return t[:1].expand_as(t) if len(t) > 1 else t + 1.0


def _generator(_: object, answer: Any) -> Iterator[Any]:  # noqa: ANN401
    yield from answer


def _mutate(inputs: Any, answer: Any) -> Any:  # noqa: ANN401
    inputs.q.add_(1.0)
    return answer


def _resize(inputs: Any, answer: Any) -> Any:  # noqa: ANN401
    inputs.q.resize_(0)
    return answer


def _free(inputs: Any, answer: Any) -> Any:  # noqa: ANN401
    inputs.q.untyped_storage().resize_(0)
    return answer


def _replace_data(inputs: Any, answer: Any) -> Any:  # noqa: ANN401
    inputs.q.data = torch.zeros(1)
    return answer


def _mutate_lengths(inputs: Any, answer: Any) -> Any:  # noqa: ANN401
    inputs.metadata.seq_lens.add_(1)
    return answer


def _require_grad(inputs: Any, answer: Any) -> Any:  # noqa: ANN401
    inputs.q.requires_grad_()
    return answer


def _delete_fields(inputs: Any, answer: Any) -> Any:  # noqa: ANN401
    with contextlib.suppress(Exception):
        vars(inputs).clear()
    return answer


def _change_later(_: object, answer: Any) -> Any:  # noqa: ANN401
    def later() -> None:
        for _ in range(200):
            answer[0].add_(1.0)
            time.sleep(0.001)

    threading.Thread(target=later, daemon=True).start()
    return answer


_count = itertools.count()


def _alternate(t: torch.Tensor) -> torch.Tensor:
    return t + 1.0 if next(_count) % 2 else t


def _noisy(t: torch.Tensor) -> torch.Tensor:
    return t * (1.0 + 2.0**-23 * (next(_count) % 2))


_memory: list[Any] = []


def _previous(_: object, answer: Any) -> Any:  # noqa: ANN401
    """Return the result of the previous call if its shape fits."""
    _memory.append(answer)
    old = _memory[-2] if len(_memory) > 1 else answer
    return old if old[0].shape == answer[0].shape else (answer[0] + 1.0, answer[1])


def _view_of_input(inputs: Any, answer: Any) -> Any:  # noqa: ANN401
    flat = inputs.q.flatten()
    count = answer[0].numel()
    if flat.numel() < count:
        return answer[0] + 1.0, answer[1]
    return flat[:count].view(answer[0].shape), answer[1]


WRONG = "FAIL|FLAKY"

RESULTS: tuple[Fault, ...] = tuple(
    Fault(f"return {name}", change=change, must=must, kind=kind, says=says, laws=laws,
          sample=name in SAMPLED)
    for SAMPLED in [("wrong numbers", "a sparse tensor", "a hostile tuple", "float64")]
    for name, change, must, kind, says, laws in (
        ("wrong numbers", out(lambda t: t + 1.0), WRONG, "numeric", "", ()),
        ("NaN", out(lambda t: t * torch.nan), WRONG, "nan", "", ()),
        ("infinity", out(lambda t: t + torch.inf), WRONG, "", "", ()),
        ("zeros", out(torch.zeros_like), WRONG, "", "", ()),
        ("float64", out(lambda t: t.double()), WRONG, "dtype", "float64", ("well_formed",)),
        ("integers", out(lambda t: t.int()), WRONG, "", "", ()),
        ("booleans", out(lambda t: t.bool()), WRONG, "", "", ()),
        ("complex numbers", out(lambda t: t.to(torch.complex64)), WRONG, "dtype", "complex", ()),
        ("float8", out(lambda t: t.float().to(torch.float8_e4m3fn)), WRONG, "dtype", "float8", ()),
        ("a sparse tensor", out(lambda t: t.to_sparse()), WRONG, "shape", "sparse", ()),
        ("a CSR tensor", out(lambda t: t.float().flatten(1).to_sparse_csr()), WRONG, "shape",
         "sparse", ()),
        ("a meta tensor", out(lambda t: torch.empty_like(t, device="meta")), WRONG, "device",
         "meta", ()),
        ("a nested tensor", out(lambda t: torch.nested.as_nested_tensor([t, t])), WRONG, "shape",
         "nested", ()),
        ("a quantised tensor", out(_quantised), WRONG, "dtype", "qint8", ()),
        ("a tensor that requires grad", out(lambda t: t.detach().clone().requires_grad_()),
         "ANY", "", "", ()),
        ("an overlapping tensor", out(_overlapping), WRONG, "", "", ()),
        ("an MKL tensor", out(lambda t: t.float().to_mkldnn()), WRONG, "", "", ()),
        ("a hostile tensor", out(lambda t: t.as_subclass(HostileTensor)), "FAIL|FLAKY|CRASH", "",
         "", ()),
        ("a tensor that lies", out(lambda t: (t + 1.0).as_subclass(LyingTensor)),
         "FAIL|FLAKY|CRASH", "", "", ()),
        ("a parameter", out(lambda t: torch.nn.Parameter(t + 1.0)), WRONG, "", "", ()),
        ("a scalar", out(lambda t: t.float().sum()), WRONG, "shape", "", ()),
        ("too many elements", out(lambda t: torch.cat([t, t])), WRONG, "shape", "", ()),
        ("too few elements", out(lambda t: t[:0]), WRONG, "shape", "", ()),
        ("another rank", out(lambda t: t.flatten()[:, None]), WRONG, "shape", "", ()),
        ("a terabyte of one element", out(lambda t: t.flatten()[:1].expand(10**12)), WRONG, "shape",
         "", ()),
        ("None for out", out(lambda _: None), WRONG, "shape", "", ()),
        ("numpy", out(lambda t: t.float().numpy()), WRONG, "shape", "", ()),
        ("a list", out(lambda t: t.tolist()), WRONG, "shape", "", ()),
        ("None", result(None), WRONG, "shape", "NoneType", ()),
        ("a number", result(3), WRONG, "shape", "int", ()),
        ("an exception", result(ValueError("returned")), WRONG, "shape", "", ()),
        ("a class", result(torch.Tensor), WRONG, "shape", "", ()),
        ("a generator", _generator, WRONG, "shape", "generator", ()),
        ("an iterator", lambda _, a: iter(a), WRONG, "shape", "iterator", ()),
        ("a triple", lambda _, a: (*a, a[0]), WRONG, "shape", "", ()),
        ("the pair the other way", lambda _, a: (a[1], a[0]), WRONG, "", "", ()),
        ("a hostile tuple", lambda _, a: HostileTuple(a), "FAIL|FLAKY|CRASH", "", "", ()),
        ("a lazy pair", result(LazyPair()), "FAIL|FLAKY|CRASH", "", "", ()),
        ("a hostile class", result(HostileClass()), "FAIL|FLAKY|CRASH", "", "", ()),
        ("lse in base 2", lse(lambda t: t * 1.4426950408889634), WRONG, "", "", ()),
        ("lse as NaN", lse(lambda t: t * torch.nan), WRONG, "nan", "", ()),
        ("lse of another shape", lse(lambda t: t.T.contiguous()[:, :1]), WRONG, "shape", "", ()),
        ("lse in float64", lse(lambda t: t.double()), "PASS", "", "", ("well_formed",)),
        ("lse of another device", lse(lambda t: t.to("meta")), WRONG, "device", "", ()),
        ("a view of an input", _view_of_input, WRONG, "", "", ()),
        ("the result before", _previous, WRONG, "", "", ("repeated_calls", "call_order")),
        ("wrong numbers in every other call", out(_alternate), WRONG, "", "", ("repeated_calls",)),
        ("other bits in every other call", out(_noisy), WRONG, "", "", ("repeated_calls",)),
        ("what a thread changes", _change_later, WRONG, "", "", ("repeated_calls",)),
        ("after changing inputs", _mutate, WRONG, "", "", ("inputs_unchanged",)),
        ("after changing lengths", _mutate_lengths, "FAIL|FLAKY|CRASH", "", "",
         ("inputs_unchanged",)),
        ("after resizing an input", _resize, "FAIL|FLAKY|CRASH", "", "", ("inputs_unchanged",)),
        ("after freeing an input", _free, "FAIL|FLAKY|CRASH", "", "", ("inputs_unchanged",)),
        ("after replacing an input's data", _replace_data, "FAIL|FLAKY|CRASH", "", "",
         ("inputs_unchanged",)),
        ("after asking for gradients", _require_grad, "FAIL", "mutated_input", "", ()),
        ("after emptying the record", _delete_fields, "FAIL|CRASH", "", "", ()),
    )
)  # fmt: skip


# supports, and what the decorator is given

_answers = itertools.count()
CHANGING = "supports says yes and no by turns"


def _by_turns() -> Any:  # noqa: ANN401
    return None if next(_answers) % 3 else "not this time"


WORDS = ("__str__", "__repr__", "__format__", "__bool__")
HostileText: Any = type("HostileText", (TextOfItsOwn,), dict.fromkeys(WORDS, _fail))
"""A reason that cannot be written."""

SUPPORTS: tuple[Fault, ...] = tuple(
    Fault(f"supports {name}", effect, at="supports", must=must, says=says, sample=sample)
    for name, effect, must, says, sample in (
        ("gives 0", lambda: 0, "NONE", "", False),
        ("gives 1", lambda: 1, "ANY|NONE", "", False),
        ("gives False", lambda: False, "NONE", "said no", False),
        ("gives a float", lambda: 3.5, "NONE|ANY", "", False),
        ("gives an empty text", lambda: "", "NONE", "said no", False),
        ("gives a list", lambda: ["no"], "NONE|ANY", "", True),
        ("gives a tensor", lambda: torch.ones(3), "NONE|ANY", "", False),
        ("gives an object", object, "NONE|ANY", "", False),
        ("gives bytes", lambda: b"no\xff", "NONE|ANY", "", False),
        ("gives a text that forges", lambda: FORGED, "NONE", "", False),
        ("gives a lone surrogate", lambda: LURKING, "NONE", "", False),
        ("gives 10 MB of text", lambda: "no" * 5_000_000, "NONE", "", False),
        ("gives a hostile text", lambda: HostileText("no"), "NONE|ANY", "", False),
        ("gives an odd refusal", lambda: Refusal("no", 3, object()), "CRASH", "code is 3", False),  # type: ignore[arg-type]
        ("gives an exception", lambda: ValueError("no"), "NONE|ANY", "", False),
        ("changes its mind", _by_turns, "ANY|NONE", "", False),
        (
            "raises KeyboardInterrupt",
            raises(KeyboardInterrupt),
            "CRASH",
            "KeyboardInterrupt",
            True,
        ),
        ("raises SystemExit", raises(SystemExit), "CRASH", "SystemExit", False),
        ("raises GeneratorExit", raises(GeneratorExit), "CRASH", "GeneratorExit", False),
        ("raises KeyError", raises(KeyError("row")), "CRASH", "KeyError", False),
        ("raises what cannot be written", hostile(__str__=_fail), "CRASH", "Hostile", False),
        (
            "raises UnsupportedError",
            raises(UnsupportedError("never")),
            "CRASH|REJECTED|NONE",
            "never",
            False,
        ),
        ("recurses", deep_recursion, "CRASH", "RecursionError", False),
        ("reads address 0", _read_null, "CRASH", "SIGSEGV", True),
        ("exits", lambda: os._exit(0), "CRASH", "", False),
        ("allocates", _allocate(10**15), "CRASH", "", False),
        ("sleeps", _sleep, "HANG", "", False),
    )
)

NOT_FROM_HERE: dict[str, Any] = {"provider": "no such distribution"}
DECORATED: tuple[Fault, ...] = tuple(
    Fault(f"declare {name}", options=options, must=must)
    for name, options, must in (
        ("a name that forges", {"name": FORGED}, "ERROR"),
        ("a name of a megabyte", {"name": "x" * 10**6}, "ANY"),
        ("a lone surrogate for a name", {"name": LURKING}, "ERROR"),
        ("a number for a name", {"name": 3}, "ERROR"),
        ("no name", {"name": ""}, "ANY|ERROR"),
        ("an object for a name", {"name": object()}, "ERROR"),
        ("the bystander's name", {"name": "bystander"}, "ANY|ERROR"),
        ("unknown features", {"features": ("telepathy",)}, "ERROR"),
        ("features that are numbers", {"features": (1, 2)}, "ERROR"),
        ("an unknown backend", {"backend": "abacus"}, "ERROR"),
        ("a negative tile", {"tile": -1}, "ERROR"),
        ("a tile that is text", {"tile": "wide"}, "ERROR"),
        ("a tile without bound", {"tile": 10**30}, "ANY|ERROR"),
        ("a split that is NaN", {"split": float("nan")}, "ERROR"),
        ("minutes that are NaN", {"build_minutes": float("nan")}, "ANY|ERROR"),
        ("minutes without end", {"build_minutes": float("inf")}, "ANY|ERROR"),
        ("compilers that are text", {"build_compilers": "many"}, "ERROR"),
        ("an arithmetic that is text", {"arithmetic": "exact"}, "ERROR"),
        ("an unknown provider", NOT_FROM_HERE, "ANY"),
        ("a provider that is a list", {"provider": ["torch"]}, "ERROR"),
        ("supports that is text", {"supports": "yes"}, "CRASH|ERROR"),
        ("a key that raises", {"compile_key": lambda _: _fail()}, "CRASH|ERROR"),
        ("a key that cannot be hashed", {"compile_key": lambda _: []}, "ANY|ERROR"),
        ("a session that raises", {"session": _fail}, "ANY|ERROR"),
        ("a library that raises", {"library": lambda _: _fail(), "build_ahead": True,
                                   "compile_key": lambda _: 1}, "ANY|ERROR|NONE"),
        ("out written, which it is not", {"writes_out": True}, "FAIL|FLAKY"),
    )
)  # fmt: skip


# Lies: what a kernel replaces in its process so that its wrong result passes


def _replace_comparison() -> None:
    for name in ("all_within", "bitwise"):
        setattr(comparison, name, lambda *_: PASS)


def _replace_comparisons_of_torch() -> None:
    vars_of: Any = torch.Tensor
    vars_of.all = lambda *_, **__: torch.tensor(True)  # noqa: FBT003
    vars_of.any = lambda *_, **__: torch.tensor(False)  # noqa: FBT003


def _replace_oracle() -> None:
    def zeros(inputs: Any, arithmetic: Any) -> Bounded:  # noqa: ANN401
        expected, bound = BOUNDED_ANSWER(inputs, arithmetic)
        return Bounded(AttentionOutput(torch.zeros_like(expected.out), expected.lse), bound)

    vars(general)["bounded_answer"] = zeros


def _replace_verdict() -> None:
    def passes(verdict: Verdict, *_: object, **__: object) -> None:
        MADE(verdict, "PASS")

    vars_of: Any = Verdict
    vars_of.__init__ = passes


def _write_verdict() -> None:
    """Answer the request that is being answered, in the worker's place."""
    at: Any = sys._getframe()
    while (at.f_globals["__name__"], at.f_code.co_name) != (worker_main.__name__, "_answer"):
        at = at.f_back
    reply = {"id": at.f_locals["request"]["id"], "result": PASS.to_json()}
    at.f_back.f_locals["connection"].sendall(frame(reply))


BOUNDED_ANSWER, MADE = bounded_answer, Verdict.__init__
LIES: tuple[Fault, ...] = tuple(
    Fault(name, effect, out(torch.zeros_like), must="FAIL", kind="numeric", distrust=True,
          sample=name == "write the verdict itself")
    for name, effect in (
        ("replace the comparison", _replace_comparison),
        ("replace torch's comparisons", _replace_comparisons_of_torch),
        ("replace the oracle", _replace_oracle),
        ("replace the verdict", _replace_verdict),
        ("write the verdict itself", _write_verdict),
    )
)  # fmt: skip
BELIEVED = tuple(
    replace(row, name=f"{row.name}, believed", distrust=False, sample=False) for row in LIES
)


def moved(rows: Sequence[str], at: str, must: str, **more: Any) -> tuple[Fault, ...]:  # noqa: ANN401
    """Return rows again, at another point."""
    named = {row.name: row for table in PLAIN for row in table}
    return tuple(
        replace(
            named[name],
            **{
                "name": f"{name} at {at}",
                "at": at,
                "must": must,
                "kind": "",
                "sample": name == rows[0],
                **more,
            },
        )
        for name in rows
    )


PLAIN = (EXCEPTIONS, DEATHS, HANGS, MEMORY, LEFT, PATCHES, RESULTS)
AT_IMPORT = moved(
    (
        "raise KeyboardInterrupt", "raise SystemExit", "raise GeneratorExit", "raise Skipped",
        "raise PanicException", "raise MemoryError", "raise a chain in a circle",
        "raise nested groups", "raise an odd SyntaxError", "recurse without end",
        "__str__ raises", "__str__ interrupts", "__getattribute__ raises", "a message of 10 MB",
        "a message that forges a verdict", "a lone surrogate", "a name with a newline",
        "read address 0", "abort", "die of SIGKILL", "os._exit(0)", "sys.exit(2)",
        "become another program", "allocate a petabyte", "sleep", "spin",
        "all descriptors closed", "garbage in the connection",
    ),
    "import", "ERROR", says="",
)  # fmt: skip
THIRD = moved(
    (
        "raise KeyboardInterrupt",
        "read address 0",
        "os._exit(0)",
        "die of SIGKILL",
        "allocate a petabyte",
        "sleep",
    ),
    "third",
    "CRASH|HANG|FLAKY",
)
AFTER = (
    *moved(("raise KeyError of an object",), "after", "PASS"),
    *moved(("read address 0", "os._exit(3)", "die of SIGKILL"), "after", "CRASH|FLAKY|ANY"),
    *moved(("patch torch.Tensor.to", "all three closed"), "after", "ANY"),
)
AT_EXIT = moved(("raise KeyboardInterrupt", "sleep", "read address 0"), "exit", "PASS", says="")
ELSEWHERE = tuple(
    replace(BY, name=f"{BY.name} ({operation})", operation=operation, kind="", sample=False)
    for BY in (*EXCEPTIONS[:3], DEATHS[0], HANGS[1], RESULTS[0], RESULTS[9], RESULTS[28])
    for operation in ("merge_state", "route", "moe", "build_metadata", "append_paged_kv")
    if not (operation == "build_metadata" and BY is RESULTS[9])
)

FAULTS: tuple[Fault, ...] = (
    *(row for table in PLAIN for row in table),
    *SUPPORTS, *DECORATED, *AT_IMPORT, *THIRD, *AFTER, *AT_EXIT, *ELSEWHERE,
    *LIES, *BELIEVED,
)  # fmt: skip
BY_NAME = {row.name: row for row in FAULTS}
KNOWN: dict[str, str] = {
    "patch builtins.Exception+return wrong numbers": "the oracle's tensors cannot be made any more",
    **{row.name: "its own process judges: --distrust finds it" for row in BELIEVED},
}
"""Why rows are answered wrongly today. Strict: a right answer to a row of the table is reported."""
