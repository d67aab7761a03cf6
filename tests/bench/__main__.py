"""Benchmarks of Kernelproof itself: the oracles, their bounds, isolation, throughput.

    python -m kernelproof.tests.bench                  all of them
    python -m kernelproof.tests.bench tightness        one of them; --help lists its options

`make bench` runs it. Exit code 1: a requirement was missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import click

from kernelproof.ci.bench import throughput as of_throughput
from kernelproof.ci.bench.command import JSON, finish
from kernelproof.ci.bench.results import Results
from kernelproof.ci.console.help import CheckedGroup
from kernelproof.ci.console.outputs import Outputs
from kernelproof.tests.bench import experts as of_experts
from kernelproof.tests.bench import kernel_lines as of_kernel_lines
from kernelproof.tests.bench import oracle as of_oracle
from kernelproof.tests.bench import roundtrip as of_roundtrip
from kernelproof.tests.bench import tightness as of_tightness

COUNT = click.IntRange(min=1)


def _oracle(
    requests: int = 64, keys: int = 512, repetitions: int = 5, threads: tuple[int, ...] = (1, 2)
) -> Results:
    prefills = max(1, requests // 16)
    return of_oracle.measure(
        of_oracle.Case(f"{requests} decodes of {keys} keys", requests, 1, keys),
        of_oracle.Case(f"{prefills} prefills of {keys} tokens", prefills, keys, keys),
        threads=threads,
        repetitions=repetitions,
    )


def _experts(
    shapes: Sequence[str] = ("8-of-128",),
    dtypes: Sequence[str] = ("bfloat16",),
    tokens: Sequence[int] = of_experts.TOKENS,
    threads: Sequence[int] = (1,),
    repetitions: int = 3,
    seconds: float = 2.0,
) -> Results:
    cases = [
        replace(of_experts.SHAPES[shape], dtype=of_experts.DTYPES[dtype], tokens=count)
        for shape, dtype, count in product(shapes, dtypes, tokens)
    ]
    return of_experts.measure(cases, threads=threads, repetitions=repetitions, seconds=seconds)


def _throughput() -> Results:
    return of_throughput.measure(("torch-sdpa-paged",), "cpu", jobs=1, seconds=5.0)


@click.group(cls=CheckedGroup, invoke_without_command=True)
@JSON
@click.pass_context
def bench(context: click.Context, outputs: Outputs) -> None:
    """Measure Kernelproof itself; without a command, everything."""
    if context.invoked_subcommand is None:
        tightness, roundtrip = of_tightness.measure, of_roundtrip.measure
        finish(
            context,
            outputs,
            _oracle,
            _experts,
            lambda: tightness(400),
            lambda: roundtrip(300),
            lambda: of_kernel_lines.measure(20),
            _throughput,
        )
    elif outputs.paths:
        message = f"--json goes after the command: bench {context.invoked_subcommand} --json FILE"
        raise click.UsageError(message, context)


@bench.command()
@click.option("--requests", type=COUNT, default=64, show_default=True)
@click.option(
    "--keys",
    type=click.IntRange(min=16, max=4096),
    default=512,
    show_default=True,
    help="A multiple of the page size, 16: FlashInfer's trace reference reads whole pages.",
)
@click.option("--repetitions", type=COUNT, default=5, show_default=True)
@click.option("--threads", type=COUNT, multiple=True, default=(1, 2), show_default=True)
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
    finish(context, outputs, lambda: _oracle(requests, keys, repetitions, threads))


@bench.command()
@click.option(
    "--shape",
    "shapes",
    type=click.Choice(list(of_experts.SHAPES)),
    multiple=True,
    default=("8-of-128",),
    show_default=True,
    help="8 of 128 experts, 2,048 by 768, or 2 of 8 experts, 4,096 by 14,336; may be repeated.",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(list(of_experts.DTYPES)),
    multiple=True,
    default=("bfloat16",),
    show_default=True,
    help="Of hidden states and weights; nothing is required of float32.",
)
@click.option("--tokens", type=COUNT, multiple=True, default=of_experts.TOKENS, show_default=True)
@click.option("--threads", type=COUNT, multiple=True, default=(1,), show_default=True)
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
    *,
    shapes: tuple[str, ...],
    dtypes: tuple[str, ...],
    tokens: tuple[int, ...],
    threads: tuple[int, ...],
    repetitions: int,
    seconds: float,
    outputs: Outputs,
) -> None:
    """Time and weigh the oracle of experts against a float32 loop over experts."""
    finish(
        context, outputs, lambda: _experts(shapes, dtypes, tokens, threads, repetitions, seconds)
    )


@bench.command()
@click.option(
    "--problems",
    type=COUNT,
    default=400,
    show_default=True,
    help="Of iid values in bfloat16; other dtypes and values get a quarter of it.",
)
@JSON
@click.pass_context
def tightness(context: click.Context, problems: int, outputs: Outputs) -> None:
    """Compare honest kernels' errors with the bound."""
    finish(context, outputs, lambda: of_tightness.measure(problems))


@bench.command()
@click.option("--repetitions", type=COUNT, default=300, show_default=True)
@JSON
@click.pass_context
def roundtrip(context: click.Context, repetitions: int, outputs: Outputs) -> None:
    """Time the way to the isolated worker and back."""
    finish(context, outputs, lambda: of_roundtrip.measure(repetitions))


@bench.command()
@click.option("--repetitions", type=COUNT, default=20, show_default=True)
@JSON
@click.pass_context
def kernel_lines(context: click.Context, repetitions: int, outputs: Outputs) -> None:
    """Time what recording the lines of Triton kernels adds to a case."""
    finish(context, outputs, lambda: of_kernel_lines.measure(repetitions))


if __name__ == "__main__":
    bench(prog_name="python -m kernelproof.tests.bench")
