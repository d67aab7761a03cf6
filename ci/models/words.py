"""Reading the words in which a row of facts says what a layer of a model is."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path

Row = Mapping[str, str]
COMPARED = re.compile(r"compared with \((.+)\)")
HEADS = re.compile(r"^(\d+)/(\d+) heads, (?:QK (\d+), V (\d+)|(\d+))")
LATENT = re.compile(r"MLA absorbed, (\d+) heads, (\d+)\+(\d+), V in K")
BEFORE = re.compile(r"MLA prefill, (\d+) heads, QK (\d+)\+(\d+), V (\d+)")
WHOLE = re.compile(r"^(\d+) heads, one KV head, V is K \((\d+)\), sinks, window (\d+)")
ROUTE = re.compile(r"^route (\w+)(, bias)?, top (\d+) of (\d+)")
GROUPS = re.compile(r"(\d+) of (\d+) groups")


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
