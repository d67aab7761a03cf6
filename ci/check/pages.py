"""What is generated for the documentation and not kept, by the names of the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

import click

from ...properties.findings.ledger import Entry, load_ledger
from ..support.rendering import support_matrix
from .field_book import field_book
from .json_schemas import SCHEMAS
from .law_book import issue_link, law_book

COMMANDS = """\
# Commands

For whoever looks up an option: the help of every command, as `kernelproof COMMAND --help` prints
it. [Reading a report](reports.md) explains what a run prints, [fields](fields.md) what `--only`
takes. Written by `kernelproof list --markdown commands.md`.

## Options in pyproject.toml

The nearest `pyproject.toml`, of the current folder or one around it, may hold what the command line
does not say. A key is the long name of an option:

```toml
[tool.kernelproof]        # of every command that has the option
device = "cuda"
law = ["parity", "soak"]  # an option that may be repeated takes a list

[tool.kernelproof.check]  # of one command
profile = "quick"
allow-incomplete = true
```

The command line comes before the environment, and that before the file. Paths are relative to the
file, whose folder need not be the current one. An unknown key or a wrong value ends the command
with exit code 2 and names file, table and key. `--watch` is for the command line only.

## Completion in the shell

Commands, options, implementations, laws, operations and the values of `support` are completed. For
bash, in `~/.bashrc`:

```bash
eval "$(_KERNELPROOF_COMPLETE=bash_source kernelproof)"
```

`zsh_source` does the same in `~/.zshrc`. For fish,
`_KERNELPROOF_COMPLETE=fish_source kernelproof | source` goes into
`~/.config/fish/completions/kernelproof.fish`.
"""
WIDTH = 96
"""Columns of the help on this page."""
KNOWN_FINDINGS = """\
# Known findings

For whoever wants to know what is wrong with a release of FlashInfer or of a serving engine: each
entry of the ledger (`fixtures/ledger.toml`). [Findings](findings.md) says how to read and replay
them. Written by `kernelproof list --markdown known-findings.md`.
"""
ANY = "any release"
"""Heading of the entries that name no release."""


def command_book() -> str:
    """Return the page of commands as Markdown; a command of the group must be running."""
    return "\n".join([COMMANDS, *_helps(click.get_current_context().find_root().command)])


def _helps(command: click.Command, parent: click.Context | None = None) -> list[str]:
    """Return the help of a command, and of those below it."""
    context = click.Context(
        command,
        info_name=command.name if parent else "kernelproof",
        parent=parent,
        terminal_width=WIDTH,
        **command.context_settings,
    )
    lines = [f"## {context.command_path}", "", "```text", command.get_help(context), "```", ""]
    for each in getattr(command, "commands", {}).values():
        if not each.hidden:
            lines += _helps(each, context)
    return lines


def ledger_book() -> str:
    """Return the page of known findings, by the distribution that each names first."""
    lines = [KNOWN_FINDINGS]
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


PAGES: Mapping[str, Callable[[], str]] = {
    "law-book.md": law_book,
    "fields.md": field_book,
    "commands.md": command_book,
    "known-findings.md": ledger_book,
    "support-matrix.md": support_matrix,
}
"""What makes each page."""
GENERATED: Mapping[str, tuple[str, Mapping[str, Callable[[], object]]]] = {
    "--markdown": ("page", PAGES),
    "--schema": ("schema", SCHEMAS),
}
"""What each option of ``list`` writes, and what makes each file by its name."""


def writer(flag: str, path: Path) -> Callable[[], object]:
    """Return what makes the file of this name.

    Raises:
        UsageError: nothing that the option writes has this name.
    """
    what, made = GENERATED[flag]
    if path.name not in made:
        message = f"{flag} {path}: no {what} has this name; there are {', '.join(made)}"
        raise click.UsageError(message)
    return made[path.name]
