"""Files of data as they are read: TOML, JSON and text, refused in a sentence that names the file.

Whoever wrote a file, reading it ends: what is no regular file is not opened for long, what is too
large is not read, and what is nested too deep, or holds a number without bound, is refused here.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Refusal = Callable[[str], Exception]
"""Makes the exception of a sentence."""
MOST_BYTES = 32 << 20
"""Largest file of data that is read: 32 MiB, twenty times the largest of a comparison."""
DEEPEST = 100
"""Most levels of lists and tables inside one another."""
TOO_DEEP = f"its lists and tables are nested more than {DEEPEST} deep"
QUOTED = re.compile(r""""[^"]*"|'[^']*'""")
LARGEST = 2**64
"""No whole number of a file is larger: seeds have 64 bits, and all others fewer."""


class _UnfitError(ValueError):
    """What a language allows and no reader here takes; the message is the end of a sentence."""


def read_toml(path: Path, refusal: Refusal) -> dict[str, Any]:
    """Return what a TOML file holds; raise the refusal where it cannot be read or is no TOML."""
    table: dict[str, Any] = _parsed(path, refusal, "TOML", _toml)
    return table


def read_toml_part(path: Path, refusal: Refusal, names: Sequence[str]) -> Any:  # noqa: ANN401  TOML
    """Return what stands in a TOML file under these names, one in another; None if nothing does.

    What stands elsewhere, whatever numbers it has, is nobody's concern.
    """

    def part(text: str) -> Any:  # noqa: ANN401  TOML
        found: Any = _toml(text)
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    return _parsed(path, refusal, "TOML", part)


def read_json(path: Path, refusal: Refusal) -> Any:  # noqa: ANN401  JSON
    """Return what a JSON file holds; raise the refusal where it cannot be read or is no JSON."""
    return _parsed(path, refusal, "JSON", partial(json.loads, object_pairs_hook=_table))


def read_text(path: Path, refusal: Refusal) -> str:
    """Return a text file, without its byte order mark; raise the refusal where it is none."""
    text: str = _parsed(path, refusal, "text in UTF-8", str)
    return text


def read_bytes(path: Path, refusal: Refusal, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file; raise the refusal where it is none, or has too many."""
    try:
        # A pipe without a writer would never open, a device like /dev/zero never end.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            check_regular(file)
            if os.fstat(file).st_size > most:
                raise OSError(0, f"is larger than {most >> 20} MiB, the most that is read")
            with open(file, "rb", closefd=False) as opened:
                data = opened.read(most + 1)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        message = f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})"
        raise refusal(message) from error
    if len(data) > most:
        message = f"{path}: is larger than {most >> 20} MiB, the most that is read"
        raise refusal(message)
    return data


def check_regular(file: int) -> None:
    """Refuse an open file that is a folder, a pipe or a device.

    Raises:
        OSError: its ``strerror`` says so.
    """
    mode = os.fstat(file).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(0, "is a folder")
    if not stat.S_ISREG(mode):
        raise OSError(0, "is a pipe or a device, no file")


def _parsed(path: Path, refusal: Refusal, language: str, parse: Callable[[str], Any]) -> Any:  # noqa: ANN401  of the file
    data = read_bytes(path, refusal)
    try:
        found = parse(data.decode("utf-8-sig").replace("\r\n", "\n"))
        _check_values(found)
    except _UnfitError as error:
        message = f"{path}: {error}"
        raise refusal(message) from error
    except ValueError as error:
        message = f"{path}: not {language} ({error})"
        raise refusal(message) from error
    except RecursionError as error:
        message = f"{path}: {TOO_DEEP}"
        raise refusal(message) from error
    return found


def _toml(text: str) -> dict[str, Any]:
    """Parse TOML whose keys have not too many parts: tomllib takes the square of their number."""
    for line in text.splitlines():
        if QUOTED.sub("", line).partition("#")[0].count(".") > DEEPEST:
            raise _UnfitError(TOO_DEEP)
    table: dict[str, Any] = tomllib.loads(text)
    return table


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a table of JSON, each key of which stands once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        message = f"the key {twice!r} is given twice"
        raise _UnfitError(message)
    return found


def _check_values(data: object) -> None:
    """Refuse nesting and numbers beyond what any file of ours holds."""
    level = [("", data)]
    for _ in range(DEEPEST):
        inner: list[tuple[str, Any]] = []
        for place, each in level:
            if isinstance(each, dict):
                inner += [(f"{place}.{key}", value) for key, value in each.items()]
            elif isinstance(each, list):
                inner += [(f"{place}[{number}]", value) for number, value in enumerate(each)]
            elif isinstance(each, int) and abs(each) > LARGEST:
                message = f"{place.lstrip('.') or 'it'} is a number of more than 64 bits"
                raise _UnfitError(message)
            elif isinstance(each, float) and not math.isfinite(each):
                message = f"{place.lstrip('.') or 'it'} is {each}, no finite number"
                raise _UnfitError(message)
        if not inner:
            return
        level = inner
    raise _UnfitError(TOO_DEEP)
