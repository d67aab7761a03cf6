"""Laws of metadata builders and slot mappings: integers, compared exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ....reference import (
    PAD_SLOT,
    BatchProblem,
    MetadataProblem,
    Problem,
    SlotsProblem,
    oracle,
    slice_phases,
    split_decodes_and_prefills,
)
from ....reference.tensors.inputs import MetadataInputs
from ....reference.tensors.preparation import BatchInputs
from ....reference.tensors.slots import SlotInputs, slots_of
from ....reference.tensors.steps import StepsInputs
from ....reference.tensors.values import choose
from ...verdicts.comparison import bitwise, fail
from ...verdicts.contained import Stop
from ...verdicts.operations import APPENDED
from ...verdicts.snapshot import Snapshot
from ...verdicts.subject import Subject
from ...verdicts.verdict import PASS, VACUOUS, Verdict
from ..law import (
    APPEND,
    BATCH,
    CONTEXT_PARALLEL,
    METADATA,
    NORM,
    QUANTIZE,
    REARRANGE,
    ROPE,
    SLOTS,
    STEPS,
    Law,
)

COMPARED = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
"""Dtypes that torch compares with int32; what another integer holds is not read."""

FIELDS = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "seq_lens")


def _build(subject: Subject, problem: MetadataProblem, inputs: MetadataInputs) -> dict[str, Any]:
    """Run a builder and copy its result."""
    built = fields_of(subject, subject.call(problem, inputs))
    if "no_host_sync" in subject.implementation.features:
        # The host did not know the count, so the buffer behind it is longer.
        count = int(built["paged_kv_indptr"][-1])
        built["paged_kv_indices"] = built["paged_kv_indices"][:count]
    return built


def _tensor(name: str, result: object) -> torch.Tensor | None:
    value = getattr(result, name, None)
    return value if isinstance(value, torch.Tensor) else None


def _itself(result: object) -> torch.Tensor | None:
    return result if isinstance(result, torch.Tensor) else None


def _part(name: str, result: object) -> object:
    return getattr(result, name, None)


def fields_of(subject: Subject, result: object) -> dict[str, torch.Tensor]:
    """Copy the tensors of batch metadata: a persistent buffer changes with the next call.

    Raises:
        Stop: one is missing, or cannot be compared.
    """
    built: dict[str, torch.Tensor] = {}
    for name in FIELDS:
        value = subject.read(partial(_tensor, name), result)
        if value is None:
            message = f"the result has no tensor {name}: it is a {type(result).__name__}"
            raise Stop(fail("shape", message))
        value = subject.usable(name, value)
        if value.dtype not in COMPARED:
            raise Stop(fail("dtype", f"{name} is {value.dtype}, not int32"))
        if value.dim() != 1:
            raise Stop(fail("shape", f"{name} has {value.dim()} dimensions, not 1"))
        built[name] = value.clone()
    return built


def parity(subject: Subject, problem: MetadataProblem) -> Verdict:
    """Check every tensor of every step against the oracle's, values and dtype."""
    for step in range(len(problem.steps)):
        inputs = subject.materialise(problem, step=step)
        expected = oracle.metadata(inputs).tensors()
        for name, value in _build(subject, problem, inputs).items():
            found = bitwise(f"step {step}: {name}", value, expected[name])
            if found.bad:
                return found
            if value.dtype != torch.int32:
                return fail("dtype", f"step {step}: {name} is {value.dtype}, not int32")
    return Verdict("PASS", ratio=0.0)


def invariants(subject: Subject, problem: MetadataProblem) -> Verdict:
    """Check what must hold of any metadata, without asking the oracle."""
    for step in range(len(problem.steps)):
        inputs = subject.materialise(problem, step=step)
        built = {name: value.tolist() for name, value in _build(subject, problem, inputs).items()}
        broken = _broken_invariant(built, inputs)
        if broken:
            return fail("numeric", f"step {step}: {broken}")
    return PASS


