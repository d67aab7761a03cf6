"""The support matrix for people: tables on a terminal and in Markdown, differences, one call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from string import ascii_uppercase

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...impl.gating import (
    CHIPS,
    Decision,
    Feature,
    RuleBook,
    Target,
    capability_name,
    decide,
    explain,
    load_rules,
)
from ...impl.gating.decision import describe
from ...impl.gating.explanation import lacking
from ...properties.verdicts.text import count_of
from .rows import ALL_CHIPS, Difference, Matrix, Row, all_rows, matrix

MARKS = {"compiled": " c", "selected": " s", "run": " r"}
"""Marks of permissions that are known by more than declarations and reports."""
STYLES = {"refused": "bold red", "unknown": "dim", "supported": "green"}
"""Styles of what the rules say, in the order in which reasons are printed."""
MOST_LINES = 25
"""Number of lines of the answer to one question."""
MOST_NAMES = (21, 34)
"""Characters of operations' names that share a row: few leave room for the other columns."""
MOST_TITLES = 2
"""Number of calls that a reason names."""
SIGNS = {"supported": "yes", "refused": "**no**", "unknown": "-"}
LEGEND = (
    "`yes`: a rule allows it (`c`: FlashInfer's module was compiled for the chip, `s`: the release"
    " selects a shipped kernel for it, `r`: it ran there and was right). `no`: a rule refuses it,"
    " see the footnote. `-`: no rule speaks of it, which `require` refuses too."
)
Decided = Sequence[tuple[Row, tuple[Decision, ...]]]
"""Rows, each with the decision on each chip."""


def _tables(made: Matrix) -> Iterable[tuple[str, Decided]]:
    """Return the rows of each operation and backend, under their names."""
    for (operation, backend), rows in groupby(made.rows, key=_served):
        yield f"{operation}: {backend}", list(rows)


def _served(decided: tuple[Row, tuple[Decision, ...]]) -> tuple[str, str]:
    feature = decided[0].feature
    return feature.operation, feature.backend


def print_matrix(out: Console, made: Matrix, space: float) -> int:
    """Print a table an operation: a column a backend, a line for the calls that are alike.

    Where only that makes it fit, letters stand for chips, or one table names what each backend
    serves.

    Args:
        out: where to print.
        made: the matrix.
        space: the number of lines that it should fit.

    Returns:
        The number of lines.
    """
    names = ", ".join(map(capability_name, made.chips))
    key = f"yes: allowed on {names} (c: compiled, s: selected, r: run there)"
    if len(made.chips) > 1:
        key = f"allowed on these of {names}"
    heading = f"flashinfer-python {made.version}. {key}; no: refused; -: no rule, refused"
    operations: dict[str, dict[str, dict[str, tuple[Decision, ...]]]] = {}
    for row, decisions in made.rows:
        titles = operations.setdefault(row.feature.operation, {})
        titles.setdefault(row.title, {})[row.feature.backend] = decisions
    letters: dict[str, str] = {}
    shown = [Text(heading), *_shown(operations, letters)]
    if _lines_of(out, shown) > space:
        chips = {_marked(each) for _, each in made.rows if sum(one.supported for one in each) > 1}
        letters = dict(zip(sorted(chips), ascii_uppercase, strict=False))
        sets = (f"{letter}: {each.replace(' ', ',')}" for each, letter in letters.items())
        legend = Text("; ".join(sets))
        short = [Text(heading), legend, *_shown(operations, letters)]
        tried = (short, *_summaries(made))
        shown = next((one for one in tried if _lines_of(out, one) <= space), shown)
    for each in shown:
        out.print(each)
    return _lines_of(out, shown)


def _lines_of(out: Console, shown: Iterable[Text | Table]) -> int:
    return sum(len(out.render_lines(each)) for each in shown)


def _shown(
    operations: Mapping[str, Mapping[str, Mapping[str, tuple[Decision, ...]]]],
    letters: Mapping[str, str],
) -> Iterator[Text | Table]:
    """Yield a table an operation, each behind an empty line."""
    for operation, titles in operations.items():
        backends = tuple(dict.fromkeys(name for columns in titles.values() for name in columns))
        alike: dict[tuple[str, ...], list[str]] = {}
        for title, columns in titles.items():
            cells = tuple(_marked(columns[name]) if name in columns else "" for name in backends)
            alike.setdefault(cells, []).append(title)
        table = _table(operation, *backends)
        for cells, several in alike.items():
            table.add_row("; ".join(several), *(_styled(letters.get(x, x)) for x in cells))
        yield Text()
        yield table


