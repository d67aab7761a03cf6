"""Batched experts in stages, faults in how counts and rows are read, and honest controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ....impl.torch.batched_moe import FEATURES, apply_expert, options_of, rows_of
from ....reference import Arithmetic
from ....reference.tensors.batched_moe import BatchedMoEInputs
from ..catalogue import SeededBug, seeded

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
BATCHED = "batched_moe"
TILE = 8
"""Rows that a program computes."""
Tensor = torch.Tensor
Expert = Callable[[Tensor, int], Tensor]
_counts: dict[tuple[int, ...], list[int]] = {}
_packed: dict[tuple[tuple[int, ...], str], tuple[Tensor, Tensor]] = {}
_strides: dict[tuple[float, ...], int] = {}


def apply(
    inputs: BatchedMoEInputs,
    counts: Sequence[int] | None = None,
    hidden: Tensor | None = None,
    expert: Expert | None = None,
) -> Tensor:
    """Compute each expert's rows; what is behind them is the number 11."""
    options = options_of(inputs)
    hidden = rows_of(inputs) if hidden is None else hidden
    apply_to = expert or (lambda x, e: apply_expert(options, x, e))
    out = torch.full_like(hidden, 11.0)
    for e, count in enumerate(inputs.counts.tolist() if counts is None else counts):
        if count > 0:
            out[e, :count] = apply_to(hidden[e, :count], e)
    return out.to(inputs.out_dtype)


@seeded(BUGS, BATCHED, "parity", features=FEATURES)
def count_of_next_expert(inputs: BatchedMoEInputs) -> Tensor:
    """Read the count of the expert behind."""
    return apply(inputs, inputs.counts.roll(-1).tolist())


@seeded(BUGS, BATCHED, "parity", features=FEATURES)
def one_count_for_all(inputs: BatchedMoEInputs) -> Tensor:
    """Read the first expert's count once, for all experts."""
    first = int(inputs.counts[0])
    return apply(inputs, [first] * len(inputs.counts))


@seeded(BUGS, BATCHED, "parity", features=FEATURES)
def full_expert_has_no_rows(inputs: BatchedMoEInputs) -> Tensor:
    """Take counts modulo the room for rows, so that a full expert has none."""
    room = rows_of(inputs).shape[1]
    return apply(inputs, [n % room if room > 1 else n for n in inputs.counts.tolist()])


@seeded(BUGS, BATCHED, "parity", features=FEATURES)
def ends_at_expert_without_rows(inputs: BatchedMoEInputs) -> Tensor:
    """Leave the loop over experts at the first one without a row."""
    counts: list[int] = inputs.counts.tolist()
    end = counts.index(0) if 0 in counts else len(counts)
    return apply(inputs, counts[:end])


@seeded(BUGS, BATCHED, "parity", features=FEATURES)
def rows_of_whole_tiles(inputs: BatchedMoEInputs) -> Tensor:
    """Compute no row of an expert's last tile where the count does not fill it."""
    counts = inputs.counts.tolist()
    return apply(inputs, [n - n % TILE if n > TILE else n for n in counts])


