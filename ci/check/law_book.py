"""The page of the laws: what each says, the seeded bugs that it kills, what it has caught."""

from __future__ import annotations

from collections.abc import Sequence

from ...fixtures import CAUGHT
from ...impl.targets.data_files import read_json
from ...properties.findings.ledger import Entry, load_ledger
from ...properties.laws import LAWS, Law
from ...properties.seeded import BUGS, triton_bugs
from ...properties.seeded.catalogue import SeededBug
from ...properties.verdicts.text import count_of

HEAD = """\
# The law book

For whoever wants the record of a law: its definition, what it has caught in released code, and the
faults that were written for it. [The laws](laws.md) explains them by kind.

A law has caught a finding where it fails on the smallest case, where the ledger names it, or where
a kept run (`fixtures/evidence/`) has it; most causes can show under others too. Written by
`kernelproof list --markdown law-book.md` from the laws, the ledger (`fixtures/ledger.toml`), the
kept runs and the seeded bugs (`properties/seeded/`).
"""


def law_book() -> str:
    """Return the page as Markdown."""
    entries = load_ledger().entries
    laws = {entry.id: {*entry.laws, *(entry.load_case() or ())[:1]} for entry in entries}
    kept = read_json(CAUGHT, ValueError)
    for entry in entries:
        laws[entry.id].update(kept.get(entry.id, ()))
    caught = {law.name: [each for each in entries if law.name in laws[each.id]] for law in LAWS}
    return "\n".join([HEAD, *("\n".join(_section(law, caught[law.name])) for law in LAWS)])


def _section(law: Law, caught: Sequence[Entry]) -> list[str]:
    lines = [f"## {law.name}", "", f"{law.statement[0].upper()}{law.statement[1:]}.", ""]
    of = ", ".join(f"`{each}`" for each in law.operations)
    needs = " or ".join(f"`{each}`" for each in law.needs)
    lines += [f"- Speaks of {of}" + (f", of implementations with {needs}." if needs else ".")]
    if caught:
        lines += [f"- Has caught {count_of(len(caught), 'known finding')}:", *_by_issue(caught)]
    mine = [bug for bug in (*BUGS, *triton_bugs.BUGS) if bug.law == law.name]
    if mine:
        lines += ["- Written for it:", *(f"  - {_bug(bug)}" for bug in mine)]
    else:
        lines += ["- No seeded bug was written for it alone."]
    if law.overlap:
        lines += [f"- Kept although others kill what it kills: {law.overlap}."]
    return [*lines, ""]


def _by_issue(entries: Sequence[Entry]) -> list[str]:
    """List the findings under each public issue, and those that have none."""
    issues = dict.fromkeys(entry.issue for entry in entries)
    lines = []
    for issue in sorted(issues, key=lambda each: not each):
        names = ", ".join(f"`{entry.id}`" for entry in entries if entry.issue == issue)
        link = issue_link(issue) if issue else "without a public issue"
        lines.append(f"  - {link}: {names}")
    return lines


def issue_link(issue: str) -> str:
    """Return a link to a public issue, by repository and number."""
    parts = issue.rstrip("/").split("/")
    name = f"{parts[-3]}#{parts[-1]}" if len(parts) > 3 else issue  # noqa: PLR2004  repo/issues/1
    return f"[{name}]({issue})"


def _bug(bug: SeededBug) -> str:
    model = f" ({bug.model})" if bug.model else ""
    return f"`{bug.name}`: {bug.description.rstrip('.')}{model}."
