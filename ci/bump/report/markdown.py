"""A comparison's report as Markdown, for a comment on a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....properties.verdicts.text import count_of, printable
from ..verdicts.findings import engines_in_words, spared, uses_in_words
from .display import (
    NEW,
    REPORTED_IN_FULL,
    chip_label,
    claims_of,
    is_known,
    known_lines,
    problems_in_words,
    stored_first,
    title,
)

MARKS = {
    "bump": "✅",
    "bump with conditions": "⚠️",
    "do not bump": "❌",
    "undecided": "❔",
}
LONGEST = 60_000
"""Characters: GitHub refuses a comment of more than 65,536."""
MOST_FINDINGS = 40
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|@~$])")


def to_markdown(report: Mapping[str, Any]) -> str:
    """Return the report; what is long is folded, and cut where a comment would be too long."""
    lines = [*_lines(report)]
    text = "\n".join(lines) + "\n"
    if len(text) <= LONGEST:
        return text
    cut = "\n\nCut here: the whole report is in the JSON.\n"
    kept, size = [], 0
    for line in lines:
        size += len(line) + 1
        if size > LONGEST - len(cut) - 100:
            break
        kept.append(line)
    unclosed = sum(line == "<details>" for line in kept) - kept.count("</details>")
    return "\n".join([*kept, *["", "</details>"] * unclosed]) + cut


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    mark = MARKS[report["verdict"]]
    yield f"## {mark} {escaped(title(report))}: {report['verdict']}"
    yield ""
    yield escaped(report["message"])
    yield ""
    if report["chips"]:
        yield "| chip | verdict | evidence | blocked by | conditions |"
        yield "|---|---|---|---|---|"
        for each in report["chips"]:
            yield (
                f"| {each['name']} | {MARKS[each['verdict']]} {each['verdict']} "
                f"| {each['evidence']} | {len(each['blocked_by'])} | {len(each['conditions'])} |"
            )
        yield ""
    if report["conditions"]:
        yield "### Conditions"
        yield ""
        for each in report["conditions"]:
            yield f"- {escaped(each['rule'])}"
        yield ""
    for action, heading in (("block", "What blocks"), ("condition", "What sets conditions")):
        yield from _folded(heading, [e for e in report["findings"] if e["action"] == action])
    unused = spared(report)
    yield from _folded("Not used by the engine's source", unused)
    told = [
        e
        for e in report["findings"]
        if e["action"] == "report" and not is_known(e) and e not in unused
    ]
    yield from _folded("New, and only reported", [e for e in told if e["change"] in NEW])
    yield from _known([each for each in report["findings"] if is_known(each)])
    if report["failures"]:
        yield "### Incomplete"
        yield ""
        yield from (f"- {escaped(each)}" for each in report["failures"])
        yield ""
    behaviour = [e for e in told if e["change"] in REPORTED_IN_FULL and e["change"] not in NEW]
    yield from _folded("Other behaviour", behaviour)
    rest = [each for each in told if each["change"] not in REPORTED_IN_FULL]
    if rest:
        yield from _details(f"Other changes ({len(rest)})")
        for each in rest[:MOST_FINDINGS]:
            yield f"- `{each['change']}` {escaped(each['message'])}"
        if len(rest) > MOST_FINDINGS:
            yield f"- and {len(rest) - MOST_FINDINGS} more"
        yield ""
        yield "</details>"
        yield ""
    yield from _machines(report)


def _known(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if findings:
        yield from _details(f"Known ({len(findings)})")
        yield from (f"- {escaped(line)}" for line in known_lines(findings))
        yield ""
        yield "</details>"
        yield ""


def _folded(heading: str, findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not findings:
        return
    yield from _details(f"{heading} ({len(findings)})")
    for each in findings[:MOST_FINDINGS]:
        yield from _finding(each)
    if len(findings) > MOST_FINDINGS:
        yield f"and {len(findings) - MOST_FINDINGS} more"
    yield ""
    yield "</details>"
    yield ""


def _finding(each: Mapping[str, Any]) -> Iterator[str]:
    where = ", ".join(map(chip_label, each["chips"]))
    yield f"- **{escaped(each['change'])}** {escaped(each['message'])}" + (
        f" ({where})" if where else ""
    )
    if each["problem"]:
        yield f"  - problem: {code(str(each['problem'].get('told', '')))}"
    for side, text in each["replay"].items():
        yield f"  - {side}: {code(text)}"
    if each["entry"]:
        yield f"  - known: {code(each['entry'])} {escaped(each['issue'])}"
    if told := uses_in_words(each.get("uses")):
        yield f"  - engine: {escaped(told)}"
    if each["accepted"]:
        yield f"  - accepted: {escaped(each['accepted'])}"


def _machines(report: Mapping[str, Any]) -> Iterator[str]:
    yield from _details("What ran, and what did not")
    for machine in report["machines"]:
        yield (
            f"- {chip_label(machine['chip'])} ({escaped(machine['device_name'])}): "
            f"{problems_in_words(machine)} of "
            f"{count_of(len(machine['implementations']), 'implementation')}, profile "
            f"{machine['profile']}{stored_first(machine)}"
        )
        for name, claim in claims_of(machine):
            yield f"  - {code(name)} {escaped(claim)}"
        for each in machine["not_tested"]:
            yield f"  - not tested: {escaped(each['what'])}: {escaped(each['why'])}"
    for each in report["not_tested"]:
        yield f"- not tested: {escaped(each['what'])}: {escaped(each['why'])}"
    for each in engines_in_words(report):
        yield f"- engine: {escaped(each)}"
    yield ""
    yield f"{code(report['command'])}, Kernelproof {report['kernelproof']}, {report['date']}"
    yield ""
    yield "</details>"


def _details(summary: str) -> Iterator[str]:
    yield "<details>"
    yield f"<summary>{summary}</summary>"
    yield ""


def escaped(text: object) -> str:
    """Return text that Markdown and HTML show as it is, on one line; ``@`` calls nobody."""
    plain = " ".join(printable(str(text)).split())
    return _SPECIAL.sub(lambda found: "&#64;" if found[1] == "@" else f"\\{found[1]}", plain)


def code(text: str) -> str:
    """Return text as code on one line, whatever backticks it has."""
    plain = " ".join(printable(text).split())
    longest = max((len(run) for run in re.findall(r"`+", plain)), default=0)
    fence = "`" * (longest + 1)
    space = " " if "`" in plain else ""
    return f"{fence}{space}{plain}{space}{fence}"
