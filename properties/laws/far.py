"""Laws of far addresses: pages and rows that lie more than 2^32 elements apart.

On a CPU their memory is mapped, and takes room only where it is written; on a GPU it is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch

from ...impl.gpu.workspaces import workspaces_apart
from ...reference import AttentionProblem, BatchMetadata, MoEProblem
from ...reference.tensors.allocation import FAR, LEAST_ROWS, rows_apart, unreserved
from ...reference.tensors.inputs import (
    AppendInputs,
    AttentionInputs,
    PagedAttentionInputs,
    RaggedAttentionInputs,
)
from ..verdicts.comparison import agree
from ..verdicts.subject import Subject
from ..verdicts.verdict import VACUOUS, Verdict
from .append import appended, compared, expected_of
from .general import kept, run_on
from .law import APPEND, ATTENTION, PAGED, Law
from .slack import PARITY

AnyProblem = TypeVar("AnyProblem", AttentionProblem, MoEProblem)
ROWS, PAGES = ("large_tensors", "large_rows"), ("large_tensors", "large_caches")
"""Claims of offsets of 64 bits, one of which an implementation must make: of rows, and of pages."""
FIRST, TWO, SECOND = (0,), (0, 1), (1,)
"""Axes that count rows, the first of which that is long enough lies apart."""
Apart = Mapping[str, tuple[int, ...]]
"""The axes of tensors by name."""
_NEW: Apart = {"new_k": FIRST, "new_v": FIRST}
_STATES: Apart = {"outs": TWO, "states": FIRST, "lses": FIRST, "out": FIRST}
_TABLE: Apart = {"block_table": FIRST}
APART: dict[str, Apart] = {
    "append_paged_kv": _NEW, "merge_state": _STATES, "route": {"logits": FIRST},
    "moe": {"hidden": FIRST, "out": FIRST}, "quantize": {"x": FIRST},
    "norm_and_quantize": {"x": FIRST, "residual": FIRST}, "build_metadata": _TABLE,
    "map_slots": _TABLE, "rope_and_append": {"q": FIRST, "k": FIRST, "v": FIRST},
}  # fmt: skip
"""Tensors with rows of tokens, states or requests by operation, and the axes that count these."""
WEIGHTS: Apart = {"w13": SECOND, "w2": SECOND}
"""Experts' weights, whose rows are a matrix's: output channels."""
GIB, WORKSPACE_BYTES = 1 << 30, 4
"""Bytes of a GiB, and of a number of a workspace."""


def has_room(subject: Subject, needed: int) -> bool:
    """Return whether the target's GPU is large enough for this many bytes; a CPU has room.

    Raises:
        MemoryError: it is, but others use its memory now: the problem is tried again later.
    """
    if subject.target.device != "cuda":
        return True
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info()
    if free < needed <= whole:
        message = f"{needed / GIB:.1f} GiB are needed, and {free / GIB:.1f} GiB are free"
        raise MemoryError(message)
    return needed <= whole


def narrow(subject: Subject, problem: AnyProblem) -> AnyProblem:
    """Return the problem on a GPU with values of 16 bits, if claimed: they take half the memory."""
    halved = replace(problem, dtype="bfloat16")
    wide = problem.dtype == "float32" and subject.target.device == "cuda"
    return halved if wide and subject.claims(halved) else problem


def far_pages(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Keep a batch's pages far apart in caches of more than 2^32 numbers: nothing changes."""
    plain = replace(problem, strided_kv=False, different_kv_strides=False, kv_views="")
    near = narrow(subject, plain)
    if not _asked(subject, near, PAGES) or near.cache_entry.scaled or not near.num_pages:
        return VACUOUS
    inputs = subject.materialise(near)
    rooms = 1 if _share_room(near, inputs) else 2
    # An implementation may copy its caches.
    if not has_room(subject, 2 * rooms * FAR * inputs.k_cache.element_size()):
        return VACUOUS
    return _unmoved(subject, near, inputs, _with_far_pages(near, inputs))


def _share_room(problem: AttentionProblem, inputs: PagedAttentionInputs | AppendInputs) -> bool:
    """Whether one room holds the far pages of keys and of values: one is a page behind the other.

    A GPU that others use too has room for one more often than for two.
    """
    k_cache, v_cache = inputs.k_cache, inputs.v_cache
    alike = k_cache.shape == v_cache.shape and k_cache.dtype == v_cache.dtype
    return problem.values_in_keys or alike


