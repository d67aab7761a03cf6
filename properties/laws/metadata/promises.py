"""Laws of what builders promise: indices of 64 bits, errors, metadata that attention can use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ....impl.features import INT64_INPUTS, REFUSES
from ....reference import BatchMetadata, MetadataProblem, oracle, paged_attention
from ....reference.tensors.inputs import MetadataInputs
from ....reference.tensors.preparation import prepared
from ....reference.tensors.slots import slots_of
from ...verdicts.comparison import bitwise, fail
from ...verdicts.contained import Stop
from ...verdicts.subject import Subject
from ...verdicts.verdict import PASS, VACUOUS, Verdict
from ..law import BATCH, METADATA, SLOTS, Law
from .builders import WRITTEN, Expected, Stepped, buffer_after, fields_of

BUFFERS: dict[str, Expected] = {"map_slots": slots_of, "prepare_batch": prepared}
"""The oracles of what writes a buffer, by operation."""
CHANNELS = 2
"""Channels of the queries, keys and values that a builder's metadata is attended with."""


def _page_size(result: object) -> object:
    return getattr(result, "page_size", None)


def attended(subject: Subject, problem: MetadataProblem) -> Verdict:
    """Attend by what was built of the last batch: the oracle's metadata gives the same.

    Slots of no key hold NaN, and what lies behind the page ids of the batch is not handed on.
    """
    inputs = subject.materialise(problem, step=len(problem.steps) - 1)
    expected = oracle.metadata(inputs).to("cpu")
    result = subject.call(problem, inputs)
    built = {name: value.cpu() for name, value in fields_of(subject, result).items()}
    size = subject.read(_page_size, result)
    pool, ids = expected.paged_kv_indices.unique(), built["paged_kv_indices"]
    ids = ids[: int(built["paged_kv_indptr"][-1:].sum())]
    if not torch.isin(ids, pool).all():
        return fail("numeric", f"paged_kv_indices {ids.tolist()} has pages of no request")

    def in_pool(metadata: BatchMetadata) -> BatchMetadata:
        places = torch.searchsorted(pool, metadata.paged_kv_indices).int()
        return replace(metadata, paged_kv_indices=places)

    try:
        used = BatchMetadata(
            **{**built, "paged_kv_indices": ids},
            page_size=inputs.page_size if size is None else size,  # type: ignore[arg-type]
        )
        found = _attention(in_pool(used), in_pool(expected), len(pool))
    except ValueError as error:
        return fail("numeric", f"attention refuses what was built: {error}")
    wanted = _attention(in_pool(expected), in_pool(expected), len(pool))
    for name, value, other in zip(("out", "lse"), found, wanted, strict=True):
        compared = bitwise(f"{name} of attention by what was built", value, other)
        if compared.bad:
            return compared
    return PASS


def _attention(
    metadata: BatchMetadata, expected: BatchMetadata, pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by metadata to a cache of the keys that the oracle's has, all else NaN."""
    size = expected.page_size
    shape = (pages, size, 1, CHANNELS)
    cache = torch.full(shape, torch.nan, dtype=torch.float64)
    values = torch.arange(cache.numel()).sin().double().view(shape)
    starts = expected.paged_kv_indptr.tolist()
    for request, keys in enumerate(expected.seq_lens.tolist()):
        of_request = expected.paged_kv_indices[starts[request] : starts[request + 1]].long()
        is_key = torch.arange(len(of_request) * size).view(-1, size) < keys
        kept = torch.where(is_key[..., None, None], values[of_request], cache[of_request])
        cache[of_request] = kept
    tokens = int(expected.qo_indptr[-1])
    q = torch.arange(tokens * CHANNELS).cos().double().view(tokens, 1, CHANNELS)
    answer = paged_attention(q, cache, -cache, metadata)
    return answer.out, answer.lse


def int64_inputs(subject: Subject, problem: MetadataProblem | Stepped) -> Verdict:
    """Build of lengths, rows and tables in int64 what is built of those in int32."""
    inputs = subject.materialise(problem)
    own = WRITTEN.get(problem.operation)
    wide = replace(
        inputs,
        **{
            name: value.long()
            for name, value in vars(inputs).items()
            if isinstance(value, torch.Tensor) and value.dtype == torch.int32 and name != own
        },
    )
    if not isinstance(problem, MetadataProblem):
        wanted = BUFFERS[problem.operation](inputs)
        return bitwise("the buffer, of int64", buffer_after(subject, problem, wide), wanted)
    expected = oracle.metadata(inputs).tensors()
    for name, value in fields_of(subject, subject.call(problem, wide)).items():
        wanted = expected[name]
        # A builder that never waits may have more room than there are pages.
        compared = bitwise(f"{name}, of int64", value[: len(wanted)], wanted)
        if compared.bad:
            return compared
    return PASS


def refusals(subject: Subject, problem: MetadataProblem) -> Verdict:
    """Build malformed batches: each raises an error that names what is wrong."""
    inputs = subject.materialise(problem)
    tried = False
    for what, names, broken in _malformed(inputs):
        tried = True
        try:
            subject.call(problem, broken)
        except Stop as stop:
            said = stop.verdict.message
            if any(name in said for name in names):
                continue
            return fail("refusal", f"{what}: raised {stop.verdict.kind}, which names no argument")
        return fail("refusal", f"{what}: the call returned")
    return PASS if tried else VACUOUS


def _malformed(inputs: MetadataInputs) -> Iterator[tuple[str, tuple[str, ...], MetadataInputs]]:
    """Yield what is wrong, the arguments that an error may name, and a batch that has it."""

    def changed(name: str, place: tuple[int, ...], value: int) -> MetadataInputs:
        tensor = getattr(inputs, name).clone()
        tensor[place] = value
        return replace(inputs, **{name: tensor})

    requests, columns = inputs.block_table.shape
    if not requests:
        return
    last = requests - 1
    for name in ("query_lens", "seq_lens"):
        yield f"{name}[{last}] is -1", (name,), changed(name, (last,), -1)
    beyond = columns * inputs.page_size + 1
    names = ("seq_lens", "block_table")
    yield f"seq_lens[{last}] is {beyond}", names, changed("seq_lens", (last,), beyond)
    has_pages = inputs.seq_lens.nonzero().flatten().tolist()
    for request in has_pages[-1:]:
        broken = changed("block_table", (request, 0), -1)
        yield f"block_table[{request}, 0] is -1", ("block_table",), broken


LAWS = (
    Law(
        "metadata_attended",
        METADATA,
        attended,
        "attention by what was built, and slots of no key NaN, is attention by the oracle's",
        weight=0.5,
    ),
    Law(
        "int64_inputs",
        METADATA + SLOTS + BATCH,
        int64_inputs,
        "lengths, rows and tables in int64 give what those in int32 give",
        weight=0.5,
        needs=(INT64_INPUTS,),
    ),
    Law(
        "metadata_refusals",
        METADATA,
        refusals,
        "a builder that promises it refuses lengths and pages that no batch has, and names them",
        weight=0.5,
        needs=(REFUSES,),
    ),
)
