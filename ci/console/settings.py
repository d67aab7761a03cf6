"""The tables of a pyproject.toml, ``[tool.kernelproof]``, which give options other defaults."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ...fixtures.suggestions import did_you_mean
from ...impl.targets.data_files import read_toml_part
from ...impl.targets.unpacked import FROM
from .errors import MACHINE, MachineError, UsageRefusedError
from .help import SectionedGroup

FILE = "pyproject.toml"
TABLE = "tool.kernelproof"
ON_THE_COMMAND_LINE = ("--watch",)
"""Options that no file gives: a check that is started again would read the file and never end."""
VARIABLES = {"--from": FROM, "--examples": "KERNELPROOF_EXAMPLES"}
"""Environment variables that commands read themselves, by the option that they stand for."""
NO_TABLE = "must be a table"
SETTINGS = f"{__name__}.settings"
"""Key under which a context keeps the settings of the command that runs."""


@dataclass(frozen=True)
class Setting:
    """A value of a file.

    Attributes:
        file: the path of the file from the current folder.
        table: the name of the table.
        key: the name of the option, without dashes.
        value: the value as the file has it.
    """

    file: Path
    table: str
    key: str
    value: Any

    @property
    def flag(self) -> str:
        """The option."""
        return f"--{self.key}"

    @property
    def place(self) -> str:
        """File, table and key."""
        return f"{self.file}: [{self.table}] {self.key}"

    def refusal(self, why: str) -> UsageRefusedError:
        """Return an error that names the place."""
        return UsageRefusedError(f"{self.place}: {why}")

    def unfit(self, option: click.Option) -> str:
        """Return what the value must be for an option; empty where it is that."""
        if option.multiple:
            if not isinstance(self.value, list):
                return "must be a list"
            return next(filter(None, (_unfit(option, each) for each in self.value)), "")
        return _unfit(option, self.value)

    def for_option(self, option: click.Option) -> Any:  # noqa: ANN401  any option's
        """Return the value for an option: paths are relative to the file's folder."""
        if not (isinstance(option.type, click.Path) or self._is_ledger):
            return self.value
        values = self.value if option.multiple else [self.value]
        found = [os.path.normpath(self.file.parent / each) for each in values]
        return found if option.multiple else found[0]

    @property
    def _is_ledger(self) -> bool:
        """Whether it is a path though its option takes a word too."""
        return self.flag == "--expectations" and self.value != "none"


Given = dict[click.Option, Setting]
"""Settings of a command, by its options."""


class ConfiguredGroup(SectionedGroup):
    """A group whose commands take from a pyproject.toml what the command line does not say."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command and its arguments; what a file says becomes its defaults."""
        name, command, rest = super().resolve_command(ctx, args)
        if not ctx.resilient_parsing:
            found = {words: given for words, given in _settings(self) if words[0] == name}
            ctx.default_map = _default_map(found)
            ctx.meta[SETTINGS] = [each for given in found.values() for each in given.items()]
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  click's
        """Run the command; an error about an option that a file has set names its place there."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            message = error.format_message()
            for option, setting in ctx.meta.get(SETTINGS, ()):
                if _is_named(setting.flag, message) and not _is_given(option, ctx.obj or ()):
                    kind = MachineError if error.exit_code == MACHINE else UsageRefusedError
                    message = f"{setting.place}: {message}"
                    raise kind(message) from error
            raise


def words_of_settings(context: click.Context) -> list[str]:
    """Return the words that say on a command line what files say of the running command."""
    words: list[str] = []
    for option, setting in context.meta.get(SETTINGS, ()):
        value = setting.for_option(option)
        if option not in context.command.params or not is_from_file(option.name or ""):
            continue
        if option.is_flag:
            words += [setting.flag] if value else option.secondary_opts[:1]
        else:
            for each in value if option.multiple else [value]:
                words += [setting.flag, str(each)]
    return words


def is_from_file(name: str) -> bool:
    """Whether a file has set a parameter of the running command."""
    context = click.get_current_context(silent=True)
    return context is not None and (
        context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP
    )


def _settings(group: click.Group) -> Iterator[tuple[tuple[str, ...], Given]]:
    """Yield the settings of each command, by its words.

    Raises:
        UsageRefusedError: the nearest file cannot be read, no option or command has the name of a
            key, or a value is of the wrong type.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:  # somebody has removed the folder
        return
    around = (each / FILE for each in (here, *here.parents))
    path = next((each for each in around if os.path.isfile(each)), None)  # noqa: PTH113  never raises
    if path is None:
        return
    shown = Path(os.path.relpath(path))
    outer, _, key = TABLE.rpartition(".")
    table = read_toml_part(shown, UsageRefusedError, (outer, key))
    if table is not None:
        yield from _read(group, (), Setting(shown, outer, key, table), ())


