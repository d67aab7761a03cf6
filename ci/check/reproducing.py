"""A script that calls a kernel as a law did, compares its answer, and needs no Kernelproof."""

from __future__ import annotations

import base64
import io
import textwrap
import zlib
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import torch

from ...properties.findings.files import Output, OutputError
from ...properties.laws.metadata.builders import WRITTEN as BUFFERS
from ...properties.verdicts.operations import APPENDED, AS_READ
from ...properties.verdicts.text import compact, one_line
from ...properties.verdicts.verdict import Verdict
from ...properties.worker.keeping import Kept
from ...reference import Problem

MOST_INSIDE = 64 << 10
"""Most bytes of compressed tensors in the script itself; more lie in a file beside it."""
IN_USE = (
    '{{"out": {0}.masked_fill((torch.arange({0}.shape[1], device={0}.device) '
    ">= inputs.counts.unsqueeze(1)).unsqueeze(2), 0)}}"
)
"""Code that hides the rows of batched experts behind the counts, of which nothing is promised."""
ANSWERS = {
    "append_paged_kv": f"dict(zip({APPENDED!r}, result))",
    "route": 'dict(zip(("topk_ids", "topk_weights"), result))',
    "moe": '{"out": result}',
    "batched_moe": IN_USE.format("result"),
    "build_metadata": '{name: getattr(result, name) for name in tensors["expected"]}',
    "map_slots": '{"slot_mapping": result}',
    "prepare_batch": '{"buffer": result}',
    "prepare_steps": "result",
    "quantize": 'dict(zip(("codes", "scales"), result))',
    "norm_and_quantize": '{**dict(zip(("codes", "scales"), result)), "residual": inputs.residual}',
    "rearrange": '{"vector": result}',
    "rope_and_append": '{"q": result, "k_cache": inputs.k_cache, "v_cache": inputs.v_cache}',
    "slice_context_parallel": '{name: getattr(result, name) for name in tensors["expected"]}',
}
"""Code by operation that reads an answer as tensors by name; others are pairs (out, lse)."""
PAIR = 'dict(zip(("out", "lse"), result))'
READ_FROM_CODES = (
    f"dict(zip({(*APPENDED, *AS_READ)!r}, (*result, *(({{}} - scales[..., 1:].double()) "
    "* scales[..., :1].double() for codes, scales in zip(result[:2], result[2:])))))"
)
"""The same of codes with zero points, with what is read from them."""
CODES = {"int8": "codes.double()", "int4": "torch.cat([codes & 15, codes >> 4], -1).double()"}
WRITTEN = '{"out": inputs.out, "lse": getattr(inputs, "lse", None)}'
WITHOUT_LSE = '{"out": inputs.out}'
TEMPLATE = Path(__file__).parents[1] / "templates" / "reproduce.py.template"


@dataclass(frozen=True)
class Kernel:
    """What a script imports.

    Attributes:
        reference: MODULE:NAME.
        device: ``"cpu"`` or ``"cuda"``.
    """

    reference: str
    device: str


def no_script(kernel: Kernel, kept: Kept | None, verdict: Verdict) -> str:
    """Return in a sentence why a script cannot show a failure; empty where it can."""
    compared = verdict.status == "FAIL" and verdict.kind != "mutated_input"
    here = "debug it with --in-process"
    reasons = {
        "the case does not fail: there is nothing to reproduce": not verdict.bad,
        f"the kernel is a part of Kernelproof and takes its records: {here}": (
            kernel.reference.startswith("kernelproof.")
        ),
        "the kernel was not called: it failed before": kept is None,
        f"the law plans and runs a session, which is more than a call: {here}": (
            kept is not None and kept.session
        ),
        f"of equal scores either expert is right, which takes the law to judge: {here}": (
            compared and kept is not None and kept.operation == "route"
        ),
        f"many plans of a batch are right, which takes the law to judge: {here}": (
            compared and kept is not None and kept.operation == "plan"
        ),
        f"each call is within its bound by itself, and the law compares several: {here}": (
            compared and kept is not None and not kept.wrong
        ),
    }
    return next((sentence for sentence, holds in reasons.items() if holds), "")