def _summaries(made: Matrix) -> Iterator[list[Text | Table]]:
    """Yield tables of what backends serve, those of equal answers in one row.

    Each names fewer calls than the one before; then operations of equal rows share one, and last
    calls are only counted.
    """
    answers: dict[str, dict[tuple[tuple[str, ...], ...], list[str]]] = {}
    titles: dict[str, list[str]] = {}
    for (operation, backend), group in groupby(made.rows, key=_served):
        rows = list(group)
        titles[operation] = [row.title for row, _ in rows]
        allowed = tuple(
            tuple(row.title for row, decisions in rows if decisions[number].supported)
            for number in range(len(made.chips))
        )
        answers.setdefault(operation, {}).setdefault(allowed, []).append(backend)
    names = ", ".join(map(capability_name, made.chips))
    heading = Text(f"flashinfer-python {made.version} on {names}; any other call is refused")
    sizes = [(most, 0) for most in range(max(map(len, titles.values())), 0, -1)]
    for most, width in (*sizes, *((1, most) for most in MOST_NAMES), (0, MOST_NAMES[-1])):
        table = _table("operation", "backends", "calls that they serve")
        rows_of: dict[tuple[str, str, str], list[str]] = {}
        for operation, alike in answers.items():
            for allowed, backends in alike.items():
                said = _calls_by_chip(made, allowed, titles[operation], most)
                apart = "" if width and said == "all" else operation
                if said:
                    rows_of.setdefault((apart, ", ".join(backends), said), []).append(operation)
        for (_, backends_of, said), named in rows_of.items():
            for several in _joined(named, width):
                table.add_row(several, backends_of, said)
        yield [heading, Text(), table]


def _joined(names: Sequence[str], width: int) -> list[str]:
    """Join names into cells of at most ``width`` characters; with 0 each name has its own cell."""
    cells: list[str] = []
    for name in sorted(names, key=len, reverse=True):
        fitting = (i for i, each in enumerate(cells) if len(f"{each}, {name}") <= width)
        if (place := next(fitting, None)) is None:
            cells.append(name)
        else:
            cells[place] += f", {name}"
    return cells


def _calls_by_chip(
    made: Matrix, allowed: Sequence[Sequence[str]], titles: Sequence[str], most: int
) -> str:
    """Return which calls are allowed, after the chips where these are not all that were asked.

    Args:
        made: the matrix.
        allowed: the calls that are allowed on each chip.
        titles: all calls.
        most: the number of calls that are named at most; 0 counts them.
    """
    chips: dict[tuple[str, ...], list[str]] = {}
    for chip, calls in zip(made.chips, allowed, strict=True):
        if calls:
            chips.setdefault(tuple(calls), []).append(str(chip or "cpu"))
    found = []
    for calls, where in chips.items():
        others = [each for each in titles if each not in calls]
        said = _few(calls, most) if len(others) > len(calls) else f"all but {_few(others, most)}"
        said = said if others else "all"
        found.append(said if len(where) == len(made.chips) else f"{','.join(where)}: {said}")
    return " | ".join(found)


def print_reasons(out: Console, made: Matrix, space: float) -> None:
    """Print why calls are decided as they are on the first chip: each reason once.

    Args:
        out: where to print.
        made: the matrix.
        space: the number of lines that are left; reasons beyond are counted.
    """
    reasons: dict[tuple[str, str], list[tuple[Row, Decision]]] = {}
    instead: dict[str, dict[str, None]] = {}
    for row, (decision, *_) in made.rows:
        reasons.setdefault((decision.status, decision.reason), []).append((row, decision))
        if not decision.supported:
            instead.setdefault(decision.instead, {})[row.title] = None
    texts = [
        Text(f"{_few([*titles])}: {said}".removeprefix(": "), "bold")
        for said, titles in instead.items()
    ]
    ordered = sorted(reasons.items(), key=lambda found: tuple(STYLES).index(found[0][0]))
    texts += [_reason(*key, several) for key, several in ordered]
    for number, text in enumerate(texts, 1):
        space -= len(text.wrap(out, out.width))
        if space < (number < len(texts)):
            more = count_of(len(texts) - number + 1, "more reason")
            out.print(Text(f"{more}: give -v, --backend or --json FILE", "dim"))
            return
        out.print(text)


