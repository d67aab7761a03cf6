"""The command support: what may run where, by the rules; no GPU is needed to ask."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..console.completion import among, chip_names, feature_values
from ..console.errors import CONFORMING, INTERRUPTED, NONCONFORMING, UsageRefusedError
from ..console.help import SectionedCommand
from ..console.lines import tell
from ..console.outputs import Outputs, output_option
from ..options import CPU

if TYPE_CHECKING:
    from ...impl.gating import RuleBook
    from .rows import Matrix, Row

FIELDS: dict[str, tuple[str, str]] = {
    "--operation": ("OP", "Such as paged_attention, mla, moe."),
    "--backend": ("NAME", "Such as fa2, trtllm-gen, cutlass, triton."),
    "--phase": ("PHASE", "decode, prefill, or mixed (a batch of both)."),
    "--head-dim": ("D", "Of queries and keys."),
    "--head-dim-vo": ("D", "Of values, where it differs."),
    "--q-dtype": ("T", "Of queries, or of a MoE's activations."),
    "--kv-dtype": ("T", "Of the KV cache: bf16, fp8, nvfp4, ..."),
    "--kv-storage": ("T", "uint8, where the cache is a tensor of bytes."),
    "--kv-layout": ("L", "NHD or HND."),
    "--page-size": ("N", "Keys a page."),
    "--group-size": ("N", "Query heads a KV head."),
    "--query-len": ("N", "Query tokens a request in decode."),
    "--ragged-queries": ("", "Other requests have fewer of them."),
    "--window": ("", "With a sliding window."),
    "--soft-cap": ("", "With a soft cap on logits."),
    "--sinks": ("", "With attention sinks."),
    "--mask": ("MASK", "none, causal, custom or, of draft tokens, tree."),
    "--padding": ("KIND", "The emptiest requests: none, no_query, few_keys or no_keys."),
    "--activation": ("NAME", "Of a MoE: swiglu, relu2, ..."),
    "--quantisation": ("NAME", "Of a MoE's weights: none, nvfp4, ..."),
    "--routing": ("NAME", "Routing method: renormalize, deepseek_v3, ..."),
    "--num-experts": ("N", "Experts of a MoE."),
    "--top-k": ("N", "Experts a token."),
    "--hidden-size": ("N", "Channels of a token."),
    "--intermediate-size": ("N", "Channels of an expert's inner layer."),
    "--weights-on-input": ("", "Routing weights scale the tokens before the experts."),
    "--bias-dtype": ("T", "Of the biases of a MoE's experts."),
    "--routing-bias-dtype": ("T", "Of the bias on the scores of experts."),
}
"""Options of the fields of a feature, each with the placeholder of its value, which a switch does
not have, and its help."""
NUMBERS = ("D", "N")
"""Placeholders of whole numbers."""
WITHOUT_COMPLETION = ("--kv-storage",)
SECTIONS = {
    "Chips and releases": ("--sm", "--cpu", "--flashinfer", "--against", "--triton"),
    "The call": ("--model", *FIELDS),
    "What to answer": (
        "--require",
        "--explain",
        "--declared",
        "--binaries",
        "--compile",
        "--unit",
        "--jobs",
    ),
    "Outputs": ("--verbose", "--json", "--markdown"),
    "Support rules": ("--rules",),
}
"""Options by the heading under which help shows them."""


def model_families(
    _context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Return the families of models with attention that begin with a word."""
    from .models import model_names

    return among(model_names(), incomplete)


def feature_options(command: Callable[..., int]) -> Callable[..., int]:
    """Add an option for each field of a feature."""
    for flag, (stands_for, said) in reversed(FIELDS.items()):
        name = "head_dim_qk" if flag == "--head-dim" else flag.strip("-").replace("-", "_")
        kind: dict[str, Any] = {"metavar": stands_for, "shell_complete": feature_values}
        if not stands_for:
            kind = {"is_flag": True, "default": None}
        elif stands_for in NUMBERS:
            kind = {"metavar": stands_for, "type": int}
        elif flag in WITHOUT_COMPLETION:
            del kind["shell_complete"]
        command = click.option(flag, name, help=said, **kind)(command)
    return command


