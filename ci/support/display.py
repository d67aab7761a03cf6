"""The support matrix on a terminal: tables, the difference of two versions, one call explained."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...impl.gating import Decision, Feature, RuleBook, Target, capability_name, decide, explain
from ...impl.gating.decision import describe
from ...impl.gating.explanation import MACHINE_CONDITIONS
from ...impl.gating.rules import unmet_in_words
from .rows import Difference, Matrix

MARKS = {"declared": "yes", "reported": "yes", "compiled": "yes c", "run": "yes r"}
STYLES = {"supported": "green", "refused": "bold red", "unknown": "dim"}
MOST_REASONS = 12


def print_matrix(out: Console, made: Matrix) -> None:
    """Print one table an operation and backend."""
    key = "yes: allowed (c: compiled for the chip, r: run there); no: refused; -: no rule, refused"
    out.print(Text(f"flashinfer-python {made.version}. {key}"))
    keyed = groupby(made.rows, key=lambda row: (row[0].feature.operation, row[0].feature.backend))
    for (operation, backend), group in keyed:
        table = _table(f"{operation}: {backend}", *map(capability_name, made.chips))
        for row, decisions in group:
            table.add_row(row.title, *map(_cell, decisions))
        out.print(table)


def print_reasons(out: Console, made: Matrix) -> None:
    """Print why each row is supported on the first chip or not, and what to use instead."""
    for row, decisions in made.rows[:MOST_REASONS]:
        decision = decisions[0]
        text = Text(f"{decision.status}  ", STYLES[decision.status])
        text.append(f"{row.feature.backend} {row.title}".strip(), "bold")
        text.append(f": {decision.reason}. {decision.instead}".rstrip())
        out.print(text)
        if decision.source:
            evidence = f"{decision.evidence}, " if decision.evidence else ""
            out.print(Text(f"    {decision.rule} ({evidence}{decision.source})", "dim"))


def print_differences(out: Console, old: str, new: str, found: Sequence[Difference]) -> None:
    """Print what another version supports less, then more: the calls of one reason together."""
    by_reason: dict[tuple[bool, str, str], dict[str, list[str]]] = {}
    for each in sorted(found, key=lambda each: each.after.supported):
        chips = ", ".join(map(capability_name, each.chips))
        key = (each.after.supported, chips, each.telling.reason)
        feature = each.row.feature
        calls = by_reason.setdefault(key, {})
        calls.setdefault(f"{feature.operation} {feature.backend}", []).append(each.row.title)
    for (supported, chips, reason), calls in by_reason.items():
        style = STYLES["supported" if supported else "refused"]
        heading = Text(f"{'supported' if supported else 'refused'} on {chips}", style)
        out.print(heading.append(f": {reason}", "default"))
        for name, titles in calls.items():
            out.print(Text(f"    {name}: {'; '.join(titles)}", "dim"))
    out.print(Text(f"{len(found)} differences in support between {old} and {new}"))


def print_explanation(out: Console, feature: Feature, target: Target, book: RuleBook) -> None:
    """Walk the rules for one call: those that hold first, then what each other one lacks."""
    decision = decide(feature, target, book=book)
    out.print(Text(f"{feature} on {describe(target)}", "bold"))
    for rule, machine, fields in explain(decision.feature, target, book=book):
        lacks = [MACHINE_CONDITIONS.get(name, f"the artifact {name}") for name in machine]
        lacks += [
            unmet_in_words(name, rule.when[name], getattr(decision.feature, name))
            for name in fields
        ]
        line = Text("does not hold  " if lacks else "holds  ", "dim" if lacks else "bold")
        line.append(f"{rule.effect} {rule.id}: {rule.reason}", "dim" if lacks else "")
        if lacks:
            line.append(f" [differs in {'; '.join(lacks)}]", "dim")
        out.print(line)
    out.print(Text(f"{decision.status}: ", STYLES[decision.status]).append(str(decision)))


def _cell(decision: Decision) -> Text:
    if decision.supported:
        return Text(MARKS[decision.evidence], STYLES["supported"])
    return Text("no" if decision.status == "refused" else "-", STYLES[decision.status])


def _table(first: str, *headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, safe_box=True)
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
