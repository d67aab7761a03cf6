"""What a kernel or a file says steers no terminal and no log, and begins no line of its own."""

from __future__ import annotations

import pytest

from kernelproof.properties.verdicts.text import indented, one_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x07\x1b[31mb\r\x00", r"a\x07\x1b[31mb\r\x00"),
        ("\x9b2J\u202e\ud800\u2028", r"\x9b2J\u202e\ud800\u2028"),
        ("a\tb\nc", "a   b\nc"),
        ("  ::error file=x::y", r"  \x3a:error file=x::y"),
        ("x::Add-Mask::y ::stop-commands::z", r"x\x3a:Add-Mask::y \x3a:stop-commands::z"),
        ("##[error]a ##vso[task] ##teamcity[x]", r"\x23#[error]a \x23#vso[task] \x23#teamcity[x]"),
        ("at::native a.py::test_it", "at::native a.py::test_it"),
    ],
)
def test_what_steers_is_made_visible(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_a_line_stays_one_and_further_lines_are_indented() -> None:
    assert one_line("a\nCONFORMING: all") == r"a\nCONFORMING: all"
    assert indented("a\nCONFORMING: all") == "a\n  CONFORMING: all"
