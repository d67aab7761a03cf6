"""Names of ``triton.language`` that a module binds at import, replaced while its kernels run.

Triton's interpreter replaces functions of the language where they are attributes. A global that
still is the original (``log2 = tl.log2``, ``from triton.language import range``) gets for the time
of a launch what the attribute got. Functions of libdevice get what ``libdevice.py`` has of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from .libdevice import modules, replacements

LANGUAGE = "triton.language"
PLACES = (LANGUAGE, f"{LANGUAGE}.core", f"{LANGUAGE}.math")
"""Modules whose attributes a launch replaces."""


class _Globals:
    """A module's globals as attributes, which the interpreter's scope sets and restores."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


def reach_bound_names(
    patch: Callable[[Any], Any],
    interpreter: Any,  # noqa: ANN401  a module
) -> Callable[[Any], Any]:
    """Extend what patches the language at a launch, and at each call of a jitted helper in it.

    Args:
        patch: takes a function and returns the scope of what it changed.
        interpreter: the module ``triton.runtime.interpreter``, while no kernel runs.
    """
    return _Launches(patch, interpreter).patched


class _Launches:
    def __init__(self, patch: Callable[[Any], Any], interpreter: Any) -> None:  # noqa: ANN401
        self._patch, self._interpreter = patch, interpreter
        self._language, self._core, _ = places = [importlib.import_module(n) for n in PLACES]
        self._libraries, self._by_numpy = modules(), replacements(interpreter)
        self._places = [*places, *self._libraries]
        self._originals = _originals(self._places)
        self._launch: list[Any] = []
        self._reached: set[int] = set()

    def patched(self, fn: Any) -> Any:  # noqa: ANN401  a kernel or a helper
        """Replace the language's functions, and those that the function's module bound."""
        names = fn.__globals__
        outermost = self._core.is_builtin(self._language.add)  # a launch replaces and restores it
        visible = [each for each in names.values() if isinstance(each, ModuleType)]
        seen = fn
        if self._language not in visible and (outermost or self._core not in visible):
            # The interpreter looks for the module, which `from triton.language import ...` lacks.
            seen = SimpleNamespace(__globals__={**names, LANGUAGE: self._language})
        scope = self._patch(seen)
        if outermost:
            self._begin(scope)
        if id(names) not in self._reached:
            self._reached.add(id(names))
            # Nobody restores the scope of a helper's call: its names belong to the launch's.
            self._replace(names, self._launch[0] if self._launch else scope)
        return scope

    def _begin(self, scope: Any) -> None:  # noqa: ANN401
        self._launch[:] = [scope]
        self._reached.clear()
        for library in self._libraries:
            for name in self._by_numpy.keys() & vars(library).keys():
                scope.set_attr(library, name, self._by_numpy[name])

    def _replace(self, names: dict[str, Any], scope: Any) -> None:  # noqa: ANN401
        if any(names is vars(place) for place in self._places):
            return
        target = _Globals(names)
        for name, value in list(names.items()):
            places = self._originals.get(id(value), ())
            now = [vars(place)[known] for place, known in places]
            replaced = [each for each in now if each is not value]
            if replaced:
                scope.set_attr(target, name, replaced[0])
            elif now and self._core.is_builtin(value):
                builder, patch = self._interpreter.interpreter_builder, self._interpreter
                patch._patch_attr(target, name, value, builder, scope)  # noqa: SLF001


def _originals(places: list[ModuleType]) -> dict[int, list[tuple[ModuleType, str]]]:
    """Return the modules and names of each function of the language, by its identity."""
    found: dict[int, list[tuple[ModuleType, str]]] = {}
    for place in places:
        for name, value in vars(place).items():
            if callable(value):
                found.setdefault(id(value), []).append((place, name))
    return found
