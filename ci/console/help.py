"""Help with headings: options of a command, and commands of a group, the most needed first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

Sections = Mapping[str, Sequence[str]]
"""Flags, or names of commands, by the heading under which help shows them."""
Record = tuple[str, str]


class SectionedCommand(click.Command):
    """A command whose help shows its options under headings.

    Args:
        sections: flags by heading; options that none of them names come last.
    """

    def __init__(self, *args: Any, sections: Sections, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **options)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a list for each heading."""
        records = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if isinstance(option, click.Option) and record is not None:
                records[max(option.opts, key=len)] = record
        _write(formatter, self.sections, records, "Other options")


class SectionedGroup(click.Group):
    """A group whose help shows its commands under headings.

    Args:
        sections: names of commands by heading; commands that none of them names come last.
    """

    def __init__(self, *args: Any, sections: Sections, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **options)
        self.sections = sections

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, a list for each heading."""
        del ctx
        longest = max(map(len, self.commands))
        room = formatter.width - longest - 6
        records = {
            name: (name.ljust(longest), command.get_short_help_str(room))
            for name, command in self.commands.items()
            if not command.hidden
        }
        _write(formatter, self.sections, records, "Other commands")


def _write(
    formatter: click.HelpFormatter, sections: Sections, records: dict[str, Record], rest: str
) -> None:
    for heading, names in sections.items():
        rows = [records.pop(name) for name in names if name in records]
        if rows:
            with formatter.section(heading):
                formatter.write_dl(rows)
    if records:
        with formatter.section(rest):
            formatter.write_dl(list(records.values()))
