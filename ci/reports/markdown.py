"""A report as Markdown, for a comment on a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ...properties.verdicts.text import printable
from .outline import Block, Item, Line, Part, Table, filled, sized

LONGEST = 60_000
"""Characters: GitHub refuses a comment of more than 65,536."""
MOST_ITEMS = 40
"""Most items of a part that is folded; it counts the others."""
COPIED = ("problem", "replay", "printed")
"""Labels of texts that are shown as code."""
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|@~$])")


def to_markdown(heading: str, parts: Iterable[Part], made: str) -> str:
    """Return a report; what is long is folded, and cut where a comment would be too long.

    Args:
        heading: its first line, as Markdown.
        parts: the parts of its outline; the first one has no heading.
        made: how the report was made, as Markdown.
    """
    first, *others = filled(parts)
    lines = [f"## {heading}", "", *_items(first.items), ""]
    for part in others:
        lines += _part(part, [*part.items])
    lines += [made, ""]
    text = "\n".join(lines)
    if len(text) <= LONGEST:
        return text
    cut = "\n\nCut here: the whole report is in the JSON.\n"
    kept, size = [], 0
    for line in lines:
        size += len(line) + 1
        if size > LONGEST - len(cut) - 100:
            break
        kept.append(line)
    unclosed = sum(line == "<details>" for line in kept) - kept.count("</details>")
    return "\n".join([*kept, *["", "</details>"] * unclosed]) + cut


def _part(part: Part, items: Sequence[Item]) -> list[str]:
    if not part.folded:
        return [f"### {part.heading}", "", *_items(items), ""]
    more = [f"- and {len(items) - MOST_ITEMS} more"] if len(items) > MOST_ITEMS else []
    summary = f"<summary>{part.heading} ({len(items)})</summary>"
    return ["<details>", summary, "", *_items(items[:MOST_ITEMS]), *more, "", "</details>", ""]


def _items(items: Iterable[Item]) -> Iterator[str]:
    for item in items:
        if isinstance(item, Line):
            label = f"{escaped(item.label)}: " if item.label else ""
            yield f"- {label}{escaped(sized(item.text, LONGEST))}"
        elif isinstance(item, Block):
            message = escaped(sized(item.message, LONGEST))
            yield f"- **{escaped(item.title.strip())}** {message}"
            for label, text in item.notes:
                yield f"  - {label}: {code(text) if label in COPIED else escaped(text)}"
        elif isinstance(item, Table):
            yield from (f"- {escaped(name)}: {escaped(told)}" for name, _, told in item.instead)


def escaped(text: object) -> str:
    """Return text that Markdown and HTML show as it is, on one line; ``@`` calls nobody."""
    plain = " ".join(printable(str(text)).split())
    return _SPECIAL.sub(lambda found: "&#64;" if found[1] == "@" else f"\\{found[1]}", plain)


def code(text: str) -> str:
    """Return text as code on one line, whatever backticks it has."""
    plain = " ".join(printable(text).split())
    longest = max((len(run) for run in re.findall(r"`+", plain)), default=0)
    fence = "`" * (longest + 1)
    space = " " if "`" in plain else ""
    return f"{fence}{space}{plain}{space}{fence}"
