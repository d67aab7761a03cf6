"""Preparing batches with torch operations only; it shares no code with the oracle's lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...reference.tensors.preparation import BatchInputs
from ..protocol import implementation


class _Units(NamedTuple):
    """Tokens, keys or pages of a batch, one after the other: the request of each, its number."""

    request: torch.Tensor
    number: torch.Tensor


def _units(counts: torch.Tensor) -> _Units:
    counts = counts.long()
    request = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    ends = counts.cumsum(0)
    number = torch.arange(len(request), device=counts.device) - (ends - counts)[request]
    return _Units(request, number)


def _tokens(inputs: BatchInputs) -> _Units:
    return _units(inputs.query_start_loc.diff())


def _pages(inputs: BatchInputs) -> tuple[_Units, torch.Tensor]:
    """Return the pages of all requests, 0 for those before a window."""
    size = inputs.page_size
    units = _units((inputs.seq_lens + size - 1) // size)
    found = inputs.block_table[inputs.rows.long()[units.request], units.number]
    seen = units.number >= inputs.first_keys[units.request] // size
    return units, torch.where(seen, found, 0)


def _slots(inputs: BatchInputs) -> torch.Tensor:
    units = _units(inputs.seq_lens - inputs.first_keys)
    keys = units.number + inputs.first_keys[units.request]
    return inputs.token_table[inputs.rows.long()[units.request], keys]


def _positions(inputs: BatchInputs) -> torch.Tensor:
    units = _tokens(inputs)
    return inputs.computed[inputs.rows.long()[units.request]] + units.number


def _local_seq_lens(inputs: BatchInputs) -> torch.Tensor:
    turn = inputs.world * inputs.interleave
    rest = inputs.seq_lens % turn - inputs.rank * inputs.interleave
    return inputs.seq_lens // turn * inputs.interleave + rest.clamp(0, inputs.interleave)


FLAT: dict[str, Callable[[BatchInputs], torch.Tensor]] = {
    "kv_indices": _slots,
    "page_indices": lambda inputs: _pages(inputs)[1],
    "kv_indptr": lambda inputs: inputs.kv_indptr,
    "query_start_loc": lambda inputs: inputs.query_start_loc,
    "query_starts": lambda inputs: inputs.query_start_loc[:-1],
    "positions": _positions,
    "token_seq_lens": lambda inputs: _positions(inputs) + 1,
    "local_positions": lambda inputs: _tokens(inputs).number,
    "seq_lens": lambda inputs: inputs.computed[inputs.rows.long()] + inputs.query_start_loc.diff(),
    "local_seq_lens": _local_seq_lens,
    "token_to_request": lambda inputs: _tokens(inputs).request,
    "token_rows": lambda inputs: inputs.rows[_tokens(inputs).request],
}
"""The entries of tensors without rows, by output."""


@implementation("prepare_batch", name="torch-prepare-batch")
def prepare_batch(inputs: BatchInputs) -> torch.Tensor:
    """Compute all entries at once, and write them into the buffer."""
    buffer, behind = inputs.buffer, len(inputs.rows)
    if inputs.output == "page_table":
        if inputs.rest == "zero_tails":
            buffer[:behind] = 0
        units, pages = _pages(inputs)
        buffer[units.request, units.number] = pages
    else:
        entries = FLAT[inputs.output](inputs)
        behind = len(entries)
        buffer[:behind] = entries.to(buffer.dtype)
    if inputs.rest == "zero_rows":
        buffer[behind:] = 0
    return buffer
