"""Faults in what a MoE wrapper keeps from call to call: plans, packed weights, options.

A single call gives the right answer: each of these goes wrong in the calls that one law makes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from ....impl.features import MOE_FEATURES
from ....reference import QuantizedMatrix
from ....reference.tensors.moe_inputs import OPTIONS, MoEInputs
from ..attention.stateful_bugs import checksum, planned
from ..catalogue import SeededBug, seeded
from .kernels import apply, changed, count_of

BUGS: list[SeededBug] = []
MOE = "moe"
PRIME = 2**31 - 1
Tensor = torch.Tensor


def digest(tensor: Tensor, dim: int = 0) -> int:
    """Add up bits such that the order along an axis counts, and along the others does not."""
    if not tensor.numel():
        return 0
    moved = tensor.movedim(dim, 0)
    # A fresh tensor: contiguous() leaves odd strides where an axis has one element.
    rows = torch.empty((len(moved), moved[0].numel()), dtype=tensor.dtype)
    rows = rows.copy_(moved.reshape(rows.shape)).view(torch.uint8).long()
    sums = rows.square().sum(dim=1) % PRIME
    places = (torch.arange(len(sums)) * 40503 + 1) % PRIME
    return int((sums * places % PRIME).sum())


def _hidden(inputs: MoEInputs) -> int:
    hidden = inputs.hidden
    return digest(hidden.codes if isinstance(hidden, QuantizedMatrix) else hidden.contiguous())


def _codes(matrix: Tensor | QuantizedMatrix) -> Tensor:
    return matrix.codes if isinstance(matrix, QuantizedMatrix) else matrix


def _weights(inputs: MoEInputs) -> tuple[int, ...]:
    """Return a digest of the weights that changes with any reordering of them."""
    matrices = _codes(inputs.w13), _codes(inputs.w2)
    return tuple(digest(matrix, dim) for matrix in matrices for dim in (0, 1))


def _bits(inputs: MoEInputs) -> tuple[Hashable, ...]:
    """Return a key of the call by its tokens, ids and routing weights."""
    ids, weights = inputs.topk_ids, inputs.topk_weights
    named = (digest(ids), digest(ids, 1), digest(weights), digest(weights, 1))
    return (_hidden(inputs), *named, inputs.activation, *_codes(inputs.w13).shape)


@seeded(BUGS, MOE, "token_order")
def order_of_first_plan(inputs: MoEInputs) -> Tensor:
    """Keep which rows an expert gets from the first call with these tokens in any order."""
    ids, weights = inputs.topk_ids, inputs.topk_weights
    columns = (digest(ids, 1), digest(weights, 1), checksum(_codes(inputs.hidden)))
    key = ("token order", *ids.shape, *columns, digest(_codes(inputs.w13)))
    return apply(replace(inputs, topk_ids=planned(key, ids.clone())))


@seeded(BUGS, MOE, "slot_order")
def slots_of_first_plan(inputs: MoEInputs) -> Tensor:
    """Keep the ids of the first call in which each token has these experts in any order."""
    ids, weights = inputs.topk_ids, inputs.topk_weights
    rows = (digest(ids), digest(weights), _hidden(inputs))
    key = ("slot order", *ids.shape, *rows, digest(_codes(inputs.w13)))
    return apply(replace(inputs, topk_ids=planned(key, ids.clone())))


@seeded(BUGS, MOE, "token_batches")
def rows_of_first_batch(inputs: MoEInputs) -> Tensor:
    """Compute as many rows as the first batch had that ended with the same token."""
    count = len(inputs.topk_ids)
    if not count:
        return apply(inputs)
    last = (_codes(inputs.hidden), inputs.topk_ids, inputs.topk_weights)
    key = ("rows", *(digest(each[-1:], 1) for each in last), *_weights(inputs))
    out = apply(inputs)
    if planned(key, count, most=4) != count:
        out[count // 2 :] = 0.0
    return out


@seeded(BUGS, MOE, "expert_order")
def packed_by_sum(inputs: MoEInputs) -> Tensor:
    """Pack weights once, and know them by a sum over the experts, in any order."""
    w13 = inputs.w13
    assert isinstance(w13, Tensor)  # noqa: S101  it names no quantised weights
    each = sum(digest(expert) ** 2 for expert in w13)
    key = ("packed", each, *w13.shape, _hidden(inputs), digest(inputs.topk_weights))
    return apply(replace(inputs, w13=planned(key, w13.clone())))


@seeded(BUGS, MOE, "gate_up_swap", features=("interleaved_w13",))
def packed_by_sums_of_experts(inputs: MoEInputs) -> Tensor:
    """Pack weights once, and know them by the sum over each expert's rows, in any order."""
    w13 = inputs.w13
    assert isinstance(w13, Tensor)  # noqa: S101  it names no quantised weights
    key = ("packed rows", digest(w13), *w13.shape, *_bits(inputs), inputs.interleaved)
    return apply(replace(inputs, w13=planned(key, w13.clone())))


@seeded(BUGS, MOE, "no_tokens")
def idle_flag_kept(inputs: MoEInputs) -> Tensor:
    """Skip the call after one without tokens, too."""
    idle = _idle.pop("idle", False)
    if not len(inputs.topk_ids):
        _idle["idle"] = True
    out = apply(inputs)
    return torch.zeros_like(out) if idle else out


