"""What a person sees of a report on a terminal or in a log."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from ...impl.targets.registrations import Registration
from ...properties.verdicts.text import one_line, printable
from .outline import Block, Line, Part, Table, sized

TABLE_WIDTH = 72
"""Below this many columns there is no room for the table."""
STYLES = {
    "": "",
    "PASS": "green",
    "KNOWN": "yellow",
    "INCOMPLETE": "yellow",
    "FLAKY": "yellow",
    "UNSUPPORTED": "dim",
    "UNJUDGED": "dim",
}


def print_outline(out: Console, parts: Iterable[Part]) -> None:
    """Print all parts of an outline, without their headings."""
    for part in parts:
        for item in part.items:
            if isinstance(item, Line):
                line(out, item.label, sized(item.text, out.width - len(item.label)), item.style)
            elif isinstance(item, Block):
                _print_block(out, item)
            elif out.width >= TABLE_WIDTH:
                out.print(_grid(item))
            else:
                for name, style, told in item.instead:
                    out.print(Text(one_line(name), style_of(style)), soft_wrap=True)
                    out.print(Padding(Text(told), (0, 0, 0, 2)))


def _print_block(out: Console, block: Block) -> None:
    message = sized(block.message, out.width)
    if block.inline:
        line(out, "", f"{block.title}{message}", style_of(block.style))
    else:
        say(out, block.title, message, style=block.style)
    for each in block.trace:
        out.print(Text(f"    {one_line(each)}", "dim"), soft_wrap=True)
    for label, text in block.notes:
        command(out, label, text)
    if block.notes and not block.inline:
        out.print()


def _grid(table: Table) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, safe_box=True)
    grid.add_column(table.heads[0], overflow="fold")
    for head in table.heads[1:]:
        grid.add_column(head, justify="right", no_wrap=True)
    for row in table.rows:
        grid.add_row(*(Text(one_line(text), style) for text, style in row))
    return grid


def print_broken(out: Console, broken: Iterable[Registration]) -> None:
    """Print a line for each registration that cannot be used."""
    for each in broken:
        line(out, "left out", one_line(each.text), "yellow")


def line(out: Console, label: str, text: str, style: str = "") -> None:
    """Print a label and its text in one line, whatever they hold; without a style, one is dim."""
    told = Text.assemble((f"{one_line(label)}: ", style or "dim") if label else "", one_line(text))
    told.stylize(style)
    out.print(told, soft_wrap=True)


def say(out: Console, title: str, message: str, *, style: str) -> None:
    """Print a title and, indented, what it is about."""
    out.print(Text(one_line(title), style_of(style)), soft_wrap=True)
    body = Text(printable(message.strip()))
    if out.is_terminal:
        out.print(Padding(body, (0, 0, 0, 2)))
    else:  # a log is searched line by line
        out.print(Text("\n").join(Text("  ") + line for line in body.split()), soft_wrap=True)


def command(out: Console, label: str, text: str) -> None:
    """Print something to be copied: it is never wrapped."""
    out.print(
        Text.assemble((f"  {label + ': ':<9}", "dim"), one_line(text)),
        soft_wrap=True,
    )


def style_of(status: str) -> str:
    """Return the colour of a status."""
    return STYLES.get(status, "bold red")
