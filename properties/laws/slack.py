"""Laws of the memory around a batch: garbage in it changes nothing, and kernels do not touch it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from ...impl.features import INTERPRETED
from ...impl.gpu.touched_memory import TouchedMemory
from ...reference import AttentionProblem, MergeProblem
from ...reference.tensors.allocation import SLACK_ROWS
from ...reference.tensors.inputs import AttentionInputs, PagedAttentionInputs
from ...reference.tensors.values import choose
from ..verdicts.comparison import Result, against_oracle, fail
from ..verdicts.contained import Stop
from ..verdicts.snapshot import Snapshot
from ..verdicts.subject import Subject
from ..verdicts.verdict import VACUOUS, Verdict
from . import quantisers, routing
from .append import append_parity, rope_parity
from .general import expectation_of, kept, parity
from .law import (
    APPEND,
    ATTENTION,
    BATCH,
    BATCHED,
    CONTEXT_PARALLEL,
    MERGE,
    METADATA,
    MOE,
    NORM,
    QUANTIZE,
    REARRANGE,
    ROPE,
    ROUTE,
    SLOTS,
    Law,
)
from .metadata import builders, context_parallel, preparation, rearranging

INTEGERS = (2**31 - 1, -1, -(2**31), 2**30)
"""What integers hold behind a batch: a page, a slot, an offset or a length that does not exist."""
LSES = (torch.nan, torch.inf, -torch.inf, 3e38)
"""What lses hold behind a batch; -inf is also that of a state without keys."""
PARITY: dict[str, Callable[[Subject, Any], Verdict]] = {
    **dict.fromkeys((*ATTENTION, *MERGE, *MOE, *BATCHED), parity),
    **dict.fromkeys(ROUTE, routing.parity),
    **dict.fromkeys(APPEND, append_parity),
    **dict.fromkeys(METADATA, builders.parity),
    **dict.fromkeys(CONTEXT_PARALLEL, context_parallel.parity),
    **dict.fromkeys(SLOTS, builders.slots_parity),
    **dict.fromkeys(BATCH, preparation.parity),
    **dict.fromkeys(QUANTIZE, quantisers.parity),
    **dict.fromkeys(NORM, quantisers.norm_parity),
    **dict.fromkeys(REARRANGE, rearranging.parity),
    **dict.fromkeys(ROPE, rope_parity),
}
"""Comparisons of answers with the oracle's, by operation."""


SLACK = (
    *ATTENTION, *MERGE, *APPEND, *METADATA, *CONTEXT_PARALLEL, *SLOTS, *BATCH, *QUANTIZE, *NORM,
    *REARRANGE,
    *ROPE,
)  # fmt: skip
"""Operations whose tensors engines pad."""


def slack_rows(subject: Subject, problem: Any) -> Verdict:  # noqa: ANN401  of the operations
    """Check that garbage behind the rows of a batch changes nothing.

    Engines pad their tensors. The garbage lies behind the tensors in memory or, in three problems
    of four where the operation or the implementation allows it, in additional rows of the tensors.
    """
    if choose(problem.seed, "slack", 0, 4):
        if isinstance(problem, MergeProblem):
            return _more_states(subject, problem)
        if "padded_rows" in subject.implementation.features:
            return _more_rows(subject, problem)
    integer = INTEGERS[choose(problem.seed, "slack", 1, len(INTEGERS))]
    with subject.surrounded(unused=torch.nan, garbage=integer):
        return _said(PARITY[problem.operation](subject, problem), f"NaN and {integer} in memory")


def _more_states(subject: Subject, problem: MergeProblem) -> Verdict:
    """Check a merge of more tokens than the batch has, those behind it of garbage."""
    problem = replace(problem, strides="", context="all", lse_layout="")
    inputs = subject.materialise(problem)
    expectation = expectation_of(subject, problem, inputs)
    more = 1 + choose(problem.seed, "slack", 2, SLACK_ROWS)
    states, tokens, *row = inputs.outs.shape
    outs = inputs.outs.new_full((states, more, *row), torch.nan)
    lses = inputs.lses.new_full((states, more, row[0]), _lse(problem.seed))
    padded = replace(
        inputs,
        outs=torch.cat([inputs.outs, outs], dim=1),
        apart=None,
        lses=torch.cat([inputs.lses, lses], dim=1),
    )
    result = subject.run_operation(replace(problem, num_tokens=tokens + more), padded)
    verdict = against_oracle(_first(result, tokens), expectation, exact=subject.exact(problem))
    return _said(verdict, f"{more} tokens whose lses are {_lse(problem.seed)}")


def _lse(seed: int) -> float:
    return LSES[choose(seed, "slack", 3, len(LSES))]


