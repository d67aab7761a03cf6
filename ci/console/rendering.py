"""Pages that need nothing else: every value is escaped, and nothing is loaded."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ...properties.verdicts.text import count_of, printable

FOLDER = Path(__file__).parents[1] / "templates"
LONGEST = 10_000
"""Characters of one value on a page; the JSON has all of it."""


def render(template: str, /, **values: Any) -> str:  # noqa: ANN401  whatever a template shows
    """Render a page of ``templates``; whatever the values say is shown as text, never as markup."""
    return environment().get_template(template).render(values)


@cache
def environment() -> Environment:
    """Return the templates' environment.

    A name that a template misspells is an error, and control characters are made visible.
    """
    made = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(count_of=count_of, number=number, seconds=seconds)
    made.globals.update(inline=_inline, source=_source)
    return made


def number(value: object, digits: int = 3) -> str:
    """Return a number in a few digits; JSON's ``"inf"`` and other text as it is."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def seconds(value: object) -> str:
    """Return a time in the unit that suits it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return number(value)
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def cut(text: str, longest: int = LONGEST) -> str:
    """Cut what would make a page unwieldy, and say so."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]} ... ({len(text) - longest:,} more characters: see the JSON)"


def _shown(value: object) -> object:
    """Return what a template prints: text without control characters, of a bearable length."""
    return value if isinstance(value, Markup) else cut(printable(str(value)))


def _source(name: str) -> str:
    """Return the hash by which a page's policy allows a style sheet or script, and no other."""
    digest = hashlib.sha256(_text(name).encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _inline(name: str) -> Markup:
    """Return a style sheet or a script of ours, to stand in a page."""
    return Markup(_text(name))  # noqa: S704  a file of this package


@cache
def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
