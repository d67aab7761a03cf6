"""The page of commands: the help of each."""

from __future__ import annotations

import click

HEAD = """\
# Commands

For whoever looks up an option: the help of every command, as `kernelproof COMMAND --help` prints
it. [Reading a report](reports.md) explains what a run prints, [fields](fields.md) what `--only`
takes. Written by `kernelproof list --markdown commands.md`.

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


def command_book() -> str:
    """Return the page as Markdown; a command of the group must be running."""
    return "\n".join([HEAD, *_helps(click.get_current_context().find_root().command)])


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
