"""How a command ends early: one sentence and an exit code."""

from __future__ import annotations

import click

CONFORMING, NONCONFORMING, USAGE, MACHINE, INCOMPLETE = range(5)
INTERRUPTED, TERMINATED = 130, 143
"""Exit codes of all commands; the last two after SIGINT and SIGTERM."""
WORST_FIRST = (TERMINATED, INTERRUPTED, USAGE, MACHINE, NONCONFORMING, INCOMPLETE, CONFORMING)
"""Exit codes in the order in which one hides another, where a command runs two."""


class UsageRefusedError(click.ClickException):
    """Wrong usage or unreadable input; the message names the file, field or flag."""

    exit_code = USAGE


class MachineError(click.ClickException):
    """The machine or the suite failed, or nothing could run."""

    exit_code = MACHINE
