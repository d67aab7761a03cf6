"""Single kernel files of serving engines, loaded without running the rest of the engine.

An adapter names its file and the modules that stand in for the rest of the engine::

    FILE = "vllm.v1.attention.ops.triton_merge_attn_states"

    def stubs():  # called once, at the first call of the kernel
        import triton
        return {"vllm.triton_utils": {"triton": triton, "tl": triton.language}}

    def supports(problem, target):
        return unavailable(FILE, target) or True

    @implementation("merge_state", name="vllm-...", provider="vllm", supports=supports, ...)
    def merge(inputs):
        with load(FILE, stubs) as kernels:
            kernels.merge_attn_states(...)

Call the kernel inside of ``with``: functions of engines import more when they run. A module is, in
this order: a stub, if one has its name; a package without its ``__init__``, if there is a folder;
the file itself. A stub of another package than the engine's names each of its parents too
(``{"sgl_kernel": {}, "sgl_kernel.flash": {...}}``). Outside of ``with`` none of these modules is
importable: whoever has the engine installed and imports it gets the real one.

Where releases have the file in different places, ``FILE`` is a tuple of its names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import protocol
from ..gpu.triton_interpreter import hasten, uninterpreted
from ..protocol import Implementation, Operation
from ..targets.exceptions import message_of
from ..targets.optional import missing
from ..targets.refusal import Refusal
from ..targets.target import Target, UnsupportedError, installed_version
from ..targets.unpacked import FROM, Package, unpacked

Names = str | tuple[str, ...]
"""The dotted name of a file, or those that it has in different releases, the newest first."""
Stubs = Callable[[], Mapping[str, Mapping[str, object]]]
"""Makes the attributes of modules that stand in for an engine's, by the modules' names."""


class AbsentError(UnsupportedError, AttributeError):
    """An attribute that a stub does not have; ``hasattr`` and ``getattr`` understand it."""


def find(name: str) -> Package | None:
    """Return the package of an engine: unpacked in a folder of ``FROM``, or installed."""
    return _find(name, os.environ.get(FROM, ""), *sys.path)


@functools.cache  # support is asked thousands of times
def _find(name: str, *_: str) -> Package | None:
    found = unpacked(name)
    if found is not None:
        return found
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None)
        # Only a folder of this name in the current one has no origin.
        if spec is not None and spec.origin and spec.submodule_search_locations:
            return Package(name, Path(spec.origin).parent, installed_version(name))
    return None


def implementation(
    operation: Operation,
    *,
    provider: str,
    supports: Callable[[Any, Target], Refusal | str | bool],
    **options: Any,  # noqa: ANN401  of ``protocol.implementation``
) -> Callable[[Callable[[Any], Any]], Implementation]:
    """Make an implementation of an engine's kernel, for use as a decorator.

    It refuses a problem first because the package is not there: a survey then asks nothing more,
    where it would look for a problem that is supported among many thousands.

    Args:
        operation, supports, options: the same as in ``protocol.implementation``.
        provider: the engine's package.
    """

    def supported(problem: Any, target: Target) -> Refusal | str | bool:  # noqa: ANN401  any record
        return _not_installed(provider) or supports(problem, target)

    return protocol.implementation(operation, provider=provider, supports=supported, **options)


def missing_file(module: Names) -> Refusal | None:
    """Return why an engine's module cannot be loaded; None if its file is there.

    Nothing is imported.
    """
    found = _found(module)
    return found if isinstance(found, Refusal) else None


def missing_name(module: Names, name: str) -> Refusal | None:
    """Return why what an engine's module defines cannot be used; None if its file says the name."""
    found = _found(module)
    if isinstance(found, Refusal):
        return found
    package, file = found
    if says(file, name):
        return None
    return Refusal(f"{package.title} has no {name} in {_path(file)}", "package", package.name)


def says(module: Names, word: str) -> bool:
    """Whether a name stands in an engine's file: releases differ in what their kernels take."""
    file = source_of(module)
    return file is not None and word in _words(file)


def source_of(module: Names) -> Path | None:
    """Return an engine's file; None if it is not there."""
    found = _found(module)
    return None if isinstance(found, Refusal) else _place(*found).with_suffix(".py")