_idle: dict[str, bool] = {}


@seeded(BUGS, MOE, "routing_weight_linearity")
def outputs_by_ids(inputs: MoEInputs) -> Tensor:
    """Keep the output for tokens and ids where no routing weight has grown."""
    ids, weights = inputs.topk_ids, inputs.topk_weights
    zero = weights == 0
    key = ("by ids", _hidden(inputs), digest(ids), digest(ids, 1), digest(zero), digest(zero, 1),
           *_weights(inputs), inputs.activation)  # fmt: skip
    out = apply(inputs)
    most, kept = planned(key, (weights.clone(), out))
    return kept.clone() if bool((weights <= most).all()) else out


@dataclass
class _Ranks:
    """What is remembered of the last tokens that all experts saw."""

    tokens: tuple[Hashable, ...] = ()
    experts: int = 0
    offset: int | None = None


_ranks = _Ranks()


@seeded(BUGS, MOE, "expert_shards", features=("expert_parallel",))
def offset_of_first_rank(inputs: MoEInputs) -> Tensor:
    """Keep the first rank's offset for the other ranks of the same batch."""
    tokens, count = (*_bits(inputs)[:-3], inputs.num_experts), count_of(inputs)
    if tokens != _ranks.tokens or count > _ranks.experts:
        _ranks.tokens, _ranks.experts, _ranks.offset = tokens, count, None
        return apply(inputs)
    if count == _ranks.experts:
        return apply(inputs)
    if _ranks.offset is None:
        _ranks.offset = inputs.expert_offset
    return apply(replace(inputs, expert_offset=_ranks.offset))


@seeded(BUGS, MOE, "inter_shards")
def second_weights_of_first_plan(inputs: MoEInputs) -> Tensor:
    """Keep the second product's weights of the first call with these tokens and shapes."""
    w2 = inputs.w2
    assert isinstance(w2, Tensor)  # noqa: S101  it names no quantised weights
    key = ("second", *_bits(inputs), *w2.shape)
    return apply(replace(inputs, w2=planned(key, w2.clone())))


@seeded(BUGS, MOE, "zero_weight_slots")
def tiles_of_first_plan(inputs: MoEInputs) -> Tensor:
    """Keep where each expert's rows begin, though slots of weight 0 have other experts now."""
    ids, weights = inputs.topk_ids, inputs.topk_weights
    weighing = ids.masked_fill(weights == 0, -1)
    counts = ids.flatten().long().bincount(minlength=count_of(inputs))
    key = ("tiles", _hidden(inputs), digest(weights), digest(weights, 1), digest(weighing),
           digest(weighing, 1), *_weights(inputs))  # fmt: skip
    if torch.equal(planned(key, counts), counts):
        return apply(inputs)
    return apply(inputs, changed(schedule=lambda tokens, slots: (tokens.roll(1), slots)))


@seeded(BUGS, MOE, "moe_sensitivity", features=MOE_FEATURES)
def options_of_first_call(inputs: MoEInputs) -> Tensor:
    """Keep the options of the first call with these tokens and weights."""
    mine = {name: getattr(inputs, name) for name in OPTIONS}
    key = ("options", *_bits(inputs), digest(_codes(inputs.w13)), digest(_codes(inputs.w13), 1),
           count_of(inputs), inputs.expert_offset, isinstance(inputs.w13, Tensor))  # fmt: skip
    kept = planned(key, mine)
    changes = {n: kept[n] for n in ("alpha", "beta", "limit", "interleaved", "weights_on_input")}
    return apply(replace(inputs, **changes))


@seeded(BUGS, MOE, "hidden_strides", features=("strided_hidden",))
def strides_of_first_call(inputs: MoEInputs) -> Tensor:
    """Keep the strides of the hidden states from the first call with their values."""
    hidden = inputs.hidden
    assert isinstance(hidden, Tensor)  # noqa: S101  it names no quantised hidden states
    key = ("hidden strides", *_bits(inputs), checksum(_codes(inputs.w13)))
    strides = planned(key, hidden.stride())
    return apply(replace(inputs, hidden=hidden.as_strided(hidden.shape, strides)))


@seeded(BUGS, MOE, "call_order")
def counts_not_cleared(inputs: MoEInputs) -> Tensor:
    """Keep the counts of a larger batch in the workspace, so that the next one begins late."""
    count = len(inputs.topk_ids)
    before, _last["count"] = _last.get("count", 0), count
    out = apply(inputs)
    if before > count > 0:
        out[: min(before - count, count)] = 0.0
    return out


_last: dict[str, int] = {}


@seeded(BUGS, MOE, "output_buffers", writes_out=True, features=())
def adds_to_given_output(inputs: MoEInputs) -> None:
    """Add to the output's buffer where it holds a finite number already."""
    if inputs.out is not None:
        inputs.out.copy_(inputs.out.nan_to_num(nan=0.0) + apply(inputs))


@seeded(BUGS, MOE, "inputs_unchanged")
def hidden_scaled_in_place(inputs: MoEInputs) -> Tensor:
    """Multiply the hidden states by the routing weights in place where there is one slot."""
    out = apply(inputs)
    if inputs.topk_ids.shape[1] == 1 and isinstance(inputs.hidden, Tensor):
        inputs.hidden.mul_(inputs.topk_weights.to(inputs.hidden.dtype))
    return out
