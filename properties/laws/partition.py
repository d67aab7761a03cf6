"""Laws of attention to parts of a batch: chunks of queries, ranges of keys, requests reordered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...reference import (
    Arithmetic,
    AttentionOutput,
    AttentionProblem,
    merge_error_bound,
    merge_states,
)
from ...reference.attention.bounds import Bounded
from ...reference.problems.mask_fields import NO_MASK, PLAIN_MASK, WITHOUT_TABLES
from ...reference.tensors.inputs import AttentionInputs
from ..verdicts.comparison import Result, agree, worse
from ..verdicts.subject import Subject
from ..verdicts.verdict import VACUOUS, Verdict
from .general import run_on
from .law import ATTENTION, Choice, Law, Values, chosen
from .selection import Part, described, rows_of, select, whole

EXACT_MERGE = Arithmetic(accumulate="float64")
"""Partial states are merged by the oracle, whose own error is far below theirs."""


CAUSAL: dict[str, Any] = {
    "causal": True, "causal_by_request": False, "tree": 0, **WITHOUT_TABLES
}  # fmt: skip
"""Fields of a batch whose rows see the keys up to their own, and no fewer."""


def _with_several(phases: Values) -> Values:
    return phases if {"prefill", "chunk", "verify"} & set(phases) else ()


def _windows(values: Values) -> Values:
    return tuple(value for value in values if value >= 0)


SEVERAL_QUERIES: tuple[Choice, ...] = (
    {"phase": _with_several, "causal": chosen},
    {"verify": chosen, "causal": chosen},
)
"""Requests of several query tokens, which are causal: these laws make them so."""


class _Batch:
    """A problem's inputs and what the subject makes of them, whole and in parts."""

    def __init__(self, subject: Subject, problem: AttentionProblem) -> None:
        self.subject, self.problem = subject, problem
        self.inputs: AttentionInputs = subject.materialise(problem)

    def whole(self) -> tuple[Result, Bounded]:
        """Run on all of it."""
        return run_on(self.subject, self.problem, self.inputs)

    def supports(self, parts: Sequence[Part]) -> bool:
        """Whether the subject claims the batch of these parts."""
        other = described(self.problem, parts)
        return other is not None and self.subject.supports(other)

    def part(self, parts: Sequence[Part]) -> tuple[Result, Bounded]:
        """Run on a batch of parts."""
        other = described(self.problem, parts)
        assert other is not None  # noqa: S101  `supports` has been asked
        return run_on(self.subject, other, select(self.inputs, parts))

    def rows(self, parts: Sequence[Part]) -> torch.Tensor:
        """Return the rows of the whole batch that the parts' queries are."""
        return rows_of(self.inputs, parts)


def _pick(result: Result, bounded: Bounded, rows: torch.Tensor) -> tuple[Result, AttentionOutput]:
    """Return some rows of a result and of its bound."""
    out, lse = result
    bound = AttentionOutput(bounded.bound.out[rows], bounded.bound.lse[rows])
    return (out[rows], None if lse is None else lse[rows]), bound


def _same_rows(
    batch: _Batch, ran: tuple[Result, Bounded], parts: Sequence[Part], other: tuple[Result, Bounded]
) -> Verdict:
    """Compare a run of parts with their rows of the whole batch."""
    expected, bound = _pick(*ran, batch.rows(parts))
    result, bounded = other
    return agree(expected, result, (bound, bounded.bound), exact=batch.subject.exact(batch.problem))


def _about(judged: AttentionProblem, given: AttentionProblem, verdict: Verdict) -> Verdict:
    """Return a bad verdict with the problem that it is about, where that is not the given one."""
    return replace(verdict, about=judged.to_json() if verdict.bad and judged != given else None)