@seeded(BUGS, BATCHED, "parity", features=FEATURES)
def last_tile_into_next_expert(inputs: BatchedMoEInputs) -> Tensor:
    """Write an expert's last tile whole, over the first rows of the next expert."""
    out = apply(inputs)
    room = out.shape[1]
    behind = [-(-n // TILE) * TILE - room if n else 0 for n in inputs.counts.tolist()]
    for expert, rows in enumerate(behind[:-1]):
        if rows > 0:
            out[expert + 1, :rows] = 0
    return out


@seeded(BUGS, BATCHED, "parity", features=FEATURES)
def rows_packed_by_count(inputs: BatchedMoEInputs) -> Tensor:
    """Begin an expert's rows where those before it end, as if there were no room behind counts."""
    hidden = rows_of(inputs)
    flat, packed = hidden.flatten(0, 1), torch.zeros_like(hidden)
    start = 0
    for expert, count in enumerate(inputs.counts.tolist()):
        packed[expert, :count] = flat[start : start + count]
        start += count
    return apply(inputs, hidden=packed)


@seeded(BUGS, BATCHED, "rows_behind_counts", features=FEATURES)
def scale_of_whole_expert(inputs: BatchedMoEInputs) -> Tensor:
    """Scale by the largest number among all of an expert's rows, those behind its count too."""
    hidden = rows_of(inputs)
    largest = hidden.abs().amax(dim=(1, 2), keepdim=True)
    scale = torch.exp2(torch.log2(largest.clamp(min=2.0**-60)).floor())
    return apply(inputs, hidden=hidden / scale * scale)


@seeded(BUGS, BATCHED, "rows_behind_counts", features=FEATURES)
def mask_by_product(inputs: BatchedMoEInputs) -> Tensor:
    """Multiply rows behind the count by 0, and take sums over all rows of an expert."""
    hidden, used = rows_of(inputs), ~inputs.unused()
    masked = hidden * used
    return apply(inputs, hidden=masked + 0 * masked.sum(dim=1, keepdim=True))


@seeded(BUGS, BATCHED, "call_order", features=FEATURES)
def counts_of_call_before(inputs: BatchedMoEInputs) -> Tensor:
    """Use the counts of the call before where it had the same shape, as a host that runs ahead."""
    shape, counts = tuple(rows_of(inputs).shape), inputs.counts.tolist()
    before, _counts[shape] = _counts.get(shape, counts), counts
    return apply(inputs, before)


@seeded(BUGS, BATCHED, "room_for_rows", features=FEATURES)
def stride_of_first_call(inputs: BatchedMoEInputs) -> Tensor:
    """Keep the stride of experts with a batch's counts and first number, and find it by these."""
    hidden, counts = rows_of(inputs), inputs.counts.tolist()
    experts, room = hidden.shape[:2]
    key = (*counts, float(hidden[counts.index(max(counts)), 0, 0]))
    stride = _strides.setdefault(key, room)
    places = stride * torch.arange(experts).unsqueeze(1) + torch.arange(room)
    flat = hidden.flatten(0, 1)
    return apply(inputs, hidden=flat[places.clamp(max=len(flat) - 1)])


@seeded(BUGS, BATCHED, "batched_expert_order", features=FEATURES)
def rows_by_packed_weights(inputs: BatchedMoEInputs) -> Tensor:
    """Keep the first weights of each sum, as if a sum told the order of experts."""
    if isinstance(inputs.w13, Tensor) and isinstance(inputs.w2, Tensor):
        total = float(inputs.w13.double().abs().sum())
        key = (tuple(inputs.w13.shape), f"{total:.6g}")
        w13, w2 = _packed.setdefault(key, (inputs.w13.clone(), inputs.w2.clone()))
        inputs = replace(inputs, w13=w13, w2=w2)
    return apply(inputs)


@seeded(BUGS, BATCHED, "inputs_unchanged", features=FEATURES)
def clears_rows_behind_counts(inputs: BatchedMoEInputs) -> Tensor:
    """Write zeros into the caller's hidden states behind the counts."""
    out = apply(inputs)
    if isinstance(inputs.hidden, torch.Tensor):
        inputs.hidden.masked_fill_(inputs.unused(), 0.0)
    return out


@seeded(BUGS, BATCHED, "parity", features=FEATURES, writes_out=True)
def out_of_most_rows_only(inputs: BatchedMoEInputs) -> Tensor:
    """Write no row of an expert whose count is less than half of the room."""
    counts, room = inputs.counts.tolist(), rows_of(inputs).shape[1]
    out = apply(inputs)
    assert inputs.out is not None  # noqa: S101  it declares writes_out
    for expert, count in enumerate(counts):
        if 2 * count >= room:
            inputs.out[expert] = out[expert]
    return inputs.out


@seeded(CONTROLS, BATCHED, control="honest", features=FEATURES)
def batched_experts_in_float32(inputs: BatchedMoEInputs) -> Tensor:
    """Compute each expert's rows in use in float32."""
    return apply(inputs)


@seeded(CONTROLS, BATCHED, control="honest", features=FEATURES)
def batched_experts_on_all_rows(inputs: BatchedMoEInputs) -> Tensor:
    """Compute every row that there is room for, whatever it holds."""
    room = rows_of(inputs).shape[1]
    return apply(inputs, [room if n else 0 for n in inputs.counts.tolist()])


@seeded(
    CONTROLS,
    BATCHED,
    control="honest",
    features=FEATURES,
    writes_out=True,
    arithmetic=Arithmetic(projections="inputs", intermediate="inputs", partial_outputs=True),
)
def batched_experts_into_buffers(inputs: BatchedMoEInputs) -> Tensor:
    """Write whole tiles of rows into the buffer that is given, as far as there is room."""
    out = apply(inputs)
    assert inputs.out is not None  # noqa: S101  it declares writes_out
    for expert, count in enumerate(inputs.counts.tolist()):
        rows = -(-count // TILE) * TILE
        inputs.out[expert, :rows] = out[expert, :rows]
    return inputs.out
