"""The command line. Whatever is heavy (torch, Hypothesis, rich) is imported inside the commands."""

from __future__ import annotations

import io
import os
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import __version__
from ..properties.findings.files import OutputError
from ..properties.findings.redaction import masked
from ..properties.isolation.sanitizer import TOOLS
from ..properties.verdicts.text import indented, printable
from .bench.command import bench
from .bump.merge_command import merge
from .check.engine_folders import from_option
from .console.choices import Choice
from .console.completion import among, implementation_names
from .console.errors import CONFORMING, INTERRUPTED, MACHINE, USAGE
from .console.help import SectionedCommand
from .console.lines import tell
from .console.outputs import Outputs, output_option, refuse_shared_files
from .console.settings import ConfiguredGroup, words_of_settings
from .ledger.command import corpus, expectations
from .mutate.command import mutate
from .options import (
    COMPARE,
    DEVICES,
    DISTRUST,
    FOLDER,
    HIDDEN_SIDES,
    JUDGE,
    PACKAGE,
    RUN,
    SECTIONS,
    SIDES,
    law_option,
    options,
    refuse_empty,
)
from .published.command import published
from .releases.packages import PACKAGES
from .score.command import score
from .support.command import support

if TYPE_CHECKING:
    from .check.gating_command import GatingRequest


COMMANDS = {
    "Commands": (
        "check",
        "gate",
        "bump",
        "support",
        "published",
        "replay",
        "mutate",
        "new",
        "list",
    ),
    "Reports and known findings": ("merge", "expectations", "corpus"),
    "For maintainers of Kernelproof": ("score", "bench"),
}


EXIT_CODES = """\b
Exit codes:
  0    conforming
  1    not conforming
  2    wrong usage, or unreadable input
  3    the machine failed, or nothing could run
  4    incomplete: too little was judged
  130  ended by SIGINT (143: by SIGTERM); reports hold what was learned,
       and a second signal ends the process at once

\b
Completion in bash (zsh: zsh_source), in .bashrc:
  eval "$(_KERNELPROOF_COMPLETE=bash_source kernelproof)\""""


class Commands(ConfiguredGroup):
    """The commands; one of earlier versions leads to that which took its place."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command and its arguments, those of bump where gate was given two releases."""
        name, *rest = args
        if name == "gate" and any(word.partition("=")[0] in SIDES for word in rest):
            if not ctx.resilient_parsing:
                alias = "`gate --baseline A --candidate B` is an alias: the command is `bump A B`"
                tell(f"kernelproof: {alias}", err=True)
            name = "bump"
        return super().resolve_command(ctx, [name, *rest])


@click.group(
    cls=Commands,
    sections=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)
@click.version_option(__version__, prog_name="kernelproof")
def cli() -> None:
    """Test attention and MoE inference kernels against an oracle before they are shipped."""


