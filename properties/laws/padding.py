"""Laws of what engines leave around a batch: spoilt rows, padded requests, bounds with slack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...reference import (
    AttentionOutput,
    AttentionProblem,
    BatchedMoEProblem,
    MoEProblem,
    RouteProblem,
)
from ...reference.problems import MAX_SEQ_LEN
from ...reference.problems.mask_fields import WITHOUT_TABLES
from ...reference.tensors.inputs import AttentionInputs, PagedAttentionInputs
from ...reference.tensors.values import choose
from ..verdicts.appended import by_slot
from ..verdicts.comparison import (
    Result,
    against_oracle,
    agree,
    bitwise,
    fail,
    same_bits,
    worse,
)
from ..verdicts.operations import APPENDED
from ..verdicts.routes import agree_routes, misshapen
from ..verdicts.routes import guarded as guarded_route
from ..verdicts.snapshot import Snapshot
from ..verdicts.subject import Subject
from ..verdicts.verdict import VACUOUS, Verdict
from .append import appended
from .batches import described
from .expert_calls import answer, guarded, same
from .general import expectation_of, kept, run, run_on
from .law import APPEND, ATTENTION, BATCHED, MOE, PAGED, ROUTE, Law

SPOILS = ("nan", "nan", "inf", "-inf", "max")
"""What a spoilt row holds, each as often as it is named. NaN is what engines leave most often."""
CODE_OF_NAN, LARGEST_CODE = 0x7F, {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}
"""Codes of one byte: NaN of both FP8 types, which have no infinity or must not, and the largest."""
PADDING = ((2, 0), (1, 0), (0, 0))
"""(query_len, seq_len) of a padded request: two tokens of a verify step, a decode, nothing."""
MOST_PADDING = 3
"""Most requests that are added to a batch."""
MODEL_KEYS = 2**13
"""Keys by which a bound is larger that is a model's length, as under a graph."""


def row_containment(subject: Subject, problem: Any) -> Verdict:  # noqa: ANN401  of the operations
    """Spoil the rows of one request, or of one token: no other row changes, and the call ends."""
    return CONTAINED[problem.operation](subject, problem)


def _requests_contained(subject: Subject, problem: AttentionProblem) -> Verdict:
    asking = [i for i, t in enumerate(problem.query_lens) if t]
    if len(asking) < 2:  # noqa: PLR2004  nobody else is there
        return VACUOUS
    request = asking[choose(problem.seed, "spoilt request", 0, len(asking))]
    (first, bounded), inputs = run(subject, problem), subject.materialise(problem)
    begin = sum(problem.query_lens[:request])
    rows = slice(begin, begin + problem.query_lens[request])
    _spoil(inputs.q[rows], problem.seed)
    if choose(problem.seed, "spoilt keys", 0, 2) and not problem.shared_prefix_pages:
        _spoil_keys(inputs, problem, request)
    second = kept(subject.run_operation(problem, inputs))
    others = torch.ones(problem.num_tokens, dtype=torch.bool, device=inputs.q.device)
    others[rows] = False
    verdict = _rows_agree(subject, problem, first, second, bounded.bound, others)
    return _said(verdict, f"with {_what(problem.seed)} in request {request} alone")


