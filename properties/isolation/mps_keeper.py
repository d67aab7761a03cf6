"""Starts NVIDIA's MPS daemon, and ends it at the end of whoever has started this process.

It is run by its path, without the package: ``python -I -S mps_keeper.py PROGRAM FOLDER [DEVICES]``.
The folder is the daemon's, and is removed with it; the devices are those that a client sees, of all
that the daemon has. The end of standard input is the end; the process has a session of its own, so
that Ctrl-C is not for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

READY = b"ready\n"
"""What is written once a client has come."""
_CLIENT = """\
import ctypes, sys
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    sys.exit()  # whatever the clients are, they do not use CUDA
context = ctypes.c_void_p()
sys.exit(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
"""
"""A client, which ends well where CUDA serves it: the daemon starts in a container, too, that lets
none connect."""
_SECONDS = 10.0
_QUIT = b"quit -t 1\n"  # seconds that clients are given


def main() -> None:
    """Keep a daemon until the end of standard input."""
    program, folder, *devices = sys.argv[1:]
    try:
        if _ended_well([program, "-d"], b""):
            seen = {"CUDA_VISIBLE_DEVICES": devices[0]} if devices else {}
            if _ended_well([sys.executable, "-I", "-S", "-c", _CLIENT], b"", **seen):
                sys.stdout.buffer.write(READY)
                sys.stdout.buffer.flush()
                sys.stdin.buffer.read()
            _ended_well([program], _QUIT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ended_well(command: list[str], told: bytes, **variables: str) -> bool:
    # The daemon keeps what it inherits: with a pipe, nobody would see the program's end.
    try:
        ended = subprocess.run(
            command,
            input=told,
            check=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **variables},
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode == 0


if __name__ == "__main__":
    main()
