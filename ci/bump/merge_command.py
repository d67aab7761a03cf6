"""The command merge."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from ..console.errors import UsageRefusedError
from ..console.outputs import refuse_shared_files

OUTPUT = click.Path(dir_okay=False, path_type=Path)


@click.command("merge")
@click.argument("reports", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--policy", type=click.Path(path_type=Path), help="Instead of the first report's.")
@click.option("--json", "json_path", type=OUTPUT, help="Write the joined report to this file.")
@click.option("--junit", "junit_path", type=OUTPUT, help="Write JUnit XML to this file.")
@click.option("--markdown", "markdown_path", type=OUTPUT, help="Write a comment's Markdown.")
@click.option("--html", "html_path", type=OUTPUT, help="Write a page to this file.")
def merge(
    reports: tuple[Path, ...],
    policy: Path | None,
    json_path: Path | None,
    junit_path: Path | None,
    markdown_path: Path | None,
    html_path: Path | None,
) -> int:
    """Join the reports of several runners, one for each chip, into one matrix and verdict.

    REPORTS are files of `kernelproof gate --baseline A --candidate B --json`, all of the same two
    releases.
    """
    refuse_shared_files()
    from .command import tell
    from .report.merging import merge as joined
    from .verdicts.policy import PolicyError, load_policy

    try:
        chosen = load_policy(policy) if policy is not None else None
    except PolicyError as error:
        message = f"--policy {error}"
        raise UsageRefusedError(message) from error
    words = click.get_current_context().find_root().obj or []
    report = joined(reports, chosen, shlex.join(["kernelproof", *map(str, words)]))
    paths = {
        "--json": json_path,
        "--junit": junit_path,
        "--markdown": markdown_path,
        "--html": html_path,
    }
    return tell(report, {option: path for option, path in paths.items() if path is not None})