@click.command(
    "support",
    cls=SectionedCommand,
    sections=SECTIONS,
    short_help="Answer which kernel may run on which chip, and why.",
)
@click.option(
    "--sm",
    metavar="SM[,SM]",
    help="Chips: 103, sm_103a, GB300, dgx-spark or cpu; all by default.",
    shell_complete=chip_names,
)
@CPU
@click.option(
    "--flashinfer",
    "releases",
    multiple=True,
    metavar="VERSION",
    help="Release of FlashInfer; by default the newest that the rules know.",
)
@click.option("--against", metavar="VERSION", help="Show only what this other release changes.")
@click.option(
    "--triton", default="", metavar="VERSION", help="Triton of Triton kernels; a recent one if not."
)
@click.option(
    "--model",
    metavar="NAME",
    help="All attention calls of a model or its family: gemma-4, Qwen3-8B.",
    shell_complete=model_families,
)
@feature_options
@click.option("--explain", "explained", is_flag=True, help="Show which rules decide one call.")
@click.option(
    "--require", "required", is_flag=True, help="Exit with 1 unless a backend serves the call."
)
@click.option(
    "--declared",
    multiple=True,
    metavar="VERSION|WHEEL|FOLDER",
    help="Compare the rules with what this release declares; may be repeated.",
)
@click.option(
    "--binaries",
    metavar="RELEASE|WHEEL|PACKAGE==VERSION",
    help="Compare the rules with the kernels that a FlashInfer release selects; of another wheel, "
    "answer what its libraries hold for each chip.",
)
@click.option(
    "--compile",
    "compiled",
    metavar="SM[,SM]",
    help="Compile FlashInfer's modules for these chips, with nvcc; repeat --flashinfer for several "
    "releases.",
    shell_complete=chip_names,
)
@click.option("--unit", "units", multiple=True, metavar="NAME", help="Compile only this module.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Compilers at a time.")
@click.option("-v", "--verbose", is_flag=True, help="Print each call and each reason.")
@output_option("--json", "Write the answer to this file.")
@output_option("--markdown", "Write the answer as Markdown.")
@click.option(
    "--rules",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Use the support rules in this folder.",
)
def support(
    sm: str | None,
    releases: tuple[str, ...],
    against: str | None,
    model: str | None,
    folder: Path | None,
    verbose: bool,  # noqa: FBT001  click's
    outputs: Outputs,
    **options: Any,  # noqa: ANN401  click's options
) -> int:
    """Answer which kernel may run on which chip, why, and what to use instead. Needs no GPU.

    Without fields of a call, prints the whole matrix; with some (--head-dim 512 --kv-dtype fp8), or
    a model, each backend that could serve it; with one chip, the reasons too.

    With --declared, compares the rules with what releases of FlashInfer declare, and exits with 1
    where they disagree; with --binaries, with the kernels that a release's own code selects (of one
    call, if there are fields of one), for which nvcc builds its launcher. Of a wheel of another
    package it reads which kernels the libraries hold for each chip, and which of them are stubs.
    With --compile, compiles FlashInfer's modules for chips that need not be here, and writes the
    records to --json.
    """
    outputs.check()
    declared, compiled = options.pop("declared"), options.pop("compiled")
    explained, required = options.pop("explained"), options.pop("required")
    binaries, cpu = options.pop("binaries"), options.pop("cpu")
    making = {name: options.pop(name) for name in ("units", "jobs")}
    _refuse(making if compiled is None else {}, "goes with --compile")
    _refuse({"cpu": cpu} if binaries is None else {}, "goes with --binaries")
    others = {"--compile": compiled, "--binaries": binaries, "--declared": declared}
    triton = _checked_triton(options.pop("triton"), others)
    if compiled is not None:
        return _compile(releases, compiled, outputs=outputs, **making)
    if binaries is not None:
        others = {"releases": releases, "against": against, "model": model, "declared": declared}
        others |= {"explained": explained, "required": required}
        _refuse(others, "does not go with --binaries")
        chips = () if sm is None else chips_of(sm)
        return _answer_binaries(
            binaries, chips, cpu, _given(options), folder=folder, verbose=verbose, outputs=outputs
        )
    book = _load(folder)
    if declared:
        from .declared import compare_releases

        return compare_releases(declared, book=book, outputs=outputs, tell=_tell)
    if len(releases) > 1:
        message = "--flashinfer may be repeated with --compile alone; see --against"
        raise UsageRefusedError(message)
    chips = chips_of(sm)
    version = releases[0] if releases else book.newest
    asked = _given(options)
    for flag, release in (("--flashinfer", version), ("--against", against or version)):
        _check_release(flag, release)
    try:
        if explained:
            return _explain(asked, version, chips, book, model, triton)
        rows, left_out = _rows(asked) if model is None else _of_model(model, asked)
        made = _decide(rows, version, chips, book, triton)
        other = _decide(rows, against, chips, book, triton) if against else None
    except ValueError as error:
        message = f"{_flag_of(error)}{error}"
        raise UsageRefusedError(message) from error
    if other is not None:
        return _compare(made, other, outputs)
    _write(made, book, outputs)
    _print(made, left_out, reasons=bool(asked) or sm is not None, verbose=verbose)
    return NONCONFORMING if required and not _served(made, each=model is not None) else CONFORMING


