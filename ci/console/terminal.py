"""The console that commands write to; it needs rich alone."""

from __future__ import annotations

import os
from typing import TextIO

from rich.console import Console

PLAIN_WIDTH = 120
"""Of a table that goes into a file or a pipe."""


def console(stream: TextIO) -> Console:
    """Return a console; NO_COLOR and COLUMNS are respected."""
    made = Console(file=stream, highlight=False, markup=False, emoji=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PLAIN_WIDTH
    return made
