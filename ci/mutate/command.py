"""The command mutate: which faults of a kernel do the laws find, or somebody's own tests?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from ..check.engine_folders import from_option
from ..console.choices import Choice
from ..console.completion import implementation_names, law_names
from ..console.errors import CONFORMING, INCOMPLETE, MachineError, UsageRefusedError
from ..console.outputs import Outputs
from ..options import JOBS, JSON, LAW, ONLY


@click.command("mutate", short_help="Judge mutants of a Triton kernel: which faults are found?")
@click.argument("name", metavar="NAME", shell_complete=implementation_names)
@click.option("--file", metavar="F", help="Only this file of its kernels: a path, or its end.")
@click.option(
    "--sample",
    type=click.IntRange(min=1),
    metavar="N",
    help="Judge N mutants, spread evenly over kernels and operators; all by default.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="S",
    help="Another seed takes another sample, and draws other problems.",
)
@click.option(
    "--profile",
    type=Choice(["quick", "gate"]),
    default="gate",
    show_default=True,
    help="How thoroughly each is judged.",
)
@click.option(
    "--tests",
    default="",
    metavar="COMMAND",
    help="Ask this command instead of the laws: a mutant that makes it fail is killed. Its "
    "PYTHONPATH begins with a copy of the package; where the kernels lie in the current folder, it "
    "runs in a copy of that.",
)
@click.option("--resume", is_flag=True, help="Judge no mutant that an earlier run has judged.")
@click.option(
    "--equivalents",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="JSON that has, for a survivor's id, why no input tells it from the kernel.",
)
@LAW
@click.option(
    "--without",
    multiple=True,
    metavar="NAME",
    help="Do not run this law, to see what the others find; may be repeated.",
    shell_complete=law_names,
)
@ONLY
@from_option
@JOBS
@JSON
def mutate(
    name: str,
    *,
    file: str | None,
    sample: int | None,
    seed: int,
    profile: str,
    tests: str,
    resume: bool,
    equivalents: Path | None,
    laws: tuple[str, ...],
    without: tuple[str, ...],
    only: tuple[str, ...],
    jobs: int | None,
    outputs: Outputs,
) -> int:
    """Judge mutants of the Triton kernels that an implementation launches.

    A mutant is a copy of a file in which one thing of a jitted function is changed: an operator, a
    constant, a mask or a condition of it, a cast, an axis, `other=`, two strides, an update, or an
    early exit. The laws judge it in Triton's interpreter. NAME is a name of `kernelproof list`, or
    MODULE:NAME.

    A mutant is refused (Triton raises an error), unreached (its line never ran), killed (by the
    law that is named), or survived (its diff is shown). Exit code 0 if mutants were judged,
    whatever became of them; 4 if none was reached. The time to the first finding counts from when a
    mutant is in place: processes that judge have started by then.
    """
    from ...properties.laws import LAWS
    from ..console.selection import check_laws, only_of
    from ..console.signals import SIGNALLED, ended_by_signals, signal_of
    from ..console.terminal import console
    from .measuring import find, judge_of, measure
    from .report import print_report

    outputs.check()
    check_laws(laws)
    check_laws(without, "--without")
    only_of(only)
    if without:
        asked = laws or [law.name for law in LAWS]
        laws = tuple(law for law in asked if law not in without)
        if not laws:
            message = "--without: no law is left to judge by"
            raise UsageRefusedError(message)
    arguments = _equivalents(equivalents)
    kernels = find(name, file)
    err = console(sys.stderr)

    def tell(line: str) -> None:
        err.print(line, soft_wrap=True)

    judge = judge_of(
        kernels,
        seed=seed,
        tests=tests,
        laws=laws,
        only=only,
        jobs=jobs,
        resume=resume,
        tell=tell,
    )
    stage = "tests" if tests else profile
    with judge.journal, ended_by_signals(judge.end):
        try:
            measured = measure(judge, stage, sample, tell, arguments)
        except MachineError:
            if not judge.ended:  # else a signal has ended what the kernel as it is does
                raise
            return SIGNALLED + signal_of(judge.ended)
    print_report(console(sys.stdout), measured)
    outputs.write({"--json": measured.to_json})
    if judge.ended:
        return SIGNALLED + signal_of(judge.ended)
    return CONFORMING if measured.killed_of_reached()[1] else INCOMPLETE


def _equivalents(path: Path | None) -> dict[str, str]:
    """Read the arguments for equivalent mutants.

    Raises:
        UsageRefusedError: the file cannot be read, or has something else.
    """
    if path is None:
        return {}
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"--equivalents {path}: {error}"
        raise UsageRefusedError(message) from error
    if not isinstance(read, dict) or not all(isinstance(each, str) for each in read.values()):
        message = f"--equivalents {path}: it must be an object with a text for each id"
        raise UsageRefusedError(message)
    return read
