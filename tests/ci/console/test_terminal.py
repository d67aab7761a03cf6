"""Whatever commands print is printable, whoever made it."""

from __future__ import annotations

import io

import pytest
from rich.table import Table
from rich.text import Text

from kernelproof.ci.console.errors import UsageRefusedError
from kernelproof.ci.console.lines import tell
from kernelproof.ci.console.terminal import console
from kernelproof.ci.reports.display import command, say

FORGED = "\x1b]0;title\x07name\nCONFORMING: no new finding"


def test_a_console_prints_nothing_that_steers() -> None:
    stream = io.StringIO()
    out = console(stream)
    table = Table("a\x7f", "::error::b")
    table.add_row("\x1b[2J", Text("c\x00"))
    out.print(table)
    out.print("d\x9b", Text("##[error]e", "bold"), soft_wrap=True)
    printed = stream.getvalue()
    assert all(line.isprintable() for line in printed.split("\n"))
    for shown in (r"a\x7f", r"\x3a:error::b", r"\x1b[2J", r"c\x00", r"d\x9b", r"\x23#[error]e"):
        assert shown in printed


def test_a_name_and_a_message_begin_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    out = console(stream)
    say(out, f"FAIL nan  {FORGED}", f"a\n{FORGED}", style="FAIL")
    command(out, "replay", FORGED)
    tell(FORGED)
    lines = [*stream.getvalue().split("\n"), *capsys.readouterr().out.split("\n")]
    assert not any(line.startswith("CONFORMING") for line in lines)
    assert all(line.isprintable() for line in lines)


def test_an_error_is_printable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kernelproof.ci import cli

    def refuse(*_: object, **__: object) -> int:
        raise UsageRefusedError(FORGED)

    monkeypatch.setattr(cli.cli, "main", refuse)
    assert cli.main(["list"]) == 2
    said = capsys.readouterr().err
    assert said == "Error: \\x1b]0;title\\x07name\n  CONFORMING: no new finding\n"
