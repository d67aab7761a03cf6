"""The files of kernels that an implementation may launch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...impl.engines import sources
from ...impl.registry import BUILT_IN, find_implementation
from ...impl.targets.backends import KERNELPROOF
from ...properties.findings.expectations import read_expectations
from ...properties.laws import laws_of
from ...properties.search.engine import Run
from ...properties.search.plan import Plan
from ...properties.space.profiles import PROFILES
from .kernel_source import Source

SHORT = replace(PROFILES["quick"], problems=4, shrink_seconds=0.0)
"""The profile of the run that shows which files a built-in adapter launches kernels of."""
SHORT_SECONDS = 60.0
MOST_FILES = 500
"""Most files of a plug-in's folder that are read to find its kernels."""


def find_kernels(reference: str, file: str | None) -> dict[str, Any]:
    """Return the fields of ``Kernels`` for an implementation, which is imported.

    Args:
        reference: a built-in name, or MODULE:NAME.
        file: the end of the path of one of its files of kernels, or a path; all files if None.
    """
    implementation, built_in = find_implementation(reference), reference in BUILT_IN
    by_engine = built_in and implementation.provider not in ("", KERNELPROOF)
    engine = sources.find(implementation.provider) if by_engine else None
    if by_engine and engine is None:
        return {"reference": reference, "folder": "", "package": "", "files": ()}
    given = Path(file).resolve() if file is not None and Path(file).is_file() else None
    if built_in:
        folder, package = Path(__file__).resolve().parents[2], __name__.partition(".")[0]
        if engine is not None:
            folder, package = engine.folder.resolve(), engine.name
        start = [given] if given else _launched(reference, implementation.operation, folder)
    else:
        home = sys.modules[implementation.function.__module__]
        start = [given or Path(str(home.__file__)).resolve()]
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


def _launched(reference: str, operation: str, folder: Path) -> list[Path]:
    """Return the files in a folder of which a short run of an adapter launches kernels."""
    plan = Plan(
        [reference],
        SHORT,
        ledger=read_expectations(None),
        jobs=1,
        laws=[next(law.name for law in laws_of(operation) if not law.needs)],
        confirm=False,
        seconds=SHORT_SECONDS,
    )
    report = Run(plan).execute().implementations[0]
    files = [Path(file).resolve() for file, run in report.kernel_runs.files.items() if run.launched]
    return [each for each in files if each.is_relative_to(folder)]


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
