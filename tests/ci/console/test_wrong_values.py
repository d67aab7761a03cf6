"""An option without a value, or with nonsense: exit code 2 and one line that names the flag."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from kernelproof.ci.cli import cli, main
from kernelproof.ci.console.help import REFUSED_LATER

COMMANDS = {
    "check": ["check", "mine.py:mine"],
    "gate": ["gate"],
    "bump": ["bump", "0.6.7", "0.6.8"],
    "support": ["support"],
    "replay": ["replay", "case.json"],
    "list": ["list"],
    "score": ["score"],
}
OPTIONS = [
    (name, max(option.opts, key=len))
    for name in COMMANDS
    for option in cli.commands[name].params
    if isinstance(option, click.Option) and not option.is_flag and option.name not in REFUSED_LATER
]
OF_NAMES = [
    flag
    for name, flag in OPTIONS
    if name == "support" and flag not in ("--json", "--markdown", "--jobs", "--compile")
]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.out + said.err


@pytest.mark.parametrize(("command", "flag"), OPTIONS)
def test_an_empty_value_is_refused_by_its_flag(
    command: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    said = refusal(capsys, *COMMANDS[command], flag, "")
    assert said.splitlines()[-1] == f"Error: {flag} is empty"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "name"),
    [(["check", ""], "MODULE:NAME..."), (["replay", ""], "CASE.json"), (["new", ""], "NAME"),
     ],
)  # fmt: skip
def test_an_empty_argument_is_refused_by_its_name(
    words: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, *words).splitlines()[-1] == f"Error: {name} is empty"


@pytest.mark.parametrize("value", ["nonsense", "-1"])
@pytest.mark.parametrize("flag", OF_NAMES)
def test_nonsense_of_support_is_refused_by_its_flag(
    flag: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert flag in refusal(capsys, "support", f"{flag}={value}")
