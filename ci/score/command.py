"""The command score: do the laws find bugs that are known to be there?"""

from __future__ import annotations

import sys

import click

from ...fixtures.suggestions import did_you_mean
from ...properties.space.profiles import PROFILES
from ..console.errors import CONFORMING, INTERRUPTED, NONCONFORMING, UsageRefusedError
from ..console.outputs import Outputs
from ..options import JOBS, JSON


@click.command("score")
@click.option("--profile", type=click.Choice(["quick", "gate"]), default="gate", show_default=True)
@JOBS
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@JSON
@click.option(
    "--bug",
    "--only",
    "names",
    multiple=True,
    metavar="NAME",
    help="Only this bug; may be repeated.",
)
@click.option(
    "--operation",
    "operations",
    multiple=True,
    metavar="OP",
    help="Only bugs of this operation, such as moe; may be repeated.",
)
def score(
    profile: str,
    jobs: int | None,
    seed: int,
    names: tuple[str, ...],
    operations: tuple[str, ...],
    outputs: Outputs,
) -> int:
    """Run the laws on seeded bugs and honest controls.

    Exit code 0 if at least 95 % of the bugs and every hang and crash are found, the median time to
    find one is at most 10 s, no honest control is accused, and (at profile gate) every law kills a
    bug that no other kills or says why it is kept; 1 otherwise. A last table says what usual
    comparisons, such as allclose, would have found of the same bugs.
    """
    from ...properties.seeded import CATALOGUE, triton_bugs
    from ..console.terminal import console
    from .display import print_score, watch, watch_comparison
    from .scoring import run_score

    known = {bug.name for bug in (*CATALOGUE, *triton_bugs.BUGS)}
    unknown = sorted(set(names) - known)
    if unknown:
        meant = did_you_mean(unknown[0], known)
        there = f"there are {', '.join(sorted(known))}"
        message = f"--bug {unknown[0]!r} is no seeded bug; {meant}{there}"
        raise UsageRefusedError(message)
    scored = {bug.operation for bug in CATALOGUE}
    strange = sorted(set(operations) - scored)
    if strange:
        meant = did_you_mean(strange[0], scored)
        message = f"--operation {strange[0]!r}: {meant}no seeded bug is of such an operation"
        raise UsageRefusedError(message)
    names += tuple(bug.name for bug in CATALOGUE if bug.operation in operations)
    outputs.check()
    err = console(sys.stderr)
    done = run_score(
        PROFILES[profile],
        names=names,
        seed=seed,
        jobs=jobs or 0,
        watch=lambda stage: watch(err, stage),
        watch_comparison=lambda total: watch_comparison(err, total),
    )
    print_score(console(sys.stdout), done)
    outputs.write({"--json": done.to_json})
    if done.interrupted:
        return INTERRUPTED
    return NONCONFORMING if done.shortfalls else CONFORMING
