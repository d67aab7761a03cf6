"""The option ``--from``: folders with the files of serving engines, for a run and its workers."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ...impl.targets.unpacked import ENGINES, FROM, engines_in
from ..console.errors import UsageRefusedError


def _use(context: click.Context, _parameter: click.Parameter, folders: tuple[Path, ...]) -> None:
    """Put the folders into the environment, which workers inherit, until the command ends.

    Raises:
        UsageRefusedError: a folder holds no engine.
    """
    if not folders:
        return
    for folder in folders:
        if not engines_in(folder):
            known = " or ".join(f"{name}/" for name in ENGINES)
            message = f"--from {folder}: it must be a folder that holds {known}, unpacked"
            raise UsageRefusedError(message)
    before = os.environ.get(FROM)
    os.environ[FROM] = os.pathsep.join(str(folder.absolute()) for folder in folders)
    context.call_on_close(lambda: _restore(before))


def _restore(before: str | None) -> None:
    if before is None:
        del os.environ[FROM]
    else:
        os.environ[FROM] = before


FROM_OPTION = click.option(
    "--from",
    "engine_folders",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    expose_value=False,
    callback=_use,
    help="Folder with an unpacked vLLM or SGLang, whose kernels are judged instead of the "
    f"installed ones; may be repeated; also ${FROM}.",
)
