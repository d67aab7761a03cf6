"""Calls of experts made of parts of another call: some of its tokens, of its experts, of inter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...reference import MoEProblem, QuantizedMatrix
from ...reference.moe.weights import IN_BLOCKS, SCALE_BLOCK, WEIGHT_FORMATS
from ...reference.problems.moe import WITHOUT_SHARED
from ...reference.tensors.moe_inputs import MoEInputs, map_matrix
from ...reference.tensors.values import bits, stream
from ..verdicts.comparison import bitwise, fail, within
from ..verdicts.subject import Subject
from ..verdicts.verdict import Verdict
from .general import run_on

OF_EXPERTS = ("w13", "w2", "w13_bias", "w2_bias", "alpha", "beta", "limit", "intermediate_scale")
"""Fields that have an entry for each expert, if they are tensors or matrices."""
NOTHING_SHARED: dict[str, Any] = {
    "shared_w13": None, "shared_w2": None, "shared_weight": 1.0,
    "shared_gate": None, "shared_gate_logits": False,
}  # fmt: skip
"""Arguments of a call without shared experts."""
OF_TOKENS = ("hidden", "topk_ids", "topk_weights", "shared_gate")


class Answer(NamedTuple):
    """What a subject made of a call [tokens, hidden], and how far an honest one may be off."""

    out: torch.Tensor
    bound: torch.Tensor


def answer(subject: Subject, problem: MoEProblem, inputs: MoEInputs) -> Answer:
    """Run the subject and ask the oracle.

    Raises:
        Stop: it raised, or gave something of another shape.
    """
    (out, _), bounded = run_on(subject, problem, guarded(inputs))
    return Answer(out, bounded.bound.out)


def result(subject: Subject, problem: MoEProblem, inputs: MoEInputs) -> torch.Tensor:
    """Return a copy of what the subject returns, without the oracle."""
    return subject.run_operation(problem, guarded(inputs))[0].clone()


def guarded(inputs: MoEInputs) -> MoEInputs:
    """Return a record of which ids and weights may be changed: other calls are made of them yet."""
    return replace(
        inputs, topk_ids=inputs.topk_ids.clone(), topk_weights=inputs.topk_weights.clone()
    )


def same(
    actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor, *, exact: bool = False
) -> Verdict:
    """Check that two outputs differ by at most ``bound``, or in no bit where that is exact."""
    if actual.shape != expected.shape:
        return fail("shape", f"out has shape {list(actual.shape)}, not {list(expected.shape)}")
    if exact:
        return bitwise("out", actual.double(), expected.double())
    return within("out", actual, expected.to(bound.dtype), bound)


def shuffled(seed: int, tag: str, count: int) -> torch.Tensor:
    """Return a permutation of ``count`` by hash: int64, on the host."""
    rows = torch.arange(count)
    return bits(stream(seed, tag), rows, 1).flatten().argsort(stable=True)


def take(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Select rows of the first axis, of FP8 codes too, for which torch has no indexing."""
    index = index.to(tensor.device)
    if tensor.element_size() == 1 and tensor.dtype != torch.bool:
        return tensor.view(torch.uint8)[index].view(tensor.dtype)
    return tensor[index]


def of_tokens(inputs: MoEInputs, index: torch.Tensor) -> MoEInputs:
    """Return the call on some tokens, in this order."""
    found = {name: getattr(inputs, name) for name in OF_TOKENS}
    taken = {name: _taken(value, index) for name, value in found.items() if value is not None}
    return replace(inputs, **taken)


def of_experts(inputs: MoEInputs, index: torch.Tensor) -> dict[str, Any]:
    """Return the fields of some experts, by their place on this rank, in this order."""
    found = {name: getattr(inputs, name) for name in OF_EXPERTS}
    return {
        name: _taken(value, index)
        for name, value in found.items()
        if isinstance(value, (torch.Tensor, QuantizedMatrix))
        and not (isinstance(value, torch.Tensor) and value.dim() == 0)
    }


def _taken(value: Any, index: torch.Tensor) -> Any:  # noqa: ANN401  a tensor or a matrix
    return map_matrix(value, lambda tensor: take(tensor, index))


