"""Faults in who computes what: ids, shards, tiles of an expert's rows, addresses."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....reference.tensors.moe_inputs import MoEInputs
from ..catalogue import SeededBug, seeded
from .kernels import TILE, Pairs, apply, changed, count_of, local_ids

BUGS: list[SeededBug] = []
MOE = "moe"
PARALLEL = ("expert_parallel",)
Tensor = torch.Tensor


@seeded(BUGS, MOE, "parity", features=PARALLEL)
def offset_ignored(inputs: MoEInputs) -> Tensor:
    """Take global ids for local ones."""
    return apply(replace(inputs, expert_offset=0))


@seeded(BUGS, MOE, "parity", features=PARALLEL)
def foreign_ids_clamped(inputs: MoEInputs) -> Tensor:
    """Send what belongs to other ranks to the nearest expert of this one."""
    last = count_of(inputs) - 1
    return apply(
        inputs, changed(ids=lambda i: (i.topk_ids.long() - i.expert_offset).clamp(0, last))
    )


@seeded(BUGS, MOE, "parity", features=PARALLEL)
def nobody_is_last_expert(inputs: MoEInputs) -> Tensor:
    """Index the experts with -1, which is the last one."""

    def ids(inputs: MoEInputs) -> Tensor:
        nobody = inputs.topk_ids == -1
        return local_ids(inputs).masked_fill(nobody, count_of(inputs) - 1)

    return apply(inputs, changed(ids=ids))


@seeded(BUGS, MOE, "parity")
def last_tile_dropped(inputs: MoEInputs) -> Tensor:
    """Leave out the last tile of an expert's rows if it is not full and not the only one."""

    def schedule(tokens: Tensor, slots: Tensor) -> Pairs:
        whole = len(tokens) // TILE * TILE or len(tokens)
        return tokens[:whole], slots[:whole]

    return apply(inputs, changed(schedule=schedule))


@seeded(BUGS, MOE, "parity")
def rows_shifted_at_tile_edge(inputs: MoEInputs) -> Tensor:
    """Read the first row of each later tile from the row before it."""

    def schedule(tokens: Tensor, slots: Tensor) -> Pairs:
        rows = torch.arange(len(tokens))
        edge = (rows % TILE == 0) & (rows > 0)
        rows = torch.where(edge, rows - 1, rows)
        return tokens[rows], slots[rows]

    return apply(inputs, changed(schedule=schedule))


@seeded(BUGS, MOE, "parity")
def idle_expert_ends_loop(inputs: MoEInputs) -> Tensor:
    """Stop at the first expert without a token."""

    def ids(inputs: MoEInputs) -> Tensor:
        local = local_ids(inputs)
        used = torch.zeros(count_of(inputs), dtype=torch.bool)
        used[local[local >= 0]] = True
        idle = (~used).nonzero().flatten().tolist()
        return local if not idle else local.masked_fill(local > idle[0], -1)

    return apply(inputs, changed(ids=ids))


@seeded(BUGS, MOE, "parity", model="sglang#38780")
def asserts_on_no_tokens(inputs: MoEInputs) -> Tensor:
    """Assert that there is a token."""
    if not len(inputs.topk_ids):
        message = "num_rows must be greater than 0"
        raise AssertionError(message)
    return apply(inputs)


@seeded(BUGS, MOE, "parity", features=("duplicate_ids",))
def duplicates_counted_once(inputs: MoEInputs) -> Tensor:
    """Store an expert's output where another slot of the token had it added."""

    def combine(out: Tensor, tokens: Tensor, y: Tensor) -> None:
        before = out.clone()
        out[tokens] = before[tokens] + y

    return apply(inputs, changed(combine=combine))


@seeded(BUGS, MOE, "parity")
def last_slot_wins(inputs: MoEInputs) -> Tensor:
    """Store the outputs of experts in turn, rather than add them up, beyond four slots."""
    most = 4

    def weights(inputs: MoEInputs) -> Tensor:
        few = inputs.topk_weights.clone()
        if few.shape[1] > most:
            few[:, : few.shape[1] - most] = 0.0
        return few

    return apply(inputs, changed(weights=weights))


@seeded(BUGS, MOE, "parity")
def many_experts_in_a_byte(inputs: MoEInputs) -> Tensor:
    """Keep an expert's id in four bits."""
    return apply(inputs, changed(ids=lambda i: torch.where(i.topk_ids < 0, -1, i.topk_ids % 16)))


@seeded(BUGS, MOE, "well_formed")
def output_in_float32(inputs: MoEInputs) -> Tensor:
    """Return float32, whatever was asked for."""
    return apply(replace(inputs, out_dtype=torch.float32))


@seeded(BUGS, MOE, "far_experts", features=("large_weights",), model="vllm#34279, sglang#4727")
def addresses_in_int32(inputs: MoEInputs) -> Tensor:
    """Multiply an expert's id by the stride of w13 in int32."""

    def w13(inputs: MoEInputs, expert: int) -> Tensor:
        assert isinstance(inputs.w13, Tensor)  # noqa: S101  it names no quantised weights
        size = inputs.w13[0].numel()
        start = (expert * size + 2**31) % 2**32 - 2**31
        flat = inputs.w13.view(-1)
        # What lies before the first expert is somebody else's; here it is read from the end.
        start %= flat.numel()
        return flat[start : start + size].view(inputs.w13.shape[1:]).float()

    return apply(inputs, changed(w13=w13))


@seeded(BUGS, MOE, "unselected_experts")
def masked_by_multiplication(inputs: MoEInputs) -> Tensor:
    """Let every expert compute every token, and multiply by 0 where it was not selected."""
    ids = inputs.topk_ids.long()
    weights = torch.zeros((len(ids), count_of(inputs)))
    weights.scatter_add_(1, ids, inputs.topk_weights)
    everybody = torch.arange(count_of(inputs)).expand(len(ids), -1)
    given = replace(inputs, topk_ids=everybody.to(torch.int32), topk_weights=weights)
    return apply(given, changed(finish=lambda _i, y, w, _e: y * w))


@seeded(BUGS, MOE, "expert_twins")
def equal_experts_merged(inputs: MoEInputs) -> Tensor:
    """Leave out an expert with the weights of an earlier one, as if it had been loaded twice."""
    local = local_ids(inputs)
    assert isinstance(inputs.w13, Tensor)  # noqa: S101  it names no quantised weights
    for expert in range(1, count_of(inputs)):
        if any(torch.equal(inputs.w13[expert], inputs.w13[e]) for e in range(expert)):
            local = local.masked_fill(local == expert, -1)
    return apply(inputs, changed(ids=lambda _: local))


@seeded(BUGS, MOE, "parity", features=("strided_hidden",))
def hidden_taken_for_contiguous(inputs: MoEInputs) -> Tensor:
    """Take the hidden states for contiguous."""
    hidden = inputs.hidden
    assert isinstance(hidden, Tensor)  # noqa: S101  it names no quantised hidden states
    dense = hidden.as_strided(hidden.shape, (hidden.shape[1], 1))
    return apply(replace(inputs, hidden=dense))


@seeded(BUGS, MOE, "row_containment", model="aiter#4530")
def rows_combined_by_product(inputs: MoEInputs) -> Tensor:
    """Bring an expert's rows to their tokens by a product with ones and zeros."""

    def combine(out: Tensor, tokens: Tensor, y: Tensor) -> None:
        out += torch.eye(len(out))[tokens].T @ y

    return apply(inputs, changed(combine=combine))