def known(function: Callable[..., Any], **arguments: object) -> dict[str, Any]:
    """Return those arguments that a release's function has parameters for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


@functools.cache
def _words(file: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", file.read_text(encoding="utf-8", errors="replace")))


def unavailable(module: Names, target: Target) -> Refusal | None:
    """Return why a Triton kernel in an engine's module cannot run; None if it can."""
    return uninterpreted(target) or missing_file(module) or missing("triton", "triton")


@contextmanager
def load(module: Names, stubs: Stubs) -> Iterator[ModuleType]:
    """Import a module of an engine, without the packages that it lies in.

    Args:
        module: its dotted name, such as ``vllm.v1.attention.ops.triton_unified_attention``, or its
            names in different releases.
        stubs: the modules that stand in for others.

    Yields:
        The module. It and what it imports is loaded once in a process.

    Raises:
        UnsupportedError: the package or the file is missing; the file wants a module that is not
            there, or an attribute that its stub does not have.
    """
    found = _found(module)
    if isinstance(found, Refusal):
        raise UnsupportedError(found)
    package, name = found
    with _world(package, stubs).entered():
        try:
            loaded = importlib.import_module(name)
            hasten()  # its first import of Triton is later than the worker's own call
            yield loaded
        except (AbsentError, ImportError) as error:
            message = f"{_path(name)} of {package.title}: {message_of(error)}"
            raise UnsupportedError(message) from error


def _not_installed(engine: str) -> Refusal | None:
    return None if find(engine) else _absent(engine)


def _absent(engine: str) -> Refusal:
    hint = f"install it, or name a folder with its files by --from (or in {FROM})"
    return Refusal(f"{engine} is not installed: {hint}", "package", engine)


def _found(module: Names) -> tuple[Package, str] | Refusal:
    """Return the package and the first of the names that has a file, or why there is none."""
    names = (module,) if isinstance(module, str) else module
    engine = names[0].partition(".")[0]
    package = find(engine)
    if package is None:
        return _absent(engine)
    for name in names:
        if _place(package, name).with_suffix(".py").is_file():
            return package, name
    wanted = " or ".join(map(_path, names))
    return Refusal(f"{package.title} has no {wanted}", "package", engine)


class _World(MetaPathFinder, Loader):
    """An engine's modules as one adapter sees them, beside those of ``sys.modules``."""

    def __init__(self, package: Package, stubs: Mapping[str, Mapping[str, object]]) -> None:
        self._package = package
        self._stubs = stubs
        self._modules: dict[str, ModuleType] = {}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let its modules be imported, and no others of their names."""
        others = self._taken()
        sys.modules.update(self._modules)
        known = len(sys.modules)
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            # Thousands of names are not looked through after each call of a kernel.
            kept = len(sys.modules) == known and self._modules.keys() <= sys.modules.keys()
            names = list(self._modules) if kept else self._names()
            self._modules = {name: sys.modules.pop(name) for name in names}
            sys.modules.update(others)

    def _taken(self) -> dict[str, ModuleType]:
        """Take the modules of these names out of ``sys.modules``."""
        if sys.modules.keys().isdisjoint((self._package.name, *self._stubs)):
            return {}
        return {name: sys.modules.pop(name) for name in self._names()}

    def _names(self) -> list[str]:
        """Return the names of the engine's modules, and of stubs, that are in ``sys.modules``."""
        inside = f"{self._package.name}."
        return [
            name
            for name in list(sys.modules)
            if name == self._package.name or name.startswith(inside) or name in self._stubs
        ]

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find a module, as the import system asks for it."""
        del path, target
        if name in self._stubs:
            return ModuleSpec(name, self, is_package=True)
        if name.partition(".")[0] != self._package.name:
            return None
        place = _place(self._package, name)
        if place.is_dir():
            # Without a loader: a package of which nothing runs.
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec
        file = place.with_suffix(".py")
        return importlib.util.spec_from_file_location(name, file) if file.is_file() else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make a stub."""
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Set a stub's attributes."""
        vars(module).update(self._stubs[module.__name__])


class _Stub(ModuleType):
    """Stands in for a module of an engine."""

    def __getattr__(self, name: str) -> object:
        message = f"the adapter's stub of {self.__name__} has no {name}"
        raise AbsentError(message)


@functools.cache
def _world(package: Package, stubs: Stubs) -> _World:
    return _World(package, stubs())


def _place(package: Package, module: str) -> Path:
    return package.folder.joinpath(*module.split(".")[1:])


def _path(module: str) -> str:
    return f"{module.replace('.', '/')}.py"
