"""The options of a comparison, for the commands bump and gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import click

from ..console.choices import Choice
from ..console.completion import implementation_names
from ..console.errors import UsageRefusedError
from ..console.outputs import FILE, output_option
from ..releases.packages import FLASHINFER_PACKAGE, PACKAGES

SIDE_OPTIONS = (click.option("--baseline"), click.option("--candidate"))
"""Options that make a comparison of the command gate, as the alias of bump."""
PIN_OPTIONS = (
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
)
"""Options that name a file with the pin of a release instead of the release."""
USES_OPTION = click.option(
    "--uses",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Source of the engine, a folder or a wheel: what it does not use does not block; may be "
    "repeated.",
)
"""The option that names an engine's source, of the commands bump and merge."""
PACKAGE_OPTION = click.option(
    "--package",
    type=Choice([*PACKAGES]),
    default=FLASHINFER_PACKAGE.name,
    show_default=True,
    help="Package whose releases these are.",
)
"""The option that names what the releases are of, of the commands bump and replay."""
BUMP_OPTIONS = (
    click.option("--sm", metavar="SM[,SM]", help="Chips to answer for; all by default."),
    click.option(
        "--policy",
        type=click.Path(path_type=Path),
        help="TOML file that says what blocks a bump, and which findings are accepted.",
    ),
    click.option(
        "--journal",
        type=FILE,
        help="File that --resume continues from; by default one in .kernelproof/gate.",
    ),
    PACKAGE_OPTION,
    click.option(
        "--part",
        "parts",
        multiple=True,
        type=Choice(["surface", "declarations", "behaviour", "speed"]),
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
    ),
    click.option(
        "--unit", "units", multiple=True, metavar="NAME", help="Compile only this module."
    ),
    USES_OPTION,
    output_option("--markdown", "Write a comment's Markdown."),
)
BUMP_SECTION = (
    "--package",
    "--baseline-from",
    "--candidate-from",
    "--sm",
    "--uses",
    "--journal",
)
"""Options of a comparison, as its help lists them together."""
NOT_OF_BUMP = (
    "gating", "sanitizer", "examples", "costs", "allow_incomplete", "require_claims", "distrust",
)  # fmt: skip


def side_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options that name the two releases."""
    for option in reversed(SIDE_OPTIONS):
        command = option(command)
    return command


def pin_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options that name files with the pins of the two releases."""
    for option in reversed(PIN_OPTIONS):
        command = option(command)
    return command


def bump_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options of a comparison."""
    for option in reversed(BUMP_OPTIONS):
        command = option(command)
    return command


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