def _more_rows(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Check a call whose queries, keys and tables have rows that belong to no request.

    Its out has as many rows as its q.
    """
    inputs: AttentionInputs = subject.materialise(problem)
    expectation = expectation_of(subject, problem, inputs)
    more = 1 + choose(problem.seed, "slack", 2, SLACK_ROWS)
    fields: dict[str, torch.Tensor] = {"q": _with_rows(inputs.q, more)}
    if isinstance(inputs, PagedAttentionInputs):
        table = inputs.block_table
        rows = table.new_full((more, table.shape[1]), INTEGERS[problem.seed % len(INTEGERS)])
        fields["block_table"] = torch.cat([table, rows])
    else:
        fields |= {"k": _with_rows(inputs.k, more), "v": _with_rows(inputs.v, more)}
    padded: AttentionInputs = replace(inputs, **fields)  # type: ignore[arg-type]
    before = Snapshot(padded)
    result = kept(subject.run_operation(problem, padded))
    wrote = [*before.changed_views(), *before.changed_outside()]
    buffer = subject.written_outside() if subject.implementation.writes_out else None
    said = f"{more} rows of NaN"
    if wrote or buffer:
        wrote += [buffer] if buffer else []
        return fail("wrote_outside", f"with {said} behind the batch: wrote into {', '.join(wrote)}")
    first = _first(result, problem.num_tokens)
    return _said(against_oracle(first, expectation, exact=subject.exact(problem)), said)


def _with_rows(rows: torch.Tensor, more: int) -> torch.Tensor:
    """Return a tensor with more rows of NaN."""
    code = 0xFF if rows.element_size() > 1 else 0x7F  # NaN in both FP8 types
    tail = rows.new_empty((more, *rows.shape[1:]))
    tail.view(torch.uint8).fill_(code)
    parts = [each.contiguous().view(torch.uint8) for each in (rows, tail)]
    return torch.cat(parts).view(rows.dtype)


def _first(result: Result, tokens: int) -> Result:
    out, lse = result
    return out[:tokens], None if lse is None else lse[:tokens]


def _said(verdict: Verdict, what: str) -> Verdict:
    if not verdict.bad:
        return verdict
    return replace(verdict, message=f"with {what} behind the batch: {verdict.message}")


def touched_memory(subject: Subject, problem: Any) -> Verdict:  # noqa: ANN401  of the operations
    """Check what a Triton kernel touches, and that what no load defines changes nothing.

    Where the kernel is wrong without garbage too, other laws say so. The last request of every
    second problem ends with its tables and tiles, so that one tile too many lies behind them.
    """
    asked, problem = problem, _filled(subject, problem)
    verdict = _touched(subject, problem)
    return verdict if problem is asked or not verdict.bad else _about(verdict, problem)


def _about(verdict: Verdict, problem: AttentionProblem) -> Verdict:
    return replace(verdict, about=problem.to_json())


def _filled(subject: Subject, problem: Any) -> Any:  # noqa: ANN401  of the operations
    """Return every second problem with a last request that is the longest, and of whole tiles."""
    tile = subject.implementation.tile
    attends = isinstance(problem, AttentionProblem) and problem.operation in ATTENTION
    if not (tile and attends and problem.num_tokens and choose(problem.seed, "filled", 0, 2)):
        return problem
    keys = -(-max(problem.seq_lens) // tile) * tile
    all_new = problem.query_lens[-1] == problem.seq_lens[-1] > 1
    queries = keys if all_new else problem.query_lens[-1]
    with suppress(ValueError):  # a regime for few keys has no longer requests
        filled = replace(
            problem,
            query_lens=(*problem.query_lens[:-1], queries),
            seq_lens=(*problem.seq_lens[:-1], keys),
        )
        return filled if subject.supports(filled) else problem
    return problem


def _touched(subject: Subject, problem: Any) -> Verdict:  # noqa: ANN401  of the operations
    memory = TouchedMemory()
    with subject.watched_by(memory):
        verdict = _in_tight_memory(subject, problem)
    if memory.outside:
        return fail("wrote_outside" if memory.wrote else "read_outside", memory.outside)
    if not memory.launches:
        return VACUOUS
    if not verdict.bad:
        return verdict
    if _in_tight_memory(subject, problem).bad:
        return VACUOUS
    undefined = "with NaN in the lanes that a load's mask leaves undefined"
    return replace(verdict, message=f"{undefined}: {verdict.message}")


def _in_tight_memory(subject: Subject, problem: Any) -> Verdict:  # noqa: ANN401  of the operations
    """Compare an answer with the oracle's where inputs end with their allocations."""
    try:
        with subject.surrounded(tight=True):
            return PARITY[problem.operation](subject, problem)
    except Stop as stop:
        return stop.verdict


LAWS = (
    Law(
        "touched_memory",
        tuple(PARITY),
        touched_memory,
        "a Triton kernel in the interpreter reads and writes nothing behind its tensors, and "
        "what a load leaves undefined changes nothing",
        weight=0.5,
        needs=(INTERPRETED,),
        pairs=True,
    ),
    Law(
        "slack_rows",
        SLACK,
        slack_rows,
        "garbage behind the rows of a batch, where engines pad queries, states, lses, scales, "
        "lengths, tables and slots, changes nothing",
        weight=0.5,
    ),
)
