"""The page of known findings: each entry of the ledger, by the distribution that it names first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ...properties.findings.ledger import Entry, load_ledger
from .law_book import issue_link

HEAD = """\
# Known findings

For whoever wants to know what is wrong with a release of FlashInfer or of a serving engine: each
entry of the ledger (`fixtures/ledger.toml`). [Findings](findings.md) says how to read and replay
them. Written by `kernelproof list --markdown known-findings.md`.
"""
ANY = "any release"
"""Heading of the entries that name no release."""


def ledger_book() -> str:
    """Return the page as Markdown."""
    lines = [HEAD]
    entries = sorted(load_ledger().entries, key=_named_first)  # stable: the ledger's order
    for distribution, group in groupby(entries, key=_named_first):
        lines += [f"## {distribution}", ""]
        for entry in group:
            lines += _section(entry)
    return "\n".join(lines)


def _named_first(entry: Entry) -> str:
    return next(iter(entry.versions), ANY)


def _section(entry: Entry) -> Iterator[str]:
    yield from (f"### {entry.id}", "", " ".join(entry.reason.split()), "")
    names = ", ".join(f"`{name}`" for name in (entry.implementation, *entry.siblings))
    yield f"- {' '.join((entry.status, *entry.kinds))} of {names}"
    if conditions := _conditions(entry):
        yield f"- Where: {conditions}"
    if entry.issue:
        yield f"- Reported: {issue_link(entry.issue)}"
    if entry.case is not None:
        yield f"- Replay: `kernelproof replay {entry.case.name}`"
    yield ""


def _conditions(entry: Entry) -> str:
    said = [f"{name} {specifier}" for name, specifier in entry.versions.items()]
    said += [entry.device] if entry.device else []
    said += [", ".join(f"SM{chip}" for chip in entry.sm)] if entry.sm else []
    return "; ".join(said)
