"""What became of both sides of the support table, on a terminal."""

from __future__ import annotations

from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..properties.gating.cells import REFUSED, SUPPORTED
from ..properties.gating.trials import FINDING, Trial
from ..properties.gating.trying import Report
from ..properties.telling import compact, printable
from .display import command, say

STYLES = {"ok": "green", "known": "yellow", "finding": "bold red", "not run": "dim"}
LONGEST = 160


def print_trials(out: Console, report: Report) -> None:
    """Print a table of each side, then each finding with its problem and its replay."""
    for side, title in (
        (SUPPORTED, "Supported by the rules: the answer must be right"),
        (REFUSED, "Refused by the rules, called anyway: must be refused cleanly"),
    ):
        rows = [trial for trial in report.trials if trial.cell.side == side]
        if rows:
            out.print(Text(title, "bold"))
            out.print(_table(rows))
    for tried in report.implementations:
        why = tried.error or tried.reason
        if why:
            say(out, f"nothing tried  {tried.name}", why, style="UNSUPPORTED")
    for trial in report.trials:
        if trial.status == FINDING:
            _print_finding(out, trial)


def _table(trials: list[Trial]) -> Table:
    """Give a row for each rule and implementation, and for what became of their cells."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, safe_box=True)
    for heading in ("rule", "implementation", "cells", "", "what happened"):
        table.add_column(heading, overflow="fold")
    for (rules, name, status, what), group in groupby(sorted(trials, key=_row), key=_row):
        titles = [trial.cell.title for trial in group]
        cells = titles[0] if len(titles) == 1 else f"{len(titles)} cells: {titles[0]}; ..."
        table.add_row(rules, name, cells, Text(status, STYLES[status]), Text(what))
    return table


def _row(trial: Trial) -> tuple[str, str, str, str]:
    what = printable(trial.happened)[:LONGEST]
    return ", ".join(trial.cell.rules), trial.implementation, trial.status, what


def _print_finding(out: Console, trial: Trial) -> None:
    title = f"FINDING  {trial.implementation}  {trial.cell.title}"
    say(out, title, f"{trial.meaning}. {trial.happened}", style="FAIL")
    command(out, "problem", compact(trial.cell.problem))
    if trial.replay:
        command(out, "replay", trial.replay)
    out.print()
