"""The options that check, gate and bump share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from ...properties.isolation.machine import MOST_LAUNCHES
from ...properties.space.profiles import PROFILES
from ..console.choices import Choice
from ..console.completion import law_names
from ..console.outputs import output_option

CASES = Path(".kernelproof", "cases")
DEVICES = Choice(["cpu", "cuda"])
DISTRUST = click.option(
    "--distrust",
    is_flag=True,
    help="Judge in another process, which never loads the kernel: one that lies in its own process "
    "is found.",
)

RUN_OPTIONS = (
    click.option(
        "--profile",
        type=Choice(list(PROFILES)),
        default="gate",
        show_default=True,
        help="How hard to look: seconds, minutes, hours.",
    ),
    click.option(
        "--device", type=DEVICES, default="cpu", show_default=True, help="Where kernels run."
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        metavar="N",
        help="The same seed draws the same problems (nightly: 0 draws a new one).",
    ),
    click.option(
        "--minutes",
        type=click.FloatRange(min=0, min_open=True),
        metavar="N",
        help="End after so many minutes, building included, and report what was learned. Default "
        "on a GPU: 15 (gate), 5 (quick), 20 (bump); elsewhere no limit.",
    ),
    click.option(
        "--jobs",
        type=click.IntRange(min=1),
        metavar="N",
        help="Worker processes at a time; by default as cores (and a GPU's memory) allow.",
    ),
    click.option(
        "--modules",
        type=click.IntRange(min=1),
        metavar="N",
        help="Build at most N modules of each implementation whose modules compile slowly.",
    ),
    click.option(
        "--only",
        multiple=True,
        metavar="FIELD=VALUE,...",
        help="Draw only problems with one of these values of a field, such as "
        "window_left=127,511; may be repeated.",
    ),
    click.option(
        "--costs",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Read cost classes from this file, so that a seed draws the same problems on any "
        "machine. Each run writes such a file to the folder costs of its cases.",
    ),
    click.option(
        "--soak",
        type=click.IntRange(1, MOST_LAUNCHES),
        metavar="N",
        help="Launch each problem N times under the law soak; default 50 (quick), 200 (gate), "
        "5000 (nightly).",
    ),
    click.option(
        "--ray",
        metavar="ADDRESS",
        help="Run on the machines of the Ray cluster at HOST:PORT, ray://HOST:PORT, or auto, each "
        "kind of GPU by itself.",
    ),
    click.option(
        "--resume",
        is_flag=True,
        help="Continue a comparison, or a run with --ray, that was killed, and repeat nothing; "
        "start afresh where there is none.",
    ),
    DISTRUST,
    click.option(
        "--law",
        "laws",
        multiple=True,
        metavar="NAME",
        help="Run only this law; may be repeated.",
        shell_complete=law_names,
    ),
    output_option("--json", "Write JSON to this file."),
    output_option(
        "--evidence",
        "Write JSON without traces and paths of this machine, to be kept.",
    ),
    output_option("--junit", "Write JUnit XML to this file."),
    output_option("--html", "Write an HTML page to this file."),
    click.option(
        "--expectations",
        metavar="FILE|none",
        help="Ledger of known findings instead of the shipped one; with `none`, every finding is "
        "new.",
    ),
    click.option(
        "--corpus",
        type=click.Path(file_okay=False, path_type=Path),
        help="Replay the cases of this folder first, instead of the shipped ones.",
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
        help="Exit 0, not 4, where too little was judged.",
    ),
    click.option(
        "--require-claims",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Fail where a value is refused that is claimed in this file, which an earlier run "
        "wrote with --json.",
    ),
    click.option(
        "--cases",
        type=click.Path(file_okay=False, path_type=Path),
        default=CASES,
        show_default=True,
        help="Folder for the smallest problem of each finding.",
    ),
    click.option(
        "-v",
        "--verbose",
        is_flag=True,
        help="Print a line for each implementation, each known finding, and each thing that was "
        "not run, with the reason.",
    ),
)


RUN_SECTIONS = {
    "What to judge": (
        "--operation", "--law", "--only", "--from", "--implementation", "--part", "--compile",
        "--unit",
    ),
    "How hard to look": (
        "--profile", "--minutes", "--seed", "--modules", "--soak", "--costs", "--sanitizer",
        "--distrust",
    ),
    "Outputs": (
        "--verbose", "--html", "--json", "--junit", "--markdown", "--evidence", "--cases",
    ),
    "Known findings": (
        "--expectations", "--policy", "--corpus", "--examples", "--allow-incomplete",
        "--require-claims",
    ),
    "Machine": ("--device", "--jobs", "--ray", "--resume"),
    "Support rules": ("--gating", "--rules", "--without-rule"),
}  # fmt: skip
"""Options of check, gate and bump by the heading under which their help shows them."""


def run_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options that check, gate and bump share."""
    for option in reversed(RUN_OPTIONS):
        command = option(command)
    return command
