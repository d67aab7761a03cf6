"""The options that commands share, each declared once, and their headings in the help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..impl.targets.target import parse_cpu
from ..properties.isolation.machine import MOST_LAUNCHES
from ..properties.space.profiles import PROFILES
from .console.choices import Choice
from .console.completion import chip_names, implementation_names, law_names
from .console.errors import UsageRefusedError
from .console.outputs import FILE, output_option
from .releases.packages import FLASHINFER_PACKAGE, PACKAGES, PARTS

Option = Callable[[Callable[..., Any]], Callable[..., Any]]


class OfLaws(click.Option):
    """An option of a run over the laws, which is refused where `check --gating` tries the rules."""

    def handle_parse_result(
        self,
        ctx: click.Context,
        opts: Mapping[str, Any],
        args: list[str],
    ) -> tuple[Any, list[str]]:
        """Refuse the option, or read its value."""
        if self.name in opts and ("gating" in opts or ctx.lookup_default("gating")):
            message = f"{self.opts[0]} does not go with --gating"
            raise click.UsageError(message)
        return super().handle_parse_result(ctx, opts, args)


law_option = partial(click.option, cls=OfLaws)
FOLDER = Path(".kernelproof", "cases")
"""Folder of the cases of a run, unless another is named."""
DEVICES = Choice(["cpu", "cuda"])
JOBS = click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Worker processes at a time; by default as cores (and a GPU's memory) allow.",
)
DISTRUST = law_option(
    "--distrust",
    is_flag=True,
    help="Judge in another process, which never loads the kernel: one that lies in its own process "
    "is found.",
)
LAW = law_option(
    "--law",
    "laws",
    multiple=True,
    metavar="NAME",
    help="Run only this law; may be repeated.",
    shell_complete=law_names,
)
ONLY = click.option(
    "--only",
    multiple=True,
    metavar="FIELD=VALUE,...",
    help="Draw only problems with one of these values of a field, such as "
    "window_left=127,511; may be repeated.",
)
JSON = output_option("--json", "Write JSON to this file.")
JUNIT = output_option("--junit", "Write JUnit XML to this file.", cls=OfLaws)
HTML = output_option("--html", "Write an HTML page to this file.", cls=OfLaws)
SARIF = output_option("--sarif", "Write SARIF for code scanning to this file.", cls=OfLaws)
MARKDOWN = output_option("--markdown", "Write a comment's Markdown.")
VERBOSE = law_option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print all in full: each implementation, each finding, known ones too, and each thing "
    "that was not run, with the reason.",
)
POLICY = click.option(
    "--policy",
    type=click.Path(path_type=Path),
    help="TOML file that says what blocks a bump, and which findings are accepted.",
)
USES = click.option(
    "--uses",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Source of the engine, a folder or a wheel: what it does not use does not block; may be "
    "repeated.",
)


def cpu_of(
    _context: click.Context | None, _parameter: click.Parameter | None, given: str | None
) -> str:
    """Return the processor that was named; empty if none was.

    Raises:
        UsageRefusedError: there is none of that name.
    """
    try:
        return parse_cpu(given) if given else ""
    except ValueError as error:
        message = f"--cpu: {error}"
        raise UsageRefusedError(message) from error


CPU = click.option(
    "--cpu",
    metavar="NAME",
    callback=cpu_of,
    help="Processor of the wheels: x86_64 or aarch64, whose kernels differ; by default this "
    "machine's.",
)
PACKAGE = click.option(
    "--package",
    type=Choice([*PACKAGES]),
    default=FLASHINFER_PACKAGE.name,
    show_default=True,
    help="Package whose releases these are.",
)
RUN = (
    law_option(
        "--profile",
        type=Choice(list(PROFILES)),
        default="gate",
        show_default=True,
        help="How hard to look: seconds, minutes, hours.",
    ),
    click.option(
        "--device", type=DEVICES, default="cpu", show_default=True, help="Where kernels run."
    ),
    law_option(
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
        help="End after this many minutes, building included, and report what was learned. Default "
        "on a GPU: 15 (gate), 5 (quick), 20 (bump); elsewhere no limit.",
    ),
    JOBS,
    click.option(
        "--modules",
        type=click.IntRange(min=1),
        metavar="N",
        help="Build at most N modules of each implementation whose modules compile slowly.",
    ),
    ONLY,
    law_option(
        "--soak",
        type=click.IntRange(1, MOST_LAUNCHES),
        metavar="N",
        help="Launch each problem N times under the law soak; default 50 (quick), 200 (gate), "
        "5000 (nightly).",
    ),
    law_option(
        "--ray",
        metavar="ADDRESS",
        help="Run on the machines of the Ray cluster at HOST:PORT, ray://HOST:PORT, or auto, each "
        "kind of GPU by itself.",
    ),
    law_option(
        "--resume",
        is_flag=True,
        help="Continue a run that was killed, and repeat nothing; start afresh where there is "
        "none.",
    ),
    LAW,
    JSON,
    output_option(
        "--evidence",
        "Write JSON without traces and paths of this machine, to be kept.",
    ),
    JUNIT,
    HTML,
    click.option(
        "--expectations",
        metavar="FILE|none",
        help="Ledger of known findings instead of the shipped one; with `none`, every finding is "
        "new.",
    ),
    law_option(
        "--corpus",
        type=click.Path(file_okay=False, path_type=Path),
        help="Replay the cases of this folder first, instead of the shipped ones.",
    ),
    click.option(
        "--cases",
        type=click.Path(file_okay=False, path_type=Path),
        default=FOLDER,
        show_default=True,
        help="Folder for the smallest problem of each finding.",
    ),
    VERBOSE,
)
"""Options of check, gate and bump."""
JUDGE = (
    SARIF,
    law_option(
        "--annotations/--no-annotations",
        envvar="GITHUB_ACTIONS",
        help="Print findings as annotations of GitHub Actions, by file and line of the kernel. "
        "Default: where $GITHUB_ACTIONS is true.",
    ),
    law_option(
        "-x",
        "--exitfirst",
        "exit_first",
        is_flag=True,
        help="End at the first finding that no ledger entry explains.",
    ),
    law_option("--deck/--no-deck", default=True, hidden=True),  # to measure what the deck saves
    law_option(
        "--costs",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Read cost classes from this file, so that a seed draws the same problems on any "
        "machine. Each run writes such a file to the folder costs of its cases.",
    ),
    DISTRUST,
    law_option(
        "--mps/--no-mps",
        default=True,
        help="Whether the processes of a run share a GPU through NVIDIA's MPS, in a daemon of "
        "their own. By default they do where it serves them; else they have the GPU in turns.",
    ),
    law_option(
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
    law_option(
        "--require-claims",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Fail where a value is refused that is claimed in this file, which an earlier run "
        "wrote with --json.",
    ),
)
"""Options of check and gate."""
COMPARE = (
    click.option(
        "--baseline-from",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Take the baseline from the pin in a requirements file or a pyproject.toml.",
    ),
    click.option(
        "--candidate-from",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Take the candidate from the pin in such a file.",
    ),
    click.option(
        "--sm",
        metavar="SM[,SM]",
        help="Chips to answer for, by number or name (GB300); all by default.",
        shell_complete=chip_names,
    ),
    POLICY,
    click.option(
        "--journal",
        type=FILE,
        help="File that --resume continues from; by default one in .kernelproof/gate.",
    ),
    PACKAGE,
    CPU,
    click.option(
        "--part",
        "parts",
        multiple=True,
        type=Choice(PARTS),
        help="Compare only this; may be repeated.",
    ),
    click.option(
        "--implementation",
        "implementations",
        multiple=True,
        metavar="NAME",
        help="Compare only this implementation's behaviour; may be repeated.",
        shell_complete=implementation_names,
    ),
    click.option(
        "--compile",
        "compiled",
        metavar="SM[,SM]",
        help="Compile both releases' modules for these chips too, with nvcc.",
        shell_complete=chip_names,
    ),
    click.option(
        "--unit", "units", multiple=True, metavar="NAME", help="Compile only this module."
    ),
    USES,
    MARKDOWN,
)
"""Options of bump."""
HIDDEN_SIDES = (
    click.option("--baseline", "baseline_named", hidden=True),
    click.option("--candidate", "candidate_named", hidden=True),
)
"""The two releases as flags, which the alias ``gate --baseline A --candidate B`` has."""
SIDES = ("--baseline", "--candidate", "--baseline-from", "--candidate-from")
"""Flags of a comparison that make gate the alias of bump."""
SECTIONS = {
    "Releases": (
        "--package", "--cpu", "--baseline-from", "--candidate-from", "--sm", "--uses", "--journal",
    ),
    "What to judge": (
        "--operation", "--law", "--only", "--from", "--implementation", "--part", "--compile",
        "--unit",
    ),
    "How hard to look": (
        "--profile", "--minutes", "--seed", "--modules", "--soak", "--costs", "--sanitizer",
        "--distrust", "--exitfirst", "--failed-first", "--watch", "--reuse",
    ),
    "Outputs": (
        "--verbose", "--html", "--json", "--junit", "--sarif", "--markdown", "--evidence",
        "--cases", "--annotations",
    ),
    "Known findings": (
        "--expectations", "--policy", "--corpus", "--examples", "--allow-incomplete",
        "--require-claims",
    ),
    "Machine": ("--device", "--jobs", "--mps", "--ray", "--resume"),
    "Support rules": ("--gating", "--rules", "--without-rule"),
}  # fmt: skip
"""Options of check, gate and bump by the heading under which their help shows them."""


def options(*declared: Option) -> Option:
    """Return a decorator that adds options to a command, in their order."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(declared):
            command = option(command)
        return command

    return add


def refuse_empty(sides: Mapping[str, str], *, positional: bool) -> None:
    """Refuse a side that is empty, such as a variable of a pipeline that is not set.

    Args:
        sides: what was given for each.
        positional: whether they are arguments of the command, and not values of its flags.

    Raises:
        UsageRefusedError: the argument or the flag is named.
    """
    for side, given in sides.items():
        if not given.strip():
            name = side.upper() if positional else f"--{side}"
            message = f"{name} is empty: give a version, a wheel, a folder or an interpreter"
            raise UsageRefusedError(message)
