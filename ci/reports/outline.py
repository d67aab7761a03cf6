"""The outline of a report: what its forms in text say, in one order, whatever command it is of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

Sized = str | Callable[[int], str]
"""A text, or what returns as much of it as fits a width."""


class Line(NamedTuple):
    """A label and its text on one line, how it is coloured, and the finding that it is about."""

    label: str
    text: Sized
    style: str = ""
    about: Any = None


class Block(NamedTuple):
    """A title, what it is about, and labelled texts to be copied; ``style`` is a status.

    The message stands below the title, or behind it where it is ``inline``. Whatever a page has
    more to say of is ``about``.
    """

    title: str
    message: Sized
    style: str
    notes: Sequence[tuple[str, str]] = ()
    trace: Sequence[str] = ()
    inline: bool = False
    about: Any = None


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

    @property
    def anchor(self) -> str:
        """The heading as a page's links have it."""
        return re.sub(r"\W+", "-", self.heading.lower())


def filled(parts: Iterable[Part]) -> list[Part]:
    """Return the parts that have items, with their items as lists."""
    listed = (part._replace(items=list(part.items)) for part in parts)
    return [part for part in listed if part.items]


def sized(text: Sized, width: int) -> str:
    """Return a text, or as much of it as fits a width."""
    return text if isinstance(text, str) else text(width)