def _read(
    command: click.Command, words: tuple[str, ...], table: Setting, inherited: Sequence[Setting]
) -> Iterator[tuple[tuple[str, ...], Given]]:
    """Yield the settings of a command, or of those of a group.

    Args:
        command: the command or the group.
        words: the words by which it is called.
        table: the table of its name.
        inherited: the settings of the tables around that, the outermost first.
    """
    name = f"{table.table}.{table.key}"
    if not isinstance(table.value, dict):
        raise table.refusal(NO_TABLE)
    own = [Setting(table.file, name, key, value) for key, value in table.value.items()]
    below = command.commands if isinstance(command, click.Group) else {}
    tables = {each.key: each for each in own if each.key in below and isinstance(each.value, dict)}
    values = [each for each in own if each.key not in tables]
    for each in values:
        _check(each, command)
    settings = [*inherited, *values]
    if not below:
        yield words, {option: each for each in settings for option in _meant(each, [command])}
    for key, inner in below.items():
        absent = Setting(table.file, name, key, {})
        yield from _read(inner, (*words, key), tables.get(key, absent), settings)


def _check(setting: Setting, command: click.Command) -> None:
    """Refuse a setting that is of no option below a command, or that none can take."""
    leaves = _leaves(command)
    named = [each for leaf in leaves for each in _options(leaf) if setting.flag in each.opts]
    if setting.flag in ON_THE_COMMAND_LINE:
        why = f"{setting.flag} is for the command line only"
        raise setting.refusal(why)
    commands = getattr(command, "commands", {})
    if not named and setting.key in commands:
        raise setting.refusal(NO_TABLE)
    if not named:
        known = {max(each.opts, key=len)[2:] for leaf in leaves for each in _options(leaf)}
        meant = did_you_mean(setting.key, known.union(commands))
        what = "option or command" if commands else "option"
        raise setting.refusal(f"there is no such {what}; {meant}".rstrip("; "))
    if not _meant(setting, leaves):
        raise setting.refusal(setting.unfit(named[0]))


def _meant(setting: Setting, commands: Sequence[click.Command]) -> list[click.Option]:
    """Return the options of commands that a setting is for: some commands share names only."""
    named = [each for one in commands for each in _options(one) if setting.flag in each.opts]
    return [each for each in named if not setting.unfit(each)]


def _leaves(command: click.Command) -> list[click.Command]:
    if isinstance(command, click.Group):
        return [leaf for each in command.commands.values() for leaf in _leaves(each)]
    return [command]


def _options(command: click.Command) -> list[click.Option]:
    return [
        each
        for each in command.params
        if isinstance(each, click.Option)
        and not each.hidden
        and max(each.opts, key=len) not in ON_THE_COMMAND_LINE
    ]


def _unfit(option: click.Option, value: object) -> str:
    """Return what one value must be for an option; empty where it is that."""
    if isinstance(value, str) and not value.strip():
        return f"{max(option.opts, key=len)} is empty"
    wanted: tuple[type, ...] = (str,)
    words = "must be text, in quotes"
    if option.is_flag:
        wanted, words = (bool,), "must be true or false"
    elif isinstance(option.type, click.types.IntParamType):
        wanted, words = (int,), "must be a whole number"
    elif isinstance(option.type, click.types.FloatParamType):
        wanted, words = (int, float), "must be a number"
    is_fit = isinstance(value, wanted) and isinstance(value, bool) == option.is_flag
    return "" if is_fit else words


def _default_map(found: dict[tuple[str, ...], Given]) -> dict[str, Any]:
    """Return the values as click takes them: by command and parameter."""
    made: dict[str, Any] = {}
    for words, given in found.items():
        inner = made
        for word in words:
            inner = inner.setdefault(word, {})
        for option, setting in given.items():
            if not os.environ.get(VARIABLES.get(setting.flag, "")):
                inner[option.name or ""] = setting.for_option(option)
    return made


def _is_named(flag: str, message: str) -> bool:
    return re.search(rf"(?<![\w-]){flag}(?![\w-])", message) is not None


def _is_given(option: click.Option, words: Sequence[str]) -> bool:
    flags = {*option.opts, *option.secondary_opts}
    return any(word.partition("=")[0] in flags for word in words)
