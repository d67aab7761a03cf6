"""The command merge."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from ..console.errors import UsageRefusedError
from ..console.outputs import Outputs, refuse_shared_files
from ..options import HTML, JSON, JUNIT, MARKDOWN, POLICY, USES, VERBOSE, options


@click.command("merge", short_help="Join the reports of several runners of `bump`.")
@click.argument("reports", nargs=-1, required=True, type=click.Path(path_type=Path))
@options(POLICY, USES, JSON, JUNIT, MARKDOWN, HTML, VERBOSE)
def merge(
    reports: tuple[Path, ...],
    policy: Path | None,
    uses: tuple[Path, ...],
    outputs: Outputs,
    *,
    verbose: bool,
) -> int:
    """Join the reports of several runners, one for each chip, into one matrix and verdict.

    REPORTS are files that `kernelproof bump A B --json` wrote, all of the same two releases.
    One report alone will do: with --uses it is read against an engine's source. Without --policy,
    that of the first report decides.
    """
    refuse_shared_files()
    from .command import tell
    from .report.merging import merge as joined
    from .surface.uses import Source
    from .verdicts.policy import PolicyError, load_policy

    try:
        chosen = load_policy(policy) if policy is not None else None
    except PolicyError as error:
        message = f"--policy {error}"
        raise UsageRefusedError(message) from error
    words = click.get_current_context().find_root().obj or []
    sources = [Source.read(path) for path in uses]
    report = joined(reports, chosen, shlex.join(["kernelproof", *map(str, words)]), sources)
    return tell(report, outputs, verbose=verbose)
