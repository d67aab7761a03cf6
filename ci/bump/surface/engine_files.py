"""The Python files of an engine's source: of a folder, a file or a wheel, none of them imported."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ....impl.targets.data_files import MOST_BYTES, check_regular, read_bytes
from ...console.errors import UsageRefusedError

MOST_SOURCE = 512 << 20
"""Bytes of Python source that are read of one PATH, at most: 512 MiB, seven times SGLang's."""
SUFFIX = ".py"
FLASHINFER = "flashinfer"


@dataclass(frozen=True)
class EngineFile:
    """One Python file.

    Attributes:
        path: below the PATH that was given, as reports name it.
        module: its dotted name from the PATH on, which is the last part of the name it imports by.
        is_package: whether it is an ``__init__.py``.
        data: its bytes; None where it could not be read.
        why: the reason why it could not be read; else empty.
    """

    path: str
    module: str
    is_package: bool
    data: bytes | None
    why: str = ""


def read_engine(path: Path) -> list[EngineFile]:
    """Read the Python files of an engine. A top-level package ``flashinfer`` is no engine.

    Raises:
        UsageRefusedError: there is no such path, or no Python in it, or more than is read.
    """
    try:
        found = _bounded(path, _of_folder(path) if path.is_dir() else _of_file(path))
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        message = f"--uses {path}: cannot be read ({getattr(error, 'strerror', None) or error})"
        raise UsageRefusedError(message) from error
    if not found:
        message = f"--uses {path}: holds no Python files"
        raise UsageRefusedError(message)
    return found


def _bounded(path: Path, files: Iterator[EngineFile]) -> list[EngineFile]:
    found, size = list[EngineFile](), 0
    for each in files:
        size += len(each.data or b"")
        if size > MOST_SOURCE:
            message = (
                f"--uses {path}: holds more than {MOST_SOURCE >> 20} MiB of Python, "
                "the most that is read"
            )
            raise UsageRefusedError(message)
        found.append(each)
    return found


def _of_folder(folder: Path) -> Iterator[EngineFile]:
    # The folder may be the package itself, whose name its absolute imports begin with.
    top = (folder.resolve().name,)
    # An engine may have a package of that name inside; beside packages, it is the release itself.
    skipped = () if (folder / "__init__.py").exists() else (FLASHINFER,)
    for here, folders, names in os.walk(folder, onerror=_raise):
        inner = Path(here).relative_to(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name != "__pycache__"
            and not (inner == Path() and name in skipped)
        )
        for name in folders:
            if Path(here, name).is_symlink():
                why = "is a link to a folder, which is not followed"
                yield _file(inner.joinpath(name).as_posix(), top, why)
        for name in sorted(names):
            if name.endswith(SUFFIX):
                yield _file(inner.joinpath(name).as_posix(), top, _read(Path(here, name)))


def _raise(error: OSError) -> None:
    raise error


def _of_file(path: Path) -> Iterator[EngineFile]:
    if path.suffix == SUFFIX:
        yield _file(path.name, (), _read(path))
        return
    # A pipe without a writer would never open.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        check_regular(file.fileno())
        try:
            with zipfile.ZipFile(file) as wheel:
                yield from _of_wheel(wheel)
        except zipfile.BadZipFile as error:
            message = f"--uses {path}: is no folder, wheel or Python file ({error})"
            raise UsageRefusedError(message) from error


def _of_wheel(wheel: zipfile.ZipFile) -> Iterator[EngineFile]:
    for each in sorted(wheel.infolist(), key=lambda info: info.filename):
        if each.filename.endswith(SUFFIX) and not each.filename.startswith(f"{FLASHINFER}/"):
            yield _file(each.filename, (), _member(wheel, each))


def _read(path: Path) -> bytes | str:
    """Return the bytes of a file, or why there are none."""
    try:
        return read_bytes(path, UsageRefusedError)
    except UsageRefusedError as error:
        return error.message.removeprefix(f"{path}: ")


def _member(wheel: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes | str:
    if info.file_size > MOST_BYTES:  # the reader below stops at this size, whatever follows
        return f"is larger than {MOST_BYTES >> 20} MiB, the most that is read"
    try:
        return wheel.read(info)
    except (RuntimeError, zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        return f"cannot be read ({error})"  # encrypted, damaged, or compressed in an unknown way


def _file(path: str, top: Sequence[str], data: bytes | str) -> EngineFile:
    parts = [*top, *PurePosixPath(path).with_suffix("").parts]
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    if isinstance(data, str):
        return EngineFile(path, module, is_package, None, data)
    return EngineFile(path, module, is_package, data)


__all__ = ["FLASHINFER", "EngineFile", "read_engine"]
