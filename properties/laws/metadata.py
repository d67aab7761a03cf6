"""Laws of metadata builders and of appending to a cache: integers and bits, compared exactly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from ...reference import AttentionProblem, MetadataProblem, oracle
from ...reference.inputs import MetadataInputs
from ..comparison import bitwise, fail, same_bits, worse
from ..subject import Snapshot, Stop, Subject
from ..verdict import PASS, VACUOUS, Verdict
from .law import APPEND, METADATA, Law

FIELDS = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "seq_lens")


def _build(subject: Subject, problem: MetadataProblem, inputs: MetadataInputs) -> dict[str, Any]:
    """Run a builder and copy what it gave: a persistent buffer changes with the next call."""
    result = subject.call(problem, inputs)
    built: dict[str, Any] = {}
    for name in FIELDS:
        value = getattr(result, name, None)
        if not isinstance(value, torch.Tensor):
            message = f"the result has no tensor {name}: it is a {type(result).__name__}"
            raise Stop(fail("shape", message))
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
    """Say which invariant is broken; None if all hold."""
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


def inputs_unchanged(subject: Subject, problem: MetadataProblem | AttentionProblem) -> Verdict:
    """Check that the inputs keep their bits, and so does everything around them."""
    inputs = subject.materialise(problem)
    before = Snapshot(inputs)
    subject.call(problem, inputs)
    in_place = getattr(inputs, "in_place", False)
    written = {"k_cache", "v_cache"} if in_place else set()
    changed = sorted(set(before.changed_views()) - written)
    if changed:
        return fail("mutated_input", f"the call changed its input {', '.join(changed)}")
    outside = before.changed_outside()
    if outside:
        return fail("wrote_outside", f"the call wrote outside of {', '.join(outside)}")
    return PASS


def append_parity(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Check every slot of both caches, the untouched ones included, bit by bit."""
    inputs = subject.materialise(problem)
    expected = oracle.append(inputs)
    result = subject.call(problem, inputs)
    if not (isinstance(result, tuple) and len(result) == 2):  # noqa: PLR2004
        return fail("shape", f"returned {type(result).__name__}, not (k_cache, v_cache)")
    verdict = Verdict("PASS", ratio=0.0)
    for name, cache, wanted, given in zip(
        ("k_cache", "v_cache"), result, expected, (inputs.k_cache, inputs.v_cache), strict=True
    ):
        if cache.shape != wanted.shape or cache.dtype != wanted.dtype:
            return fail("shape", f"{name} became {cache.dtype} {list(cache.shape)}")
        if inputs.in_place and cache.data_ptr() != given.data_ptr():
            return fail("shape", f"in_place: the returned {name} is another tensor")
        if not same_bits(cache, wanted):
            verdict = worse(verdict, bitwise(name, cache, wanted))
    return verdict


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
    ),
    Law(
        "metadata_fresh_buffers",
        METADATA,
        fresh_buffers,
        "a batch built again after others is the same: nothing stale is left in a buffer",
    ),
    Law(
        "integer_inputs_unchanged",
        METADATA + APPEND,
        inputs_unchanged,
        "inputs, and the canaries around them, keep every bit",
        weight=0.5,
    ),
    Law(
        "append_parity",
        APPEND,
        append_parity,
        "new keys and values stand in their slots, and every other slot keeps its bits",
        weight=2.0,
    ),
)
