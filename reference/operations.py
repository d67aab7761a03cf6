"""The table of operations: what the oracle knows of each, for everything that differs by operation.

What the isolated worker loads stands here and in ``properties.verdicts.operations``; how problems
are drawn, which needs Hypothesis, in ``properties.space.operations``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from . import oracle, problems
from .attention.bounds import Bounded
from .formats.arithmetic import BLOCK_FORMATS, Arithmetic
from .problems import Problem
from .problems.field_types import hints_of
from .problems.from_json import read_problem
from .tensors import (
    batched_moe,
    context_parallel,
    norm_quantize,
    plan,
    planner,
    preparation,
    quantize,
    rearrange,
    rope_append,
    slots,
    steps,
)
from .tensors import inputs as records
from .tensors import materialise as tensors
from .tensors import moe_inputs as moe_records
from .tensors import moe_materialise as moe_tensors
from .tensors.allocation import CANARY, Allocator
from .tensors.inputs import Inputs

Entry = TypeVar("Entry")


class Table(dict[str, Entry]):
    """Entries by operation; an operation without an entry is an error that names the table.

    Args:
        name: where the table stands.
        entries: the entries by operation.
    """

    def __init__(self, name: str, entries: Mapping[str, Entry]) -> None:
        super().__init__(entries)
        self.name = name

    def __missing__(self, operation: str) -> Entry:
        """Raise the LookupError for an operation without an entry."""
        message = f"{self.name} has no entry for {operation!r}; it has {', '.join(self)}"
        raise LookupError(message)


def _always(arithmetic: Arithmetic) -> bool:
    del arithmetic
    return True


def _differences(arithmetic: Arithmetic) -> bool:
    """Whether logits keep all bits, and exponentials of equal ones are 1: of differences."""
    return arithmetic.exponent == "difference" and arithmetic.logits is None


def _wide_intermediates(arithmetic: Arithmetic) -> bool:
    """Whether no codes are between both products of an expert, and weights are as given."""
    narrow = str(arithmetic.intermediate).startswith("float8")
    codes = narrow or arithmetic.intermediate in BLOCK_FORMATS
    return not codes and arithmetic.routing == "given"


@dataclass(frozen=True)
class Operation:
    """What the oracle knows of one operation.

    Problems say themselves how much ``work`` they are and whether they are ``exact``.

    Attributes:
        problem: type of its problems.
        inputs: type of the record that implementations get; no two operations share one.
        materialise: makes that record of a problem, in the memory of an allocator.
        answer: the oracle's answer to a record.
        bounded: the answer as out and lse with bounds, for an arithmetic; None where answers are
            integers or copies, which laws compare bit by bit.
        exact: whether the answer to an exact problem must be met bit by bit in an arithmetic.
    """

    problem: type[Problem]
    inputs: type[Inputs]
    materialise: Callable[..., Inputs]
    answer: Callable[[Any], Any]
    bounded: Callable[[Any, Arithmetic], Bounded] | None = None
    exact: Callable[[Arithmetic], bool] = _always


OPERATIONS = Table("kernelproof.reference.operations.OPERATIONS", {
    "paged_attention": Operation(
        problems.AttentionProblem, records.PagedAttentionInputs, tensors.paged_inputs,
        oracle.attention, oracle.bounded_attention, _differences),
    "ragged_attention": Operation(
        problems.AttentionProblem, records.RaggedAttentionInputs, tensors.ragged_inputs,
        oracle.attention, oracle.bounded_attention, _differences),
    "merge_state": Operation(
        problems.MergeProblem, records.MergeInputs, tensors.merge_inputs,
        oracle.merged, oracle.bounded_merge, _differences),
    "append_paged_kv": Operation(
        problems.AttentionProblem, records.AppendInputs, tensors.append_inputs, oracle.append),
    "build_metadata": Operation(
        problems.MetadataProblem, records.MetadataInputs, tensors.metadata_inputs, oracle.metadata),
    "slice_context_parallel": Operation(
        problems.ContextParallelProblem, context_parallel.ContextParallelInputs,
        context_parallel.context_parallel_inputs, context_parallel.slice_of_rank),
    "map_slots": Operation(
        problems.SlotsProblem, slots.SlotInputs, slots.slot_inputs, slots.slots_of),
    "prepare_batch": Operation(
        problems.BatchProblem, preparation.BatchInputs, preparation.batch_inputs,
        preparation.prepared),
    "prepare_steps": Operation(
        problems.StepsProblem, steps.StepsInputs, steps.steps_inputs, steps.prepared_steps),
    "plan": Operation(problems.PlanProblem, plan.PlanInputs, plan.plan_inputs, planner.plan),
    "route": Operation(
        problems.RouteProblem, moe_records.RouteInputs, moe_tensors.route_inputs,
        oracle.routing, oracle.shapes_of_routing),
    "moe": Operation(
        problems.MoEProblem, moe_records.MoEInputs, moe_tensors.expert_inputs,
        oracle.experts, oracle.paired_experts, _wide_intermediates),
    "batched_moe": Operation(
        problems.BatchedMoEProblem, batched_moe.BatchedMoEInputs, batched_moe.batched_inputs,
        oracle.batched_experts, oracle.paired_batched_experts, _wide_intermediates),
    "quantize": Operation(
        problems.QuantizeProblem, quantize.QuantizeInputs, quantize.quantize_inputs,
        quantize.quantized),
    "norm_and_quantize": Operation(
        problems.NormQuantizeProblem, norm_quantize.NormQuantizeInputs,
        norm_quantize.norm_quantize_inputs, norm_quantize.normed),
    "rearrange": Operation(
        problems.RearrangeProblem, rearrange.RearrangeInputs, rearrange.rearrange_inputs,
        rearrange.rearranged),
    "rope_and_append": Operation(
        problems.RopeAppendProblem, rope_append.RopeAppendInputs, rope_append.rope_append_inputs,
        rope_append.roped),
})  # fmt: skip
"""Every operation, in the order in which commands name them."""
PROBLEM_TYPES: dict[str, type[Problem]] = {
    each.problem.kind: each.problem for each in OPERATIONS.values()
}
"""Types of problem, by their kind in JSON."""
_each: Any
for _each in PROBLEM_TYPES.values():
    hints_of(_each)  # now: an implementation may take modules out of sys.modules


def operation_of(inputs: Inputs) -> str:
    """Return the operation that a record of inputs belongs to.

    Raises:
        LookupError: it is no operation's; the table is named.
    """
    for name, each in OPERATIONS.items():
        if type(inputs) is each.inputs:
            return name
    message = f"no operation of {OPERATIONS.name} has inputs of type {type(inputs).__name__}"
    raise LookupError(message)


def bounded_answer(inputs: Inputs, arithmetic: Arithmetic) -> Bounded:
    """Return the oracle's answer to a record with the bounds for an arithmetic.

    Raises:
        LookupError: the record is no operation's, or its answers are compared bit by bit.
    """
    name = operation_of(inputs)
    bounded = OPERATIONS[name].bounded
    if bounded is None:
        message = f"{OPERATIONS.name} has no bound for {name!r}: its answers are compared bitwise"
        raise LookupError(message)
    return bounded(inputs, arithmetic)


def problem_from_json(data: Mapping[str, Any]) -> Problem:
    """Read a problem back from what ``to_json`` wrote.

    Raises:
        ValueError: another schema, an unknown type or field, a value of the wrong type or outside
            its range; the field is named.
    """
    return read_problem(data, PROBLEM_TYPES)


def materialise(
    problem: Problem,
    device: torch.device | str = "cpu",
    *,
    unused: float = CANARY,
    garbage: int | None = None,
    tight: bool = False,
    apart: Mapping[str, Sequence[int]] | None = None,
    **options: int,
) -> Inputs:
    """Make the tensors of a problem.

    Args:
        problem: what to make.
        device: where; the bits are the same everywhere.
        unused: fills whatever must not be read: canaries, pages of no request, the tail of each
            last page. NaN poisons them.
        garbage: where engines have padded the tensors, what integers hold behind them: then whole
            rows of ``unused`` lie behind tensors of floats, and this number behind integers.
        tight: let the memory of each tensor end where the tensor does, without a fence behind it.
        apart: names of tensors whose rows lie more than 2^32 elements apart, see ``Allocator``.
        options: what a problem's operation takes besides: ``step`` of a MetadataProblem.

    Returns:
        The record of the problem's operation, see ``reference.tensors.inputs``.
    """
    home = Allocator(torch.device(device), unused, garbage, tight=tight, apart=apart)
    return OPERATIONS[problem.operation].materialise(problem, home, **options)