def _answer_binaries(
    release: str,
    chips: Sequence[int | None],
    cpu: str,
    asked: dict[str, Any],
    *,
    folder: Path | None,
    verbose: bool,
    outputs: Outputs,
) -> int:
    """Answer what a release of FlashInfer selects, or what the libraries of another wheel hold."""
    if not _is_flashinfer(release):
        from .shipped import answer_binaries

        _refuse(asked, f"goes with --binaries of FlashInfer, not of {release}")
        return answer_binaries(
            release, chips or chips_of(None), cpu=cpu, outputs=outputs, verbose=verbose, tell=_tell
        )
    from .selected import compare_binaries

    release = release.removeprefix("flashinfer-python==")
    _refuse({"cpu": cpu}, "does not go with --binaries of FlashInfer")
    return compare_binaries(release, chips, asked, book=_load(folder), outputs=outputs, tell=_tell)


def _is_flashinfer(release: str) -> bool:
    """Whether a release is a version of FlashInfer, its wheel or a folder with it."""
    path = Path(release)
    if path.suffix == ".whl":
        return path.name.startswith("flashinfer_python-")
    version = re.match(r"(flashinfer-python==)?\d+(\.\d+)+", release)
    return version is not None or (path / "flashinfer").is_dir()


def _refuse(given: dict[str, Any], why: str) -> None:
    """Refuse the first of some options that was given.

    Raises:
        UsageRefusedError: one was given.
    """
    name = next((name for name, value in given.items() if value), None)
    if name is not None:
        message = f"{_flags()[name]} {why}"
        raise UsageRefusedError(message)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a call that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _load(folder: Path | None) -> RuleBook:
    from ...impl.gating import RulesError, load_rules

    try:
        return load_rules(folder) if folder else load_rules()
    except RulesError as error:
        message = f"--rules: {error}" if folder else str(error)
        raise UsageRefusedError(message) from error


def _served(made: Matrix, *, each: bool) -> bool:
    """Whether some backend serves a call of the matrix, or each of its calls, on some chip."""
    calls: dict[tuple[str, str], bool] = {}
    for row, decisions in made.rows:
        call = (row.feature.operation, row.title)
        calls[call] = calls.get(call, False) or any(one.supported for one in decisions)
    return all(calls.values()) if each else any(calls.values())


def _check_release(flag: str, version: str) -> None:
    from ...impl.gating.rules import parse_version

    try:
        parse_version(version)
    except ValueError as error:
        message = f"{flag}: {error}"
        raise UsageRefusedError(message) from error


def _checked_triton(version: str, others: Mapping[str, Any]) -> str:
    """Return the version of Triton that was given; it goes with none of some other options."""
    if version:
        for option in (name for name, value in others.items() if value):
            _refuse({"triton": version}, f"does not go with {option}")
        _check_release("--triton", version)
    return version


def _flag_of(error: ValueError) -> str:
    """Return the flag whose value an error names first, with a colon."""
    field = str(error).partition(" ")[0]
    flags = _flags()
    return f"{flags[field]}: " if field in flags else ""


def _flags() -> dict[str, str]:
    """Return the flag of each option, by the name of its argument."""
    return {each.name: each.opts[0] for each in support.params if each.name}


def _tell(line: str) -> None:
    tell(line, err=True)


