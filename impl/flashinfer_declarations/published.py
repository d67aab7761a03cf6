"""The names that a FlashInfer release publishes, found in its source: nothing is imported."""

from __future__ import annotations

import re
from pathlib import Path

from .sources import OWN_DATA

_MARK = b"@flashinfer_"
_LINE = re.compile(
    r"^(?P<indent>[ ]*)(?:(?P<mark>@flashinfer_(?:experimental_)?api\b)|(?P<kind>def|class)"
    r"\s+(?P<name>\w+))",
    re.MULTILINE,
)
"""A decorator that FlashInfer puts on what users may call, or the beginning of a definition."""


def published_names(root: Path) -> frozenset[str]:
    """Return the functions that a release marks, and the classes that are or hold a marked one.

    Found line by line: parsing the files takes 16 s, and this a tenth of a second.

    Args:
        root: folder of the package ``flashinfer``.
    """
    found: set[str] = set()
    for path in root.rglob("*.py"):
        source = b"" if path.relative_to(root).parts[0] == OWN_DATA else path.read_bytes()
        if _MARK in source:
            found.update(_marked(source.decode(errors="replace")))
    return frozenset(found)


def _marked(source: str) -> set[str]:
    found: set[str] = set()
    owner, is_marked = "", False
    for line in _LINE.finditer(source):
        if line["mark"]:
            is_marked = True
            continue
        if line["kind"] == "class" and not line["indent"]:
            owner = line["name"]
        elif not line["indent"]:
            owner = ""
        if is_marked:
            found.add(owner or line["name"])
        is_marked = False
    return {name for name in found if not name.startswith("_")}
