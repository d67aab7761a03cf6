"""Names of ``triton.language`` that a module binds at import, replaced while its kernels run.

Triton's interpreter replaces functions of the language where they are attributes. A global that
still is the original (``log2 = tl.log2``, ``from triton.language import range``) gets for the time
of a launch what the attribute got.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

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
    places = [importlib.import_module(name) for name in PLACES]
    language, core, _ = places
    originals = _originals(places)
    launch: list[Any] = []
    reached: set[int] = set()

    def patched(fn: Any) -> Any:  # noqa: ANN401  a kernel or a helper
        names = fn.__globals__
        outermost = core.is_builtin(language.add)  # each launch replaces and restores it
        seen = fn
        modules = [each for each in names.values() if isinstance(each, ModuleType)]
        if language not in modules and (outermost or core not in modules):
            # The interpreter looks for the module, which `from triton.language import ...` lacks.
            seen = SimpleNamespace(__globals__={**names, LANGUAGE: language})
        scope = patch(seen)
        if outermost:
            launch[:] = [scope]
            reached.clear()
        if id(names) not in reached:
            reached.add(id(names))
            # Nobody restores the scope of a helper's call: its names belong to the launch's.
            _replace(names, launch[0] if launch else scope)
        return scope

    def _replace(names: dict[str, Any], scope: Any) -> None:  # noqa: ANN401
        if any(names is vars(place) for place in places):
            return
        target = _Globals(names)
        for name, value in list(names.items()):
            now = [vars(place)[known] for place, known in originals.get(id(value), ())]
            replaced = [each for each in now if each is not value]
            if replaced:
                scope.set_attr(target, name, replaced[0])
            elif now and core.is_builtin(value):
                builder = interpreter.interpreter_builder
                interpreter._patch_attr(target, name, value, builder, scope)  # noqa: SLF001

    return patched


def _originals(places: list[ModuleType]) -> dict[int, list[tuple[ModuleType, str]]]:
    """Return the modules and names of each function of the language, by its identity."""
    found: dict[int, list[tuple[ModuleType, str]]] = {}
    for place in places:
        for name, value in vars(place).items():
            if callable(value):
                found.setdefault(id(value), []).append((place, name))
    return found