def unshared(problem: MoEProblem, inputs: MoEInputs) -> tuple[MoEProblem, MoEInputs]:
    """Return the call without its shared experts."""
    return (
        replace(problem, **WITHOUT_SHARED),
        replace(inputs, **NOTHING_SHARED),
    )


def inter_steps(problem: MoEProblem) -> int:
    """Return the multiples of inter at which a call may be cut: no block of scales is."""
    if problem.quantized in IN_BLOCKS:
        return SCALE_BLOCK
    form = WEIGHT_FORMATS.get(problem.quantized)
    return max(form.weights.entry.block, 1) if form else 1


def of_inter(problem: MoEProblem, inputs: MoEInputs, start: int, stop: int) -> MoEInputs:
    """Return the call on a range of inter, as a tensor-parallel rank has it.

    Only the first range has the second product's bias: ranks add theirs up.
    """
    rows = torch.arange(start, stop)
    if problem.interleaved:
        rows = torch.arange(2 * start, 2 * stop)
    elif problem.gated:
        rows = torch.cat([rows, rows + problem.inter])
    w13_bias = inputs.w13_bias
    if w13_bias is not None:
        w13_bias = w13_bias[:, rows.to(w13_bias.device)]
    return replace(
        inputs,
        w13=with_rows(inputs.w13, rows, interleaved=problem.interleaved),
        w2=_columns(inputs.w2, start, stop),
        w13_bias=w13_bias,
        w2_bias=inputs.w2_bias if start == 0 else None,
    )


def with_rows(
    matrix: torch.Tensor | QuantizedMatrix, rows: torch.Tensor, *, interleaved: bool = False
) -> Any:  # noqa: ANN401
    """Select rows of every expert of a w13; blocks of scales, gate and up must stay whole."""

    def chosen(tensor: torch.Tensor) -> torch.Tensor:
        return take(tensor.transpose(0, 1), rows).transpose(0, 1).contiguous()

    if isinstance(matrix, torch.Tensor):
        return chosen(matrix)
    scales = matrix.scales
    if matrix.format.in_blocks:
        scales = _blocks(scales, 1, rows[::SCALE_BLOCK] // SCALE_BLOCK)
    elif matrix.format.scales != "tensor":
        scales = chosen(scales)
    zeros, scale = matrix.zero_points, matrix.global_scale
    if isinstance(scale, torch.Tensor) and scale.dim() > 1:
        # Rows of what was the gate's half, or the up's, make each of the halves.
        old, first = matrix.codes.shape[1], torch.tensor([0, 1 if interleaved else len(rows) // 2])
        halves = rows[first] % 2 if interleaved else rows[first] // (old // 2)
        scale = take(scale.transpose(0, 1), halves).transpose(0, 1).contiguous()
    return matrix._replace(
        codes=chosen(matrix.codes),
        scales=scales,
        global_scale=scale,
        zero_points=None if zeros is None else chosen(zeros),
    )


def _columns(matrix: torch.Tensor | QuantizedMatrix, start: int, stop: int) -> Any:  # noqa: ANN401
    """Select columns of every expert."""
    if isinstance(matrix, torch.Tensor):
        return matrix[:, :, start:stop].contiguous()
    packed = matrix.format.packed
    codes = matrix.codes[:, :, start // packed : stop // packed].contiguous()
    scales, zeros, columns = matrix.scales, matrix.zero_points, torch.arange(start, stop)
    if matrix.format.in_blocks:
        scales = _blocks(scales, 2, columns[::SCALE_BLOCK] // SCALE_BLOCK)
    elif not matrix.format.scales:
        step = matrix.format.entry.block
        groups = slice(start // step, -(-stop // step))
        scales = scales[:, :, groups].contiguous()
        zeros = None if zeros is None else zeros[:, :, groups].contiguous()
    return matrix._replace(codes=codes, scales=scales, zero_points=zeros)


def _blocks(scales: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return take(scales.transpose(0, dim), index).transpose(0, dim).contiguous()