def _asked(subject: Subject, near: AttentionProblem, claims: Sequence[str]) -> bool:
    large = any(each in subject.implementation.features for each in claims)
    # Of another module than those of the run, say of 16 bits: its kernel is compiled in the call.
    return large and near.num_tokens > 0 and subject.claims(near)


def _unmoved(
    subject: Subject,
    problem: AttentionProblem,
    near: AttentionInputs,
    far: AttentionInputs,
    apart: Apart | None = None,
) -> Verdict:
    """Check that a call gives the same where its tensors lie far apart."""
    first, bounded = run_on(subject, problem, near)
    with subject.surrounded(apart=apart or {}):
        second = kept(subject.run_operation(problem, far))
    bounds = (bounded.bound, bounded.bound)
    return agree(first, second, bounds, exact=subject.exact(problem))


@dataclass(frozen=True)
class _Apart:
    """A batch's pages, spread over large caches; other pages hold nothing.

    Attributes:
        used: the ids of its pages in the small caches.
        places: what they are in the large ones.
        k_cache, v_cache: these, with the same contents.
        metadata: the batch's, with the ids in the large caches.
    """

    used: torch.Tensor
    places: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    metadata: BatchMetadata


def _apart(problem: AttentionProblem, inputs: PagedAttentionInputs | AppendInputs) -> _Apart:
    """Spread a batch's pages over large caches."""
    used = inputs.metadata.paged_kv_indices.unique()
    count = FAR // min(inputs.k_cache[0].numel(), inputs.v_cache[0].numel()) + len(used)
    step = count // len(used)
    places = torch.zeros(len(inputs.k_cache), dtype=torch.int32, device=used.device)
    places[used.long()] = (count - 1 - step * torch.arange(len(used), device=used.device)).int()

    def moved(cache: torch.Tensor, apart: torch.Tensor) -> torch.Tensor:
        # Codes are copied as bytes: not every dtype can be indexed.
        apart.view(torch.uint8)[places[used.long()].long()] = cache.view(torch.uint8)[used.long()]
        return apart

    def room(cache: torch.Tensor) -> torch.Tensor:
        return unreserved((count + 1, *cache.shape[1:]), cache.dtype, cache.device)

    keys = room(inputs.k_cache)
    k_cache = moved(inputs.k_cache, keys[:-1])
    if problem.values_in_keys:
        v_cache = k_cache[..., : inputs.v_cache.shape[-1]]
    else:
        values = keys if _share_room(problem, inputs) else room(inputs.v_cache)
        v_cache = moved(inputs.v_cache, values[1:])
    indices = places[inputs.metadata.paged_kv_indices.long()]
    metadata = replace(inputs.metadata, paged_kv_indices=indices)
    return _Apart(used.long(), places[used.long()].long(), k_cache, v_cache, metadata)


def _with_far_pages(
    problem: AttentionProblem, inputs: PagedAttentionInputs
) -> PagedAttentionInputs:
    """Return the same call with its pages spread over large caches."""
    apart, table = _apart(problem, inputs), inputs.block_table.clone()
    indptr, indices = apart.metadata.paged_kv_indptr, apart.metadata.paged_kv_indices
    for row, (begin, end) in enumerate(pairwise(indptr.tolist())):
        table[row, : end - begin] = indices[begin:end]
    return replace(
        inputs,
        k_cache=apart.k_cache,
        v_cache=apart.v_cache,
        metadata=apart.metadata,
        block_table=table,
    )


