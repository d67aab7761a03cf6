"""Laws of merging: states form a commutative monoid that attention maps into."""

from __future__ import annotations

import dataclasses

import torch

from ...reference import (
    AttentionOutput,
    AttentionProblem,
    MergeProblem,
    merge_error_bound,
    ragged_attention,
    unit_roundoff,
)
from ...reference.attention.bounds import Bounded
from ...reference.tensors.inputs import MergeInputs
from ..verdicts.comparison import Result, against_oracle, agree, fail, within, worse
from ..verdicts.contained import Stop
from ..verdicts.subject import Subject
from ..verdicts.verdict import VACUOUS, Verdict
from .law import MERGE, Law

FLOAT32_LSE = 2.0**-23
"""Relative error of an lse that went through float32 and a change of base."""


class _Pair:
    """Merges through the subject and carries the bound of what it merged along."""

    def __init__(self, subject: Subject, problem: MergeProblem, inputs: MergeInputs) -> None:
        self.subject, self.problem, self.inputs = subject, problem, inputs

    def states(self, outs: torch.Tensor, lses: torch.Tensor) -> MergeInputs:
        """Make a record of these states [states, tokens, heads, dim]."""
        return dataclasses.replace(
            self.inputs, outs=outs.contiguous(), lses=lses.contiguous(), apart=None
        )

    def merge(
        self,
        outs: torch.Tensor,
        lses: torch.Tensor,
        errors: AttentionOutput | None = None,
    ) -> tuple[Result, AttentionOutput]:
        """Merge states that are off by at most ``errors``; give the result and its bound."""
        record = self.states(outs, lses)
        merged = self.subject.run_operation(self.problem, record)
        if merged[0].isnan().any():
            count, total = int(merged[0].isnan().sum()), merged[0].numel()
            message = f"merging {len(outs)} states gives NaN ({count} of {total} elements of out)"
            raise Stop(fail("nan", message))
        bound = merge_error_bound(
            outs,
            lses,
            out_errors=None if errors is None else errors.out,
            lse_errors=None if errors is None else errors.lse,
            arithmetic=self.subject.implementation.arithmetic,
            out_dtype=record.out_dtype,
        )
        return (merged[0].clone(), None if merged[1] is None else merged[1].clone()), bound


def _pair(subject: Subject, problem: MergeProblem, num_states: int) -> _Pair | None:
    """Materialise the problem with this many states; None where pairs are not supported."""
    problem = _dense(problem)
    two = dataclasses.replace(problem, num_states=2)
    if not subject.supports(two):
        return None
    problem = dataclasses.replace(problem, num_states=num_states)
    return _Pair(subject, two, subject.materialise(problem))


def _dense(problem: MergeProblem) -> MergeProblem:
    """Return the problem with whole, dense states: a law's own are so, and parity has others."""
    return dataclasses.replace(
        problem, strides="", context="all", inf_marks_empty=False, output_scale=None
    )


def identity(subject: Subject, problem: MergeProblem) -> Verdict:
    """Merge with the state of no keys, from both sides: nothing changes."""
    pair = _pair(subject, problem, 1)
    if pair is None:
        return VACUOUS
    outs, lses = pair.inputs.outs, pair.inputs.lses
    nothing, minus_infinity = torch.zeros_like(outs), torch.full_like(lses, -torch.inf)
    verdict = Verdict("PASS", ratio=0.0)
    for side in ((0, 1), (1, 0)):
        both_outs = torch.cat([(outs, nothing)[i] for i in side])
        both_lses = torch.cat([(lses, minus_infinity)[i] for i in side])
        (out, lse), bound = pair.merge(both_outs, both_lses)
        found = within("out", out, outs[0].double(), bound.out)
        if lse is not None:
            found = worse(found, within("lse", lse, lses[0].double(), bound.lse))
        if found.bad:
            where = "left" if side == (1, 0) else "right"
            return dataclasses.replace(
                found, message=f"(0, -inf) merged from the {where}: {found.message}"
            )
        verdict = worse(verdict, found)
    return verdict


def commutativity(subject: Subject, problem: MergeProblem) -> Verdict:
    """Merge the states in reverse order."""
    problem = _dense(problem)
    if not subject.supports(problem):
        return VACUOUS
    pair = _Pair(subject, problem, subject.materialise(problem))
    outs, lses = pair.inputs.outs, pair.inputs.lses
    forwards, bound = pair.merge(outs, lses)
    backwards, other_bound = pair.merge(outs.flip(0), lses.flip(0))
    return agree(forwards, backwards, (bound, other_bound), exact=subject.exact(problem))


