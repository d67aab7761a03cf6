"""Files that a command writes: declared, tried before a long run, and written after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from ...properties.findings.files import Output, OutputError, is_special
from .errors import UsageRefusedError
from .lines import tell

FILE = click.Path(dir_okay=False, path_type=Path)
"""Type of an option that names a file to write."""
WRITTEN = f"{__name__}.written"
"""Key under which a running command keeps the files that it has written."""


@dataclass(frozen=True)
class Outputs:
    """The files that a command was asked to write.

    Attributes:
        paths: the paths by the option that names each.
    """

    paths: Mapping[str, Path] = field(default_factory=dict)

    def check(self) -> None:
        """Check before a long run that its results can be written after it.

        Raises:
            UsageRefusedError: a folder cannot be made, or no file can be written in it.
        """
        _raise(_failure(flag, path, Output.check) for flag, path in self.paths.items())

    def write(
        self, contents: Mapping[str, Callable[[], object]], failures: Sequence[str] = ()
    ) -> None:
        """Write the files, the others too where one cannot be written.

        Args:
            contents: functions by option that make the text of a file, or what its JSON holds. An
                option that was not given is left out, and nothing is made for it.
            failures: sentences on other files that could not be written, for the same error.

        Raises:
            UsageRefusedError: a file cannot be written.
        """
        failed = {
            path: _failure(flag, path, lambda output: output.write(contents[output.flag]()))
            for flag, path in self.paths.items()
            if flag in contents
        }
        _tell_at_the_end(path for path, why in failed.items() if not why)
        _raise([*failed.values(), *failures])


def output_option(
    flag: str, about: str, cls: type[click.Option] = click.Option
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare an option that names a file to write.

    A command with such options has a parameter ``outputs``, which holds those that were given.
    """
    return click.option(flag, type=FILE, expose_value=False, callback=_collect, help=about, cls=cls)


def refuse_shared_files() -> None:
    """Refuse a file to write that another option of the running command names too.

    Raises:
        UsageRefusedError: what is written last would replace the other; both options are named.
    """
    context = click.get_current_context()
    outputs = context.params.get("outputs", Outputs())
    named = sorted(
        [*_named_files(context), *((*each, True) for each in outputs.paths.items())],
        key=lambda each: each[2],
    )
    owners: dict[Path, str] = {}
    for option, path, is_output in named:  # files that are read may be the same
        place = Path(os.path.realpath(path))  # which takes a loop of links
        if is_special(place):
            continue
        if is_output and place in owners:
            message = f"{option} {path}: is the file of {owners[place]} too"
            raise UsageRefusedError(message)
        owners[place] = option


def _tell_at_the_end(written: Iterable[Path]) -> None:
    """Have the running command say last, below its report, which files it wrote: each once."""
    context = click.get_current_context(silent=True)
    if context is None:
        return
    if WRITTEN not in context.meta:
        context.meta[WRITTEN] = {}
        context.call_on_close(partial(_tell_written, context.meta[WRITTEN]))
    context.meta[WRITTEN].update(dict.fromkeys(each for each in written if not is_special(each)))


def _tell_written(paths: Iterable[Path]) -> None:
    for path in paths:
        tell(f"wrote {path}", err=True)


def _failure(flag: str, path: Path, action: Callable[[Output], None]) -> str:
    """Return why an action on a file fails; nothing if it does not."""
    try:
        action(Output(flag, path))
    except OutputError as error:
        return str(error)
    return ""


def _raise(failures: Iterable[str]) -> None:
    message = "; ".join(filter(None, failures))
    if message:
        raise UsageRefusedError(message)


def _collect(context: click.Context, option: click.Parameter, path: Path | None) -> None:
    outputs = context.params.get("outputs", Outputs())
    given = {} if path is None else {option.opts[0]: path}
    context.params["outputs"] = Outputs({**outputs.paths, **given})


def _named_files(context: click.Context) -> Iterator[tuple[str, Path, bool]]:
    """Yield each file that the command names beside its outputs, and whether it is written."""
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
