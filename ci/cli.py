"""The command line. Whatever is heavy (torch, Hypothesis, rich) is imported inside the commands."""

from __future__ import annotations

import io
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .. import __version__
from ..properties.findings.files import OutputError
from ..properties.findings.redaction import masked
from ..properties.isolation.sanitizer import TOOLS
from ..properties.verdicts.text import indented, printable
from .bench.command import bench
from .bump.merge_command import merge
from .bump.options import BUMP_ONLY, NOT_OF_BUMP, bump_options, side_options
from .check.run_options import CASES, DEVICES, run_options
from .console.errors import CONFORMING, INTERRUPTED, MACHINE, USAGE, UsageRefusedError
from .console.outputs import Outputs, output_option, refuse_shared_files
from .evidence.command import evidence
from .ledger.command import corpus, expectations
from .score.command import score
from .support.command import support

if TYPE_CHECKING:
    from .check.gating_command import GatingRequest


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kernelproof")
def cli() -> None:
    """Prove attention and MoE inference kernels against an oracle before they are shipped.

    Exit codes: 0 conforming, 1 not conforming, 2 wrong usage or unreadable input, 3 the machine
    failed or nothing could run, 4 incomplete, 130 and 143 ended by SIGINT and SIGTERM: reports then
    hold what was learned, and a second signal ends the process at once.
    """


@cli.command()
@click.argument("implementations", nargs=-1, metavar="MODULE:NAME...")
@click.option("--operation", metavar="OP", help="What plain functions implement.")
@click.option(
    "--without-rule",
    "without_rules",
    multiple=True,
    metavar="RULE",
    help="Do not ask this support rule: call what it refuses; may be repeated.",
)
@click.option(
    "--gating",
    is_flag=True,
    help="Try both sides of the support rules instead: what they allow must be right; what they "
    "refuse, called anyway, must be refused cleanly. Tries all that is registered by default.",
)
@click.option(
    "--rules",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --gating: folder of support rules instead of the shipped ones.",
)
@click.option(
    "--sanitizer",
    type=click.Choice(TOOLS),
    help="Run the workers under this tool of compute-sanitizer: slow, and an error is a CRASH.",
)
@run_options
def check(
    implementations: tuple[str, ...],
    operation: str | None,
    *,
    gating: bool,
    rules: Path | None,
    **options: Any,  # noqa: ANN401  click's options
) -> int:
    """Check implementations against the laws.

    MODULE is a dotted module, found from the current folder too, or a path that ends in .py; a name
    of `kernelproof list` serves as well.
    """
    refuse_shared_files()
    if gating:
        return _try_gating(implementations, rules)
    if not implementations:
        message = "Missing argument 'MODULE:NAME...'."
        raise click.UsageError(message)
    if rules is not None:
        message = "--rules goes with --gating"
        raise click.UsageError(message)
    if not options["outputs"].paths:  # else the reports say it too
        _refuse_unknown(implementations)
    from .check.checking import Request, examine

    return examine(Request(implementations, operation=operation, **options, command=_command()))


def _refuse_unknown(implementations: Sequence[str]) -> None:
    """Refuse a name that leads nowhere before torch is imported, which takes seconds."""
    from ..impl.registry import ImplementationNotFoundError, check_name

    try:
        for name in implementations:
            check_name(name)
    except ImplementationNotFoundError as error:
        raise UsageRefusedError(str(error)) from error


@cli.command()
@click.option(
    "--gating",
    is_flag=True,
    help="Then try both sides of the support rules too, as `check --gating` does.",
)
@side_options
@bump_options
@run_options
def gate(
    *,
    gating: bool,
    baseline: str | None,
    candidate: str | None,
    baseline_from: Path | None,
    candidate_from: Path | None,
    **options: Any,  # noqa: ANN401  click's options
) -> int:
    """Check every registered implementation that this machine can run.

    With --baseline and --candidate, does what `bump` does: compares two FlashInfer releases.
    """
    refuse_shared_files()
    from ..impl.registry import registered
    from .check.checking import Request, examine

    if baseline_from or candidate_from:
        from .releases.requirement_pins import side

        baseline = side("baseline", baseline, baseline_from)
        candidate = side("candidate", candidate, candidate_from)
        if baseline_from and candidate_from and baseline == candidate:
            click.echo(f"Both files pin {baseline}: there is nothing to compare.")
            return 0
    if baseline is not None or candidate is not None:
        return _bump(baseline, candidate, options)
    _refuse(BUMP_ONLY, "goes with --baseline and --candidate")
    options = {name: value for name, value in options.items() if name not in BUMP_ONLY}
    request = Request(registered(), gate=True, **options, command=_command())
    if not gating:
        return examine(request)
    from .check.gate import gate_both

    return gate_both(request, _gating_request(request.implementations, only=()))


