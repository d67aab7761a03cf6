"""Reading problems back from JSON, validated field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...fixtures.suggestions import did_you_mean
from . import Problem
from .base import SCHEMA, refuse
from .field_types import hints_of, typed


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
        values[name] = typed(name, value, hints[name])
    problem: Problem = cls(**values)
    return problem
