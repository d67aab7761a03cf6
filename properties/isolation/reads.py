"""What a worker process reads: files, modules and programs, as Python's audit hooks see them.

A file that a library opens in C or Rust is not seen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from os import fsdecode, path  # what the code under test puts there is not called
from typing import Any, Final, NamedTuple

PROGRAM: Final = "program"
"""Kind of what was started: whoever did not start it has not read by it."""


class Read(NamedTuple):
    """One thing that a process has read or started.

    Attributes:
        kind: ``"file"``, also one that was looked for in vain; ``"written"``, a file that it has
            written; ``"module"``; or ``"program"``, of which it is not known what it reads.
        name: its path, its dotted name or its command.
    """

    kind: str
    name: str


_OF_THE_SYSTEM: Final = ("/proc/", "/dev/", "/sys/")
_DISTRIBUTION: Final = ".dist-info/"
"""Part of the paths of files about what is installed, whose names have its version."""
_READ_NOTHING: Final = ("ptxas", "ldconfig", "nvidia-smi", "lscpu", "uname")
"""Programs that read nothing of the code under test but what was read before, such as PTX."""
_new: list[list[str]] = []
_known: set[tuple[str, str]] = set()
_watching: list[int] = []


def watch() -> None:
    """Begin to record what this process reads; an audit hook stays until its end."""
    if os.getpid() not in _watching:
        _watching[:] = [os.getpid()]
        sys.addaudithook(_note)


def taken() -> list[list[str]]:
    """Return what was read since the last such call."""
    count = len(_new)
    read, _new[:count] = _new[:count], []
    _known.difference_update([(PROGRAM, name) for kind, name in read if kind == PROGRAM])
    return read


def parsed(read: object) -> set[Read]:
    """Return what a reply says was read; the code under test may have written it."""
    pairs = read if isinstance(read, list) else []
    return {
        Read(*pair) for pair in pairs if isinstance(pair, list) and [*map(type, pair)] == [str, str]
    }


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    record = _RECORDS.get(event)
    if record is None:
        return
    try:
        record(arguments)
    except Exception as error:  # noqa: BLE001  it would become the error of the call that is seen
        _add(PROGRAM, f"{event}: {type(error).__name__}")


def _add(kind: str, name: str) -> None:
    if (kind, name) not in _known:
        _known.add((kind, name))
        _new.append([kind, name])


def _opened(arguments: tuple[Any, ...]) -> None:
    name, _, flags = arguments
    if isinstance(name, int):
        return
    access = flags & os.O_ACCMODE
    if access != os.O_RDONLY:
        _add_file(name, "written")
    if access != os.O_WRONLY:
        _add_file(name)


def _add_file(name: str | bytes | os.PathLike[str], kind: str = "file") -> None:
    place = path.abspath(fsdecode(name))  # noqa: PTH100  links stay what they are
    # A worker has a folder of its own for temporary files, which ends with it.
    scratch = os.environ.get("TMPDIR", "")
    own = (f"{scratch}/",) if scratch else ()
    if not place.startswith((*_OF_THE_SYSTEM, *own)) and _DISTRIBUTION not in place:
        _add(kind, place)


def _imported(arguments: tuple[Any, ...]) -> None:
    name, file, *_ = arguments
    _add("module", str(name))
    if file:
        _add_file(file)


def _loaded(arguments: tuple[Any, ...]) -> None:
    (name,) = arguments
    if name and "/" in fsdecode(name):  # else a library of the system
        _add_file(name)


def _started(arguments: tuple[Any, ...]) -> None:
    first, command = arguments[0], arguments[1] if len(arguments) > 1 else None
    if first is None and isinstance(command, (list, tuple)) and command:
        first = command[0]
    name = fsdecode(first).rpartition("/")[2] if isinstance(first, (str, bytes)) else str(first)
    if name not in _READ_NOTHING:
        _add(PROGRAM, name)


def _forked(_: tuple[Any, ...]) -> None:
    _add(PROGRAM, "a fork")


_RECORDS: Final[Mapping[str, Callable[[tuple[Any, ...]], None]]] = {
    "open": _opened,
    "import": _imported,
    "ctypes.dlopen": _loaded,
    "os.rename": lambda arguments: _add_file(arguments[1], "written"),
    "subprocess.Popen": _started,
    "os.system": _started,
    "os.exec": _started,
    "os.posix_spawn": _started,
    "os.spawn": lambda arguments: _started(arguments[1:]),
    "os.fork": _forked,
    "os.forkpty": _forked,
}