def chunked_prefill(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Prefill in two chunks, the second one over the keys of both: as in one shot."""
    given, problem = problem, replace(problem, **CAUSAL)
    halves: tuple[list[Part], list[Part]] = ([], [])
    for request, queries, (keys,) in whole(problem):
        cut = len(queries) // 2 if len(queries) <= len(keys) else 0
        seen = max(len(keys) - len(queries) + cut, 0)
        halves[0].append(Part(request, range(cut), (range(seen),)))
        halves[1].append(Part(request, range(cut, len(queries)), (keys,)))
    if not any(part.queries for part in halves[0]) or not subject.supports(problem):
        return VACUOUS
    batch = _Batch(subject, problem)
    if not all(batch.supports(parts) for parts in halves):
        return VACUOUS
    ran = batch.whole()
    verdict = Verdict("PASS", ratio=0.0)
    for parts in halves:
        verdict = worse(verdict, _same_rows(batch, ran, parts, batch.part(parts)))
    return _about(problem, given, verdict)


def appended_pairs(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Append query and key pairs to a causal batch: the rows before them stay as they were."""
    given, problem = problem, replace(problem, **CAUSAL)
    parts = []
    for request, queries, (keys,) in whole(problem):
        added = min(len(queries) // 2 + len(queries) % 2, len(keys))
        added = added if len(queries) <= len(keys) else 0
        left = range(len(queries) - added)
        parts.append(Part(request, left, (range(len(keys) - added),)))
    fewer = sum(len(part.queries) for part in parts)
    if not fewer or fewer == problem.num_tokens or not subject.supports(problem):
        return VACUOUS
    batch = _Batch(subject, problem)
    if not batch.supports(parts):
        return VACUOUS
    before = batch.part(parts)
    return _about(problem, given, _same_rows(batch, batch.whole(), parts, before))


def verify_chain(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Decode some of each request's tokens one by one, each over the keys up to it, as requests."""
    given, problem = problem, replace(problem, **CAUSAL)
    parts = [
        Part(request, range(row, row + 1), (range(len(keys) - len(queries) + row + 1),))
        for request, queries, (keys,) in whole(problem)
        if len(queries) <= len(keys)
        for row in dict.fromkeys((*queries[:2], *queries[len(queries) // 2 :][:1], *queries[-1:]))
    ]
    if problem.most_queries <= 1 or not parts or not subject.supports(problem):
        return VACUOUS
    batch = _Batch(subject, problem)
    if not batch.supports(parts):
        return VACUOUS
    verdict = _same_rows(batch, batch.whole(), parts, batch.part(parts))
    return _about(problem, given, verdict)


def split_kv(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Attend to two ranges of the keys and merge the states: attention to all of them."""
    one_query_each = max(problem.query_lens, default=0) <= 1
    problem = replace(
        problem,
        **PLAIN_MASK,
        tree=0,
        sinks=False,
        alibi=False,
        window_left=-1,
        window_right=-1,
        output_scale=None,
        causal=problem.causal and one_query_each,
        causal_by_request=problem.causal_by_request and one_query_each,
    )
    size = problem.page_size
    halves: tuple[list[Part], list[Part]] = ([], [])
    for request, queries, (keys,) in whole(problem):
        cut = min(-(-len(keys) // (2 * size)) * size, len(keys))
        halves[0].append(Part(request, queries, (range(cut),)))
        halves[1].append(Part(request, queries, (range(cut, len(keys)),)))
    if not any(part.num_keys for part in halves[1]) or not subject.supports(problem):
        return VACUOUS
    batch = _Batch(subject, problem)
    if not all(batch.supports(parts) for parts in halves):
        return VACUOUS
    states, answers, lses = [], [], []
    for parts in halves:
        (out, lse), bounded = batch.part(parts)
        if lse is None:
            return VACUOUS
        states.append(out.double())
        lses.append(lse.double())
        answers.append(bounded)
    outs, all_lses = torch.stack(states), torch.stack(lses)
    if outs.isnan().any() or all_lses.isnan().any():
        return VACUOUS  # what parity says of each range
    merged = merge_states(outs, all_lses)
    bound = merge_error_bound(
        outs,
        all_lses,
        out_errors=torch.stack([bounded.bound.out for bounded in answers]),
        lse_errors=torch.stack([bounded.bound.lse for bounded in answers]),
        arithmetic=EXACT_MERGE,
        out_dtype=torch.float64,
    )
    result, bounded = batch.whole()
    return agree((merged.out, merged.lse), result, (bound, bounded.bound), exact=False)


def keys_behind_window(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Drop the pages of keys that lie behind every row's window: nothing changes."""
    # First keys and chunks count positions from the first key, which goes.
    problem = replace(problem, **WITHOUT_TABLES, tree=0, chunk=0, sink_tokens=0)
    longest = max(
        (s - t for t, s in zip(problem.query_lens, problem.seq_lens, strict=True)), default=0
    )
    for window in dict.fromkeys((problem.window_left, max(longest, 0) // 2, 0)):
        windowed = replace(problem, window_left=window)
        parts = [_behind(part, windowed) for part in whole(windowed)]
        dropped = any(part.keys[0].start for part in parts)
        if window >= 0 and dropped and subject.supports(windowed):
            break
    else:
        return VACUOUS
    batch = _Batch(subject, windowed)
    if not batch.supports(parts):
        return VACUOUS
    verdict = _same_rows(batch, batch.whole(), parts, batch.part(parts))
    return _about(windowed, problem, verdict)


def _behind(part: Part, problem: AttentionProblem) -> Part:
    """Leave out a request's leading pages that no row's window reaches."""
    (keys,) = part.keys
    if len(part.queries) > len(keys):
        return part
    first_seen = max(len(keys) - len(part.queries) - problem.window_left, 0)
    kept = range(first_seen // problem.page_size * problem.page_size, len(keys))
    return part._replace(keys=(kept,))


def doubled_keys(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Attend to every key twice: each takes half its weight, and lse grows by log 2."""
    one_query_each = max(problem.query_lens, default=0) <= 1
    problem = replace(
        problem,
        **PLAIN_MASK,
        tree=0,
        sinks=False,
        alibi=False,
        window_left=-1,
        window_right=-1,
        causal=problem.causal and one_query_each,
        causal_by_request=problem.causal_by_request and one_query_each,
    )
    size = problem.page_size
    full = [range(len(keys) // size * size) for _, _, (keys,) in whole(problem)]
    pairs = list(zip(whole(problem), full, strict=True))
    once = [part._replace(keys=(keys,)) for part, keys in pairs]
    twice = [part._replace(keys=(keys, keys)) for part, keys in pairs]
    if not any(part.num_keys and part.queries for part in once) or not subject.supports(problem):
        return VACUOUS
    batch = _Batch(subject, problem)
    if not (batch.supports(once) and batch.supports(twice)):
        return VACUOUS
    (out, lse), bounded = batch.part(once)
    expected: Result = (out, None if lse is None else lse.double() + math.log(2.0))
    result, other = batch.part(twice)
    verdict = agree(expected, result, (bounded.bound, other.bound), exact=False)
    if not verdict.bad:
        return verdict
    # Of requests shorter than a page, requests without keys have become.
    made = described(problem, twice)
    return replace(verdict, about=None if made is None else made.to_json())


def request_order(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Put the requests into another order: each keeps its rows."""
    problem = replace(problem, **NO_MASK, logits_bias="", tree=0)
    parts = whole(problem)[::-1]
    if len(parts) < 2 or not subject.supports(problem):  # noqa: PLR2004  nothing to reorder
        return VACUOUS
    batch = _Batch(subject, problem)
    if not batch.supports(parts):
        return VACUOUS
    return _same_rows(batch, batch.whole(), parts, batch.part(parts))


LAWS = (
    Law(
        "chunked_prefill",
        ATTENTION,
        chunked_prefill,
        "a prefill in two chunks equals the prefill in one",
        weight=0.5,
        looks_at=SEVERAL_QUERIES,
    ),
    Law(
        "appended_pairs",
        ATTENTION,
        appended_pairs,
        "query and key pairs appended to a causal batch leave earlier rows unchanged",
        weight=0.5,
        looks_at=SEVERAL_QUERIES,
    ),
    Law(
        "verify_chain",
        ATTENTION,
        verify_chain,
        "the last tokens of a request at once equal the decodes of each of them",
        weight=0.5,
        looks_at=SEVERAL_QUERIES,
    ),
    Law(
        "split_kv",
        ATTENTION,
        split_kv,
        "attention to two ranges of keys, merged, is attention to all of them (without sinks)",
        weight=0.5,
    ),
    Law(
        "keys_behind_window",
        ATTENTION,
        keys_behind_window,
        "keys behind every row's window change nothing",
        weight=0.5,
        looks_at=({"window_left": _windows},),
        overlap="chunked_prefill kills its bug when both chunks happen to hold the same queries",
    ),
    Law(
        "doubled_keys",
        ATTENTION,
        doubled_keys,
        "every key given twice takes half its weight: out is the same, lse grows by log 2",
        weight=0.5,
    ),
    Law(
        "request_order",
        ATTENTION,
        request_order,
        "the order of the requests does not matter",
        weight=0.5,
    ),
)
