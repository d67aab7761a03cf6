"""What became of both sides of the support table, on a terminal."""

from __future__ import annotations

from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...properties.gating.cells import REFUSED, SUPPORTED
from ...properties.gating.trials import FINDING, Trial
from ...properties.gating.trying import Report
from ...properties.verdicts.text import compact, one_line
from ..reports.display import command, say

STYLES = {"ok": "green", "known": "yellow", "finding": "bold red", "not run": "dim"}
LONGEST = 120


def print_trials(out: Console, report: Report) -> None:
    """Print each finding with its problem and its replay, then a table of each side."""
    for trial in report.trials:
        if trial.status == FINDING:
            _print_finding(out, trial)
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


def _table(trials: list[Trial]) -> Table:
    """Return a row for each rule and implementation, and for what became of their cells."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, safe_box=True)
    for heading in ("rule", "implementation", "cells", "", "what happened"):
        table.add_column(heading, overflow="fold")
    for (rules, name, status, *_), group in groupby(sorted(trials, key=_row), key=_row):
        alike = list(group)
        first = alike[0].cell.title
        cells = first if len(alike) == 1 else f"{len(alike)} cells: {first}; ..."
        # Messages differ from cell to cell: all are in the JSON.
        entry = f"{alike[0].entry}: " if alike[0].entry else ""
        what = one_line(entry + alike[0].happened)
        shown = what if len(what) <= LONGEST else f"{what[:LONGEST]}..."
        table.add_row(rules, name, cells, Text(status, STYLES[status]), Text(shown))
    return table


def _row(trial: Trial) -> tuple[str, str, str, str, str]:
    rules = ", ".join(trial.cell.rules)
    return rules, trial.implementation, trial.status, trial.outcome, trial.entry


def _print_finding(out: Console, trial: Trial) -> None:
    title = f"FINDING  {trial.implementation}  {trial.cell.title}"
    say(out, title, f"{trial.meaning}. {trial.happened}", style="FAIL")
    command(out, "problem", compact(trial.cell.problem))
    if trial.replay:
        command(out, "replay", trial.replay)
    out.print()
