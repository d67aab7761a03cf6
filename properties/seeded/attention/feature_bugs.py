"""Faults in what is drawn only where named: two-sided windows, ALiBi, strides, causal flags."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....reference.tensors.inputs import RaggedAttentionInputs
from ..catalogue import SeededBug, seeded
from ..kernels import HONEST, TILE, alibi, attend, in_right_window

BUGS: list[SeededBug] = []
Pair = tuple[torch.Tensor, torch.Tensor]
RAGGED = "ragged_attention"
TILE_OF_ROWS, TILE_OF_KEYS = 64, 32


@seeded(BUGS, RAGGED, "parity", features=("window_right",))
def right_window_off_by_one(inputs: RaggedAttentionInputs) -> Pair:
    """Keep one key too many on the right of a two-sided window."""

    def right(position: torch.Tensor, key: torch.Tensor, window_right: int) -> torch.Tensor:
        return in_right_window(position, key, window_right + 1)

    return attend(inputs, replace(HONEST, right=right))


@seeded(BUGS, RAGGED, "parity", features=("window_right",))
def last_tile_ends_early(inputs: RaggedAttentionInputs) -> Pair:
    """Leave out the last key that a tile of rows sees where a tile of keys begins with it."""

    def right(position: torch.Tensor, key: torch.Tensor, window_right: int) -> torch.Tensor:
        last = position + window_right
        lost = (position % TILE_OF_ROWS == TILE_OF_ROWS - 1) & (last % TILE_OF_KEYS == 0)
        return in_right_window(position, key, window_right) & ~(lost & (key == last))

    return attend(inputs, replace(HONEST, right=right))


@seeded(BUGS, RAGGED, "parity", features=("two_sided_window", "causal_by_request"))
def right_side_without_flags_only(inputs: RaggedAttentionInputs) -> Pair:
    """Forget the right side of a window where each request says whether it is causal."""

    def right(position: torch.Tensor, key: torch.Tensor, window_right: int) -> torch.Tensor:
        del window_right
        return (key >= 0).expand(len(position), -1)

    flagged = isinstance(inputs.causal, torch.Tensor)
    return attend(inputs, replace(HONEST, right=right) if flagged else HONEST)


@seeded(BUGS, RAGGED, "parity", features=("alibi",))
def slopes_of_key_value_heads(inputs: RaggedAttentionInputs) -> Pair:
    """Take ALiBi's slope of the first query head that shares the keys, not of the head itself."""
    group = inputs.q.shape[1] // inputs.k.shape[1]

    def bias(slopes: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return alibi(slopes[::group].repeat_interleave(group), position, key)

    return attend(inputs, replace(HONEST, bias=bias))


@seeded(BUGS, RAGGED, "parity", features=("alibi",))
def alibi_within_tile(inputs: RaggedAttentionInputs) -> Pair:
    """Count ALiBi's positions of keys from the first of their tile."""

    def bias(slopes: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return alibi(slopes, position, key % TILE)

    return attend(inputs, replace(HONEST, bias=bias))


@seeded(BUGS, RAGGED, "parity", features=("different_kv_strides",))
def values_with_strides_of_keys(inputs: RaggedAttentionInputs) -> Pair:
    """Read V with the strides of K."""
    v = inputs.v
    memory = inputs.storages.get("v", inputs.storages["k"])
    places = torch.full(v.shape, int(v.storage_offset()), device=v.device)
    for axis, step in enumerate(inputs.k.stride()):
        along = torch.arange(v.shape[axis], device=v.device) * step
        places += along.view(-1, *[1] * (v.dim() - 1 - axis))
    return attend(replace(inputs, v=memory[places % len(memory)]))


@seeded(BUGS, RAGGED, "parity", features=("causal_by_request",))
def causal_as_first_request(inputs: RaggedAttentionInputs) -> Pair:
    """Take the causal flag of the first request for that of all."""
    causal = inputs.causal
    flag = causal if isinstance(causal, bool) else bool(causal[:1].any())
    return attend(replace(inputs, causal=flag))
