"""What all problems share: JSON, a stable id, the refusal of a bad field."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, ClassVar, NoReturn

from ...fixtures.suggestions import did_you_mean
from ..validation import listed

SCHEMA = "kernelproof/problem/1"
DTYPES = ("float32", "float16", "bfloat16")
MAX_SEQ_LEN = 2**18
"""Longest request, in keys: twice the context of most models."""
LARGEST_SIZE, LARGEST_SEED = 2**31 - 1, 2**63 - 1
"""Sizes are int32 to kernels, seeds int64 to torch."""
_fields: dict[type[Any], tuple[tuple[str, bool, Any], ...]] = {}


class BaseProblem:
    """A frozen dataclass of plain values that describes one call."""

    kind: ClassVar[str]
    later_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that came after the schema: left out at their default, so that ids stay the same."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary that ``problem_from_json`` reads back."""
        found = {"schema": SCHEMA, "type": self.kind}
        for name, always, default in _json_fields(type(self)):
            value = getattr(self, name)
            if always or value != default:
                found[name] = _listed(value)
        return found

    @cached_property
    def id(self) -> str:
        """Twelve hexadecimal digits that depend on nothing but the problem."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _json_fields(kind: type[Any]) -> tuple[tuple[str, bool, Any], ...]:
    """Return the name of each field, whether it is always in the JSON, and its default."""
    if kind not in _fields:  # a run writes hundreds of thousands of problems
        _fields[kind] = tuple(
            (field.name, field.name not in kind.later_fields, field.default)
            for field in fields(kind)
        )
    return _fields[kind]


def _listed(value: Any) -> Any:  # noqa: ANN401  JSON
    """Return tuples as lists, all the way down."""
    return [_listed(each) for each in value] if isinstance(value, tuple) else value


def is_power_of_two(number: float) -> bool:
    """Whether multiplying by it only changes an exponent."""
    return math.frexp(number)[0] == 0.5  # noqa: PLR2004


def check_one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a field with a value that is not among these."""
    if value not in allowed:
        refuse(name, value, f"one of {listed(allowed)}", meant=did_you_mean(str(value), allowed))


def check_at_least(problem: object, least: Sequence[tuple[str, int]]) -> None:
    """Refuse a problem with a field below its least value, or above what its type holds."""
    for name, low in least:
        most = LARGEST_SEED if name == "seed" else LARGEST_SIZE
        if getattr(problem, name) < low:
            refuse(name, getattr(problem, name), f"at least {low}")
        if getattr(problem, name) > most:
            refuse(name, getattr(problem, name), f"at most {most}")


def check_lengths(name: str, lengths: Sequence[int]) -> None:
    """Refuse a field of lengths with one that no request has."""
    for position, length in enumerate(lengths):
        if not 0 <= length <= MAX_SEQ_LEN:
            refuse(f"{name}[{position}]", length, f"from 0 to {MAX_SEQ_LEN}")


def refuse(name: str, value: object, expected: str, *, meant: str = "") -> NoReturn:
    """Raise the ValueError for a field with a bad value, and what may have been meant instead."""
    message = f"problem field {name} is {value!r}; {meant}it must be {expected}"
    raise ValueError(message)
