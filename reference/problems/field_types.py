"""The types of problems' fields, which their annotations state."""

from __future__ import annotations

import functools
import types
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .base import BaseProblem, refuse


def check_types(problem: BaseProblem) -> None:
    """Refuse a problem with a field of another type than its annotation."""
    kind: Any = type(problem)
    for name, exact, hint in _checks(kind):
        value = getattr(problem, name)
        if type(value) not in exact and not _is_of_integers(value, hint):
            typed(name, value, hint)


@functools.cache
def _checks(cls: Any) -> tuple[tuple[str, frozenset[type], Any], ...]:  # noqa: ANN401  a type
    """Return each field's name, the types that need no second look, and its annotation."""
    hints = hints_of(cls)
    return tuple(
        (field.name, _exact(hints[field.name]), hints[field.name]) for field in fields(cls)
    )


def _exact(hint: Any) -> frozenset[type]:  # noqa: ANN401  a typing annotation
    if get_origin(hint) in (Union, types.UnionType):
        return frozenset().union(*map(_exact, get_args(hint)))
    if get_origin(hint) is Literal:
        return frozenset({str})
    if get_origin(hint) is not None:
        return frozenset()
    return frozenset({float, int} if hint is float else {hint})


def _is_of_integers(value: object, hint: Any) -> bool:  # noqa: ANN401  a typing annotation
    # Batches have hundreds of lengths, and a run makes hundreds of thousands of problems.
    return hint == tuple[int, ...] and type(value) is tuple and set(map(type, value)) <= {int}


@functools.cache
def hints_of(cls: Any) -> dict[str, Any]:  # noqa: ANN401  a type of problem
    """Return the types of a problem's fields."""
    return get_type_hints(cls)


def typed(name: str, value: object, hint: Any) -> Any:  # noqa: ANN401  a typing annotation
    """Return a field's value, lists as tuples; refuse one of another type."""
    if type(value) is hint:
        return value
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        hint = str  # which names there are, the problem itself checks
    if origin in (Union, types.UnionType):
        return None if value is None else typed(name, value, arguments[0])
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            refuse(name, value, "a list")
        items = list(value)
        inner = arguments[:1] * len(items) if arguments[-1] is Ellipsis else arguments
        if len(inner) != len(items):
            refuse(name, value, f"a list of {len(inner)}")
        return tuple(
            typed(f"{name}[{i}]", item, each)
            for i, (item, each) in enumerate(zip(items, inner, strict=True))
        )
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            refuse(name, value, "a number that a float can hold")
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        refuse(name, value, f"of type {hint.__name__}")
    return value
