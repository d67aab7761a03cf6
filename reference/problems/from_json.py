"""Reading problems back from JSON, validated field by field."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ...fixtures.suggestions import did_you_mean
from . import Problem
from .base import SCHEMA, refuse


def read_problem(data: Mapping[str, Any], problem_types: Mapping[str, type[Problem]]) -> Problem:
    """Return the problem that ``to_json`` wrote, given the types of problem by their kind.

    Raises:
        ValueError: another schema, an unknown type or field, a value of the wrong type or outside
            its range; the field is named.
    """
    if not isinstance(data, Mapping):
        message = f"a problem is a JSON object, not {type(data).__name__}"
        raise ValueError(message)
    if data.get("schema") != SCHEMA:
        refuse("schema", data.get("schema"), repr(SCHEMA))
    kind = data.get("type")
    if not isinstance(kind, str) or kind not in problem_types:
        meant = did_you_mean(str(kind), problem_types)
        refuse("type", kind, f"one of {sorted(problem_types)}", meant=meant)
    cls: Any = problem_types[kind]
    hints = hints_of(cls)
    known = {field.name for field in fields(cls)}
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name in ("schema", "type"):
            continue
        if name not in known:
            meant = did_you_mean(name, known)
            refuse(name, value, f"absent: {kind} problems have no such field", meant=meant)
        values[name] = _typed(name, value, hints[name])
    problem: Problem = cls(**values)
    return problem


@functools.cache
def hints_of(cls: Any) -> dict[str, Any]:  # noqa: ANN401  a type of problem
    """Return the types of a problem's fields."""
    return get_type_hints(cls)


def _typed(name: str, value: object, hint: Any) -> Any:  # noqa: ANN401  a typing annotation
    if type(value) is hint:
        return value
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        hint = str  # which names there are, the problem itself checks
    if origin in (Union, types.UnionType):
        return None if value is None else _typed(name, value, arguments[0])
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            refuse(name, value, "a list")
        items = list(value)
        inner = arguments[:1] * len(items) if arguments[-1] is Ellipsis else arguments
        if len(inner) != len(items):
            refuse(name, value, f"a list of {len(inner)}")
        return tuple(
            _typed(f"{name}[{i}]", item, each)
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
