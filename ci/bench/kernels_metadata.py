"""Building batch metadata: one Triton launch against a sequence of torch operations."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ...impl.triton.metadata import DeviceMetadata, build
from ...reference.tensors.inputs import MetadataInputs
from .gpu import race
from .results import Requirement, Table

LAUNCH_TO_TORCH = 0.3
PAGE_SIZE = 16
SHAPES = ((1, 512), (64, 512), (256, 512), (256, 2048), (1024, 128))
"""Requests, and columns of the block table."""
TARGET = (64, 512)
SETS = 8


@dataclass(frozen=True)
class Row:
    """Microseconds of one shape."""

    requests: int
    columns: int
    launch: float
    sequence: float

    @property
    def ratio(self) -> float:
        """The launch's share of the sequence."""
        return self.launch / self.sequence


def torch_sequence(inputs: MetadataInputs) -> DeviceMetadata:
    """Build metadata with torch operations of fixed shapes, none of which waits for the GPU.

    The page ids are scattered to where they belong, and those that belong nowhere to one entry
    behind all others: a gather by a mask would have to ask the device how many there are.
    """
    table, page_size = inputs.block_table, inputs.page_size
    requests, columns = table.shape
    pages = (inputs.seq_lens + (page_size - 1)) // page_size
    kv_indptr, qo_indptr = (
        torch.nn.functional.pad(torch.cumsum(counts, 0, dtype=torch.int32), (1, 0))
        for counts in (pages, inputs.query_lens)
    )
    column = torch.arange(columns, dtype=torch.int32, device=table.device)
    place = torch.where(
        column[None, :] < pages[:, None], kv_indptr[:-1, None] + column[None, :], requests * columns
    )
    indices = table.new_empty(requests * columns + 1)
    indices.scatter_(0, place.flatten().long(), table.flatten())
    return DeviceMetadata(
        qo_indptr=qo_indptr,
        paged_kv_indptr=kv_indptr,
        paged_kv_indices=indices[:-1],
        paged_kv_last_page_len=inputs.seq_lens - (pages - 1).clamp_min(0) * page_size,
        seq_lens=inputs.seq_lens,
        page_size=page_size,
    )


def example(requests: int, columns: int, device: str, seed: int = 0) -> MetadataInputs:
    """Return decodes and short prefills of random lengths, and a block table of random pages."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        drawn = torch.randint(low, high, shape, generator=generator, dtype=torch.int32)
        return drawn.to(device)

    return MetadataInputs(
        query_lens=integers(1, 9, requests),
        seq_lens=integers(9, columns * PAGE_SIZE + 1, requests),
        block_table=integers(0, 2**20, requests, columns),
        page_size=PAGE_SIZE,
    )


def check(inputs: MetadataInputs) -> None:
    """Compare the launch with the sequence, entry by entry.

    Raises:
        RuntimeError: they differ.
    """
    launched, expected = build(inputs), torch_sequence(inputs)
    count = int(expected.paged_kv_indptr[-1])
    for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len", "seq_lens"):
        if not torch.equal(getattr(launched, name), getattr(expected, name)):
            message = f"the metadata builder and torch differ in {name}"
            raise RuntimeError(message)
    if not torch.equal(launched.paged_kv_indices[:count], expected.paged_kv_indices[:count]):
        message = "the metadata builder and torch differ in paged_kv_indices"
        raise RuntimeError(message)


def measure() -> tuple[Table, list[Requirement]]:
    """Time both by graph replay, on several sets of inputs that take turns."""
    rows = []
    for requests, columns in SHAPES:
        sets = [example(requests, columns, "cuda", seed) for seed in range(SETS)]
        check(sets[0])
        times = race(
            {
                builder.__name__: [functools.partial(builder, inputs) for inputs in sets]
                for builder in (build.function, torch_sequence)
            }
        )
        launch, sequence = (1e3 * time for time in times.values())
        rows.append(Row(requests, columns, launch, sequence))
    table = Table(
        "metadata builder, µs a call under graph replay",
        ("requests", "columns", "one launch", "torch", "ratio"),
        tuple((row.requests, row.columns, row.launch, row.sequence, row.ratio) for row in rows),
    )
    return table, [
        Requirement(
            f"metadata launch to torch, {row.requests} requests of {row.columns} columns",
            row.ratio,
            high=LAUNCH_TO_TORCH,
        )
        for row in rows
    ]
