"""The options that check and gate share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from ...properties.isolation.machine import MOST_LAUNCHES
from ...properties.space.profiles import PROFILES
from ..console.outputs import output_option

CASES = Path(".kernelproof", "cases")
DEVICES = click.Choice(["cpu", "cuda"])

RUN_OPTIONS = (
    click.option(
        "--profile",
        type=click.Choice(list(PROFILES)),
        default="gate",
        show_default=True,
        help="How hard to look: seconds, minutes, hours.",
    ),
    click.option("--device", type=DEVICES, default="cpu", show_default=True),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Of the search: the same seed draws the same problems (nightly: 0 draws a new one).",
    ),
    click.option(
        "--minutes",
        type=click.FloatRange(min=0, min_open=True),
        help="Most minutes of the run, building included; it then reports what it has learned. "
        "By default 15 (gate) or 5 (quick) on a GPU, 20 where two releases are compared, and "
        "elsewhere no limit.",
    ),
    click.option(
        "--jobs",
        type=click.IntRange(min=1),
        help="Worker processes at a time; by default by the cores, on a GPU by its memory too.",
    ),
    click.option(
        "--modules",
        type=click.IntRange(min=1),
        help="Most modules built of an implementation whose modules take long; by profile, and "
        "fewer where one takes minutes.",
    ),
    click.option(
        "--only",
        multiple=True,
        metavar="FIELD=VALUE,...",
        help="Draw only problems with one of these values of a field, such as "
        "window_left=127,511; may be repeated. With check --gating: try only such cells.",
    ),
    click.option(
        "--costs",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Take cost classes from this file instead of measuring them: the same seed draws the "
        "same problems on any machine. Each run writes one, in the folder costs of its cases.",
    ),
    click.option(
        "--soak",
        type=click.IntRange(1, MOST_LAUNCHES),
        metavar="N",
        help="Launches of each problem under the law soak: 50 (quick), 200 (gate), 5000 (nightly).",
    ),
    click.option(
        "--law", "laws", multiple=True, metavar="NAME", help="Only this law; may be repeated."
    ),
    output_option("--json", "Write the results to this file."),
    output_option(
        "--evidence",
        "Write the results to be kept: as JSON, without traces and paths of this machine.",
    ),
    output_option("--junit", "Write JUnit XML to this file."),
    output_option("--html", "Write a page to this file."),
    click.option(
        "--expectations",
        metavar="FILE|none",
        help="Ledger of known findings instead of the shipped one; none: find everything afresh.",
    ),
    click.option(
        "--corpus",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder of cases that are replayed first, instead of the shipped one.",
    ),
    click.option(
        "--examples",
        metavar="PLACE[,PLACE]",
        help="Share failing examples of --profile nightly: a folder, github:OWNER/REPO, a Redis "
        "URL; also $KERNELPROOF_EXAMPLES.",
    ),
    click.option(
        "--allow-incomplete",
        is_flag=True,
        help="Exit 0, not 4, where too little was judged; the verdict stays incomplete.",
    ),
    click.option(
        "--cases",
        type=click.Path(file_okay=False, path_type=Path),
        default=CASES,
        show_default=True,
        help="Folder for the smallest problem of each finding.",
    ),
)


def run_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options that check and gate share."""
    for option in reversed(RUN_OPTIONS):
        command = option(command)
    return command
