"""Commands whose help has headings, the most needed first, and whose values are not empty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

Sections = Mapping[str, Sequence[str]]
"""Flags, or names of commands, by the heading under which help shows them."""
Record = tuple[str, str]
REFUSED_LATER = ("baseline", "candidate", "baseline_named", "candidate_named")
"""Parameters whose empty value a comparison refuses itself: its reports say so too."""


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


class CheckedGroup(click.Group):
    """A group none of whose commands takes an empty value."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command and its arguments, none of which is empty."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:
            _refuse_empty(command, click.Context(command, parent=ctx, info_name=name), rest)
        return name, command, rest


class SectionedGroup(CheckedGroup):
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


def _refuse_empty(command: click.Command, ctx: click.Context, args: Sequence[str]) -> None:
    """Refuse an empty value, such as that of a shell variable that is not set.

    A path made of it would be the current folder, and a name would be missing from messages.
    """
    values, _, _ = command.make_parser(ctx).parse_args(list(args))
    for parameter in command.params:
        given = values.get(parameter.name or "")
        values_given = given if isinstance(given, (list, tuple)) else [given]
        if "" in values_given and parameter.name not in REFUSED_LATER:
            name = parameter.human_readable_name
            flags = isinstance(parameter, click.Option) and max(parameter.opts, key=len)
            message = f"{flags or parameter.metavar or name} is empty"
            raise click.UsageError(message, ctx)


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
