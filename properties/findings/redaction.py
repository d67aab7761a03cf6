"""What a message or a report must not tell: a password in the URL of a server."""

from __future__ import annotations

import re

IN_URL = re.compile(r"(://[^:/\s]*):(?:(?!,\w+://)\S)*@")
"""A user may have an at sign in his name; a password may have whatever is not written as %2C."""
IN_QUERY = re.compile(r"([?&]password=)[^&#\s]*")


def masked(text: str) -> str:
    """Return a text with ``***`` in the place of each password in a URL."""
    return IN_QUERY.sub(r"\1***", IN_URL.sub(r"\1:***@", text))
