"""The table of real values: rows of facts and of public configurations that have a source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...properties.space.real_values import COLUMNS
from .words import Row, compared_with, figures

RANKS = (1, 2, 4, 8, 16)
"""Numbers of ranks among which engines split the heads of a layer."""
LATENT = ("mla", "mla_prefill", "dsa")
"""Kinds of a latent layer: of its family's other rows, head dims are those of a part of a key."""


@dataclass(frozen=True)
class Table:
    """The table and what was left out of it.

    Attributes:
        rows: of the table, in its order.
        families: of all inputs.
        without_source: those of which no row has a source.
    """

    rows: tuple[dict[str, str], ...]
    families: int
    without_source: tuple[str, ...]


def table_of(inputs: Iterable[Sequence[Row]], date: str) -> Table:
    """Make the table.

    A row with a source of its own is a public configuration: of attention, or of experts where it
    names a method of routing. Another one counts where it was compared with the defaults of a
    library's configuration, unless its family has a public configuration of that kind, or of
    experts where it is a row of those.

    Args:
        inputs: rows of each file.
        date: on which the rows were compared that do not say themselves.
    """
    given = [row for rows in inputs for row in rows]
    experts = [row for row in given if row.get("source") and row.get("method")]
    public = [row for row in given if row.get("source") and not row.get("method")]
    known = {(row["family"], row["kind"]) for row in public}
    of_experts = {row["family"] for row in experts}
    whole = {(row["family"], row["source"]) for row in experts}
    facts = [row for row in given if "source" not in row]
    latent = {(row["family"], compared_with(row)) for row in facts if row["kind"] in LATENT}
    found = [_completed(row, "attention") for row in public]
    found += [_completed(row, "moe") for row in experts]
    kinds = {row["family"]: row["kind"] for row in reversed(facts)
             if row["class"] == "moe" and row["parameters"].startswith("experts")}  # fmt: skip
    for row in public:
        said = (row["family"], row["source"]) in whole
        if row["experts"] and row["family"] in kinds and not said:
            columns = ("family", "hidden", "inter", "experts", "top_k", "source", "date")
            same = {name: row[name] for name in columns}
            found.append(_completed({**same, "kind": kinds[row["family"]]}, "moe"))
    for row in facts:
        library, configuration = compared_with(row)
        of_part = row["class"] == "attention" and row["kind"] not in LATENT
        if not configuration or (of_part and (row["family"], compared_with(row)) in latent):
            continue
        if row["class"] == "moe" and row["family"] in of_experts:
            continue
        source = f"{library} configuration {configuration}"
        for each in figures(row):
            kind = each.get("kind", row["kind"])
            if (row["family"], kind) not in known:
                named = {**each, "family": row["family"], "kind": kind}
                found.append(_completed({**named, "source": source, "date": date}, row["class"]))
    families = {row["family"] for row in given}
    sourced = {row["family"] for row in found}
    return Table(tuple(_sorted(found)), len(families), tuple(sorted(families - sourced)))


def lines_of(table: Table) -> Iterator[str]:
    """Return the lines of the table's file."""
    yield "\t".join(COLUMNS)
    for row in table.rows:
        yield "\t".join(row[name] for name in COLUMNS)


def _completed(row: Row, of: str) -> dict[str, str]:
    """Return all columns of a row; what is not known is empty."""
    found = {name: row.get(name, "") for name in COLUMNS} | {"class": of}
    if of == "attention":
        found["ranks"] = ",".join(map(str, _ranks(int(row["query_heads"]), int(row["kv_heads"]))))
    return found


def _ranks(heads: int, kv_heads: int) -> list[int]:
    """Return the numbers of ranks that each have a share of the heads; one head may be copied."""
    return [n for n in RANKS if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]


def _sorted(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Return distinct rows in one order, whatever that of the files was."""
    distinct = {tuple(row[name] for name in COLUMNS): row for row in rows}
    return [distinct[key] for key in sorted(distinct, key=lambda key: (key[0].lower(), key))]
