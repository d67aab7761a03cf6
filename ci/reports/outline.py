"""The outline of a report: what its forms in text say, in one order, whatever command it is of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

Sized = str | Callable[[int], str]
"""A text, or what returns as much of it as fits a width."""


class Line(NamedTuple):
    """A label and its text on one line, and how it is coloured."""

    label: str
    text: Sized
    style: str = ""


class Block(NamedTuple):
    """A title, what it is about, and labelled texts to be copied; ``style`` is a status.

    The message stands below the title, or behind it where it is ``inline``.
    """

    title: str
    message: Sized
    style: str
    notes: Sequence[tuple[str, str]] = ()
    trace: Sequence[str] = ()
    inline: bool = False


class Table(NamedTuple):
    """Rows of texts with their styles; without room, the name, state and words of each."""

    heads: Sequence[str]
    rows: Sequence[Sequence[tuple[str, str]]]
    instead: Sequence[tuple[str, str, str]]


Item = Line | Block | Table


class Part(NamedTuple):
    """Items that belong together, and a heading for forms that have some."""

    heading: str
    items: Iterable[Item]
    folded: bool = True


def sized(text: Sized, width: int) -> str:
    """Return a text, or as much of it as fits a width."""
    return text if isinstance(text, str) else text(width)