def _broken_invariant(built: dict[str, list[int]], inputs: MetadataInputs) -> str | None:
    """Return the invariant that is broken, in words; None if all hold."""
    totals = {
        "qo_indptr": int(inputs.query_lens.sum()),
        "paged_kv_indptr": len(built["paged_kv_indices"]),
    }
    for name, total in totals.items():
        indptr = built[name]
        if len(indptr) != len(inputs.seq_lens) + 1 or (indptr[0], indptr[-1]) != (0, total):
            return f"{name} = {indptr} does not go from 0 to {total} with one entry a request"
        if any(b < a for a, b in pairwise(indptr)):
            return f"{name} = {indptr} decreases"
    rows = zip(inputs.seq_lens.tolist(), inputs.block_table.tolist(), strict=True)
    for request, (seq_len, row) in enumerate(rows):
        start, end = built["paged_kv_indptr"][request : request + 2]
        pages, last = end - start, built["paged_kv_last_page_len"][request]
        keys = (pages - 1) * inputs.page_size + last if pages or last else 0
        if keys != seq_len or last > inputs.page_size or (seq_len and last < 1):
            return f"request {request}: {pages} pages and a last of {last} are not {seq_len} keys"
        if built["paged_kv_indices"][start:end] != row[:pages]:
            return f"request {request}: paged_kv_indices are not its row of the block table"
    return None


def fresh_buffers(subject: Subject, problem: MetadataProblem) -> Verdict:
    """Build the first batch again after all others: nothing of them may be left in it."""
    if len(problem.steps) < 2:  # noqa: PLR2004  nothing in between
        return VACUOUS
    first: dict[str, Any] = {}
    for step in (*range(len(problem.steps)), 0):
        built = _build(subject, problem, subject.materialise(problem, step=step))
        first = first or built
    for name in FIELDS:
        found = bitwise(f"{name} of the first batch, built again", built[name], first[name])
        if found.bad:
            return found
    return PASS


def inputs_unchanged(subject: Subject, problem: Problem) -> Verdict:
    """Check that the inputs keep their bits, and so does everything around them."""
    inputs = subject.materialise(problem)
    before = Snapshot(inputs)
    subject.call(problem, inputs)
    in_place = getattr(inputs, "in_place", False)
    written = set(APPENDED) if in_place else {"residual"} if problem.operation in NORM else set()
    if problem.operation in WRITTEN:
        written = {WRITTEN[problem.operation]}
    if isinstance(inputs, StepsInputs):
        written = {buffer.name for buffer in inputs.buffers}
    changed = sorted(set(before.changed_views()) - written)
    if changed:
        return fail("mutated_input", f"the call changed its input {', '.join(changed)}")
    outside = before.changed_outside()
    if outside:
        return fail("wrote_outside", f"the call wrote outside of {', '.join(outside)}")
    return PASS


def phases(subject: Subject, problem: MetadataProblem) -> Verdict:
    """Check the phases of mixed batches, decodes first, of builders that give them."""
    if "phases" not in subject.implementation.features:
        return VACUOUS
    ordered = tuple(_decodes_first(*step) for step in problem.steps)
    problem = replace(problem, steps=ordered)
    for step in range(len(problem.steps)):
        inputs = subject.materialise(problem, step=step)
        result = subject.call(problem, inputs)
        num_decodes = split_decodes_and_prefills(
            inputs.query_lens,
            decode_threshold=inputs.decode_threshold,
            require_uniform=inputs.decode_threshold > 1,
        )[0]
        expected = slice_phases(oracle.metadata(inputs), num_decodes)
        for phase, wanted in zip(("decodes", "prefills"), expected, strict=True):
            for name in (*FIELDS, "cum_seq_lens_q", "cum_pages_kv"):
                part = subject.read(partial(_part, phase), result)
                value = subject.read(partial(_tensor, name), part)
                if value is None:
                    return fail("shape", f"step {step}: {phase} has no tensor {name}")
                value = subject.usable(name, value)
                found = bitwise(f"step {step}: {phase}.{name}", value, getattr(wanted, name))
                if found.bad:
                    return found
    return Verdict("PASS", ratio=0.0)