def _reason(status: str, said: str, several: Sequence[tuple[Row, Decision]]) -> Text:
    """Return one reason, whose it is and by which rule."""
    calls: dict[str, list[str]] = {}
    for row, _ in several:
        calls.setdefault(row.feature.backend, []).append(row.title)
    text = Text(f"{SIGNS[status].strip('*')}  ", STYLES[status])
    named = (f"{backend} {_few(titles)}".strip() for backend, titles in calls.items())
    text.append("; ".join(named), "bold").append(f": {said.rstrip('.')}")
    decision = several[0][1]
    evidence = f"{decision.evidence}, " if decision.evidence else ""
    by = f" ({decision.rule}: {evidence}{decision.source})" if decision.source else ""
    return text.append(by, "dim")


def _few(titles: Sequence[str], most: int = MOST_TITLES) -> str:
    """Return the first titles, and how many others there are."""
    if not most:
        return count_of(len(titles), "call")
    others = len(titles) - most
    return "; ".join(titles[:most]) + (f" and {others} more" if others > 0 else "")


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
        lacks = lacking(rule, machine, fields, decision.feature)
        line = Text("does not hold  " if lacks else "holds  ", "dim" if lacks else "bold")
        line.append(f"{rule.effect} {rule.id}: {rule.reason}", "dim" if lacks else "")
        if lacks:
            line.append(f" [differs in {'; '.join(lacks)}]", "dim")
        out.print(line)
    out.print(Text(f"{decision.status}: ", STYLES[decision.status]).append(str(decision)))


def _marked(decisions: Sequence[Decision]) -> str:
    """Return a cell: what is said on one chip, or those of several chips that are allowed."""
    allowed = [number for number, each in enumerate(decisions) if each.supported]
    if not allowed:
        refused = any(each.status == "refused" for each in decisions)
        return SIGNS["refused" if refused else "unknown"].strip("*")
    if len(decisions) == 1:
        return SIGNS["supported"] + MARKS.get(decisions[0].evidence, "")
    if len(allowed) == len(decisions):
        return "all"
    found: list[str] = []
    # Neighbours among the chips that were asked about stand together: 80-103.
    for _, run in groupby(enumerate(allowed), key=lambda each: each[1] - each[0]):
        names = [str(decisions[number].target.sm or "cpu") for _, number in run]
        found += names if len(names) <= 2 else [f"{names[0]}-{names[-1]}"]  # noqa: PLR2004  no range
    return " ".join(found)


def _styled(cell: str) -> Text:
    status = {"no": "refused", "-": "unknown", "": "unknown"}.get(cell, "supported")
    return Text(cell, STYLES[status])


def _table(first: str, *headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, safe_box=True, show_edge=False)
    table.add_column(first, overflow="fold", min_width=len(first))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def support_matrix() -> str:
    """Return the page of the newest release that the rules know, over all chips."""
    book = load_rules()
    return matrix_page(matrix(all_rows(), book.newest, ALL_CHIPS, book), book)


def matrix_page(made: Matrix, book: RuleBook) -> str:
    """Return a matrix as a page of Markdown."""
    lines = [*_heading(made.version, book), *_sections(made), *_chips_in_words()]
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


def _sections(made: Matrix) -> list[str]:
    """Return a table for each operation and backend, with the reasons of its refusals below."""
    lines = []
    for title, rows in _tables(made):
        lines += [f"## {title}", ""]
        lines += _lines(made, rows)
        lines += ["", *_footnotes(rows), *_permissions(rows), ""]
    return lines


def _lines(made: Matrix, rows: Decided) -> list[str]:
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
        return sign + MARKS.get(decision.evidence, "")
    return f"{sign} ({numbers[decision.rule]})" if decision.rule else sign


def _numbers(rows: Decided) -> dict[str, int]:
    refusing = (d.rule for _, decisions in rows for d in decisions if d.status == "refused")
    return {rule: number for number, rule in enumerate(dict.fromkeys(refusing), 1)}


def _footnotes(rows: Decided) -> list[str]:
    said = {d.rule: d for _, decisions in rows for d in decisions if d.status == "refused"}
    return [
        f"{number}. {said[rule].why} ({said[rule].source})"
        for rule, number in _numbers(rows).items()
    ]


def _permissions(rows: Decided) -> list[str]:
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