def associativity(subject: Subject, problem: MergeProblem) -> Verdict:
    """Merge three states from the left and from the right."""
    pair = _pair(subject, problem, 3)
    if pair is None:
        return VACUOUS
    left = _fold(pair, (0, 1, 2))
    right = _fold(pair, (2, 1, 0))
    if left is None or right is None:
        return VACUOUS
    return agree(left[0], right[0], (left[1], right[1]), exact=subject.exact(problem))


def many_at_once(subject: Subject, problem: MergeProblem) -> Verdict:
    """Merge all states in one call, and one after the other."""
    pair = _pair(subject, problem, problem.num_states)
    if pair is None or problem.num_states < 3:  # noqa: PLR2004  two at once are a pair
        return VACUOUS
    at_once, bound = _Pair(subject, problem, pair.inputs).merge(pair.inputs.outs, pair.inputs.lses)
    folded = _fold(pair, tuple(range(problem.num_states)))
    if folded is None:
        return VACUOUS
    return agree(at_once, folded[0], (bound, folded[1]), exact=subject.exact(problem))


def _fold(pair: _Pair, order: tuple[int, ...]) -> tuple[Result, AttentionOutput] | None:
    """Merge states one after the other in this order; None where the subject gives no lse."""
    outs, lses = pair.inputs.outs, pair.inputs.lses
    first = order[0]
    result: Result = (outs[first], lses[first])
    bound = AttentionOutput(
        torch.zeros_like(outs[first], dtype=torch.float64),
        torch.zeros_like(lses[first], dtype=torch.float64),
    )
    for index in order[1:]:
        out, lse = result
        if lse is None:
            return None
        if out.shape != outs[index].shape or lse.shape != lses[index].shape:
            return None
        errors = AttentionOutput(
            torch.stack([bound.out, torch.zeros_like(bound.out)]),
            torch.stack([bound.lse, torch.zeros_like(bound.lse)]),
        )
        result, bound = pair.merge(
            torch.stack([out.to(outs.dtype), outs[index]]),
            torch.stack([lse.to(lses.dtype), lses[index]]),
            errors,
        )
    return result, bound


def union(subject: Subject, problem: MergeProblem) -> Verdict:
    """Attend to parts of the keys and merge: that is attention to all of them (without sinks)."""
    problem = _dense(problem)
    if not subject.supports(problem) or not problem.num_tokens:
        return VACUOUS
    sizes = [(problem.seed + 3 * state) % 7 for state in range(problem.num_states)]
    sizes[0] = max(sizes[0], 1)  # Merging nothing but empty states is parity's to judge.
    attention = AttentionProblem(
        operation="ragged_attention",
        query_lens=(problem.num_tokens,),
        seq_lens=(sum(sizes),),
        num_kv_heads=problem.num_heads,
        head_dim_qk=16,
        head_dim_vo=problem.head_dim,
        dtype=problem.dtype,
        seed=problem.seed,
    )
    inputs = subject.materialise(attention)
    tokens = inputs.qo_indptr
    parts, start = [], 0
    for size in sizes:
        keys = slice(start, start + size)
        indptr = torch.tensor([0, size], dtype=torch.int32)
        parts.append(
            ragged_attention(inputs.q, inputs.k[keys], inputs.v[keys], tokens, indptr, causal=False)
        )
        start += size
    exact_outs = torch.stack([part.out for part in parts])
    exact_lses = torch.stack([part.lse for part in parts])
    record = dataclasses.replace(
        subject.materialise(problem),
        outs=exact_outs.to(inputs.q.dtype),
        apart=None,
        lses=exact_lses.to(torch.float32),
    )
    whole = ragged_attention(inputs.q, inputs.k, inputs.v, tokens, inputs.kv_indptr, causal=False)
    finite_lses = torch.where(exact_lses.isneginf(), 0.0, exact_lses)
    bound = merge_error_bound(
        record.outs,
        record.lses,
        out_errors=unit_roundoff(inputs.q.dtype) * exact_outs.abs(),
        lse_errors=FLOAT32_LSE * finite_lses.abs(),
        arithmetic=subject.implementation.arithmetic,
        out_dtype=record.out_dtype,
    )
    result = subject.run_operation(problem, record)
    return against_oracle(result, Bounded(whole, bound), exact=False)


LAWS = (
    Law("merge_identity", MERGE, identity, "merging with (0, -inf) changes nothing"),
    Law("merge_commutativity", MERGE, commutativity, "the order of states does not matter"),
    Law("merge_associativity", MERGE, associativity, "(a b) c equals a (b c)"),
    Law(
        "merge_many_at_once",
        MERGE,
        many_at_once,
        "merging many at once equals pair by pair",
        overlap="others kill its bug when the draw before happened to merge more states",
    ),
    Law(
        "merge_union",
        MERGE,
        union,
        "merging attention over parts of the keys is attention over all of them",
    ),
)
