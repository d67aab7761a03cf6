"""The files of kernels that an implementation may launch."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ...impl.engines import sources
from ...impl.registry import BUILT_IN, find_implementation
from ...impl.targets.unpacked import Package
from .kernel_source import Source

NAMED = ("FILE", "KERNEL")
"""Ends of the names of constants by which our adapters name modules with kernels."""
MOST_FILES = 500
"""Most files of a plug-in's folder that are read to find its kernels."""


def find_kernels(reference: str, file: str | None) -> dict[str, Any]:
    """Return the fields of ``Kernels`` for an implementation, which is imported.

    Args:
        reference: a built-in name, or MODULE:NAME.
        file: the end of the path of one of its files of kernels, or a path; all files if None.
    """
    home = sys.modules[find_implementation(reference).function.__module__]
    built_in = reference in BUILT_IN
    start = list(_named_by(home)) if built_in else [Path(str(home.__file__)).resolve()]
    engine = _engine(home) if built_in else None
    if file is not None and Path(file).is_file():
        start = [Path(file).resolve()]
    if not start:
        return {"reference": reference, "folder": "", "package": "", "files": ()}
    if engine is not None:
        folder, package = engine.folder.resolve(), engine.name
    elif built_in:
        folder, package = Path(__file__).resolve().parents[2], __name__.partition(".")[0]
    else:
        folder, package = _folder_of(start[0])
    found = dict.fromkeys(_with_kernels(start, folder, package, all_of_them=not built_in))
    files = [str(each.relative_to(folder)) for each in found if each.is_relative_to(folder)]
    module, _, name = reference.rpartition(":")
    if module.endswith(".py") and not package:
        reference = f"{Path(module).resolve().relative_to(folder)}:{name}"
    return {
        "reference": reference,
        "folder": str(folder),
        "package": package,
        "files": [each for each in files if file is None or _is_meant(folder / each, file)],
        "engine": engine is not None,
        "title": engine.title if engine is not None else "",
    }


def _is_meant(path: Path, file: str) -> bool:
    """Whether a path is a file that was asked for, or ends with it, name by name."""
    given = Path(file)
    if given.is_file():
        return path.resolve() == given.resolve()
    return path.parts[-len(given.parts) :] == given.parts


def _adapters(home: ModuleType) -> Iterator[ModuleType]:
    """Yield a module, and those of its package that it has names of, and so on."""
    inside, waiting, seen = f"{home.__package__}.", [home], {home.__name__}
    while waiting:
        module = waiting.pop(0)
        yield module
        for value in vars(module).values():
            name = value.__name__ if isinstance(value, ModuleType) else _home_of(value)
            if name.startswith(inside) and name not in seen and name in sys.modules:
                seen.add(name)
                waiting.append(sys.modules[name])


def _home_of(value: object) -> str:
    return str(getattr(value, "__module__", ""))


def _names(home: ModuleType) -> Iterator[str | tuple[str, ...]]:
    for adapter in _adapters(home):
        for name, value in vars(adapter).items():
            if name.endswith(NAMED) and isinstance(value, (str, tuple)):
                yield value


def _named_by(home: ModuleType) -> Iterator[Path]:
    for value in _names(home):
        first = value if isinstance(value, str) else value[0]
        if first.partition(".")[0] == __name__.partition(".")[0]:
            spec = importlib.util.find_spec(first)
            if spec is not None and spec.origin:
                yield Path(spec.origin).resolve()
        elif (source := sources.source_of(value)) is not None:
            yield source.resolve()


def _engine(home: ModuleType) -> Package | None:
    for value in _names(home):
        first = value if isinstance(value, str) else value[0]
        name = first.partition(".")[0]
        if name != __name__.partition(".")[0]:
            return sources.find(name)
    return None


def _folder_of(file: Path) -> tuple[Path, str]:
    """Return what is copied for a file of a user's, and the package that it is."""
    here = Path.cwd().resolve()
    if file.is_relative_to(here):
        return here, ""
    folder = file.parent
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
    return (folder, folder.name) if (folder / "__init__.py").exists() else (file.parent, "")


def _with_kernels(
    start: list[Path], folder: Path, package: str, *, all_of_them: bool
) -> Iterator[Path]:
    """Yield files with jitted functions, and follow imports within a folder.

    Args:
        start: the files where it begins.
        folder: the folder.
        package: the package that it is.
        all_of_them: whether imports of files without kernels are followed as well.
    """
    waiting, seen = list(start), set(start)
    while waiting and len(seen) < MOST_FILES:
        file = waiting.pop(0)
        source = Source(file.read_text(encoding="utf-8"))
        if source.kernels:
            yield file
        if source.kernels or all_of_them:
            new = set(_imported(source.tree, file, folder, package)) - seen
            seen |= new
            waiting += sorted(new)


def _imported(tree: ast.Module, file: Path, folder: Path, package: str) -> Iterator[Path]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [each.name.split(".") for each in node.names]
            base = folder
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".") if node.module else []
            names = [module, *([*module, each.name] for each in node.names)]
            base = file.parents[node.level - 1] if node.level else folder
        else:
            continue
        for name in names:
            absolute = base == folder and package and name[:1] == [package]
            place = base.joinpath(*(name[1:] if absolute else name)).with_suffix(".py")
            if name and place.is_file() and place.is_relative_to(folder):
                yield place
