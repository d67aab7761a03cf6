"""``kernelproof bench``: kernels on a GPU, a check's time to its first finding, problems a second.

The benchmarks of Kernelproof itself are in `tests/bench` (`make bench`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ...properties.space.profiles import PROFILES
from ..console.choices import Choice
from ..console.errors import CONFORMING, NONCONFORMING
from ..console.help import CheckedGroup
from ..console.outputs import Outputs, output_option

if TYPE_CHECKING:
    from .results import Results

SCHEMA = "kernelproof/bench/1"
JSON = output_option("--json", "Write the results to this file.")


@click.group(cls=CheckedGroup, short_help="Time kernels on a GPU, or checks.")
def bench() -> None:
    """Time kernels side by side, checks until their first finding, or the stages of a judgement.

    Exit code 1: a requirement was missed.
    """


@bench.command()
@click.option(
    "--device",
    type=click.Choice(["cuda"]),
    default="cuda",
    show_default=True,
    help="Interpreted on a CPU, a kernel's time says nothing.",
)
@click.option("--quick", is_flag=True, help="The cases of the requirements alone.")
@click.option(
    "--only",
    type=click.Choice(["attention", "verify", "metadata", "moe"]),
    multiple=True,
    help="A part alone; may be repeated.",
)
@JSON
@click.pass_context
def kernels(
    context: click.Context,
    device: str,
    quick: bool,  # noqa: FBT001
    only: tuple[str, ...],
    outputs: Outputs,
) -> None:
    """Time the Triton kernels against FlashInfer's on a GPU, side by side.

    Exit code 3: there is no GPU.
    """
    del device

    def measured() -> Results:
        from .gpu import require_gpu
        from .kernels import PARTS, measure

        require_gpu()
        return measure(quick=quick, only=only or PARTS)

    finish(context, outputs, measured)


@bench.command("first-finding")
@click.argument("names", nargs=-1, metavar="[NAME...]")
@click.option(
    "--profile",
    type=Choice(list(PROFILES)),
    default="gate",
    show_default=True,
    help="Profile of the checks.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Seed of the checks."
)
@click.option(
    "--sample", type=click.IntRange(min=1), metavar="N", help="Draw N of the subjects, by the seed."
)
@click.option("--deck/--no-deck", default=True, help="Whether the checks ask the deck first.")
@JSON
@click.pass_context
def first_finding(
    context: click.Context,
    names: tuple[str, ...],
    profile: str,
    seed: int,
    sample: int | None,
    *,
    deck: bool,
    outputs: Outputs,
) -> None:
    """Time whole checks of faulty implementations until they print a failure.

    NAME is a seeded bug or MODULE:NAME, all seeded bugs by default. Start-up is from the command to
    the first judged problem, search from there to the first printed failure. Both are also given
    for either half of the subjects, by the parity of their hashed names. The checks run one after
    another: on a busy machine the times are longer.
    """

    def measured() -> Results:
        from .first_finding import measure, results, subjects

        chosen = subjects(names, sample, seed)
        times = []
        for number, each in enumerate(measure(chosen, profile, seed, deck=deck), 1):
            found = f"{each.search:.1f} s, {each.law}" if each.search is not None else "nothing"
            click.echo(f"{number} of {len(chosen)}  {each.subject}: {found}", err=True)
            times.append(each)
        return results(times)

    finish(context, outputs, measured)


@bench.command(short_help="Count small problems judged in a second, by stage.")
@click.argument("implementations", metavar="IMPL...", nargs=-1, required=True)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where kernels run.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="Processes at a time, each with a worker, besides one alone.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    metavar="S",
    help="How long each measurement takes.",
)
@JSON
@click.pass_context
def throughput(
    context: click.Context,
    implementations: tuple[str, ...],
    device: str,
    jobs: int,
    seconds: float,
    outputs: Outputs,
) -> None:
    """Count the small problems that are judged for parity in a second, and time the stages.

    These are drawing, transport, materialising, oracle and bound, call, and comparison.
    """

    def measured() -> Results:
        from .throughput import UnmeasurableError, measure

        def tell(line: str) -> None:
            click.echo(line, err=True)

        try:
            return measure(implementations, device, jobs=jobs, seconds=seconds, tell=tell)
        except UnmeasurableError as error:
            raise click.UsageError(str(error)) from error

    finish(context, outputs, measured)


def finish(context: click.Context, outputs: Outputs, *benchmarks: Callable[[], Results]) -> None:
    """Run, print and write; leave with the exit code."""
    from .results import machine

    outputs.check()
    done = []
    click.echo(", ".join(f"{name} {value}" for name, value in machine().items()))
    for benchmark in benchmarks:
        results = benchmark()
        click.echo(f"\n{results.text()}")
        done.append(results)
    data = {
        "schema": SCHEMA,
        "machine": machine(),
        "benchmarks": [results.to_json() for results in done],
    }
    outputs.write({"--json": lambda: data})
    met = all(results.met for results in done)
    context.exit(CONFORMING if met else NONCONFORMING)
