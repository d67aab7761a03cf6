"""Help: every option and command stands under a heading, the comparison's only where it belongs."""

from __future__ import annotations

import copy

import click
import pytest

from kernelproof.ci.cli import cli, main


@pytest.mark.parametrize("name", ["check", "gate", "bump", "support"])
def test_every_option_stands_under_a_heading(name: str) -> None:
    """An option that no section names would stand beside --help."""
    command = copy.copy(cli.commands[name])
    vars(command)["_help_option"] = None  # click keeps the one of its first context
    with click.Context(command, info_name=name, help_option_names=["-h", "--help"]) as context:
        rest = command.get_help(context).partition("Other options:\n")[2]
    assert [line.split()[0] for line in rest.splitlines()] == ["-h,"]


def test_commands_of_users_come_before_those_of_maintainers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["-h"]) == 0
    told = capsys.readouterr().out
    assert "Other commands" not in told
    assert "..." not in told.partition("\n\n")[2], "a summary was cut"
    at = [told.index(f"\n  {name} ") for name in ("check", "gate", "bump", "support", "replay")]
    assert at == sorted(at)
    assert max(at) < min(told.index(f"\n  {name} ") for name in ("score", "bench"))


def test_the_gate_does_not_show_the_options_of_a_comparison(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["gate", "-h"]) == 0
    told = capsys.readouterr().out
    for flag in ("--baseline", "--candidate", "--sm", "--policy", "--implementation", "--markdown"):
        assert flag not in told
    assert "--minutes" in told
