"""``kernelproof bench``: kernels timed side by side on a GPU.

The benchmarks of Kernelproof itself are in `tests/bench` (`make bench`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ..console.errors import CONFORMING, NONCONFORMING
from ..console.help import CheckedGroup
from ..console.outputs import Outputs, output_option

if TYPE_CHECKING:
    from .results import Results

SCHEMA = "kernelproof/bench/1"
JSON = output_option("--json", "Write the results to this file.")


@click.group(cls=CheckedGroup, short_help="Time kernels on a GPU.")
def bench() -> None:
    """Time kernels side by side.

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
