"""Writing results: JSON that every reader takes, files that are whole or absent."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path


class OutputError(ValueError):
    """A file that cannot be written; the message names the option, the file and the reason."""


@dataclass(frozen=True)
class Output:
    """A file to write.

    Attributes:
        flag: the option that names it, or its folder; empty where none does.
        path: the path of the file.
    """

    flag: str
    path: Path

    def check(self) -> None:
        """Make the folder and try to write there: before a long run, whose results are not lost.

        Raises:
            OutputError: ``write`` would fail.
        """
        try:
            make_folder(self.path.parent)
            if not is_special(self.path):
                draft = _draft(self.path)
                draft.touch()
                draft.unlink()
        except OSError as error:
            raise self._refusal(error) from error

    def write(self, content: object) -> None:
        """Write text as it is and anything else as JSON; the file is whole or absent.

        Raises:
            OutputError: the folder cannot be made, or the file cannot be written.
        """
        text = content if isinstance(content, str) else dumps(content)
        try:
            write_text(self.path, text)
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> OutputError:
        name, reason = f"{self.flag} {self.path}".lstrip(), error.strerror
        if error.filename and Path(error.filename) in self.path.parents:  # a folder is to blame
            reason = f"{error.filename}: {reason}"
        return OutputError(f"{name}: cannot be written ({reason})")


def dumps(data: object) -> str:
    """Return JSON that every reader takes: infinities and NaN become strings."""
    return json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"


def _finite(data: object) -> object:
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    return data


def make_folder(folder: Path) -> None:
    """Make a folder and those around it, except at the root: there, a slash is one too many.

    Raises:
        OSError: it cannot be made, or would be the first one of its path.
    """
    top = folder.parents[-2] if folder.is_absolute() and len(folder.parts) > 2 else folder  # noqa: PLR2004
    if folder.is_absolute() and not top.exists():
        why = "no such folder, and none is made at the root"
        raise FileNotFoundError(errno.ENOENT, why, str(top))
    folder.mkdir(parents=True, exist_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    make_folder(path.parent)
    # Text of unknown origin may hold lone surrogates.
    data = text.encode(errors="backslashreplace")
    if is_special(path):
        path.write_bytes(data)
        return
    draft = _draft(path)
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def is_special(path: Path) -> bool:
    """Whether something is there that is no file, such as /dev/stdout or a folder."""
    try:
        return path.exists() and not path.is_file()
    except OSError:  # a name that is too long, or a folder that may not be entered
        return False


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")
