"""Files that a command writes: seen to before a long run, so that its results are not lost."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from .errors import UsageRefusedError


def prepare_outputs(outputs: Iterable[tuple[str, Path]]) -> None:
    """See before a long run that its results can be written after it.

    Args:
        outputs: option and file.

    Raises:
        UsageRefusedError: a folder cannot be made, or no file can be written in it.
    """
    for option, path in outputs:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"{option} {path}: its folder cannot be made ({error.strerror})"
            raise UsageRefusedError(message) from error
        if _is_special(path):
            continue
        draft = path.with_name(f".{path.name}.{os.getpid()}")  # as write_text makes one
        try:
            draft.touch()
            draft.unlink()
        except OSError as error:
            message = f"{option} {path}: cannot be written ({error.strerror})"
            raise UsageRefusedError(message) from error


def refuse_shared_files() -> None:
    """Refuse a file to write that another option of the running command names too.

    Raises:
        UsageRefusedError: what is written last would replace the other; both options are named.
    """
    written: dict[Path, str] = {}
    read: dict[Path, str] = {}
    for option, path, is_output in _named_files(click.get_current_context()):
        place = path.resolve()
        if _is_special(place):
            continue
        other = written.get(place) or (read.get(place) if is_output else None)
        if other is not None:
            message = f"{option} {path}: is the file of {other} too"
            raise UsageRefusedError(message)
        (written if is_output else read)[place] = option


def _is_special(path: Path) -> bool:
    """Tell whether something is there that is no file, such as /dev/stdout or a folder."""
    try:
        return path.exists() and not path.is_file()
    except OSError:  # a name that is too long, or a folder that may not be entered
        return False


def _named_files(context: click.Context) -> Iterator[tuple[str, Path, bool]]:
    """Give each file that was named: its option, and whether it is written."""
    for parameter in context.command.params:
        given = context.params.get(parameter.name or "")
        is_output = isinstance(parameter.type, click.Path) and not parameter.type.dir_okay
        is_option = isinstance(parameter, click.Option)
        option = parameter.opts[0] if is_option else (parameter.name or "").upper()
        for each in given if isinstance(given, tuple) else (given,):
            if isinstance(each, Path):
                yield option, each, is_output
            elif parameter.name == "expectations" and each not in (None, "none"):
                yield option, Path(each), False
