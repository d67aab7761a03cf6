"""A comparison that somebody ended says of no chip what it does not say of the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kernelproof.ci.bump.verdicts.findings import BLOCK
from kernelproof.ci.bump.verdicts.verdict import NO, UNDECIDED, _chip


def test_a_chip_is_undecided_after_a_signal_though_something_blocks() -> None:
    found: Any = SimpleNamespace(id="lost", action=BLOCK, rule="", message="it is gone")
    ended = _chip(90, [found], "ran", undecided=True, ended=True)
    assert (ended.verdict, ended.blocked_by) == (UNDECIDED, ("lost",))
    assert _chip(90, [found], "ran", undecided=True, ended=False).verdict == NO
