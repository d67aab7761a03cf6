"""What somebody may have meant who gave a name that is not there."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MOST = 5


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Ask whether one of the names is meant: those that hold it, else those spelt like it.

    Returns:
        A question with a space behind it; empty where no name is like it.
    """
    known = sorted(names)
    alike = [each for each in known if name and name in each] or get_close_matches(name, known)
    return f"did you mean {' or '.join(alike[:MOST])}? " if alike else ""
