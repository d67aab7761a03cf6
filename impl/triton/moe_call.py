"""One call of the Triton MoE kernels: its tensors, tiles and grids.

Nothing here waits for the GPU: only the kernels know each expert's number of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ...reference import QuantizedMatrix
from ...reference.tensors.moe_inputs import MoEInputs
from ..gpu.triton_interpreter import scalars_as_bounds
from ..targets.optional import require
from ..targets.target import UnsupportedError
from .blocks import available_memory
from .moe_blocks import Shape, Tile, columns_of, moe_tiles
from .moe_operands import E4M3, INT8, Operand, check_dtypes, multiplied, operand
from .moe_sort import Sorted, sort_pairs
from .support import ceil_div, finish, next_power_of_two, require_triton, stored
from .units import in_units, strides, unit_of

KERNEL = "kernelproof.impl.triton.kernels.moe"
CHANNELS = 1024
"""Output channels that one program adds."""
HALF = 2
"""Bytes of float16 and bfloat16."""


class Swiglu(NamedTuple):
    """Numbers of an activation gate' sigmoid(alpha gate') (up' + beta), see ``reference``."""

    alpha: float
    beta: float
    limit: float


SWIGLU = {"swiglu": Swiglu(1.0, 0.0, math.inf), "swiglu_oai": Swiglu(1.702, 1.0, 7.0)}
NUMBERS = {
    **SWIGLU,
    "swiglu_step": Swiglu(1.0, 0.0, 7.0),
    "situ": Swiglu(1.0, 4.0, 25.0),
    "geglu1": Swiglu(1.0, 1.0, math.inf),
}
"""What activations have by themselves, of those that take some of these numbers."""
GATED = (*NUMBERS, "geglu", "geglu_tanh")
UNGATED = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity")


@dataclass(frozen=True)
class Plan:
    """What the launches of one call share.

    Attributes:
        inputs: the inputs of the call.
        hidden, w13, w2: the matrices.
        first, second: tiles of the products.
        sorted: where each pair of a token and a slot is.
        interpreted: whether Triton's interpreter runs the kernels, on a CPU.
    """

    inputs: MoEInputs
    hidden: Operand
    w13: Operand
    w2: Operand
    first: Tile
    second: Tile
    sorted: Sorted
    interpreted: bool

    @property
    def gated(self) -> bool:
        """Whether w13 has gate and up rows."""
        return self.inputs.activation in GATED

    @property
    def inter(self) -> int:
        """Columns of the intermediate."""
        return self.w2.values.shape[2]

    @property
    def rounds(self) -> bool:
        """Whether the intermediate is rounded to e4m3: it is as the hidden states are."""
        return self.hidden.format == E4M3


def run_experts(inputs: MoEInputs) -> torch.Tensor:
    """Apply experts to tokens: three launches, besides one or two that sort; shared ones first.

    Args:
        inputs: the arguments of ``reference.moe``, ``out_dtype`` and ``out``.

    Returns:
        [tokens, hidden] in ``out_dtype``: ``out`` where it is given.

    Raises:
        UnsupportedError: dtypes or formats that the kernels do not multiply.
    """
    require_triton()
    ids, activation = inputs.topk_ids, inputs.activation
    if activation not in (*GATED, *UNGATED):
        message = f"activation is {activation!r}; there are {', '.join((*GATED, *UNGATED))}"
        raise UnsupportedError(message)
    hidden, w13, w2 = (operand(name, getattr(inputs, name)) for name in ("hidden", "w13", "w2"))
    check_dtypes(hidden, w13, w2)
    out = inputs.out
    if out is None:
        shape = (hidden.values.shape[0], w2.values.shape[1])
        out = hidden.values.new_empty(shape, dtype=inputs.out_dtype)
    if ids.numel() == 0:
        out.zero_()
        return out
    shared = None if inputs.shared_w13 is None else run_experts(_shared(inputs))
    if inputs.identity_experts and isinstance(inputs.hidden, torch.Tensor):
        same = _identities(inputs, inputs.hidden)
        shared = same if shared is None else shared + same
    plan = _plan(inputs, hidden, w13, w2)
    written = stored(out)
    partial = written.new_empty((ids.numel(), out.shape[1]))
    middle, scales = _project(plan)
    _contract(plan, middle, scales, partial)
    if inputs.output_norm_eps is not None:
        _normalise(inputs, partial, inputs.output_norm_eps)
    _combine(plan, partial, shared, written)
    return finish(out, written)


def _identities(inputs: MoEInputs, hidden: torch.Tensor) -> torch.Tensor:
    """Return what experts whose output is the hidden state give, float32."""
    named = inputs.topk_ids >= (inputs.num_experts or 0)
    weight = torch.where(named, inputs.topk_weights, 0.0).sum(dim=1, keepdim=True)
    weight = weight * inputs.routed_scaling_factor
    return torch.where(weight != 0, weight * hidden.float(), 0.0)


def _shared(inputs: MoEInputs) -> MoEInputs:
    """Return a call of the experts that every token goes to, whose result is float32."""
    w13, w2 = inputs.shared_w13, inputs.shared_w2
    assert w13 is not None  # noqa: S101  asked before
    assert w2 is not None  # noqa: S101  there are both or none
    codes = w13.codes if isinstance(w13, QuantizedMatrix) else w13
    experts = torch.arange(codes.shape[0], dtype=torch.int32, device=codes.device)
    ids = experts.expand(inputs.topk_ids.shape[0], -1)
    weights = torch.full_like(ids, 1, dtype=torch.float32) * inputs.shared_weight
    if inputs.shared_gate is not None:
        gate = inputs.shared_gate.float()
        weights = weights * (torch.sigmoid(gate) if inputs.shared_gate_logits else gate)
    return replace(
        inputs,
        w13=w13,
        w2=w2,
        topk_ids=ids,
        topk_weights=weights,
        w13_bias=None,
        w2_bias=None,
        expert_offset=0,
        num_experts=None,
        weights_on_input=False,
        intermediate_scale=None,
        shared_w13=None,
        shared_w2=None,
        out=None,
        out_dtype=torch.float32,
        output_norm_eps=None,
        output_norm_gain=None,
        routed_scaling_factor=1.0,
        shared_gate=None,
        identity_experts=0,
    )


def _plan(inputs: MoEInputs, hidden: Operand, w13: Operand, w2: Operand) -> Plan:
    ids, device = inputs.topk_ids, hidden.values.device
    experts = w13.values.shape[0]
    interpreted = device.type == "cpu"
    first, second = moe_tiles(
        Shape(
            ids.numel() / (inputs.num_experts or experts),
            HALF if hidden.format == INT8 else hidden.size,  # what int8 is widened to
            w13.size,
            gated=inputs.activation in GATED,
            interpreted=interpreted,
            columns=max(hidden.values.shape[1], w2.values.shape[2]),
            available=available_memory(device),
        )
    )
    by_expert = sort_pairs(
        ids,
        inputs.topk_weights,
        first.m,
        inputs.expert_offset,
        experts,
        on_input=inputs.weights_on_input,
    )
    return Plan(inputs, hidden, w13, w2, first, second, by_expert, interpreted)


def _project(plan: Plan) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the intermediate [blocks of rows, inter] and, of codes, the scales [.., tiles]."""
    inputs, tile, hidden, w13 = plan.inputs, plan.first, plan.hidden, plan.w13
    rows, experts = plan.sorted.blocks * tile.m, w13.values.shape[0]
    tiles = ceil_div(plan.inter, columns_of(tile, gated=plan.gated))
    # The interpreter warns of what rows that are no pairs happen to hold.
    new = hidden.values.new_zeros if plan.interpreted else hidden.values.new_empty
    middle = new((rows, plan.inter), dtype=_middle_dtype(plan))
    scales = middle.new_empty((rows, tiles), dtype=torch.float32) if plan.rounds else None
    numbers = _numbers(inputs, experts, hidden.values.device)
    given = inputs.intermediate_scale
    if given is not None and not isinstance(given, torch.Tensor):
        given = middle.new_full((experts,), given, dtype=torch.float32)
    elif given is not None:
        given = given.to(torch.float32).expand(experts).contiguous()
    weights = inputs.topk_weights if inputs.weights_on_input else None
    row_step, half_step = (2, 1) if inputs.interleaved else (1, plan.inter)
    steps = {
        **strides("hidden", hidden.values, "token"), **strides("w13", w13.values, "expert row"),
        **strides("middle", middle, "row"),
    }  # fmt: skip
    unit = unit_of(*steps.values())
    arguments: dict[str, Any] = {
        "hidden": hidden.values, "hidden_scales": hidden.scales,
        "w13": w13.values, "w13_scales": w13.scales, "w13_bias": inputs.w13_bias,
        "weights": weights, **plan.sorted.arguments(), "middle": middle, "middle_scales": scales,
        **{f"{name}s": each for name, (_, each) in numbers.items()}, "given_scales": given,
        **{name: one for name, (one, _) in numbers.items()},
        "top_k": inputs.topk_ids.shape[1], "columns": hidden.values.shape[1], "inter": plan.inter,
        "row_step": row_step, "half_step": half_step,
        **in_units(steps, unit), "hidden_column": hidden.values.stride(1),
        "w13_column": w13.values.stride(2), "UNIT": unit,
        **strides("hidden_scales", hidden.scales, "token block"),
        **strides("w13_scales", w13.scales, "expert row block"),
        **strides("w13_bias", inputs.w13_bias, "expert row"),
        **strides("weights", weights, "token slot"),
        "HIDDEN_FORMAT": hidden.format, "W13_FORMAT": w13.format,
        "HIDDEN_SCALED": hidden.scaled, "W13_SCALED": w13.scaled,
        "ACTIVATION": "swiglu" if inputs.activation in SWIGLU else inputs.activation,
        "GATED": plan.gated, "NUMBERS": inputs.activation in NUMBERS, "ROUNDS": plan.rounds,
    }  # fmt: skip
    dtype = multiplied(hidden.values, w13.values, interpreted=plan.interpreted)
    _run("project", tile, tiles, hidden.values.shape[1], dtype, plan, arguments)
    return middle, scales


def _contract(
    plan: Plan, middle: torch.Tensor, scales: torch.Tensor | None, partial: torch.Tensor
) -> None:
    """Write the outputs [pairs, hidden] of experts; slots that nothing is computed for stay."""
    inputs, tile, w2 = plan.inputs, plan.second, plan.w2
    rows = partial.shape[1]
    steps = {
        **strides("middle", middle, "row"), **strides("w2", w2.values, "expert row"),
        **strides("partial", partial, "row"),
    }  # fmt: skip
    unit = unit_of(*steps.values())
    arguments: dict[str, Any] = {
        "middle": middle, "middle_scales": scales, "w2": w2.values, "w2_scales": w2.scales,
        "w2_bias": inputs.w2_bias, **plan.sorted.arguments(), "partial": partial,
        "columns": plan.inter, "rows": rows, **in_units(steps, unit), "UNIT": unit,
        "middle_scales_row": None if scales is None else scales.stride(0),
        "w2_column": w2.values.stride(2),
        **strides("w2_scales", w2.scales, "expert row block"),
        **strides("w2_bias", inputs.w2_bias, "expert row"),
        "MIDDLE_FORMAT": "", "W2_FORMAT": w2.format,
        "MIDDLE_SCALED": columns_of(plan.first, gated=plan.gated) if plan.rounds else 0,
        "W2_SCALED": w2.scaled,
    }  # fmt: skip
    dtype = multiplied(middle, w2.values, interpreted=plan.interpreted)
    _run("contract", tile, ceil_div(rows, tile.n), plan.inter, dtype, plan, arguments)


def _normalise(inputs: MoEInputs, partial: torch.Tensor, eps: float) -> None:
    """Divide the outputs by their root mean square; what was not computed is not read later."""
    y = partial.float()
    gain = 1.0 if inputs.output_norm_gain is None else inputs.output_norm_gain.float()
    before, after = (gain, 1.0) if inputs.output_norm_first else (1.0, gain)
    y = y * before
    mean = y.square().mean(dim=1, keepdim=True)
    partial.copy_(y * torch.rsqrt(mean + eps) * after)


def _combine(
    plan: Plan, partial: torch.Tensor, shared: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Add the outputs of each token's experts, to what the shared ones gave."""
    inputs, (tokens, channels) = plan.inputs, out.shape
    block = min(next_power_of_two(channels), CHANNELS)
    ids, weights = inputs.topk_ids, inputs.topk_weights
    require(KERNEL, "triton").combine[(tokens, ceil_div(channels, block))](
        partial,
        shared,
        ids,
        weights,
        out,
        channels,
        float(inputs.routed_scaling_factor),
        inputs.expert_offset,
        plan.w13.values.shape[0],
        partial.stride(0),
        *ids.stride(),
        *weights.stride(),
        *out.stride(),
        ON_INPUT=inputs.weights_on_input,
        TOP_K=ids.shape[1],
        BLOCK=block,
    )


def _run(
    name: str,
    tile: Tile,
    tiles: int,
    columns: int,
    dtype: str | None,
    plan: Plan,
    arguments: dict[str, Any],
) -> None:
    language = require("triton.language", "triton")
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    with scalars_as_bounds(plan.hidden.values):
        getattr(require(KERNEL, "triton"), name)[(plan.sorted.blocks * tiles,)](
            **arguments,
            most_blocks=plan.sorted.blocks,
            DTYPE=None if dtype is None else getattr(language, dtype),
            EVEN=columns % tile.k == 0,
            BLOCK_M=tile.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            GROUP=tile.group,
            **({} if plan.interpreted else options),
        )


def _middle_dtype(plan: Plan) -> torch.dtype:
    """Return what the intermediate is stored in."""
    dtype = plan.hidden.values.dtype
    if plan.hidden.format == INT8:
        # It is not quantised again: two bytes, of which bfloat16's lose less than int8 would.
        half = plan.inputs.out_dtype.itemsize == HALF
        dtype = plan.inputs.out_dtype if half else torch.bfloat16
    if plan.interpreted:
        # The interpreter drops bits where it stores bfloat16, and has no FP8.
        return dtype if dtype == torch.float16 else torch.float32
    # float16 holds all numbers of e4m3.
    return torch.float16 if dtype == torch.uint8 else dtype


def _numbers(
    inputs: MoEInputs, experts: int, device: torch.device
) -> dict[str, tuple[float, torch.Tensor | None]]:
    """Return each number as one, and as one of each expert where one of them is a tensor.

    Either all are tensors or none: there are two kernels, and not one for each choice.
    """
    usual = NUMBERS.get(inputs.activation, SWIGLU["swiglu"])
    found = {}
    for name, value in usual._asdict().items():
        given = getattr(inputs, name)
        found[name] = value if given is None else given
    if not any(isinstance(given, torch.Tensor) for given in found.values()):
        return {name: (float(given), None) for name, given in found.items()}
    return {
        name: (
            getattr(usual, name),
            given.to(torch.float32).expand(experts).contiguous()
            if isinstance(given, torch.Tensor)
            else torch.full((experts,), given, dtype=torch.float32, device=device),
        )
        for name, given in found.items()
    }
