"""The support matrix as Markdown, for the documentation and for pull requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from ...impl.gating import CHIPS, Decision, RuleBook, capability_name, load_rules
from .rows import ALL_CHIPS, Difference, Matrix, Row, all_rows, matrix

SIGNS = {"supported": "yes", "refused": "**no**", "unknown": "-"}
LEGEND = (
    "`yes`: a rule allows it (`c`: FlashInfer's module was compiled for the chip, `r`: it ran there"
    " and was right). `no`: a rule refuses it, see the footnote. `-`: no rule speaks of it, which"
    " `require` refuses too."
)


def support_matrix() -> str:
    """Return the page of the newest release that the rules know, over all chips."""
    book = load_rules()
    return matrix_page(matrix(all_rows(), book.newest, ALL_CHIPS, book), book)


def matrix_page(made: Matrix, book: RuleBook) -> str:
    """Return a matrix as a page of Markdown."""
    lines = [*_heading(made.version, book), *_tables(made), *_chips_in_words()]
    return "\n".join(lines).rstrip() + "\n"


def _heading(version: str, book: RuleBook) -> list[str]:
    """Return the top of the page."""
    return [
        "# Support matrix",
        "",
        "For whoever chooses a backend for a chip: what may run where with flashinfer-python",
        f"{version}, by the {len(book.rules)} rules in `fixtures/support`. Each row changes one",
        "thing about a plain call (bfloat16, head dim 128, causal). Written by",
        "`kernelproof support --markdown support-matrix.md`.",
        "",
        LEGEND,
        "",
    ]


def _tables(made: Matrix) -> list[str]:
    """Return a table for each operation and backend, with the reasons of its refusals below."""
    lines = []
    keyed = groupby(made.rows, key=lambda row: (row[0].feature.operation, row[0].feature.backend))
    for (operation, backend), group in keyed:
        rows = list(group)
        lines += [f"## {operation}: {backend}", ""]
        lines += _table(made, rows)
        lines += ["", *_footnotes(rows), *_permissions(rows), ""]
    return lines


def _table(made: Matrix, rows: Iterable[tuple[Row, tuple[Decision, ...]]]) -> list[str]:
    titles = ["", *(capability_name(chip) for chip in made.chips)]
    lines = [_line(titles), _line("---" for _ in titles)]
    numbers = _numbers(rows)
    for row, decisions in rows:
        lines.append(_line([row.title, *(_cell(each, numbers) for each in decisions)]))
    return lines


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(decision: Decision, numbers: dict[str, int]) -> str:
    sign = SIGNS[decision.status]
    if decision.supported:
        mark = {"compiled": " c", "run": " r"}.get(decision.evidence, "")
        return sign + mark
    return f"{sign} ({numbers[decision.rule]})" if decision.rule else sign


def _numbers(rows: Iterable[tuple[Row, tuple[Decision, ...]]]) -> dict[str, int]:
    refusing = (d.rule for _, decisions in rows for d in decisions if d.status == "refused")
    return {rule: number for number, rule in enumerate(dict.fromkeys(refusing), 1)}


def _footnotes(rows: list[tuple[Row, tuple[Decision, ...]]]) -> list[str]:
    said = {d.rule: d for _, decisions in rows for d in decisions if d.status == "refused"}
    return [
        f"{number}. {said[rule].why} ({said[rule].source})"
        for rule, number in _numbers(rows).items()
    ]


def _permissions(rows: list[tuple[Row, tuple[Decision, ...]]]) -> list[str]:
    """Name the rules that allow, and who says so."""
    found = {d.rule: d for _, decisions in rows for d in decisions if d.supported}
    said = [f"`{rule}` ({found[rule].source})" for rule in sorted(found)]
    return ["", f"Allowed by {'; '.join(said)}."] if said else []


def differences_to_markdown(old: str, new: str, found: Sequence[Difference]) -> list[str]:
    """Return a page of what another version supports more or less."""
    lines = [f"# Support: flashinfer-python {old} and {new}", ""]
    if found:
        titles = ("operation: backend", "call", "chips", old, new, "why")
        lines += [_line(titles), _line("---" for _ in titles)]
    for each in found:
        feature, why = each.row.feature, each.telling
        lines.append(
            _line(
                (
                    f"{feature.operation}: {feature.backend}",
                    each.row.title,
                    ", ".join(map(capability_name, each.chips)),
                    SIGNS[each.before.status],
                    SIGNS[each.after.status],
                    f"{why.reason} ({why.source})" if why.source else why.reason,
                )
            )
        )
    summary = f"{len(found)} differences in support between {old} and {new}."
    return [*lines, *([""] if found else []), summary]


def _chips_in_words() -> list[str]:
    """Return the key to the columns."""
    return ["## Chips", "", *(f"- SM{sm}: {name}" for sm, name in CHIPS.items()), ""]