def write_script(
    path: Path, kernel: Kernel, kept: Kept, verdict: Verdict, law: str, problem: Problem
) -> list[Path]:
    """Write a script that makes a kept call again, and a file of its tensors where they are large.

    Returns:
        What was written.

    Raises:
        OutputError: a file cannot be written.
    """
    stream = io.BytesIO()
    expected = {} if kept.operation == "route" else kept.expected
    torch.save({"inputs": kept.inputs, "expected": expected, "bound": kept.bound}, stream)
    data, beside = zlib.compress(stream.getvalue(), 9), path.with_name(f"{path.stem}.tensors.pt")
    inside = len(data) <= MOST_INSIDE
    module, _, attribute = kernel.reference.rpartition(":")
    file = Path(module)
    is_file = file.suffix == ".py"
    title = f"{verdict.status} {verdict.kind}".strip()
    written = [*(("out", "lse") if kept.writes_out else ())]
    if kept.record["record"].get("in_place"):
        written += ["k_cache", "v_cache", "kv_cache_sf.0", "kv_cache_sf.1"]
    buffers = (*BUFFERS.values(), "buffers.")
    written += [name for name in kept.inputs if name.startswith(buffers)]
    text = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=_quoted(f"{title} of {kernel.reference} under the law {law}, call {kept.number}"),
        name=path.name,
        problem=_quoted(_problem(kept, problem, verdict)),
        where="The tensors stand at its end." if inside else f"The tensors are in {beside.name}.",
        device=repr(kernel.device),
        folder=repr(str(file.parent.resolve() if is_file else Path.cwd())),
        module=repr(file.stem if is_file else module),
        attribute=repr(attribute),
        inputs=_source(kept.record, 2),
        source=(
            "io.BytesIO(zlib.decompress(base64.b85decode(DATA.replace('\\n', ''))))"
            if inside
            else f"pathlib.Path(__file__).with_name({beside.name!r})"
        ),
        written=repr(written),
        answer=_answer(kept),
        # Of metadata a kernel may return a buffer that is longer than the batch.
        got="answer[name]" + "[: len(expected)]" * (kept.operation == "build_metadata"),
        data=f'\nDATA = """\n{_lines(data)}\n"""\n' if inside else "",
    )
    Output("--script", path).write(text)
    if inside:
        return [path]
    try:
        beside.write_bytes(stream.getvalue())
    except OSError as error:
        message = f"--script {beside}: cannot be written ({error.strerror})"
        raise OutputError(message) from error
    return [path, beside]


def _problem(kept: Kept, problem: Problem, verdict: Verdict) -> str:
    """Return the problem of the call that the script makes, the drawn one, and what was judged."""
    own, drawn = kept.problem or compact(problem), compact(problem)
    lines = [own] if own == drawn else [own, f"The law made it of {drawn}"]
    lines += [f"Call {each['call']} was {each['changes']}" for each in verdict.compared]
    return "\n".join(textwrap.fill(line, 100) for line in lines)


def _answer(kept: Kept) -> str:
    """Return the expression of a kept call's answer as tensors by name."""
    if AS_READ[0] in kept.expected:
        packed = kept.expected["k_cache"].shape[-1] < kept.expected[AS_READ[0]].shape[-1]
        return READ_FROM_CODES.format(CODES["int4" if packed else "int8"])
    if not kept.writes_out:
        return ANSWERS.get(kept.operation, PAIR)
    if kept.operation == "batched_moe":
        return IN_USE.format("inputs.out")
    return WITHOUT_LSE if kept.result and "lse" not in kept.result else WRITTEN


def _quoted(text: str) -> str:
    """Return text that may stand in a docstring."""
    lines = (one_line(line) for line in text.splitlines())
    return "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")


def _lines(data: bytes) -> str:
    return "\n".join(textwrap.wrap(base64.b85encode(data).decode(), 100))


def _source(tree: Any, depth: int) -> str:  # noqa: ANN401  JSON
    """Return the Python expression of a kept record."""
    if isinstance(tree, dict):
        if "tensor" in tree:
            return f"t[{tree['tensor']!r}]"
        if "dtype" in tree:
            return str(tree["dtype"])
        if "float" in tree:
            return f"float({tree['float']!r})"
        if "tuple" in tree:
            return f"({''.join(f'{_source(each, depth)}, ' for each in tree['tuple'])})"
        indent = "    " * depth
        parts = [(name, _source(each, depth + 1)) for name, each in tree["record"].items()]
        parts += [("options", repr(tuple(tree["keywords"])))] if "keywords" in tree else []
        lines = "".join(f"{indent}{name}={each},\n" for name, each in parts)
        return f"Record(\n{lines}{indent[4:]})"
    return repr(tree)
