"""What an exception of somebody's code says, in one line, whatever its own methods do."""

from __future__ import annotations

MOST_CHARACTERS = 500
"""Length of a message in characters beyond which it is cut."""
MOST_OF_A_NAME = 100
"""Length of the name of an exception's class in characters beyond which it is cut."""


def name_of(error: BaseException) -> str:
    """Return the name of an exception's class, in which nothing steers a terminal."""
    name = type(error).__name__[:MOST_OF_A_NAME]
    return name if name.isprintable() else ascii(name)[1:-1]


def message_of(error: BaseException) -> str:
    """Return the first line of an exception's message; empty where it has none."""
    try:
        # A plain str: the methods of a subclass are somebody's code too.
        text = str.__getitem__(str(error), slice(None))
    except BaseException as raised:  # noqa: BLE001  __str__ is the same somebody's code
        return f"its message cannot be read, which raises {name_of(raised)}"
    lines = text.strip().splitlines() or [""]
    # A lone surrogate cannot be printed, nor written to a file.
    return lines[0][:MOST_CHARACTERS].encode(errors="backslashreplace").decode()


def sentence_of(error: BaseException) -> str:
    """Return the name of an exception and its message."""
    return f"{name_of(error)}: {message_of(error)}".removesuffix(": ")
