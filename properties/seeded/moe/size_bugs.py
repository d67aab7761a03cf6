"""Faults that only sizes and counts show: whole tiles, many experts, many slots, many tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from ....impl.protocol import Supports
from ....impl.targets.target import Target
from ....impl.torch.moe_weights import expert_weights
from ....reference import Arithmetic, MoEProblem, Problem, QuantizedMatrix
from ....reference.moe.weights import SCALE_BLOCK
from ....reference.tensors.moe_inputs import MoEInputs
from ..catalogue import SeededBug, seeded
from .kernels import Pairs, apply, changed, local_ids

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
MOE = "moe"
ROWS = 64
"""Rows of an expert that the faulty kernels take right."""
BYTE = 256
"""Experts that a byte counts."""
SUMMED = 128
"""Products of FP8 that are summed before they are added in float32."""
Tensor = torch.Tensor


def whole_tiles(number: int) -> Supports:
    """Return what a kernel supports whose hidden and inter are multiples of its tile."""

    def supports(problem: Problem, target: Target) -> bool | str:
        del target
        assert isinstance(problem, MoEProblem)  # noqa: S101  it is asked about no others
        fits = not problem.hidden % number and not problem.inter % number
        return fits or f"hidden and inter are multiples of {number}"

    return supports


def one_model(problem: Problem, target: Target) -> bool:
    """Return whether sizes, counts and format are those of one model's experts; no sentence."""
    del target
    assert isinstance(problem, MoEProblem)  # noqa: S101  it is asked about no others
    tiles = not (problem.hidden % SCALE_BLOCK or problem.inter % SCALE_BLOCK)
    counts = not problem.num_experts % 8 and problem.top_k == 8  # noqa: PLR2004
    return tiles and counts and problem.quantized == "fp8_block" and problem.quantized_hidden


@seeded(CONTROLS, MOE, control="honest", supports=whole_tiles(256))
def experts_of_whole_tiles(inputs: MoEInputs) -> Tensor:
    """Take hidden and inter in multiples of 256 only."""
    return apply(inputs)


@seeded(BUGS, MOE, "parity", supports=whole_tiles(256))
def first_weights_from_third_expert(inputs: MoEInputs) -> Tensor:
    """Read the first expert's weights for the third and later ones, in a kernel of whole tiles."""
    return apply(inputs, changed(w13=lambda i, e: expert_weights(i.w13, e if e < 2 else 0)))  # noqa: PLR2004


@seeded(BUGS, MOE, "parity", supports=whole_tiles(256))
def one_tile_of_rows(inputs: MoEInputs) -> Tensor:
    """Compute 64 rows of an expert, and leave out the others, in a kernel of whole tiles."""
    return apply(inputs, changed(schedule=lambda tokens, slots: (tokens[:ROWS], slots[:ROWS])))


@seeded(BUGS, MOE, "parity", supports=whole_tiles(512))
def rows_of_an_equal_share(inputs: MoEInputs) -> Tensor:
    """Launch an equal share of the rows for each expert, in a kernel of whole tiles of 512."""
    ids = local_ids(inputs)
    used = len(ids[ids >= 0].unique())
    share = -(-int((ids >= 0).sum()) // max(used, 1))

    def schedule(tokens: Tensor, slots: Tensor) -> Pairs:
        return tokens[:share], slots[:share]

    return apply(inputs, changed(schedule=schedule))


@seeded(BUGS, MOE, "parity", supports=one_model, features=("fp8_weights", "quantized_hidden"))
def one_model_last_expert(inputs: MoEInputs) -> Tensor:
    """Read the first expert's weights for every eighth one, in a kernel for one model only."""
    return apply(inputs, changed(w2=lambda i, e: expert_weights(i.w2, 0 if e % 8 == 7 else e)))  # noqa: PLR2004


@seeded(
    BUGS,
    MOE,
    "parity",
    supports=whole_tiles(512),
    features=("fp8_weights", "quantized_hidden"),
    arithmetic=Arithmetic(fp8_products="fixed_point"),
)
def one_product_of_128(inputs: MoEInputs) -> Tensor:
    """Leave out the last one of each 128 products of FP8, in a kernel of whole tiles of 512."""
    if not isinstance(inputs.hidden, QuantizedMatrix):
        return apply(inputs)

    def but_the_last(given: MoEInputs, expert: int) -> Tensor:
        weights = expert_weights(given.w13, expert).clone()
        weights[..., SUMMED - 1 :: SUMMED] = 0
        return weights

    return apply(inputs, changed(w13=but_the_last))


@seeded(BUGS, MOE, "parity")
def ids_in_a_byte(inputs: MoEInputs) -> Tensor:
    """Keep the ids of experts in a byte."""
    return apply(inputs, changed(ids=lambda i: torch.where(i.topk_ids < 0, -1, i.topk_ids % BYTE)))


@seeded(BUGS, MOE, "parity")
def counts_of_256_experts(inputs: MoEInputs) -> Tensor:
    """Count the rows of 256 experts, and leave out those of others."""
    return apply(inputs, changed(ids=lambda i: local_ids(i).masked_fill(local_ids(i) >= BYTE, -1)))


def _slots(inputs: MoEInputs, most: int) -> Tensor:
    few = replace(inputs, topk_ids=inputs.topk_ids[:, :most])
    return apply(replace(few, topk_weights=inputs.topk_weights[:, :most]))


@seeded(BUGS, MOE, "parity")
def outputs_of_eight_slots(inputs: MoEInputs) -> Tensor:
    """Add up the first eight experts of a token."""
    return _slots(inputs, 8)


@seeded(BUGS, MOE, "parity")
def sum_of_sixteen_slots(inputs: MoEInputs) -> Tensor:
    """Add up the first sixteen experts of a token, as a tile of slots has them."""
    return _slots(inputs, 16)


@seeded(BUGS, MOE, "parity")
def tokens_of_twelve_bits(inputs: MoEInputs) -> Tensor:
    """Keep the number of a token in twelve bits."""

    def combine(out: Tensor, tokens: Tensor, y: Tensor) -> None:
        out.index_add_(0, tokens % 4096, y)

    return apply(inputs, changed(combine=combine))
