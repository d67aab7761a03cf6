"""Which slots of the keys any query of a call sees, for whoever fills the others with anything."""

from __future__ import annotations

import torch

from .batches import Batch, Call, batches
from .options import Options
from .softmax import Weights, softmax_weights


def seen_slots(call: Call, options: Options) -> torch.Tensor:
    """Return which slots some query of the call sees: bool [pages, page_size], on q's device.

    Args:
        call: a checked call; keys without pages are pages of one key.
        options: the options of the call.
    """
    slots_first = call.kv_layout == "NHD"
    pages, size = call.k.shape[0], call.k.shape[1 if slots_first else 2]
    seen = torch.zeros(pages * size, dtype=torch.bool, device=call.q.device)
    with torch.no_grad():
        for batch in batches(call, options):
            for weights in softmax_weights(batch, options):
                seen[_slots(batch, weights, size)] = True
    return seen.view(pages, size)


def _slots(batch: Batch, weights: Weights, size: int) -> torch.Tensor:
    """Return the slots that the rows of a block see."""
    block, width = weights.block, weights.block.rows.stop - weights.block.rows.start
    by_row = (~torch.isneginf(weights.logits)).unflatten(2, (width, -1)).any(dim=3).any(dim=1)
    real = torch.zeros(len(by_row) * width, dtype=torch.bool, device=by_row.device)
    real[block.places] = True  # rows past a request's queries are nobody's
    by_request = (by_row & real.view(len(by_row), width, 1)).any(dim=1).cpu()
    slots: list[int] = []
    for request, first, entries in zip(batch.requests, batch.first, by_request, strict=True):
        for entry in entries.nonzero().flatten().tolist():
            page, offset = divmod(entry + block.keys.start + first, size)
            slots.append(request.pages[page] * size + offset)
    return torch.tensor(slots, dtype=torch.int64, device=by_row.device)