def _operations(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the operations that begin so."""
    from .check.new import CALLS

    return among(CALLS, incomplete)


@cli.command(cls=SectionedCommand, sections=SECTIONS)
@click.argument(
    "implementations", nargs=-1, metavar="MODULE:NAME...", shell_complete=implementation_names
)
@law_option(
    "--operation",
    metavar="OP",
    help="Operation that undecorated functions implement.",
    shell_complete=_operations,
)
@law_option(
    "--without-rule",
    "without_rules",
    multiple=True,
    metavar="RULE",
    help="Call what this support rule refuses; may be repeated, '*' stands for all.",
)
@click.option(
    "--gating",
    is_flag=True,
    help="Test the support rules instead of the laws: calls that they allow must be right, calls "
    "that they refuse must fail cleanly. Tests everything registered by default.",
)
@click.option(
    "--rules",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --gating: use the support rules in this folder.",
)
@law_option(
    "--sanitizer",
    type=Choice(TOOLS),
    help="Run under this tool of compute-sanitizer, which is slow; its errors are CRASHes.",
)
@law_option(
    "--watch",
    is_flag=True,
    help="Check again each time a Python file beside an implementation changes, until Ctrl-C.",
)
@law_option(
    "--reuse/--no-reuse",
    default=True,
    help="Do not ask again what passed in the last such check, where nothing has changed since.",
)
@law_option(
    "--failed-first",
    is_flag=True,
    help="Begin with the laws that have a case in the folder of --cases, and with its problem.",
)
@from_option
@options(*RUN, *JUDGE)
def check(
    implementations: tuple[str, ...],
    operation: str | None,
    *,
    gating: bool,
    rules: Path | None,
    watch: bool,
    **given: Any,  # noqa: ANN401  click's options
) -> int:
    """Check implementations against the laws.

    MODULE is a dotted module, found from the current folder too, or a path that ends in .py; a name
    of `kernelproof list` serves as well.
    """
    refuse_shared_files()
    if gating:
        return _try_gating(implementations, rules, given)
    if not implementations:
        message = "Missing argument 'MODULE:NAME...'."
        raise click.UsageError(message)
    if rules is not None:
        message = "--rules goes with --gating"
        raise click.UsageError(message)
    if watch:
        from .check.watching import watch_files

        return watch_files(implementations, click.get_current_context().find_root().obj)
    from .check.repeated import repeat, repeatable

    given = {**given, "implementations": implementations, "operation": operation}
    command = _command()
    check_again = repeatable(given, command)
    if check_again is not None and (answer := check_again.answer()) is not None:
        repeat(answer, given["outputs"])
        return CONFORMING
    _preload(given)
    from .check.checking import Request, examine

    return examine(Request(**given, command=command, repeatable=check_again))


@cli.command(
    "bump",
    cls=SectionedCommand,
    sections=SECTIONS,
    short_help="Compare two releases of a package and answer whether to bump.",
)
@click.argument("baseline", metavar="BASELINE", required=False)
@click.argument("candidate", metavar="CANDIDATE", required=False)
@from_option
@options(*HIDDEN_SIDES, *COMPARE, *RUN)
def bump_command(
    baseline: str | None,
    candidate: str | None,
    *,
    baseline_named: str | None,
    candidate_named: str | None,
    baseline_from: Path | None,
    candidate_from: Path | None,
    ray: str | None,
    **given: Any,  # noqa: ANN401  click's options
) -> int:
    """Compare two releases of FlashInfer, or of --package, and answer whether to bump, by chip.

    BASELINE is the release in use, CANDIDATE the one to bump to. Each is a version, a wheel, a
    folder with the package in it, or a Python interpreter with an environment of its own. Exit 0 to
    bump, 1 not to, or not before conditions are met.
    """
    refuse_shared_files()
    positional = baseline_named is None and candidate_named is None
    if not positional and baseline is not None:
        message = (
            f"{baseline!r} stands beside --baseline or --candidate: give both releases as "
            "arguments, BASELINE and then CANDIDATE"
        )
        raise click.UsageError(message)
    if not positional:
        baseline, candidate = baseline_named, candidate_named
    elif baseline_from and candidate is None:
        baseline, candidate = None, baseline
    if baseline_from or candidate_from:
        from .releases.requirement_pins import side

        distribution = PACKAGES[given["package"]].distribution
        baseline = side("baseline", baseline, baseline_from, distribution)
        candidate = side("candidate", candidate, candidate_from, distribution)
        if baseline_from and candidate_from and baseline == candidate:
            click.echo(f"Both files pin {baseline}: there is nothing to compare.")
            return CONFORMING
    if baseline is None or candidate is None:
        absent = "baseline" if baseline is None else "candidate"
        message = f"the {absent} is missing: a comparison has two releases"
        raise click.UsageError(message)
    if not given["outputs"].paths:  # else a report says so too, once there is torch to write it
        refuse_empty({"baseline": baseline, "candidate": candidate}, positional=positional)
    if given["units"] and given["compiled"] is None:
        message = "--unit goes with --compile"
        raise click.UsageError(message)
    from .bump.command import Request, bump

    request = Request(baseline, candidate, _command(), **given, positional=positional)
    if ray is None:
        return bump(request)
    from .bump.cluster import bump_on

    return bump_on(ray, request)


@cli.command(
    cls=SectionedCommand,
    sections=SECTIONS,
    short_help="Check every implementation that this machine can run.",
)
@click.option(
    "--gating",
    "gating_too",
    is_flag=True,
    help="Then test the support rules too, as `check --gating` does.",
)
@from_option
@options(*RUN, *JUDGE)
def gate(
    *,
    gating_too: bool,
    **given: Any,  # noqa: ANN401  click's options
) -> int:
    """Check every registered implementation that this machine can run.

    On a GPU, judge what the installed FlashInfer publishes of its calls too (see `published`),
    in a fifth of the time. To compare two FlashInfer releases, use `bump`.
    """
    refuse_shared_files()
    _preload(given)
    from .check.checking import Request, examine
    from .check.listing import usable_here

    if gating_too and given["distrust"]:
        message = "--distrust does not go with --gating: the support table has no second process"
        raise click.UsageError(message)
    if gating_too and given["ray"] is not None:
        message = "--ray does not go with --gating: the support table is tried on one machine"
        raise click.UsageError(message)
    names, broken = usable_here(given["device"])
    request = Request(names, gate=True, broken=broken, **given, command=_command())
    if not gating_too:
        return examine(request)
    from .check.gate import gate_both

    return gate_both(request, _gating_request(names, {**given, "only": ()}))


@cli.command(short_help="Judge one stored case again.")
@click.argument("case", type=click.Path(path_type=Path), metavar="CASE.json")
@click.option("--device", type=DEVICES, help="Instead of the case's own.")
@click.option(
    "--implementation",
    metavar="NAME",
    help="Instead of the case's own.",
    shell_complete=implementation_names,
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    metavar="SECONDS",
    help="A call that takes longer is a HANG.",
)
@click.option(
    "--release",
    metavar="VERSION|WHEEL|FOLDER|PYTHON",
    help="Release, or environment, to judge it with.",
)
@PACKAGE
@click.option(
    "--save",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the tensors of the wrong call here: inputs, result, oracle, bound, and an index.",
)
@click.option(
    "--script",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.py",
    help="Write a script that makes the wrong call and needs torch and the kernel only.",
)
@click.option(
    "--in-process",
    is_flag=True,
    help="Judge in this process, for breakpoints, prints and profilers.",
)
@DISTRUST
@from_option
def replay(**given: Any) -> int:  # noqa: ANN401  click's options
    """Judge one case again: exit 1 if it still fails, 0 if it passes."""
    from .check.replaying import Request, replay_case

    return replay_case(Request(**given))


@cli.command("new", short_help="Write an adapter for your kernel, and a test.")
@click.argument("name", metavar="NAME")
@click.option(
    "--operation",
    required=True,
    metavar="OP",
    help="Operation of the kernel, such as merge_state.",
    shell_complete=_operations,
)
def new_command(name: str, operation: str) -> int:
    """Write an adapter NAME.py and a test test_NAME.py into the current folder, ready to run.

    The adapter calls the oracle where it is to call your kernel.
    """
    from .check.new import write_adapter

    return write_adapter(name, operation)


@cli.command("list", short_help="List implementations, laws and profiles.")
@click.option(
    "--device", type=DEVICES, default="cpu", show_default=True, help="Where kernels would run."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--coverage",
    is_flag=True,
    help="List what FlashInfer publishes, what each call needs, and which are judged here.",
)
@click.option(
    "--uses",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="With --coverage: list what an engine's source (a folder or wheel) uses; may be repeated.",
)
@click.option(
    "--published",
    "runs",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    metavar="FILE",
    help="With --coverage: count what a run of published judged (its --json); may be repeated.",
)
@click.option("--verbose", "-v", is_flag=True, help="With --coverage: list every call.")
@from_option
@output_option(
    "--markdown",
    "Write a page of the documentation; this file's name says which: law-book.md, fields.md, "
    "commands.md, known-findings.md or support-matrix.md.",
)
@output_option(
    "--schema",
    "Write a JSON Schema; this file's name says of what: report.schema.json, bump.schema.json, "
    "case.schema.json or journal.schema.json.",
)
def list_command(
    device: str,
    outputs: Outputs,
    uses: Sequence[Path],
    runs: Sequence[Path],
    *,
    as_json: bool,
    coverage: bool,
    verbose: bool,
) -> int:
    """List implementations, laws and profiles, and why an implementation cannot run here."""
    if coverage:
        from .check.coverage import print_coverage

        return print_coverage(uses, runs=runs, as_json=as_json, verbose=verbose)
    given = {"--uses": bool(uses), "--published": bool(runs), "--verbose": verbose}
    for flag, is_given in given.items():
        if is_given:
            message = f"{flag} goes with --coverage"
            raise click.UsageError(message)
    if outputs.paths:
        from .check.pages import writer

        outputs.write({flag: writer(flag, path) for flag, path in outputs.paths.items()})
        return CONFORMING
    from .check.listing import print_list

    return print_list(device, as_json=as_json)


cli.add_command(mutate)
cli.add_command(published)
cli.add_command(score)
cli.add_command(bench)
cli.add_command(support)
cli.add_command(merge)
cli.add_command(expectations)
cli.add_command(corpus)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    _say_it_in_any_encoding()
    # Hypothesis keeps what it learns of the source in the current folder otherwise.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(FOLDER.parent / "hypothesis"))
    # Kernelproof draws with nothing that is plugged into Hypothesis, and some of it imports pytest.
    os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")
    try:
        words = sys.argv[1:] if arguments is None else list(arguments)
        code = cli.main(words, prog_name="kernelproof", standalone_mode=False, obj=words)
    except click.ClickException as error:
        said = io.StringIO()
        error.show(said)
        message = error.format_message()
        sys.stderr.write(printable(said.getvalue().replace(message, indented(message))))
        return error.exit_code
    except OutputError as error:
        sys.stderr.write(f"Error: {indented(str(error))}\n")
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        sys.stderr.write("kernelproof: interrupted\n")
        return INTERRUPTED
    except Exception:  # noqa: BLE001  exit code 1 means that a kernel is wrong; this is not that
        sys.stderr.write(printable(traceback.format_exc()))
        sys.stderr.write("kernelproof: the suite itself failed, see above\n")
        return MACHINE
    return int(code or 0)


def _say_it_in_any_encoding() -> None:
    """Print what the terminal's encoding lacks as an escape rather than fail on it."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _preload(given: Mapping[str, Any]) -> None:
    """Have workers begin to import torch before this process does: each needs its own seconds."""
    if given["ray"] is None:
        from ..properties.worker.pools import preload

        preload(given["device"])


def _try_gating(
    implementations: Sequence[str], rules: Path | None, given: Mapping[str, Any]
) -> int:
    """Try the support table, with the options of the command that is running."""
    from .check.gating_command import try_gating
    from .check.listing import usable_here

    names, broken = (implementations, ()) if implementations else usable_here(given["device"])
    return try_gating(_gating_request(names, {**given, "rules": rules, "broken": broken}))


def _gating_request(implementations: Sequence[str], given: Mapping[str, Any]) -> GatingRequest:
    """Return the request for a run over the support table, which has fewer options than laws."""
    from .check.gating_command import GatingRequest

    named = {each.name for each in fields(GatingRequest)} & given.keys()
    return GatingRequest(
        implementations, command=_command(), **{name: given[name] for name in named}
    )


def _command() -> str:
    """Return the command as it is kept in reports, with what a file says of its options."""
    context = click.get_current_context()
    words = [*context.find_root().obj, *words_of_settings(context)]
    return masked(shlex.join(["kernelproof", *words]))
