"""Handlers for test_isolation.py: each misbehaves in one way. They run in workers only."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelproof.properties.isolation.worker_main import Monitor

_seen: list[object] = []


def misbehave(payload: dict[str, Any], monitor: Monitor) -> dict[str, object]:
    """Do what the payload's "do" says, in stage "run"."""
    arguments = {name: value for name, value in payload.items() if name != "implementation"}
    behave = globals()[f"do_{arguments.pop('do')}"]
    with monitor.stage("run"):
        result: dict[str, object] = behave(monitor=monitor, **arguments)
    return result


def empty(payload: dict[str, Any], monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    return {}


def torch_threads(payload: dict[str, Any], monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    return {
        "preloaded": "torch" in sys.modules,
        "threads": sys.modules["torch"].get_num_threads(),
        "omp": os.environ["OMP_NUM_THREADS"],
        "collects": gc.isenabled(),
    }


def torch_loop(payload: dict[str, Any], monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    import torch

    monitor.enter("run")
    x = torch.eye(512)
    while True:
        x = x @ x


def do_echo(*, monitor: Monitor, value: object) -> dict[str, object]:  # noqa: ARG001
    return {"value": value}


def do_remember(*, monitor: Monitor, value: object) -> dict[str, object]:  # noqa: ARG001
    _seen.append(value)
    return {"seen": _seen, "pid": os.getpid()}


def do_fail_after_others(*, monitor: Monitor, name: str) -> dict[str, object]:  # noqa: ARG001
    _seen.append(name)
    if set(_seen) != {name}:
        raise LookupError(_seen)
    return {"seen": len(_seen)}


def do_variable(*, monitor: Monitor, name: str) -> dict[str, object]:  # noqa: ARG001
    return {"value": os.environ.get(name)}


def do_end(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    return {"pid": os.getpid(), "last_reply": True}


def do_environment(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    return {
        "path": sys.path,
        "argv": sys.argv,
        "variable": os.environ.get("KERNELPROOF_TEST"),
        "cache": os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
        "session": os.getsid(0) == os.getpid(),
        "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
    }


def do_spin(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    while True:
        pass


def do_sleep(*, monitor: Monitor, seconds: float = 600) -> dict[str, object]:  # noqa: ARG001
    time.sleep(seconds)
    return {}


def do_work(*, monitor: Monitor, seconds: float, processor: int | None = None) -> dict[str, object]:
    """Use a processor, which others use too, for these seconds."""
    if processor is not None:
        os.sched_setaffinity(0, {processor})
    with monitor.stage("run"):
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass
    return {}


def do_steps(*, monitor: Monitor, steps: int, last: float) -> dict[str, object]:
    """Do steps of a tenth of a second, and one that takes longer."""
    with monitor.stage("run"):
        for _ in range(steps):
            monitor.advance()
            time.sleep(0.1)
        monitor.advance()
        time.sleep(last)
    return {}


def do_pause_in_c(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    # PyDLL keeps the interpreter lock: no other thread of the process runs any more.
    while True:
        ctypes.PyDLL(None).pause()


def do_backtrack(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    re.match(r"(a+)+$", "a" * 64 + "b")
    return {}


def do_print_without_end(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    while True:
        os.write(1, b"more and more\n" * 4096)


def do_abort(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    os.abort()


def do_segfault(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    print("about to read address 0")  # noqa: T201
    ctypes.string_at(0)
    return {}


def do_exit_now(*, monitor: Monitor, status: int) -> dict[str, object]:  # noqa: ARG001
    os._exit(status)


def do_leave(*, monitor: Monitor, status: object) -> dict[str, object]:  # noqa: ARG001
    sys.exit(status)  # type: ignore[arg-type]


def do_kill_itself(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def do_close_everything(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    os.closerange(0, 256)
    time.sleep(600)
    return {}


def do_write_garbage(*, monitor: Monitor, to: str) -> dict[str, object]:  # noqa: ARG001
    for fd in range(3, 256):  # those of the connection and of the stage board are among them
        with contextlib.suppress(OSError):
            is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
            if is_socket == (to == "socket"):
                os.write(fd, b"garbage in the protocol, of some length")
    time.sleep(600)
    return {}


def do_allocate(*, monitor: Monitor, size: int) -> dict[str, object]:  # noqa: ARG001
    return {"size": len(bytearray(size))}


def do_fail(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    msg = "a stray exception"
    raise LookupError(msg)


def do_interrupt(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    raise KeyboardInterrupt


def do_no_json(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    return {"value": object()}


def do_no_object(*, monitor: Monitor) -> list[int]:  # noqa: ARG001
    return [1]


def do_print(*, monitor: Monitor, text: str) -> dict[str, object]:  # noqa: ARG001
    print(text)  # noqa: T201
    os.system(f"echo {text} from a shell")  # noqa: S605
    return {}


def do_leave_a_child(*, monitor: Monitor, then: str, how: str = "child") -> dict[str, object]:
    child = CHILDREN[how]()
    monitor.enter("judge")
    print(f"child={child}")  # noqa: T201
    monitor.enter("run")
    if then == "exit":
        os._exit(3)
    if then == "sleep":
        time.sleep(600)
    return {"child": child}


def _orphan(*, session: bool) -> int:
    """Start a process whose parent has ended."""
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=2).pid)"
    words = [sys.executable, "-I", "-S", "-c", code]
    return int(subprocess.check_output(words, start_new_session=session))


CHILDREN = {
    "child": lambda: subprocess.Popen(["sleep", "600"]).pid,  # noqa: S607
    "group": lambda: subprocess.Popen(["sleep", "600"], preexec_fn=os.setpgrp).pid,  # noqa: PLW1509, S607
    "session": lambda: subprocess.Popen(["sleep", "600"], start_new_session=True).pid,  # noqa: S607
    "double fork": lambda: _orphan(session=True),
}


def do_end_the_process_above(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    print(f"{CHILDREN['session']()} {tempfile.gettempdir()}")  # noqa: T201
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
    return {}


def do_share_memory(*, monitor: Monitor, keep: bool) -> dict[str, object]:  # noqa: ARG001
    """Leave shared memory, which multiprocessing's helper removes unless it is to be kept."""
    memory = shared_memory.SharedMemory(create=True, size=64)
    name = memory.name
    memory.close()
    if keep:
        resource_tracker.unregister(f"/{name}", "shared_memory")
    return {"name": name, "tracker": vars(resource_tracker)["_resource_tracker"]._pid}


def do_make_temporary_files(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    folder = Path(tempfile.mkdtemp())
    (folder / "file").write_text("of a case", encoding="ascii")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as one:
        one.bind(str(folder / "socket"))
    return {"folder": str(folder), "parent": str(folder.parent)}


def do_fork_and_exit(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    # The child holds the connection open, so that its end does not tell of the parent's.
    if os.fork() == 0:
        time.sleep(600)
    os._exit(4)


def do_fork_and_return(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    return {"fork": os.fork()}


def do_die_later(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    threading.Timer(0.05, os._exit, (9,)).start()
    return {}


def do_compile_within_run(*, monitor: Monitor, before: float, within: float) -> dict[str, object]:
    time.sleep(before)
    with monitor.stage("compile"):
        time.sleep(within)
    time.sleep(before)
    return {}


def do_overrun(*, monitor: Monitor, stage: str) -> dict[str, object]:
    monitor.enter(stage)
    time.sleep(600)
    return {}


def do_disable_dumps(*, monitor: Monitor) -> dict[str, object]:  # noqa: ARG001
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    time.sleep(600)
    return {}


def do_unknown_stage(*, monitor: Monitor) -> dict[str, object]:
    monitor.enter("lunch")
    return {}


def do_time_stages(*, monitor: Monitor) -> dict[str, object]:
    """Time 100 notes, 300 times over; other processes come between some of the 300, not all."""
    taken = []
    for _ in range(300):
        began = time.perf_counter()
        for _ in range(100):
            monitor.enter("run")
        taken.append((time.perf_counter() - began) / 100)
    return {"seconds": min(taken)}


def do_meet(*, monitor: Monitor, folder: str, name: str, of: int) -> dict[str, object]:  # noqa: ARG001
    """Wait until as many processes are here at the same time."""
    (Path(folder) / name).touch()
    while len(list(Path(folder).iterdir())) < of:
        time.sleep(0.01)
    return {}