def append_far_pages(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Append to pages far apart, in place: they hold what those of small caches would."""
    plain = replace(problem, strided_kv=False, different_kv_strides=False, kv_views="")
    near = narrow(subject, plain)
    if not _asked(subject, near, PAGES) or near.cache_entry.scaled:
        return VACUOUS
    inputs: AppendInputs = subject.materialise(near)
    rooms = 1 if _share_room(near, inputs) else 2
    if not has_room(subject, rooms * FAR * inputs.k_cache.element_size()):
        return VACUOUS
    apart = _apart(near, inputs)
    far = replace(
        inputs,
        k_cache=apart.k_cache,
        v_cache=apart.v_cache,
        metadata=apart.metadata,
        slots=None,
        in_place=True,
    )
    found = []
    for given, cache in zip(inputs.written, appended(subject, near, far), strict=True):
        back = given.clone()
        back.view(torch.uint8)[apart.used] = cache.view(torch.uint8)[apart.places]
        found.append(back)
    return compared(subject, inputs, tuple(found), expected_of(inputs))


def far_tokens(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Keep rows of queries, and of ragged keys, far apart: nothing changes."""
    ragged = problem.operation == "ragged_attention"
    strided_kv = ragged or problem.strided_kv
    plain = replace(_repeated(problem), strided_q=True, strided_kv=strided_kv, kv_views="")
    near = narrow(subject, plain)
    if not _asked(subject, near, ROWS) or near.num_tokens < LEAST_ROWS:
        return VACUOUS
    inputs = subject.materialise(near)
    if not has_room(subject, (5 if ragged else 3) * FAR * inputs.q.element_size()):
        return VACUOUS
    far = replace(inputs, q=_far_rows(inputs.q))
    if isinstance(far, RaggedAttentionInputs) and len(far.k) >= LEAST_ROWS:
        far = replace(far, k=_far_rows(far.k), v=_far_rows(far.v))
    return _unmoved(subject, near, inputs, far, apart={"out": FIRST})


def _repeated(problem: AttentionProblem) -> AttentionProblem:
    """Repeat the requests of a batch until its tokens are enough to lie far apart."""
    times = -(-LEAST_ROWS // max(problem.num_tokens, 1))
    return replace(
        problem, query_lens=problem.query_lens * times, seq_lens=problem.seq_lens * times
    )


def _far_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Copy [rows, heads, channels] to where the last row begins beyond 2^32 elements."""
    apart = rows_apart(tensor.shape, tensor.dtype, tensor.device)
    apart.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return apart


def far_rows(subject: Subject, problem: Any) -> Verdict:  # noqa: ANN401  of the operations
    """Keep the rows of tokens, states or requests far apart: the answer is the oracle's.

    So are those of experts' weights, where their offsets are said to be of 64 bits too.
    """
    apart = APART[problem.operation]
    if problem.operation == "moe" and "large_weights" in subject.implementation.features:
        apart = {**apart, **WEIGHTS}
    itemsize = getattr(torch, getattr(problem, "dtype", "int32")).itemsize
    if not has_room(subject, len(apart) * FAR * itemsize) or _rows(problem) < LEAST_ROWS:
        return VACUOUS
    with subject.surrounded(apart=apart):
        return PARITY[problem.operation](subject, problem)


def _rows(problem: Any) -> int:  # noqa: ANN401  of the operations
    """Return the most rows of a tensor that lie apart."""
    if APART.get(problem.operation) == _TABLE:
        return len(problem.steps[0][0])
    return max(int(problem.num_tokens), getattr(problem, "num_states", 0))


def far_workspaces(subject: Subject, problem: AttentionProblem) -> Verdict:
    """Keep the rows of workspaces far apart: nothing changes."""
    problem = _repeated(problem)
    room = has_room(subject, 2 * FAR * WORKSPACE_BYTES)
    if not room or problem.num_tokens < LEAST_ROWS or not subject.claims(problem):
        return VACUOUS
    inputs = subject.materialise(problem)
    first, bounded = run_on(subject, problem, inputs)
    with workspaces_apart() as apart:
        second = kept(subject.run_operation(problem, inputs))
    bounds = (bounded.bound, bounded.bound)
    return agree(first, second, bounds, exact=subject.exact(problem)) if apart else VACUOUS


LAWS = (
    Law(
        "far_pages",
        PAGED,
        far_pages,
        "pages in caches of more than 2^32 numbers give what they give in small ones",
        weight=0.1,
        needs=PAGES,
        floor=1,
    ),
    Law(
        "append_far_pages",
        APPEND,
        append_far_pages,
        "pages in caches of more than 2^32 numbers get what they get in small ones",
        weight=0.1,
        needs=PAGES,
        floor=1,
    ),
    Law(
        "far_tokens",
        ATTENTION,
        far_tokens,
        "rows of queries, and of ragged keys, more than 2^32 numbers apart give the same",
        weight=0.1,
        needs=ROWS,
        floor=1,
    ),
    Law(
        "far_rows",
        tuple(APART),
        far_rows,
        "rows of tokens, states, requests or weights more than 2^32 numbers apart give the same",
        weight=0.1,
        needs=ROWS,
        floor=1,
    ),
    Law(
        "far_workspaces",
        ATTENTION,
        far_workspaces,
        "rows of workspaces more than 2^32 numbers apart give the same",
        weight=0.1,
        needs=("large_workspaces",),
        floor=1,
    ),
)
