"""The findings of a run as lines that GitHub Actions shows at the files of a change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...properties.findings.text_format import law_names
from ...properties.verdicts.text import printable
from .places import Level, Place, located, of_the_run
from .sarif import text_of
from .summary import Summary

ESCAPED: Mapping[str, str] = {"%": "%25", "\r": "%0D", "\n": "%0A"}
"""Characters of a message that would end it, or be read as an escape."""
ESCAPED_IN_PROPERTY: Mapping[str, str] = {**ESCAPED, ":": "%3A", ",": "%2C"}
"""Characters of a property's value that would end it."""


def annotation_lines(summary: Summary) -> Iterator[str]:
    """Yield a workflow command for each cause of findings, and for what was not judged.

    What the ledger explains in a file of another project is left out: nobody here can mend it.
    """
    for each in located(summary):
        if each.cause.finding.entry and not each.places:
            continue
        verdict = each.cause.finding.verdict
        state = "KNOWN" if each.cause.finding.entry else f"{verdict.status} {verdict.kind}".strip()
        title = f"{state} {law_names(each.cause.laws)}"
        yield _command(each.level, title, text_of(each), next(iter(each.places), None))
    for level, text in of_the_run(summary):
        yield _command(level, "kernelproof", text, None)


def _command(level: Level, title: str, text: str, place: Place | None) -> str:
    named = {"file": place.file, "line": str(place.line)} if place else {}
    properties = ",".join(
        f"{name}={_escaped(value, ESCAPED_IN_PROPERTY)}"
        for name, value in {**named, "title": title}.items()
    )
    return f"::{level} {properties}::{_escaped(text, ESCAPED)}"


def _escaped(text: str, characters: Mapping[str, str]) -> str:
    return "".join(characters.get(each, each) for each in printable(text))
