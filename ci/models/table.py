"""The table of real values, and reading the words of the rows of facts that it is made of.

Rows of facts say in words what a layer of a model is; rows of public configurations have a source.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...properties.space.real_values import COLUMNS

Row = Mapping[str, str]
COMPARED = re.compile(r"compared with \((.+)\)")
HEADS = re.compile(r"^(\d+)/(\d+) heads, (?:QK (\d+), V (\d+)|(\d+))")
LATENT = re.compile(r"MLA absorbed, (\d+) heads, (\d+)\+(\d+), V in K")
BEFORE = re.compile(r"MLA prefill, (\d+) heads, QK (\d+)\+(\d+), V (\d+)")
WHOLE = re.compile(r"^(\d+) heads, one KV head, V is K \((\d+)\), sinks, window (\d+)")
ROUTE = re.compile(r"^route (\w+)(, bias)?, top (\d+) of (\d+)")
GROUPS = re.compile(r"(\d+) of (\d+) groups")
RANKS = (1, 2, 4, 8, 16)
"""Numbers of ranks among which engines split the heads of a layer."""
LATENT_KINDS = ("mla", "mla_prefill", "dsa")
"""Kinds of a latent layer, in whose family other rows have the head dims of a part of a key."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a file of tab-separated values by the names of their columns."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE, restval="")
        return [{name: text.strip() for name, text in row.items()} for row in rows]


def compared_with(row: Row) -> tuple[str, str]:
    """Return the library, and its configuration, that a row was compared with; empty if none."""
    for name, text in row.items():
        if found := COMPARED.match(name):
            return found[1], text
    return "", ""


def figures(row: Row) -> list[dict[str, str]]:
    """Return the figures of each call that a row's words name, by columns of the table.

    Nothing where the words have none: a layer of latent attention is two calls.
    """
    words = row["parameters"]
    if row["class"] == "moe":
        return [router] if (router := _route(words)) else []
    if row["class"] != "attention":
        return []
    found = _latent(words) or [each for each in (_whole(words), _heads(words)) if each][:1]
    for each in found:
        for name, pattern in (
            ("window_left", r"\bwindow(?:_left)? (\d+)"),
            ("soft_cap", r"\bsoft cap (\d+)"),
        ):
            if name not in each and (number := re.search(pattern, words)):
                each[name] = number[1]
    return found


def _route(words: str) -> dict[str, str]:
    """Return method, bias, experts and groups of a router; 1 of 1 group where none are named."""
    if not (route := ROUTE.match(words)):
        return {}
    method, bias, top_k, experts = route.groups()
    chosen, groups = found.groups() if (found := GROUPS.search(words)) else ("1", "1")
    return {"method": method, "bias": "yes" if bias else "no", "top_k": top_k, "experts": experts,
            "groups": groups, "topk_groups": chosen}  # fmt: skip


def _heads(words: str) -> dict[str, str]:
    if not (found := HEADS.match(words)):
        return {}
    heads, kv_heads, qk, vo, both = found.groups()
    return _dims(heads, kv_heads, qk or both, vo or both)


def _whole(words: str) -> dict[str, str]:
    """Return the figures of one key-value head whose values are its keys, which sees itself too."""
    if not (found := WHOLE.match(words)):
        return {}
    heads, dim, window = found.groups()
    return {**_dims(heads, "1", dim, dim), "window_left": str(int(window) - 1)}


def _latent(words: str) -> list[dict[str, str]]:
    before, absorbed = BEFORE.search(words), LATENT.search(words)
    if not before or not absorbed:
        return []
    heads, nope, rope, vo = before.groups()
    there, latent, rotary = absorbed.groups()
    return [
        {"kind": "mla_prefill", **_dims(heads, heads, str(int(nope) + int(rope)), vo)},
        {"kind": "mla", **_dims(there, "1", str(int(latent) + int(rotary)), latent)},
    ]


def _dims(heads: str, kv_heads: str, qk: str, vo: str) -> dict[str, str]:
    return {"query_heads": heads, "kv_heads": kv_heads, "head_dim_qk": qk, "head_dim_vo": vo}


@dataclass(frozen=True)
class Table:
    """The table and what was left out of it.

    Attributes:
        rows: the rows of the table, in its order.
        families: the families of all inputs.
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
        date: the date on which rows were compared that do not have their own.
    """
    given = [row for rows in inputs for row in rows]
    experts = [row for row in given if row.get("source") and row.get("method")]
    public = [row for row in given if row.get("source") and not row.get("method")]
    known = {(row["family"], row["kind"]) for row in public}
    of_experts = {row["family"] for row in experts}
    whole = {(row["family"], row["source"]) for row in experts}
    facts = [row for row in given if "source" not in row]
    latent = {(row["family"], compared_with(row)) for row in facts if row["kind"] in LATENT_KINDS}
    found = [_completed(row, "attention") for row in public]
    found += [_completed(row, "moe") for row in experts]
    kinds = {
        row["family"]: row["kind"]
        for row in reversed(facts)
        if row["class"] == "moe" and row["parameters"].startswith("experts")
    }
    for row in public:
        said = (row["family"], row["source"]) in whole
        if row["experts"] and row["family"] in kinds and not said:
            columns = ("family", "hidden", "inter", "experts", "top_k", "source", "date")
            same = {name: row[name] for name in columns}
            found.append(_completed({**same, "kind": kinds[row["family"]]}, "moe"))
    for row in facts:
        library, configuration = compared_with(row)
        of_part = row["class"] == "attention" and row["kind"] not in LATENT_KINDS
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
