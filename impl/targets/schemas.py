"""Shapes of data files, checked by msgspec, whose sentence says what is wrong and where.

The file and the entry are named in front of it. Of a text that must be one of a few words, msgspec
knows only a pattern: that sentence is made here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from ...fixtures.suggestions import did_you_mean
from .capability import parse_capability
from .data_files import Refusal

T = TypeVar("T")
ANY_KEY = "[...]"
"""Any key in a place of msgspec's errors."""
STEP = re.compile(r"\.([\w-]+)|\[(\d+)\]|\['(.*?)'\]|\[\.\.\.\]")
"""One step of a place in msgspec's errors: a field, a position, a key, any key."""
UNKNOWN = re.compile("unknown field `([^`]*)`(?: - at (.*))?$")
"""An unknown field in msgspec's errors, and its place."""
CHOICES: dict[str, tuple[str, ...]] = {}
"""The words that each pattern of `one_of` allows."""


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
    CHOICES[pattern] = known
    return msgspec.Meta(pattern=pattern)


SOME = r"\S"
DISTRIBUTION = r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\Z"
WORDS = {SOME: "with something in it", DISTRIBUTION: "that names a distribution, such as vllm"}
"""What sentences say in place of a pattern."""
Text = Annotated[str, msgspec.Meta(pattern=SOME)]
"""A text with something in it."""
Provider = Annotated[str, msgspec.Meta(pattern=DISTRIBUTION)]
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
        told = _with_keys(data, kind, str(error))
        message = f"{source}: {_sentence(data, told)}{_field_meant(kind, told)}"
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


def _with_keys(data: Any, kind: type[Any], error: str) -> str:  # noqa: ANN401  of a file
    """Return msgspec's sentence with the key that it means where it writes ``[...]``."""
    message, found, place = error.rpartition(" - at ")
    copied = copy.deepcopy(data)
    while ANY_KEY in place:
        before, _, after = place.partition(ANY_KEY)
        value = copied
        for name, number, key in STEP.findall(before):
            value = value[int(number)] if number else value[name or key]
        for each in [*value] if isinstance(value, dict) else ():
            if _fails(copied, value, each, kind) == error:  # the same is wrong with this key alone
                place = f"{before}['{each}']{after}"
                break
        else:
            return error
    return f"{message} - at {place}" if found else error


def _fails(data: Any, table: dict[str, Any], key: str, kind: type[Any]) -> str:  # noqa: ANN401
    """Return what is wrong with data one table of which has this key only."""
    whole = dict(table)
    table.clear()
    table[key] = whole[key]
    try:
        msgspec.convert(data, kind, dec_hook=_parse)
    except msgspec.ValidationError as error:
        return str(error)
    finally:
        table.clear()
        table.update(whole)
    return ""


def _sentence(data: Any, error: str) -> str:  # noqa: ANN401  of a file
    """Return msgspec's sentence after the entry's id, with words in place of patterns."""
    message, has_place, place = error.rpartition(" - at ")
    if not has_place:
        return error
    entry, values = "", [data]
    for step in STEP.finditer(place):
        name, number, key = step.groups()
        values = [inner for value in values for inner in _inside(value, name or key, number)]
        ids = [each["id"] for each in values if isinstance(each, dict) and "id" in each]
        if len(values) == 1 and ids and isinstance(ids[0], str):
            entry = f"{ids[0]!r}: "
    if place.startswith("`key`"):
        values = [key for value in values if isinstance(value, dict) for key in value]
    for pattern, known in CHOICES.items():
        if message.endswith(f" matching regex {pattern!r}"):
            wrong = next(each for each in values if isinstance(each, str) and each not in known)
            words = ", ".join(each or "''" for each in known)
            meant = did_you_mean(wrong, known)
            return f"{entry}Invalid value {wrong!r} - at {place}; {meant}known: {words}"
    for pattern, words in WORDS.items():
        message = message.replace(f"matching regex {pattern!r}", words)
    return f"{entry}{message} - at {place}"


def _field_meant(kind: type[Any], error: str) -> str:
    """Return a question after the field that may be meant where a table has an unknown one."""
    unknown = UNKNOWN.search(error)
    if unknown is None:
        return ""
    kinds: list[Any] = [msgspec.inspect.type_info(kind)]
    for name in [*(step[1] for step in STEP.finditer(unknown[2] or "")), None]:
        kinds = [each for one in kinds for each in getattr(one, "types", (one,))]  # of a union
        fields = {
            field.encode_name: field.type for one in kinds for field in getattr(one, "fields", ())
        }
        inner = (getattr(one, "item_type", getattr(one, "value_type", None)) for one in kinds)
        kinds = [*filter(None, inner), *([fields[name]] if name in fields else [])]
    return f"; {did_you_mean(unknown[1], fields)}".rstrip("; ")


def _inside(value: object, name: str | None, number: str | None) -> list[Any]:
    """Return what one step of a place leads to: several values where it stands for any key."""
    if isinstance(value, list) and number is not None:
        return value[int(number) : int(number) + 1]
    if isinstance(value, dict) and number is None:
        return list(value.values()) if name is None else [value[name]] if name in value else []
    return []


def _parse(kind: type[Any], value: object) -> object:
    """Read what msgspec does not know: a path."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    message = f"Expected `str`, got `{type(value).__name__}`"
    raise ValueError(message)
