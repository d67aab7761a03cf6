"""A process that died: for lack of memory or not, and whether its call is to blame for that."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kernelproof.properties.isolation.memory_use import MemoryUse, failed_allocation
from kernelproof.properties.isolation.outcome import (
    ABORTED_FOR_MEMORY,
    KILLED,
    KILLED_FOR_MEMORY,
    Outcome,
)
from kernelproof.properties.worker.requests import HarnessError, verdict_of

MIB = 1 << 20
LIBSTDCXX = (
    "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
)
OF_TORCH = (
    "terminate called after throwing an instance of 'c10::Error'\n  what():  [enforce fail] "
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.\nframe #0\n"
)


OF_THRUST = (
    "terminate called after throwing an instance of 'thrust::system::detail::bad_alloc'\n"
    "  what():  std::bad_alloc: cudaErrorIllegalAddress: an illegal memory access was encountered\n"
)


@pytest.mark.parametrize(
    ("printed", "size"),
    [
        (LIBSTDCXX, 0),
        ("libc++abi: terminating due to uncaught exception of type std::bad_alloc: std::b", 0),
        (OF_TORCH, 4096),
        ("memory allocation of 77 bytes failed\n", 77),
        ("LLVM ERROR: out of memory\nAllocation failed\n", 0),
        ("Fatal Python error: _Py_CheckRecursiveCall: MemoryError\n", 0),
        ('Traceback (most recent call last):\n  File "x"\nMemoryError\n', 0),
    ],
)
def test_what_processes_say_of_an_allocation_that_failed(printed: str, size: int) -> None:
    found = failed_allocation(f"before\n{printed}")
    assert found is not None
    assert found.size == size


@pytest.mark.parametrize(
    "printed",
    [
        "",
        "std::bad_alloc is caught here",
        "terminate called after throwing an instance of 'std::length_error'\n  what():  x\n",
        "terminate called after throwing an instance of 'std::bad_array_new_length'\n  what():  s",
        "MemoryError was raised before\nAssertionError\n",
        "malloc(): corrupted top size\n",
        OF_THRUST,
        OF_THRUST.replace("std::bad_alloc: cuda", "cuda"),
        "libc++abi: terminating due to uncaught exception of type thrust::x::bad_alloc: std::bad_a",
        f"{LIBSTDCXX}: cudaErrorIllegalAddress",
        LIBSTDCXX.replace("std::bad_alloc", "not std::bad_alloc"),
        "terminating: this is not a std::bad_alloc\n",
        "memory allocation of 77 bytes failed, retry\n",
        "x\nLLVM ERROR: out of memoryless\n",
    ],
)
def test_what_says_nothing_of_memory(printed: str) -> None:
    assert failed_allocation(printed) is None


@pytest.mark.parametrize(
    "text",
    [
        "terminating ",
        "terminate called after throwing an instance of 'c10::Error' ",
        "terminating due to uncaught exception of type c10::Error\n",
        LIBSTDCXX.replace("\n", ""),
        "terminating with uncaught exception of type std::bad_alloc cudaError",
        "memory allocation of 1",
        "Fatal Python error:",
        "MemoryError",
        "MemoryError\n",
        "MemoryError ",
        " ",
        "1",
    ],
)
@pytest.mark.parametrize("end", ["", "x"])
def test_long_prints_are_read_in_little_time(text: str, end: str) -> None:
    printed = text * ((64 << 10) // len(text)) + end
    for before in ("", "MemoryError", "memory allocation of "):
        seconds = []
        for _ in range(5):  # the quickest of a few: another thread of the process may run beside
            began = time.process_time()
            failed_allocation(before + printed)
            seconds.append(time.process_time() - began)
        assert min(seconds) < 0.1


def died(kind: str, stage: str = "run", printed: str = "", **memory: Any) -> Outcome:  # noqa: ANN401
    use = MemoryUse(**{name: size * MIB for name, size in memory.items()})
    starved = kind == KILLED_FOR_MEMORY
    return Outcome("crash", kind=kind, stage=stage, stderr=printed, starved=starved, memory=use)


ROOM: dict[str, Any] = {"limit": 1024, "room": 200, "need": 8}
MUCH: dict[str, Any] = {"limit": 1024, "room": 700, "need": 8}
HELD: dict[str, Any] = {"limit": 1024, "held": 300, "need": 8}


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (died("SIGABRT", printed=LIBSTDCXX, **ROOM), "memory"),
        (died("SIGABRT", printed=LIBSTDCXX, **MUCH), ABORTED_FOR_MEMORY),
        (died("SIGABRT", printed=LIBSTDCXX, **{**MUCH, "need": 64}), "memory"),
        (died("SIGABRT", printed=LIBSTDCXX), ABORTED_FOR_MEMORY),  # there is no limit
        (died("SIGABRT", "judge", LIBSTDCXX, **ROOM), "memory"),
        (died("SIGABRT", "judge", LIBSTDCXX, **MUCH), ABORTED_FOR_MEMORY),  # a thread of the call's
        (died("SIGABRT", "judge", LIBSTDCXX), "memory"),  # there is no limit
        (
            died("SIGABRT", "judge", f"memory allocation of {1 << 40} bytes failed\n", **ROOM),
            ABORTED_FOR_MEMORY,
        ),
        (died("exit 1", "judge", "MemoryError\n", **MUCH), "exit 1"),
        (died("SIGABRT", **ROOM), "SIGABRT"),
        (died("SIGSEGV", printed=LIBSTDCXX, **ROOM), "SIGSEGV"),
        (died("exit 1", "load", "MemoryError\n", **ROOM), "memory"),
        (died("exit 1", "run", "MemoryError\n", **ROOM), "exit 1"),
        (died("exit 1", "load", "OSError\n", **ROOM), "exit 1"),
        (died(KILLED, **HELD, peak=900), KILLED),
        (died(KILLED_FOR_MEMORY, **HELD, peak=400), "memory"),
        (died(KILLED_FOR_MEMORY, **HELD, peak=900), KILLED_FOR_MEMORY),
        (died(KILLED_FOR_MEMORY, "materialise", **HELD, peak=900), "memory"),
        (died(KILLED_FOR_MEMORY, **{**HELD, "need": 64}, peak=900), "memory"),
        (died(KILLED_FOR_MEMORY), "memory"),  # nothing is known of it
    ],
    ids=str,
)
def test_the_cause_decides(outcome: Outcome, kind: str) -> None:
    verdict = verdict_of(outcome)
    assert (verdict.status, verdict.kind) == ("UNSUPPORTED" if kind == "memory" else "CRASH", kind)
    assert f"in stage {outcome.stage}" in verdict.message or "the call had" in verdict.message


def test_figures_are_those_of_the_call() -> None:
    verdict = verdict_of(died(KILLED_FOR_MEMORY, **HELD, peak=900))
    assert verdict.message == (
        "the process died: killed by the kernel, for lack of memory, in stage run: "
        "the call had taken 600 MiB beside the problem's 8 MiB"
    )
    verdict = verdict_of(died(KILLED_FOR_MEMORY, **HELD, peak=400))
    assert verdict.message == (
        "the machine has no room for the problem beside what else runs: the kernel ended its "
        "process for lack of memory in stage run, when the call had taken 100 MiB beside the "
        "problem's 8 MiB; it held 400 MiB at most"
    )
    verdict = verdict_of(died("SIGABRT", printed=LIBSTDCXX, **ROOM))
    assert verdict.message.startswith(
        "too large for a worker's 1 GiB: the call had 200 MiB beside the problem's 8 MiB, when its "
        "process aborted: terminate called after throwing an instance of 'std::bad_alloc'"
    )


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (Outcome("error", kind="MemoryError", detail="Traceback\nMemoryError: no room"), "no room"),
        (Outcome("error", kind="start", detail="...", starved=True), "for lack of memory"),
        (
            Outcome(
                "error", kind=KILLED_FOR_MEMORY, detail="the process that judges", starved=True
            ),
            "for lack of memory",
        ),
    ],
    ids=str,
)
def test_the_suite_without_memory_has_not_failed(outcome: Outcome, why: str) -> None:
    verdict = verdict_of(outcome)
    assert (verdict.status, verdict.kind) == ("UNSUPPORTED", "memory")
    assert why in verdict.message


def test_other_errors_of_the_suite_are_its_own() -> None:
    with pytest.raises(HarnessError):
        verdict_of(Outcome("error", kind="start", detail="Traceback\nOSError: no such file"))