def _appends_contained(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Spoil a new token: every slot but its own holds what it holds without."""
    if not problem.num_tokens:
        return VACUOUS
    token = choose(problem.seed, "spoilt token", 0, problem.num_tokens)
    inputs, spoilt = subject.materialise(problem), subject.materialise(problem)
    page, slot = divmod(int(inputs.slot_mapping[token]), problem.page_size)
    for rows in (spoilt.k, spoilt.v):
        _spoil(rows[token], problem.seed)
    verdict = Verdict("PASS", ratio=0.0)
    runs = (appended(subject, problem, spoilt), appended(subject, problem, inputs))
    for name, cache, wanted in zip(APPENDED, *runs, strict=False):
        pair = [each.clone(memory_format=torch.contiguous_format) for each in (cache, wanted)]
        for each in pair:
            by_slot(each, problem.kv_layout).view(torch.uint8)[page, slot] = 0
        if not same_bits(*pair):
            verdict = worse(verdict, bitwise(name, *pair))
    return _said(verdict, f"with {_what(problem.seed)} in new token {token} alone")


def _spoilt_token(problem: MoEProblem | RouteProblem) -> tuple[int, torch.Tensor]:
    """Return the token that is spoilt, and which tokens are not."""
    token = choose(problem.seed, "spoilt token", 0, problem.num_tokens)
    return token, torch.arange(problem.num_tokens) != token


def _experts_contained(subject: Subject, problem: MoEProblem) -> Verdict:
    if problem.num_tokens < 2:  # noqa: PLR2004  nobody else is there
        return VACUOUS
    token, others = _spoilt_token(problem)
    inputs = subject.materialise(problem)
    if not isinstance(inputs.hidden, torch.Tensor):
        return VACUOUS  # codes and scales, of which a NaN is another thing each
    first, bound = answer(subject, problem, inputs)
    spoilt = subject.materialise(problem)
    _spoil(spoilt.hidden[token : token + 1], problem.seed)
    second = kept(subject.run_operation(problem, guarded(spoilt)))[0]
    others = others.to(bound.device)
    if first.shape != second.shape:
        return fail("shape", f"out has shape {list(second.shape)}, not {list(first.shape)}")
    verdict = same(second[others], first[others], 2 * bound[others], exact=subject.exact(problem))
    return _said(verdict, f"with {_what(problem.seed)} in token {token} alone")


def _rows_contained(subject: Subject, problem: BatchedMoEProblem) -> Verdict:
    """Spoil a row in use, or one behind a count: no other row changes."""
    inputs, spoilt = subject.materialise(problem), subject.materialise(problem)
    if not isinstance(inputs.hidden, torch.Tensor):
        return VACUOUS  # codes and scales, of which a NaN is another thing each
    (first, _), bounded = run_on(subject, problem, inputs)
    rows = problem.num_experts * problem.most_rows
    expert, row = divmod(choose(problem.seed, "spoilt row", 0, rows), problem.most_rows)
    _spoil(spoilt.hidden[expert, row : row + 1], problem.seed)
    second = kept(subject.run_operation(problem, spoilt))[0]
    others = torch.ones(first.shape[:2], dtype=torch.bool, device=first.device)
    others[expert, row] = False
    bound = 2 * bounded.bound.out[others]
    verdict = same(second[others], first[others], bound, exact=subject.exact(problem))
    return _said(verdict, f"with {_what(problem.seed)} in row {row} of expert {expert} alone")


def _routes_contained(subject: Subject, problem: RouteProblem) -> Verdict:
    if problem.num_tokens < 2:  # noqa: PLR2004  nobody else is there
        return VACUOUS
    token, others = _spoilt_token(problem)
    inputs = subject.materialise(problem)
    first = kept(subject.run_operation(problem, guarded_route(inputs)))
    spoilt = guarded_route(inputs)
    _spoil(spoilt.logits[token : token + 1], problem.seed)
    second = kept(subject.run_operation(problem, spoilt))
    wrong = misshapen(inputs, first) or misshapen(inputs, second)
    if wrong is not None:
        return wrong
    said = f"with {_what(problem.seed)} in token {token} alone"
    ids = second[1]
    assert ids is not None  # noqa: S101  of route there are always both
    chosen: list[int] = ids[token].tolist()
    # Experts sort the slots by these numbers: one outside is a write outside.
    if min(chosen) < 0 or max(chosen) >= inputs.logits.shape[1]:
        return fail("shape", f"{said}: it has ids that are no expert's: {chosen}")
    if len(set(chosen)) < len(chosen):
        return fail("shape", f"{said}: it has an expert twice: {chosen}")
    others = others.to(ids.device)
    rows = inputs.of_tokens(others)
    pairs = [(each[0][others], each[1][others]) for each in (first, second) if each[1] is not None]
    return _said(agree_routes(subject.implementation, rows, *pairs), said)


CONTAINED: dict[str, Callable[[Subject, Any], Verdict]] = {
    **dict.fromkeys(ATTENTION, _requests_contained),
    **dict.fromkeys(APPEND, _appends_contained),
    **dict.fromkeys(ROUTE, _routes_contained),
    **dict.fromkeys(MOE, _experts_contained),
    **dict.fromkeys(BATCHED, _rows_contained),
}
"""Checks of ``row_containment`` by operation."""


def _what(seed: int) -> str:
    return SPOILS[choose(seed, "spoilt", 0, len(SPOILS))]


def _spoil(tensor: torch.Tensor, seed: int) -> None:
    """Overwrite a tensor with what follows from the seed."""
    what = _what(seed)
    if tensor.element_size() == 1:
        code = LARGEST_CODE.get(tensor.dtype, CODE_OF_NAN) if what == "max" else CODE_OF_NAN
        tensor.view(torch.uint8).fill_(code)
    else:
        tensor.fill_(torch.finfo(tensor.dtype).max if what == "max" else float(what))


def _spoil_keys(inputs: AttentionInputs, problem: AttentionProblem, request: int) -> None:
    """Overwrite the keys and values of a request, whole pages where there are any."""
    caches: Sequence[torch.Tensor] = (inputs.keys, inputs.values)
    if isinstance(inputs, PagedAttentionInputs):
        begin, end = inputs.metadata.paged_kv_indptr[request : request + 2].tolist()
        for page in inputs.metadata.paged_kv_indices[begin:end].tolist():
            for cache in caches:
                _spoil(cache[page], problem.seed)
        return
    begin = sum(problem.seq_lens[:request])
    for each in caches:
        _spoil(each[begin : begin + problem.seq_lens[request]], problem.seed)


def _rows_agree(
    subject: Subject,
    problem: AttentionProblem,
    first: Result,
    second: Result,
    bound: AttentionOutput,
    rows: torch.Tensor | slice,
) -> Verdict:
    """Check that two runs agree in some rows of theirs."""

    def some(result: Result) -> Result:
        return result[0][rows], None if result[1] is None else result[1][rows]

    bounds = AttentionOutput(bound.out[rows], bound.lse[rows])
    if first[0].shape != second[0].shape:
        shapes = f"{list(second[0].shape)}, not {list(first[0].shape)}"
        return fail("shape", f"out has shape {shapes}")
    return agree(some(first), some(second), (bounds, bounds), exact=subject.exact(problem))


def _said(verdict: Verdict, when: str) -> Verdict:
    return replace(verdict, message=f"{when}: {verdict.message}") if verdict.bad else verdict


def padded_batch(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Add requests without keys, as engines do to fill a graph: the others do not see them.

    Their queries are NaN, and their rows of the block table zeros or another request's pages.
    """
    if not problem.num_tokens:
        return VACUOUS
    count = 1 + choose(problem.seed, "padding", 0, MOST_PADDING)
    begin = choose(problem.seed, "padding", 1, len(PADDING))
    for queries, keys in PADDING[begin:] + PADDING[:begin]:
        if problem.tree and queries > keys:
            continue  # there is no such tree
        padded = replace(
            problem,
            query_lens=problem.query_lens + (queries,) * count,
            seq_lens=problem.seq_lens + (keys,) * count,
            request_ids=(*problem.ids, *(max(problem.ids) + 1 + i for i in range(count))),
        )
        if subject.supports(padded):
            return _unseen(subject, problem, padded)
    return VACUOUS


def _unseen(subject: Subject, problem: AttentionProblem, padded: AttentionProblem) -> Verdict:
    """Check that a batch answers as before with more requests behind it."""
    first, bounded = run(subject, problem)
    inputs = subject.materialise(padded)
    tokens, requests = problem.num_tokens, problem.num_requests
    if padded.num_tokens > tokens:
        inputs.q[tokens:].view(torch.uint8).fill_(0xFF if inputs.q.element_size() > 1 else 0x7F)
    if isinstance(inputs, PagedAttentionInputs):
        stale = choose(problem.seed, "stale pages", 0, 2)
        longest = max(range(requests), key=problem.seq_lens.__getitem__)
        table, pages = inputs.block_table, -(-problem.most_keys // problem.page_size)
        table[requests:] = 0
        if stale:
            table[requests:, :pages] = table[longest, :pages].clone()
    before = Snapshot(inputs)
    out, lse = kept(subject.run_operation(padded, inputs))
    said = f"with {padded.num_requests - requests} padded requests"
    wrote = [*before.changed_views(), *before.changed_outside()]
    buffer = subject.written_outside() if subject.implementation.writes_out else None
    wrote += [buffer] if buffer else []
    if wrote:
        return fail("wrote_outside", f"{said}: the call wrote into {', '.join(wrote)}")
    real: Result = (out[:tokens], None if lse is None else lse[:tokens])
    return _said(_rows_agree(subject, problem, first, real, bounded.bound, slice(None)), said)


def slack_bounds(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Raise the host's bounds of lengths, as engines do for a graph: nothing changes."""
    if "host_bounds" not in subject.implementation.features:
        return VACUOUS
    (first, bounded), inputs = run(subject, problem), subject.materialise(problem)
    queries, keys = inputs.max_q_len, inputs.max_kv_len
    if not queries:
        return VACUOUS
    widths = [_half_more(keys), _power_of_two(keys), keys + MODEL_KEYS]
    if isinstance(inputs, PagedAttentionInputs):
        widths.append(inputs.block_table.shape[1] * problem.page_size)
    slack = replace(
        inputs,
        q_len_bound=(queries, _half_more(queries), _power_of_two(queries))[
            choose(problem.seed, "slack of queries", 0, 3)
        ],
        kv_len_bound=widths[choose(problem.seed, "slack of keys", 0, len(widths))],
    )
    second = kept(subject.run_operation(problem, slack))
    said = (
        f"with max_q_len = {slack.max_q_len} in place of {queries} and "
        f"max_kv_len = {slack.max_kv_len} in place of {keys}"
    )
    return _said(_rows_agree(subject, problem, first, second, bounded.bound, slice(None)), said)


def exact_lengths(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Call with lengths of whole pages, write the exact ones to the same tensors, call again."""
    # A mask is of one number of keys.
    problem = replace(problem, **WITHOUT_TABLES, tree=0)
    size = problem.page_size
    bounds = tuple(min(-(-s // size) * size, MAX_SEQ_LEN) for s in problem.seq_lens)
    bound = replace(problem, seq_lens=bounds)
    supported = subject.supports(problem) and subject.supports(bound)
    if bound == problem or not (problem.num_tokens and supported):
        return VACUOUS
    inputs = subject.materialise(bound)
    if "host_bounds" in subject.implementation.features:
        inputs = replace(inputs, kv_len_bound=inputs.max_kv_len)
    exact = described(inputs, problem)
    expectation = expectation_of(subject, problem, exact)
    subject.run_operation(bound, inputs)
    for name, tensor in exact.metadata.tensors().items():
        getattr(inputs.metadata, name).copy_(tensor)
    result = subject.run_operation(problem, inputs)
    verdict = against_oracle(result, expectation, exact=subject.exact(bound))
    return _said(verdict, "after a call whose tensors held the lengths of whole pages")


def _half_more(length: int) -> int:
    return length + (length + 1) // 2


def _power_of_two(length: int) -> int:
    """Return the next power of two, above the length."""
    return 1 << length.bit_length()


LAWS = (
    Law(
        "row_containment",
        tuple(CONTAINED),
        row_containment,
        "whatever the rows of one request, or of one token, hold (NaN, infinities, the largest "
        "number), no other row changes, and the call ends",
        weight=0.5,
    ),
    Law(
        "padded_batch",
        ATTENTION,
        padded_batch,
        "requests without keys behind a batch, with queries of NaN and stale pages, change nothing "
        "and write nowhere",
        weight=0.5,
        overlap="laws that cut a batch make requests without keys too, and kill its bugs then",
    ),
    Law(
        "slack_bounds",
        ATTENTION,
        slack_bounds,
        "max_q_len and max_kv_len above the truth change nothing",
        weight=0.5,
        needs=("host_bounds",),
    ),
    Law(
        "exact_lengths",
        PAGED,
        exact_lengths,
        "exact lengths, written to the tensors that a call before was given with those of whole "
        "pages, are what the next call attends to",
        weight=0.3,
        looks_at=({"page_size": lambda values: tuple(each for each in values if each > 1)},),
    ),
)
