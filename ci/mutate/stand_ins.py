"""Copies of a package with a mutant in it, and what makes a process load them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...impl.targets.unpacked import FROM

MOST_COPIED = 1 << 20
"""Most bytes of a file, other than Python's, that is copied."""


@dataclass(frozen=True)
class Kernels:
    """The kernels of an implementation, and what is copied to change them.

    Attributes:
        name: the implementation, as it was asked for.
        reference: the implementation, as a process in the copy finds it.
        folder: the folder that is copied.
        package: the package that the folder is; empty where modules lie in it.
        files: the files with kernels that it may launch, relative to the folder.
        engine: whether adapters load the package by ``--from``.
    """

    name: str
    reference: str
    folder: str
    package: str
    files: tuple[str, ...]
    engine: bool = False
    title: str = ""
    """The name and version of an engine."""

    def text(self, file: str) -> str:
        """Return a file as it is."""
        return (Path(self.folder) / file).read_text(encoding="utf-8")


class StandIn:
    """A copy of a package, one file of which changes from mutant to mutant.

    Python files are copied, and others of at most ``MOST_COPIED`` bytes: a test that finds its
    neighbours by its own resolved path finds copies too, and what it writes there is lost. Larger
    files, environments, and folders that are links themselves are links to the originals.

    Args:
        kernels: the package that is copied.
        place: the folder for the copy.
    """

    def __init__(self, kernels: Kernels, place: Path) -> None:
        self._kernels, self.place = kernels, place.resolve()
        self._original, self._copy = Path(kernels.folder), self.place / kernels.package
        _copy(self._original, self._copy)
        if kernels.package:
            for beside in self._original.parent.glob(f"{kernels.package}-*.dist-info"):
                (self.place / beside.name).symlink_to(beside)  # the package's version

    def put(self, texts: Mapping[str, str]) -> None:
        """Write these texts into files, and into the kernels' other files their own."""
        for name in self._kernels.files:
            file = self._copy / name
            file.write_text(texts.get(name) or self._kernels.text(name), encoding="utf-8")
            # Its time and size may be those of the mutant before: no bytecode of that may be found.
            for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
                compiled.unlink()

    @property
    def files(self) -> list[str]:
        """The copies of the files with kernels."""
        return [str(self._copy / name) for name in self._kernels.files]

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which a process loads the copy."""
        path = [self.place, *(self._moved(Path(each)) for each in (*sys.path, "."))]
        engines = os.environ.get(FROM, "").split(os.pathsep)
        if self._kernels.engine:
            engines = [str(self.place), *engines]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            FROM: os.pathsep.join(filter(None, engines)),
        }

    @property
    def working_folder(self) -> Path:
        """The current folder, or the copy of it."""
        return self._moved(Path.cwd())

    def _moved(self, path: Path) -> Path:
        path, original = path.resolve(), self._original.resolve()
        if self._kernels.package or not path.is_relative_to(original):
            return path
        return self._copy / path.relative_to(original)


def modules_in(folder: Path) -> Iterator[Path]:
    """Yield the Python files of a folder that can be read, in the order of their names."""
    for each in sorted(_visible(folder)):
        if _is_part(each):
            yield from modules_in(each)
        elif each.suffix == ".py" and each.is_file() and os.access(each, os.R_OK):
            yield each


def _copy(folder: Path, copy: Path) -> None:
    copy.mkdir(parents=True, exist_ok=True)
    for each in _visible(folder):
        place = copy / each.name
        if _is_part(each):
            _copy(each, place)
        elif each.is_file() and (each.suffix == ".py" or each.stat().st_size <= MOST_COPIED):
            shutil.copy2(each, place)
        else:
            place.symlink_to(each.resolve())


def _visible(folder: Path) -> Iterator[Path]:
    return (each for each in folder.iterdir() if not each.name.startswith("."))


def _is_part(path: Path) -> bool:
    if path.is_symlink() or not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
        return False  # a folder that is a link may lead back to this one
    return not (path / "pyvenv.cfg").exists()  # no kernel lies in an environment
