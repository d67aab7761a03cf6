"""An option without a value, or with nonsense: exit code 2 and one line that names the flag."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kernelproof.ci.cli import cli, main
from kernelproof.ci.console.help import REFUSED_LATER

WORDS = {
    ("bump",): ["0.6.7", "0.6.8"],
    ("check",): ["mine.py:mine"],
    ("corpus", "add"): ["case.json"],
    ("expectations", "update"): ["report.json"],
    ("merge",): ["report.json"],
    ("published",): ["installed"],
    ("replay",): ["case.json"],
}
"""Arguments of commands that need some, by the command's words."""


def commands(group: click.Group, *before: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command of the tree, by its words; a group too, for what it does by itself."""
    for name, command in group.commands.items():
        yield (*before, name), command
        if isinstance(command, click.Group):
            yield from commands(command, *before, name)


OPTIONS = [
    (words, max(option.opts, key=len))
    for words, command in commands(cli)
    for option in command.params
    if isinstance(option, click.Option) and not option.is_flag and option.name not in REFUSED_LATER
]
ARGUMENTS = [
    (words, number, argument.metavar or argument.human_readable_name)
    for words, command in commands(cli)
    for number, argument in enumerate(
        each for each in command.params if isinstance(each, click.Argument)
    )
    if argument.name not in REFUSED_LATER
]
OF_NAMES = [
    flag
    for name, flag in OPTIONS
    if name == ("support",) and flag not in ("--json", "--markdown", "--jobs", "--compile")
]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.out + said.err


@pytest.mark.parametrize(("command", "flag"), OPTIONS)
def test_an_empty_value_is_refused_by_its_flag(
    command: tuple[str, ...],
    flag: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusal(capsys, *command, *WORDS.get(command, ()), flag, "")
    assert said.splitlines()[-1] == f"Error: {flag} is empty"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "number", "name"), ARGUMENTS)
def test_an_empty_argument_is_refused_by_its_name(
    command: tuple[str, ...], number: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS.get(command, ())]
    words[number : number + 1] = [""]
    assert refusal(capsys, *command, *words).splitlines()[-1] == f"Error: {name} is empty"


def test_what_nested_commands_take_is_among_them() -> None:
    assert (("corpus", "add"), 0, "CASE.json") in ARGUMENTS
    assert {(("corpus", "add"), "--folder"), (("bench", "kernels"), "--json")} <= {*OPTIONS}


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["bump", "", "0.6.8"], "BASELINE"),
        (["bump", "0.6.7", " "], "CANDIDATE"),
        (["gate", "--baseline", "", "--candidate", ""], "--baseline"),
        (["gate", "--baseline", "0.6.7", "--candidate", ""], "--candidate"),
    ],
)
def test_an_empty_release_is_refused_before_either_is_looked_for(
    words: list[str],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("kernelproof.ci.bump.command.compare", None)
    assert f"Error: {name} is empty: give a version" in refusal(capsys, *words)


@pytest.mark.parametrize("value", ["nonsense", "-1"])
@pytest.mark.parametrize("flag", OF_NAMES)
def test_nonsense_of_support_is_refused_by_its_flag(
    flag: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert flag in refusal(capsys, "support", f"{flag}={value}")
