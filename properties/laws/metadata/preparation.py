"""Laws of preparing batches: every entry of a buffer is compared, those behind the batch too."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....impl.features import FAR_SLOTS, INT32_SLOTS
from ....reference import PAD_SLOT, BatchProblem
from ....reference.attention.drafts import entry_counts
from ....reference.attention.preparation import OUTPUTS
from ....reference.tensors.preparation import BatchInputs, prepared
from ....reference.tensors.values import choose
from ...verdicts.comparison import bitwise
from ...verdicts.subject import Subject
from ...verdicts.verdict import PASS, VACUOUS, Verdict
from ..law import BATCH, Law, Values
from .builders import buffer_after, every_step, in_one_buffer

MORE_ENTRIES, MORE_ROWS = 1500, 9
"""Entries that a longer buffer has more, beyond a block of the kernels, and rows of a table: some
kernels launch a program for each row."""
OTHER_GARBAGE = 2**31 - 1
"""What entries hold that no request has, in another record of the same batch."""


def parity(subject: Subject, problem: BatchProblem) -> Verdict:
    """Check every entry of every step."""
    return every_step(subject, problem, prepared)


def one_buffer(subject: Subject, problem: BatchProblem) -> Verdict:
    """Prepare batch after batch in one buffer."""
    return in_one_buffer(subject, problem, prepared)


def parts(subject: Subject, problem: BatchProblem) -> Verdict:
    """Prepare the requests one by one and in another order: each has the entries that it had."""
    inputs = subject.materialise(problem)
    requests = len(inputs.rows)
    output = OUTPUTS[problem.output]
    if output.is_relative or requests < 2:  # noqa: PLR2004  no other order
        return VACUOUS
    counts = _counts(inputs)
    whole = _split(buffer_after(subject, problem, inputs), counts, is_table=output.is_table)
    turn = 1 + choose(problem.seed, "turn", 0, requests - 1)
    orders = [[request] for request in range(requests)]
    for chosen in (*orders, [*range(turn, requests), *range(turn)]):
        part = subject.materialise(problem)
        result = buffer_after(subject, problem, _of_requests(part, chosen))
        lengths = [counts[request] for request in chosen]
        entries = _split(result, lengths, is_table=output.is_table)
        for request, found in zip(chosen, entries, strict=True):
            name = f"with requests {chosen} only: {problem.output} of request {request}"
            compared = bitwise(name, found, whole[request])
            if compared.bad:
                return compared
    return PASS


def _counts(inputs: BatchInputs) -> list[int]:
    """Return the number of entries of each request."""
    pages, news = inputs.page_indptr.diff(), inputs.query_start_loc.diff()
    shift = inputs.is_shifted
    counts = {
        "keys": inputs.kv_indptr.diff(),
        "pages": pages,
        "requests": torch.ones_like(pages),
        **entry_counts(news, inputs.rejected, inputs.seq_lens, inputs.num_drafts, shift=shift),
    }
    size = OUTPUTS[inputs.output].size
    if size == "seen":
        kept = (inputs.seq_lens - inputs.rejected).tolist()
        each, branches = inputs.num_drafts, inputs.branches
        return [branches.topk * (len(branches.seen(keys)) + each) for keys in kept]
    return counts[size].tolist()


def _split(buffer: torch.Tensor, counts: list[int], *, is_table: bool) -> list[torch.Tensor]:
    """Return the entries of each request."""
    if is_table:
        return [buffer[row, :count] for row, count in enumerate(counts)]
    return list(buffer[: sum(counts)].split(counts))


def _of_requests(inputs: BatchInputs, chosen: list[int]) -> BatchInputs:
    """Return the record of these requests, in this order."""

    def indptr(whole: torch.Tensor) -> torch.Tensor:
        part = torch.zeros(len(chosen) + 1, dtype=torch.int32, device=whole.device)
        part[1:] = whole.diff()[chosen].cumsum(0)
        return part

    names = ("query_start_loc", "kv_indptr", "page_indptr")
    indptrs = {name: indptr(getattr(inputs, name)) for name in names}
    numbers = ("seq_lens", "rows", "first_keys", "rejected", "next_tokens")
    lengths = {name: getattr(inputs, name)[chosen] for name in numbers}
    news = inputs.query_start_loc.diff()
    bits = news * inputs.seq_lens if len(inputs.mask) else news * 0
    sizes = {"tokens": news, "parents": news, "mask": bits}
    for name, counts in sizes.items():
        of_requests = getattr(inputs, name).split(counts.tolist())
        lengths[name] = torch.cat([of_requests[request] for request in chosen])
    return replace(inputs, **indptrs, **lengths)  # type: ignore[arg-type]


def garbage(subject: Subject, problem: BatchProblem) -> Verdict:
    """Change what no request has, and the length of the buffer: the entries stay."""
    inputs = subject.materialise(problem)
    first = buffer_after(subject, problem, inputs)
    rows = inputs.rows.long()
    pages, keys, computed = (
        torch.full_like(getattr(inputs, name), OTHER_GARBAGE)
        for name in ("block_table", "token_table", "computed")
    )
    computed[rows] = inputs.computed[rows]
    for row, length in zip(
        rows.tolist(), (inputs.seq_lens + inputs.lookahead).tolist(), strict=True
    ):
        count = -(-length // inputs.page_size)
        pages[row, :count] = inputs.block_table[row, :count]
        keys[row, :length] = inputs.token_table[row, :length]
    longer_by = MORE_ENTRIES if first.dim() == 1 else MORE_ROWS
    more = torch.full((longer_by, *first.shape[1:]), OTHER_GARBAGE, device=first.device)
    more = more.to(first.dtype)  # fewer bits of it in masks
    longer = torch.cat([subject.materialise(problem).buffer, more])
    other = replace(
        inputs, block_table=pages, token_table=keys, computed=computed, buffer=longer.clone()
    )
    result = buffer_after(subject, problem, other)
    found = bitwise(f"{problem.output} with other garbage", result[: len(first)], first)
    if found.bad:
        return found
    blank = torch.full_like(more, OUTPUTS[problem.output].blank)
    behind = more if problem.rest != "zero_rows" else blank
    return bitwise(f"{problem.output} in a longer buffer", result[len(first) :], behind)


def far_slots(subject: Subject, problem: BatchProblem) -> Verdict:
    """Move all pages by so much that no slot fits into int32."""
    if not (_slots(((problem.output, problem.rest),)) and _far_enough((problem.page_size,))):
        return VACUOUS
    inputs = subject.materialise(problem)
    pages = -(-INT32_SLOTS // problem.page_size)
    far = replace(
        inputs,
        block_table=inputs.block_table + pages,
        token_table=inputs.token_table.long() + pages * problem.page_size,
    )
    wanted = prepared(far)
    return bitwise(f"{problem.output} beyond int32", buffer_after(subject, problem, far), wanted)


def _slots(values: Values) -> Values:
    """Leave the outputs that are slots, -1 where there is none."""
    return tuple(value for value in values if OUTPUTS[value[0]].blank == PAD_SLOT)


def _far_enough(values: Values) -> Values:
    """Leave the sizes of pages whose ids fit into int32 where their slots do not."""
    return tuple(value for value in values if value > 1)


def _of_requests_alone(values: Values) -> Values:
    """Leave out the outputs whose entries depend on the requests before."""
    return tuple(value for value in values if not OUTPUTS[value[0]].is_relative)


LAWS = (
    Law(
        "batch_parity",
        BATCH,
        parity,
        "every entry of a prepared tensor is the oracle's, and what lies behind is kept, or zero",
        weight=2.0,
        overlap="slack_rows compares with the oracle too, with garbage behind the tensors",
    ),
    Law(
        "batch_one_buffer",
        BATCH,
        one_buffer,
        "batches that follow one another in one buffer leave nothing in each other's entries",
    ),
    Law(
        "batch_parts",
        BATCH,
        parts,
        "requests alone, or in another order, have the entries that they have together",
        looks_at=({"outputs": _of_requests_alone},),
        overlap="batch_parity sees every value; this asks no oracle",
    ),
    Law(
        "batch_garbage",
        BATCH,
        garbage,
        "entries of tables that no request has, and a longer buffer, change no entry",
        overlap="batch_parity draws garbage and longer buffers too; this changes nothing else",
    ),
    Law(
        "batch_far_slots",
        BATCH,
        far_slots,
        "slots are right that do not fit into int32",
        weight=0.5,
        needs=(FAR_SLOTS,),
        looks_at=({"outputs": _slots, "page_size": _far_enough},),
    ),
)
