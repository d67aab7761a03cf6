"""Shapes of data files, checked by msgspec; what is wrong is one sentence that names its place.

msgspec checks types, choices and unknown fields. Its errors name the place as ``$.rule[3].chips``,
with ``[...]`` for any key of a dictionary; ``converted`` finds the key, the value and the choices.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from ...fixtures.suggestions import did_you_mean
from .capability import parse_capability
from .data_files import Refusal

T = TypeVar("T")
STEP = re.compile(r"\.([\w-]+)|\[(\d+)\]|\[\.\.\.\]")
"""One step of a place in msgspec's errors: a field, a position, any key."""
UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
MISSING = re.compile(r"Object missing required field `(.*)`")
WORDS = {"`": "", "array": "list", "object": "table", "Expected": "expected"}
"""Words of msgspec, and what people who write TOML call these things."""


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a file that people write: it has its fields, and no other.

    A ValueError of ``__post_init__`` is refused too; its message begins with the field's name.
    """


def one_of(choices: Iterable[str]) -> msgspec.Meta:
    """Return a condition for ``Annotated``: a text is one of these choices.

    Never in a union with a list, which takes ``Literal``: msgspec 0.22.0 writes outside of its
    memory for a pattern beside a list. A test reads everything under a debugging allocator.
    """
    known = tuple(choices)
    pattern = f"^({'|'.join(map(re.escape, known))})\\Z"
    return msgspec.Meta(pattern=pattern, extra={"choices": known})


Text = Annotated[str, msgspec.Meta(pattern=r"\S", extra={"wanted": "some text"})]
"""A text with something in it."""

Provider = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z",
        extra={"wanted": "the name of a distribution, such as vllm"},
    ),
]
"""A name that a distribution may have."""


def converted(data: object, kind: type[T], source: object, refusal: Refusal) -> T:
    """Return data as an object of this kind.

    Args:
        data: the data of a file.
        kind: a class of msgspec, or any type that it knows; ``Path`` is read from text.
        source: named first in the sentence: the file.
        refusal: makes the exception.

    Raises:
        Exception: the refusal, with the place of the first thing that is wrong.
    """
    try:
        return msgspec.convert(data, kind, dec_hook=_parse)
    except msgspec.ValidationError as error:
        message = f"{source}: {_sentence(_defect(data, kind, '', ''))}"
        raise refusal(message) from error


def parse_chips(field: str, chips: Iterable[object]) -> tuple[int | None, ...]:
    """Return compute capabilities, None for ``"cpu"``.

    Raises:
        ValueError: one is none; the message begins with the field and its position.
    """
    found: list[int | None] = []
    for number, chip in enumerate(chips):
        try:
            found.append(None if chip == "cpu" else parse_capability(chip))
        except ValueError as error:  # noqa: PERF203  a few chips
            message = f"{field}[{number}]: {error}"
            raise ValueError(message) from error
    return tuple(found)


class _Defect(NamedTuple):
    """What is wrong: where, in which entry with an id, with what value of what type, and why."""

    place: str
    entry: str
    value: object
    kind: Any
    message: str
    is_own: bool


def _defect(data: Any, kind: Any, place: str, entry: str) -> _Defect | None:  # noqa: ANN401  any type
    """Find what is wrong, if anything is."""
    try:
        msgspec.convert(data, kind, dec_hook=_parse)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        is_own = isinstance(error.__cause__, ValueError)
    else:
        return None
    for step in STEP.finditer(path):
        name, number = step.groups()
        kind = _branch(kind, data)
        if name:
            # A field may have another name in the file: `pass` is no name in Python.
            field = kind.__struct_fields__[kind.__struct_encode_fields__.index(name)]
            kind, data = get_type_hints(kind, include_extras=True)[field], data[name]
            place = f"{place}.{name}".lstrip(".")
        elif number:
            kind, data = _arguments(kind)[0], data[int(number)]
            place += step[0]
        else:
            inner = (_defect(data[k], _arguments(kind)[1], f"{place}.{k}", entry) for k in data)
            return next(filter(None, inner))
        if isinstance(data, dict) and isinstance(data.get("id"), str):
            entry = f"{data['id']!r}: "
    if path.startswith("`key`"):
        key_kind = _arguments(_branch(kind, data))[0]
        inner = (_defect(key, key_kind, f"{place} names", entry) for key in data)
        return next(filter(None, inner))
    return _Defect(place, entry, data, _branch(kind, data), message, is_own)


def _sentence(found: _Defect | None) -> str:
    assert found is not None  # noqa: S101  the conversion has just failed
    kind, message, where = found.kind, found.message, f"{found.entry}{found.place}"
    dot = f"{where}." if found.place else found.entry
    if missing := MISSING.fullmatch(message):
        return f"{dot}{missing[1]} is missing"
    if unknown := UNKNOWN.fullmatch(message):
        hint = did_you_mean(unknown[1], kind.__struct_fields__)
        return f"{dot}{unknown[1]}: no such field; {hint}known: {', '.join(kind.__struct_fields__)}"
    if found.is_own and isinstance(found.value, dict):
        return f"{dot}{message}"
    (extra,) = [each.extra for each in get_args(kind)[1:] if isinstance(each, msgspec.Meta)] or [{}]
    value = reprlib.repr(found.value)
    is_value = value if where.endswith(" names") else f"is {value}"
    choices = get_args(kind) if get_origin(kind) is Literal else (extra or {}).get("choices")
    if choices:
        hint = did_you_mean(str(found.value), choices)
        known = ", ".join(each or "''" for each in choices)
        return f"{where} {is_value}; {hint}known: {known}"
    if extra:
        message = f"expected {extra['wanted']}"
    for theirs, ours in WORDS.items():
        message = message.replace(theirs, ours)
    return f"{where or 'it'} {is_value}: {message}"


def _branch(kind: Any, data: object) -> Any:  # noqa: ANN401  any type
    """Return the member of a union that data of this shape is held to; what is none stays."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    members = [each for each in get_args(kind) if each is not NoneType]
    return next((each for each in members if _shape(each) is _shape(type(data))), members[0])


def _plain(kind: Any) -> Any:  # noqa: ANN401  any type
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _arguments(kind: Any) -> tuple[Any, ...]:  # noqa: ANN401  any type
    return get_args(_plain(kind))


def _shape(kind: Any) -> type:  # noqa: ANN401  any type
    origin = get_origin(_plain(kind)) or _plain(kind)
    is_struct = isinstance(origin, type) and issubclass(origin, msgspec.Struct)
    return {tuple: list, list: list, dict: dict}.get(dict if is_struct else origin, object)


def _parse(kind: type[Any], value: object) -> object:
    """Read what msgspec does not know: a path."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    message = f"expected str, got {type(value).__name__}"
    raise ValueError(message)