@cli.command("bump")
@click.argument("baseline", metavar="BASELINE")
@click.argument("candidate", metavar="CANDIDATE")
@bump_options
@run_options
def bump_command(
    baseline: str,
    candidate: str,
    **options: Any,  # noqa: ANN401  click's options
) -> int:
    """Compare two FlashInfer releases and answer whether to bump, chip by chip.

    Each is a version, a wheel, a folder with the package in it, or a Python interpreter with an
    environment of its own. Exit 0 to bump, 1 not to, or not before conditions are met.
    """
    refuse_shared_files()
    return _bump(baseline, candidate, options)


bump_command.params = [each for each in bump_command.params if each.name not in NOT_OF_BUMP]


@cli.command()
@click.argument("case", type=click.Path(path_type=Path), metavar="CASE.json")
@click.option("--device", type=DEVICES, help="Instead of the case's own.")
@click.option("--implementation", metavar="NAME", help="Instead of the case's own.")
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    help="Seconds that one call may take before it counts as a HANG.",
)
@click.option(
    "--release",
    metavar="VERSION|WHEEL|FOLDER|PYTHON",
    help="FlashInfer release, or environment, to judge it with.",
)
def replay(
    case: Path,
    device: str | None,
    implementation: str | None,
    deadline: float,
    release: str | None,
) -> int:
    """Judge one case again: exit 1 if it still fails, 0 if it passes."""
    from .check.replaying import replay_case

    return replay_case(
        case, device=device, implementation=implementation, deadline=deadline, release=release
    )


@cli.command("list")
@click.option("--device", type=DEVICES, default="cpu", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@output_option(
    "--markdown", "Write the page of the laws to this file instead: what each says and has caught."
)
def list_command(device: str, outputs: Outputs, *, as_json: bool) -> int:
    """List implementations (and why one cannot run here), laws and profiles."""
    if outputs.paths:
        from .check.law_book import law_book

        outputs.write({"--markdown": law_book})
        return CONFORMING
    from .check.listing import print_list

    return print_list(device, as_json=as_json)


cli.add_command(score)
cli.add_command(bench)
cli.add_command(support)
cli.add_command(evidence)
cli.add_command(merge)
cli.add_command(expectations)
cli.add_command(corpus)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    _say_it_in_any_encoding()
    # Hypothesis keeps what it learns of the source in the current folder otherwise.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(CASES.parent / "hypothesis"))
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


GATING_OPTIONS = (
    "device", "jobs", "modules", "only", "outputs", "expectations", "cases", "minutes",
    "allow_incomplete",
)  # fmt: skip
"""Options with one meaning for a run over the laws and one over the support table."""


def _try_gating(implementations: Sequence[str], rules: Path | None) -> int:
    """Try the support table, with the options of the command that is running."""
    from ..impl.registry import registered
    from .check.gating_command import try_gating

    context = click.get_current_context()
    allowed = {"implementations", "gating", "rules", "json", "evidence", *GATING_OPTIONS}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is ParameterSource.COMMANDLINE and parameter.name not in allowed:
            message = f"{parameter.opts[0]} does not go with --gating"
            raise click.UsageError(message)
    return try_gating(_gating_request(implementations or registered(), rules))


def _gating_request(
    implementations: Sequence[str],
    rules: Path | None = None,
    **more: Any,  # noqa: ANN401  a field
) -> GatingRequest:
    from .check.gating_command import GatingRequest

    given = click.get_current_context().params
    return GatingRequest(
        implementations,
        rules=rules,
        command=_command(),
        **{name: given[name] for name in GATING_OPTIONS} | more,
    )


def _bump(baseline: str | None, candidate: str | None, options: dict[str, Any]) -> int:
    """Compare two releases."""
    from .bump.command import Request, bump

    if baseline is None or candidate is None:
        absent = "--baseline" if baseline is None else "--candidate"
        message = f"{absent} is missing: a comparison has two sides"
        raise click.UsageError(message)
    _refuse(NOT_OF_BUMP, "does not go with --baseline and --candidate")
    if options["compiled"] is None:
        _refuse(("units",), "goes with --compile")
    kept = {name: value for name, value in options.items() if name not in NOT_OF_BUMP}
    return bump(Request(baseline, candidate, _command(), **kept))


def _refuse(names: Sequence[str], why: str) -> None:
    """Refuse options that were given and mean nothing here."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "")
        if given is ParameterSource.COMMANDLINE and parameter.name in names:
            message = f"{parameter.opts[0]} {why}"
            raise click.UsageError(message)


def _command() -> str:
    """Return the command as it is kept in reports."""
    return masked(shlex.join(["kernelproof", *click.get_current_context().find_root().obj]))
