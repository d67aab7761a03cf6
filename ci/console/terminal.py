"""The console that commands write to; it imports only rich."""

from __future__ import annotations

import os
from typing import TextIO

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult

from ...properties.verdicts.text import printable

PLAIN_WIDTH = 120
"""Width, in characters, of a table that goes into a file or a pipe."""


def console(stream: TextIO) -> Console:
    """Return a console; NO_COLOR and COLUMNS are respected."""
    # In a notebook rich would display what is meant for a stream, a report's text too.
    made = Console(file=stream, highlight=False, markup=False, emoji=False, force_jupyter=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PLAIN_WIDTH
    made.push_render_hook(_Printable())
    return made


def plain_console(stream: TextIO) -> Console:
    """Return a console for text that is kept, whatever the environment says of colours."""
    made = Console(
        file=stream,
        markup=False,
        emoji=False,
        force_terminal=False,
        color_system=None,
        force_jupyter=False,
        highlight=False,
        width=PLAIN_WIDTH,
    )
    made.push_render_hook(_Printable())
    return made


class _Printable(RenderHook):
    """Makes whatever a console prints printable, whoever made it."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Shown(each) for each in renderables]


class _Shown:
    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
