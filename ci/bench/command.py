"""``kernelproof bench``: the oracles, their bounds, isolation, the suite's own speed, and kernels.

Also ``python -m kernelproof.ci.bench.command``. What is heavy is imported inside the commands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..console.errors import CONFORMING, NONCONFORMING
from ..console.help import CheckedGroup
from ..console.outputs import Outputs, output_option

if TYPE_CHECKING:
    from .results import Results

SCHEMA = "kernelproof/bench/1"
JSON = output_option("--json", "Write the results to this file.")


def _oracle(
    requests: int = 64, keys: int = 512, repetitions: int = 5, threads: tuple[int, ...] = (1, 2)
) -> Results:
    from .oracle import Case, measure

    return measure(
        Case(f"{requests} decodes of {keys} keys", requests, 1, keys),
        Case(f"{max(1, requests // 16)} prefills of {keys} tokens", max(1, requests // 16), keys,
             keys),
        threads=threads,
        repetitions=repetitions,
    )  # fmt: skip


def _experts(
    shapes: Sequence[str] = ("8-of-128",),
    dtypes: Sequence[str] = ("bfloat16",),
    tokens: Sequence[int] = (),
    threads: Sequence[int] = (1,),
    repetitions: int = 3,
    seconds: float = 2.0,
) -> Results:
    from dataclasses import replace
    from itertools import product

    from .experts import DTYPES, SHAPES, TOKENS, measure

    cases = [
        replace(SHAPES[shape], dtype=DTYPES[dtype], tokens=count)
        for shape, dtype, count in product(shapes, dtypes, tokens or TOKENS)
    ]
    return measure(cases, threads=threads, repetitions=repetitions, seconds=seconds)


def _tightness(problems: int = 400) -> Results:
    from .tightness import measure

    return measure(problems)


def _roundtrip(repetitions: int = 300) -> Results:
    from .roundtrip import measure

    return measure(repetitions)


def _kernels(*, quick: bool = False, only: Sequence[str] = ()) -> Results:
    from .gpu import require_gpu
    from .kernels import PARTS, measure

    require_gpu()
    return measure(quick=quick, only=only or PARTS)


def _throughput(
    names: Sequence[str] = ("torch-sdpa-paged",),
    device: str = "cpu",
    jobs: int = 1,
    seconds: float = 5.0,
) -> Results:
    from .throughput import UnmeasurableError, measure

    try:
        return measure(names, device, jobs=jobs, seconds=seconds, tell=_tell)
    except UnmeasurableError as error:
        raise click.UsageError(str(error)) from error


def _tell(line: str) -> None:
    click.echo(line, err=True)


@click.group(
    cls=CheckedGroup, invoke_without_command=True, short_help="Measure Kernelproof itself."
)
@JSON
@click.pass_context
def bench(context: click.Context, outputs: Outputs) -> None:
    """Measure Kernelproof itself; without a command, everything but the GPU kernels.

    Exit code 1: a requirement was missed.
    """
    if context.invoked_subcommand is None:
        _finish(context, outputs, _oracle, _experts, _tightness, _roundtrip, _throughput)
    elif outputs.paths:
        message = f"--json goes after the command: bench {context.invoked_subcommand} --json FILE"
        raise click.UsageError(message, context)


@bench.command()
@click.option("--requests", type=click.IntRange(min=1), default=64, show_default=True)
@click.option(
    "--keys",
    type=click.IntRange(min=16, max=4096),
    default=512,
    show_default=True,
    help="A multiple of the page size, 16: FlashInfer's trace reference reads whole pages.",
)
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--threads", type=click.IntRange(min=1), multiple=True, default=(1, 2), show_default=True
)
@JSON
@click.pass_context
def oracle(
    context: click.Context,
    requests: int,
    keys: int,
    repetitions: int,
    threads: tuple[int, ...],
    outputs: Outputs,
) -> None:
    """Time and weigh the oracle against a float32 loop and FlashInfer's trace reference."""
    if keys % 16:
        message = f"{keys} is no multiple of the page size, 16"
        raise click.BadParameter(message, context, param_hint="--keys")
    _finish(context, outputs, lambda: _oracle(requests, keys, repetitions, threads))


@bench.command()
@click.option(
    "--shape",
    "shapes",
    type=click.Choice(["8-of-128", "2-of-8"]),
    multiple=True,
    default=("8-of-128",),
    show_default=True,
    help="8 of 128 experts, 2,048 by 768, or 2 of 8 experts, 4,096 by 14,336; may be repeated.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(["bfloat16", "float32"]),
    multiple=True,
    default=("bfloat16",),
    show_default=True,
    help="Of hidden states and weights; nothing is required of float32.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    multiple=True,
    default=(1, 4, 16, 64, 256, 1024),
    show_default=True,
)
@click.option(
    "--threads", type=click.IntRange(min=1), multiple=True, default=(1,), show_default=True
)
@click.option("--repetitions", type=click.IntRange(min=3), default=3, show_default=True)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.0),
    default=2.0,
    show_default=True,
    help="More repetitions of a case until these are over.",
)
@JSON
@click.pass_context
def experts(
    context: click.Context,
    /,
    outputs: Outputs,
    **measured: Any,  # noqa: ANN401  those of _experts
) -> None:
    """Time and weigh the oracle of experts against a float32 loop over experts."""
    _finish(context, outputs, lambda: _experts(**measured))


@bench.command()
@click.option(
    "--problems",
    type=click.IntRange(min=1),
    default=400,
    show_default=True,
    help="Of iid values in bfloat16; other dtypes and values get a quarter of it.",
)
@JSON
@click.pass_context
def tightness(context: click.Context, problems: int, outputs: Outputs) -> None:
    """Compare honest kernels' errors with the bound."""
    _finish(context, outputs, lambda: _tightness(problems))


@bench.command()
@click.option("--repetitions", type=click.IntRange(min=1), default=300, show_default=True)
@JSON
@click.pass_context
def roundtrip(context: click.Context, repetitions: int, outputs: Outputs) -> None:
    """Time the way to the isolated worker and back."""
    _finish(context, outputs, lambda: _roundtrip(repetitions))


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
    _finish(context, outputs, lambda: _kernels(quick=quick, only=only))


@bench.command()
@click.argument("implementations", metavar="IMPL...", nargs=-1, required=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Processes at a time, each with a worker, besides one alone.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
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
    """Count the small problems that are judged for parity in a second, and time the stages."""
    _finish(context, outputs, lambda: _throughput(implementations, device, jobs, seconds))


def _finish(context: click.Context, outputs: Outputs, *benchmarks: Callable[[], Results]) -> None:
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


if __name__ == "__main__":
    bench(prog_name="python -m kernelproof.ci.bench.command")