def _compile(
    releases: tuple[str, ...],
    chips: str,
    *,
    units: tuple[str, ...],
    jobs: int | None,
    outputs: Outputs,
) -> int:
    from ..compile.compiling import compile_support

    if not releases:
        message = "--compile needs --flashinfer VERSION, or a folder with a release in it"
        raise UsageRefusedError(message)
    evidence = compile_support(
        releases, chips.split(","), units=units, outputs=outputs, jobs=jobs or 0, tell=_tell
    )
    counts = Counter(record.status for record in evidence.records)
    tell(", ".join(f"{count} {status}" for status, count in sorted(counts.items())))
    return INTERRUPTED if evidence.interrupted else CONFORMING


def chips_of(text: str | None) -> tuple[int | None, ...]:
    """Read a list of chips; all that the rules know if there is none."""
    from ...impl.gating import parse_capability
    from .rows import ALL_CHIPS

    if text is None:
        return ALL_CHIPS
    try:
        return tuple(
            None if part.strip().lower() == "cpu" else parse_capability(part)
            for part in text.split(",")
        )
    except ValueError as error:
        message = f"--sm {text}: {error}"
        raise UsageRefusedError(message) from error


def _decide(
    rows: Sequence[Row],
    version: str,
    chips: tuple[int | None, ...],
    book: RuleBook,
    triton: str,
) -> Matrix:
    from .rows import matrix

    return matrix(iter(rows), version, chips, book, triton)


def _rows(asked: dict[str, Any]) -> tuple[list[Row], tuple[str, ...]]:
    from .rows import all_rows, rows_like

    broad = set(asked) <= {"operation", "backend"}
    return list(all_rows(**_checked(asked)) if broad else rows_like(_checked(asked))), ()


def _of_model(model: str, asked: dict[str, Any]) -> tuple[list[Row], tuple[str, ...]]:
    from .models import model_rows

    rows, left_out = model_rows(model, _checked(asked))
    if not rows:
        message = f"model is {model!r}, none of whose attention calls the rules can be asked for"
        raise ValueError(message)
    return rows, left_out


def _checked(asked: dict[str, Any]) -> dict[str, Any]:
    """Refuse a wrong field before anything is made of it."""
    from ...impl.gating import Feature

    Feature(**asked)
    return asked


def _explain(
    asked: dict[str, Any],
    version: str,
    chips: tuple[int | None, ...],
    book: RuleBook,
    model: str | None,
    triton: str,
) -> int:
    from ...impl.gating import Feature
    from ..console.terminal import console
    from .rendering import print_explanation
    from .rows import target_of

    if model is not None:
        message = "--explain needs one call: leave out --model"
        raise UsageRefusedError(message)
    if len(chips) != 1:
        message = "--explain needs one chip: --sm 103"
        raise UsageRefusedError(message)
    target = target_of(chips[0], version, triton)
    print_explanation(console(sys.stdout), Feature(**asked), target, book)
    return CONFORMING


def _print(made: Matrix, left_out: Sequence[str], *, reasons: bool, verbose: bool) -> None:
    from ..console.terminal import console
    from .rendering import MOST_LINES, print_matrix, print_reasons

    out = console(sys.stdout)
    reasons = reasons and len(made.chips) == 1
    # A line is kept for what follows, if only to count it.
    space = (math.inf if verbose else MOST_LINES) - bool(left_out)
    space -= print_matrix(out, made, space - reasons)
    if left_out:
        out.print(f"not asked, since no field of a call states them: {', '.join(left_out)}")
    if reasons:
        print_reasons(out, made, space)


def _compare(made: Matrix, other: Matrix, outputs: Outputs) -> int:
    from ..console.terminal import console
    from .rendering import differences_to_markdown, print_differences
    from .rows import differences

    found = differences(made, other)
    versions = (made.version, other.version)
    data = {
        "schema": "kernelproof/support-difference/1",
        "flashinfer": made.version,
        "against": other.version,
        "differences": [each.to_json() for each in found],
    }
    outputs.write(
        {
            "--json": lambda: data,
            "--markdown": lambda: _text(differences_to_markdown(*versions, found)),
        }
    )
    print_differences(console(sys.stdout), *versions, found)
    return CONFORMING


def _write(made: Matrix, book: RuleBook, outputs: Outputs) -> None:
    from .rendering import matrix_page

    def page() -> str:
        return matrix_page(made, book)

    def data() -> dict[str, Any]:
        return {"schema": "kernelproof/support/1", **made.to_json()}

    outputs.write({"--json": data, "--markdown": page})


def _text(lines: list[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"