def _decodes_first(
    query_lens: tuple[int, ...], seq_lens: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Reorder a batch as serving stacks do: by query tokens, padding last."""
    pairs = sorted(zip(query_lens, seq_lens, strict=True), key=lambda pair: (not pair[0], pair[0]))
    return tuple(t for t, _ in pairs), tuple(s for _, s in pairs)


def no_host_sync(subject: Subject, problem: MetadataProblem) -> Verdict:
    """Build on a GPU without waiting for it: torch raises where a call synchronises."""
    if subject.target.device != "cuda" or "no_host_sync" not in subject.implementation.features:
        return VACUOUS
    inputs = subject.materialise(problem)
    subject.call(problem, inputs)  # the first call may compile, and synchronise for that
    torch.cuda.set_sync_debug_mode("error")
    try:
        subject.implementation(inputs)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return fail("host_sync", f"the call waits for the GPU: {error}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Verdict("PASS", ratio=0.0)


SLOT_MAPPING = "slot_mapping"
Stepped = SlotsProblem | BatchProblem
"""Problems of several batches, one after another."""
WRITTEN = {"map_slots": SLOT_MAPPING, "prepare_batch": "buffer"}
"""The tensor of a record that calls of an operation write, and return."""
MORE_SLOTS = 1500
"""Entries that a longer buffer has more: kernels that pad by blocks of 1024 need two of them."""


def buffer_after(
    subject: Subject, problem: Stepped, inputs: SlotInputs | BatchInputs
) -> torch.Tensor:
    """Run what writes a buffer and copy its answer: a persistent one changes with the next call.

    Raises:
        Stop: it is no tensor of the buffer's dtype and shape.
    """
    return _returned(subject, problem, inputs).clone()


def _returned(subject: Subject, problem: Stepped, inputs: SlotInputs | BatchInputs) -> torch.Tensor:
    """Run what writes a buffer and return its answer; raise what ``buffer_after`` does."""
    name = WRITTEN[problem.operation]
    buffer: torch.Tensor = getattr(inputs, name)
    wanted, dtype = tuple(buffer.shape), buffer.dtype
    result = subject.call(problem, inputs)
    value = subject.read(_itself, result)
    if value is None:
        raise Stop(fail("shape", f"the result is a {type(result).__name__}, not a tensor"))
    found = subject.usable(name, value)
    if found.dtype != dtype:
        raise Stop(
            fail("dtype", f"{name} is {found.dtype}, not {str(dtype).removeprefix('torch.')}")
        )
    if tuple(found.shape) != wanted:
        raise Stop(fail("shape", f"{name} has shape {tuple(found.shape)}, not {wanted}"))
    return found


def inputs_changed_after(subject: Subject, problem: Stepped) -> Verdict:
    """Change every input after the call: what was built of them stays."""
    inputs, name = subject.materialise(problem), WRITTEN[problem.operation]
    result = _returned(subject, problem, inputs)
    before = result.clone()
    for field, value in vars(inputs).items():
        if isinstance(value, torch.Tensor) and field != name:
            value.bitwise_not_()
    return bitwise("what was built, after its inputs changed", result, before)


Expected = Callable[[Any], torch.Tensor]
"""The oracle's buffer, by the record of a call."""


def every_step(subject: Subject, problem: Stepped, expected: Expected) -> Verdict:
    """Check every entry of every step against the oracle's, each in a buffer of garbage."""
    for step in range(len(problem.steps)):
        found = _step(subject, problem, step, subject.materialise(problem, step=step), expected)
        if isinstance(found, Verdict):
            return found
    return Verdict("PASS", ratio=0.0)


def in_one_buffer(subject: Subject, problem: Stepped, expected: Expected) -> Verdict:
    """Check batch after batch, and the first again, each in the buffer that the last one left."""
    left: torch.Tensor | None = None
    for step in (*range(len(problem.steps)), 0):
        inputs = subject.materialise(problem, step=step)
        if left is not None:
            getattr(inputs, WRITTEN[problem.operation]).copy_(left)
        found = _step(subject, problem, step, inputs, expected, " in the buffer of the last")
        if isinstance(found, Verdict):
            return found
        left = found
    return PASS


def _step(
    subject: Subject,
    problem: Stepped,
    step: int,
    inputs: SlotInputs | BatchInputs,
    expected: Expected,
    where: str = "",
) -> torch.Tensor | Verdict:
    """Return the buffer after a call, or what is wrong in it."""
    wanted = expected(inputs)
    found = buffer_after(subject, problem, inputs)
    name = getattr(problem, "output", WRITTEN[problem.operation])
    compared = bitwise(f"step {step}: {name}{where}", found, wanted)
    return compared if compared.bad else found


def slots_parity(subject: Subject, problem: SlotsProblem) -> Verdict:
    """Check every slot of every step."""
    return every_step(subject, problem, slots_of)


def slots_one_buffer(subject: Subject, problem: SlotsProblem) -> Verdict:
    """Map batch after batch into one buffer."""
    return in_one_buffer(subject, problem, slots_of)


def slots_ranks(subject: Subject, problem: SlotsProblem) -> Verdict:
    """Check, without the oracle, that each token has one slot of one rank, in its own page."""
    inputs = subject.materialise(problem)
    slots = torch.stack([
        buffer_after(subject, problem, replace(inputs, rank=rank)) for rank in range(problem.world)
    ]).cpu()  # fmt: skip
    tokens = len(inputs.positions)
    if (slots[:, tokens:] != PAD_SLOT).any():
        return fail("numeric", f"an entry behind the {tokens} tokens is not {PAD_SLOT}")
    starts, table = inputs.query_start_loc.tolist(), inputs.block_table.tolist()
    positions = inputs.positions.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        row = int(inputs.rows[request])
        held: set[tuple[int, int]] = set()
        for token in range(start, end):
            found = [(r, int(s)) for r, s in enumerate(slots[:, token]) if int(s) != PAD_SLOT]
            where = f"token {token} of request {request}"
            if len(found) != (row >= 0):
                return fail("numeric", f"{where} has a slot on {len(found)} ranks")
            page = positions[token] // (problem.page_size * problem.world)
            if found and found[0][1] // problem.page_size != table[row][page]:
                return fail("numeric", f"{where} has slot {found[0][1]}, not in page {page}")
            held.update(found)
        if row >= 0 and len(set(table[row])) == len(table[row]) and len(held) != end - start:
            return fail("numeric", f"two tokens of request {request} have one slot")
    return PASS


def slots_parts(subject: Subject, problem: SlotsProblem) -> Verdict:
    """Map the requests one by one and in another order: each token keeps its slot."""
    inputs = subject.materialise(problem)
    requests = len(inputs.rows)
    if requests < 2:  # noqa: PLR2004  no other order
        return VACUOUS
    whole = buffer_after(subject, problem, inputs)
    starts = inputs.query_start_loc.tolist()
    turn = 1 + choose(problem.seed, "turn", 0, requests - 1)
    for order in ([request] for request in range(requests)), [[
        *range(turn, requests), *range(turn),
    ]]:  # fmt: skip
        for chosen in order:
            found = buffer_after(subject, problem, _of_requests(inputs, chosen))
            tokens = [t for request in chosen for t in range(starts[request], starts[request + 1])]
            compared = bitwise(f"requests {chosen} alone", found[: len(tokens)], whole[tokens])
            if compared.bad:
                return compared
    return PASS


def _of_requests(inputs: SlotInputs, chosen: list[int]) -> SlotInputs:
    """Return the record of these requests, in this order."""
    starts = inputs.query_start_loc.tolist()
    positions = [inputs.positions[starts[each] : starts[each + 1]] for each in chosen]
    lengths = torch.tensor([0, *(len(each) for each in positions)], dtype=torch.int32)
    return replace(
        inputs,
        query_start_loc=lengths.cumsum(0, dtype=torch.int32).to(inputs.rows.device),
        positions=torch.cat(positions),
        rows=inputs.rows[chosen],
    )


def slots_garbage(subject: Subject, problem: SlotsProblem) -> Verdict:
    """Change what no token needs, and the length of the buffer: the slots stay."""
    inputs = subject.materialise(problem)
    first = buffer_after(subject, problem, inputs)
    table = inputs.block_table.clone()
    used = torch.zeros(table.shape, dtype=torch.bool)
    size = problem.page_size * problem.world
    starts = inputs.query_start_loc.tolist()
    for row, (start, end) in zip(inputs.rows.tolist(), pairwise(starts), strict=True):
        if row >= 0:
            used[row, (inputs.positions[start:end] // size).cpu()] = True
    table.masked_fill_(~used.to(table.device), 2**31 - 1)
    buffer = inputs.slot_mapping.new_full((len(first) + MORE_SLOTS,), 2**41)
    other = buffer_after(subject, problem, replace(inputs, block_table=table, slot_mapping=buffer))
    found = bitwise("slots with other garbage", other[: len(first)], first)
    if found.bad:
        return found
    if (other[len(first) :] != PAD_SLOT).any():
        return fail("numeric", f"an entry of a longer buffer is not {PAD_SLOT}")
    return PASS


LAWS = (
    Law(
        "metadata_parity",
        METADATA,
        parity,
        "indptrs, indices and last page lengths are the oracle's, batch after batch",
        weight=2.0,
    ),
    Law(
        "metadata_invariants",
        METADATA,
        invariants,
        "indptrs start at 0 and never decrease, pages and last lengths add up, garbage stays out",
        overlap="metadata_parity sees every value; this asks no oracle and names the broken rule",
    ),
    Law(
        "metadata_fresh_buffers",
        METADATA,
        fresh_buffers,
        "a batch built again after others is the same: nothing stale is left in a buffer",
    ),
    Law(
        "metadata_phases",
        METADATA,
        phases,
        "decodes and prefills start at 0, count pages as pages, and hold their own requests only",
        needs=("phases",),
    ),
    Law(
        "metadata_no_host_sync",
        METADATA,
        no_host_sync,
        "a builder that declares no_host_sync never waits for the GPU",
        weight=0.5,
        needs=("no_host_sync",),
        overlap="there is nothing to wait for on a CPU, where the score runs",
    ),
    Law(
        "integer_inputs_unchanged",
        METADATA
        + CONTEXT_PARALLEL
        + SLOTS
        + BATCH
        + STEPS
        + APPEND
        + QUANTIZE
        + NORM
        + REARRANGE
        + ROPE,
        inputs_unchanged,
        "inputs, and the canaries around them, keep every bit",
        weight=0.5,
    ),
    Law(
        "inputs_changed_after",
        SLOTS + BATCH,
        inputs_changed_after,
        "what was built of a batch stays while the next one is written over its inputs",
        weight=0.5,
    ),
    Law(
        "slots_parity",
        SLOTS,
        slots_parity,
        "each token's slot is the oracle's, and -1 stands behind the last token",
        weight=2.0,
        overlap="slack_rows compares with the oracle too, with garbage behind the tensors",
    ),
    Law(
        "slots_one_buffer",
        SLOTS,
        slots_one_buffer,
        "nothing of an earlier batch is left in a buffer that batches share",
    ),
    Law(
        "slots_ranks",
        SLOTS,
        slots_ranks,
        "each token has one slot on one rank of the group, in the page that its request has there",
        overlap="slots_parity sees every value; this asks no oracle and names the broken rule",
    ),
    Law(
        "slots_parts",
        SLOTS,
        slots_parts,
        "requests alone, or in another order, have the slots that they have together",
        overlap="slots_parity sees every value; this asks no oracle",
    ),
    Law(
        "slots_garbage",
        SLOTS,
        slots_garbage,
        "entries of the block table that no token lies in, and a longer buffer, change no slot",
        overlap="slots_parity draws garbage and longer buffers too; this changes nothing else",
    ),
)
