"""The option ``--from``: folders with the files of serving engines, for a run and its workers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ...impl.targets.unpacked import FROM, packages_in
from ..console.errors import UsageRefusedError
from ..options import law_option


def from_option(command: Callable[..., int]) -> Callable[..., int]:
    """Add the option; the command runs with its folders in the environment."""

    @functools.wraps(command)
    def run(*arguments: Any, engine_folders: Sequence[Path], **options: Any) -> int:  # noqa: ANN401
        with _named(engine_folders):
            return command(*arguments, **options)

    return law_option(
        "--from",
        "engine_folders",
        multiple=True,
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Folder with an unpacked package (vLLM, SGLang, lmdeploy or any other), whose kernels "
        f"are judged instead of the installed ones; may be repeated; also ${FROM}.",
    )(run)


@contextmanager
def _named(folders: Sequence[Path]) -> Iterator[None]:
    """Put folders into the environment, which workers inherit.

    Raises:
        UsageRefusedError: a folder holds no package.
    """
    if not folders:
        yield
        return
    for folder in folders:
        if not packages_in(folder):
            message = f"--from {folder}: it must be a folder that holds a package, unpacked"
            raise UsageRefusedError(message)
    before = os.environ.get(FROM)
    os.environ[FROM] = os.pathsep.join(str(folder.absolute()) for folder in folders)
    try:
        yield
    finally:
        if before is None:
            del os.environ[FROM]
        else:
            os.environ[FROM] = before
