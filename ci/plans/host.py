"""The process that calls one release's plan functions: a fault in them ends it, and no other.

It needs the standard library only, reads a line of JSON a question and writes one an answer. The
workspaces are files that the asking process has mapped as well.

    python -I host.py DRIVER PLANNER INTEGERS STAGED
"""

from __future__ import annotations

import ctypes
import json
import mmap
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FLOATS = 1 << 40
"""The address of the workspace of floats, which nothing touches: a plan calculates with it."""
CAPABILITY, SHARED_MEMORY = 90, 232448
LONGEST_VECTOR = 64


class Buffers(ctypes.Structure):
    """The workspaces of a call, as the planner has them."""

    _fields_ = (
        ("integers", ctypes.c_void_p),
        ("staged", ctypes.c_void_p),
        ("integer_bytes", ctypes.c_size_t),
        ("floats", ctypes.c_void_p),
        ("float_bytes", ctypes.c_size_t),
    )


def mapped(path: str) -> mmap.mmap:
    """Return a file as memory, which is shared with whoever maps it too."""
    with Path(path).open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def address(memory: mmap.mmap) -> int:
    """Return where a mapping lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def ask(planner: ctypes.CDLL, integers: int, staged: int, question: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Return a plan's vector, or the error of the release."""
    buffers = Buffers(integers, staged, question["integer_bytes"], FLOATS, question["float_bytes"])
    arrays = [(ctypes.c_int32 * len(each))(*each) for each in question["arrays"]]
    numbers = (ctypes.c_int64 * len(question["numbers"]))(*question["numbers"])
    found = (ctypes.c_int64 * LONGEST_VECTOR)()
    call = getattr(planner, question["function"])
    count = call(ctypes.byref(buffers), *arrays, numbers, found)
    if count < 0:
        return {"error": planner.planner_error().decode(errors="replace")}
    return {"info": list(found[:count])}


def main() -> None:
    """Answer questions until there are no more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    driver_path, planner_path, *files = sys.argv[1:]
    # Global: the planner's library, which is loaded later, finds its CUDA in it.
    driver = ctypes.CDLL(driver_path, mode=ctypes.RTLD_GLOBAL)
    planner = ctypes.CDLL(planner_path)
    planner.planner_error.restype = ctypes.c_char_p
    memories = [mapped(path) for path in files]
    integers, staged = (address(memory) for memory in memories)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        driver.recording_chip(CAPABILITY, question["multiprocessors"], SHARED_MEMORY)
        driver.recording_occupancy(question["blocks"])
        print(json.dumps(ask(planner, integers, staged, question)), flush=True)


if __name__ == "__main__":
    main()
