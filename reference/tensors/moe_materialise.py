"""Making the tensors of MoE problems, with the same bits on every device."""

from __future__ import annotations

from typing import Any

import torch

from ..moe.weights import GATE_UP, WEIGHT_FORMATS, QuantizedMatrix
from ..problems.moe import MoEProblem, RouteProblem
from .allocation import Allocator
from .moe_codes import Codes, quantised, quantised_by_half
from .moe_inputs import MoEInputs, RouteInputs
from .moe_regimes import (
    SHARED,
    ExpertValues,
    assignment,
    bias_values,
    expert_values,
    gain_values,
    gate_values,
    hidden_values,
    largest_hidden,
    logit_values,
    routing_weights,
    scale_values,
    swiglu_numbers,
    table_values,
    vocabulary_ids,
)
from .moe_widths import padded, scale_shape
from .values import choose, stream

NORM_EPS = (1e-6, 1e-5, 2.0**-4)
"""Epsilons of norms: models', and one that decides where outputs are small."""
INTERMEDIATE_SCALE = 2.0**-4
"""Scale of FP8 intermediates where it is given beforehand: what exceeds 28 saturates."""


def route_inputs(problem: RouteProblem, home: Allocator) -> RouteInputs:
    """Make the tensors of a call of ``route``."""
    bias = home.place("bias", bias_values(problem, home.device)) if problem.bias else None
    scales = table = ids = None
    if problem.expert_scales:
        scales = home.place("expert_scales", scale_values(problem, home.device))
    if problem.hash_vocabulary:
        table = home.place("expert_table", table_values(problem, home.device))
        ids = home.place("input_ids", vocabulary_ids(problem, home.device))
    return RouteInputs(
        logits=home.place("logits", logit_values(problem, home.device)),
        top_k=problem.top_k,
        method=problem.method,
        bias=bias,
        num_groups=problem.num_groups if problem.grouped else None,
        topk_groups=problem.topk_groups if problem.grouped else None,
        scaling_factor=problem.scaling_factor,
        masked_groups=problem.masked_groups,
        renormalise_floor=problem.renormalise_floor,
        expert_scales=scales,
        best_of_each_group=problem.best_of_each_group,
        shared_experts=problem.shared_experts,
        expert_table=table,
        input_ids=ids,
        jitter=problem.jitter,
        storages=home.storages,
        group_score=problem.group_score or None,
    )


def expert_inputs(problem: MoEProblem, home: Allocator, padding: float = 0.0) -> MoEInputs:
    """Make the tensors of a call of ``moe``; ``padding`` is what lies behind hidden and inter."""
    dtype = getattr(torch, problem.dtype)
    routed = expert_values(problem, home.device)
    w13, w2 = _weights(problem, routed, home, "", problem.expert_offset, padding)
    shared_w13 = shared_w2 = None
    if problem.shared_experts:
        shared = expert_values(problem, home.device, shared=True)
        shared_w13, shared_w2 = _weights(problem, shared, home, "shared_", SHARED, padding)
    w13_bias, w2_bias = _biases(problem, routed, home, padding)
    return MoEInputs(
        hidden=_hidden(problem, home, padding),
        w13=w13,
        w2=w2,
        topk_ids=home.place("topk_ids", assignment(problem, home.device)),
        topk_weights=home.place("topk_weights", routing_weights(problem, home.device)),
        out_dtype=dtype,
        activation=problem.activation,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        **_numbers(problem, home),
        interleaved=problem.interleaved,
        expert_offset=problem.expert_offset,
        num_experts=problem.num_experts,
        weights_on_input=problem.weights_on_input,
        intermediate_scale=_intermediate_scale(problem),
        shared_w13=shared_w13,
        shared_w2=shared_w2,
        shared_weight=_shared_weight(problem),
        **_norm(problem, home),
        routed_scaling_factor=problem.routed_scaling_factor,
        **_gate(problem, home),
        one_product=problem.one_product,
        identity_experts=problem.identity_experts,
        hidden_size=problem.hidden if problem.pad_to else None,
        inter_size=problem.inter if problem.pad_to else None,
        storages=home.storages,
    )


def _biases(
    problem: MoEProblem, values: ExpertValues, home: Allocator, padding: float
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not problem.biases:
        return None, None
    dtype = getattr(torch, problem.dtype)
    rows = values.w13_bias.to(dtype)
    if problem.pad_to:
        rows = padded(rows, _wide_rows(problem, rows), padding, parts=_parts(problem))
    first = home.place("w13_bias", rows)
    if problem.one_product:
        return first, None
    channels = values.w2_bias.to(dtype)
    if problem.pad_to:
        channels = padded(channels, (len(channels), problem.wide_hidden), padding)
    return first, home.place("w2_bias", channels)


def _parts(problem: MoEProblem) -> int:
    """Return how many parts of w13's rows are padded each for themselves."""
    return 2 if problem.gated and not problem.interleaved else 1


def _wide_rows(problem: MoEProblem, rows: torch.Tensor) -> tuple[int, int]:
    """Return experts, and the rows of w13 that there is room for."""
    return len(rows), (2 if problem.gated else 1) * problem.wide_inter


def _wide_shape(
    problem: MoEProblem, matrix: torch.Tensor, *, second: bool
) -> tuple[tuple[int, int, int], int]:
    """Return the shape of weights with padding, and the parts of rows that are padded apart."""
    if second:
        return (len(matrix), problem.wide_hidden, problem.wide_inter), 1
    return (*_wide_rows(problem, matrix), problem.wide_hidden), _parts(problem)


def _wide(made: Codes, shape: tuple[int, ...], padding: float, *, parts: int = 1) -> Codes:
    """Pad codes and scales of a matrix to the shape of a wider one; 0 stands for zeros."""
    packed = made.format.packed
    codes = padded(made.codes, (*shape[:-1], shape[-1] // packed), padding, parts=parts)
    if not made.scales.dim() or made.format.scales == "tensor":
        return made._replace(codes=codes)
    scales = padded(made.scales, scale_shape(made.format, shape), padding, parts=parts)
    return made._replace(codes=codes, scales=scales)


def _hidden(problem: MoEProblem, home: Allocator, padding: float) -> torch.Tensor | QuantizedMatrix:
    values = hidden_values(problem, home.device)
    if not problem.quantized_hidden:
        values = values.to(getattr(torch, problem.dtype))
        if problem.pad_states:
            values = padded(values, (len(values), problem.wide_hidden), padding)
        return _place_rows("hidden", values, home, strided=problem.strided_hidden)
    made = quantised(
        values,
        WEIGHT_FORMATS[problem.quantized].hidden,
        stream(problem.seed, "hidden scales"),
        torch.tensor(problem.ids, dtype=torch.int64, device=home.device),
        largest_hidden(problem),
    )
    if problem.pad_states:
        made = _wide(made, (len(made.codes), problem.wide_hidden), padding)
    return _place_codes("hidden", made, home, strided=problem.strided_hidden)


def _place_rows(name: str, values: torch.Tensor, home: Allocator, *, strided: bool) -> torch.Tensor:
    if not strided:
        return home.place(name, values)
    # A slice of wider rows, as a fused projection leaves it; what is aligned stays so.
    wide = home.empty(name, (values.shape[0], 2 * values.shape[1]), values.dtype)
    return wide[:, : values.shape[1]].copy_(values)


def _weights(
    problem: MoEProblem,
    values: ExpertValues,
    home: Allocator,
    prefix: str,
    first: int,
    padding: float,
) -> tuple[torch.Tensor | QuantizedMatrix, torch.Tensor | QuantizedMatrix]:
    placed: list[torch.Tensor | QuantizedMatrix] = []
    for name, matrix in ((f"{prefix}w13", values.w13), (f"{prefix}w2", values.w2)):
        if problem.one_product and name == "w2":
            empty = matrix.new_empty((len(matrix), problem.inter, 0))
            placed.append(home.place(name, empty.to(getattr(torch, problem.dtype))))
        elif problem.quantized:
            key = stream(problem.seed, f"{name} scales")
            ids = torch.arange(first, first + len(matrix), device=matrix.device)
            made = _coded(problem, name, matrix, key, ids)
            if problem.pad_to:
                shape, parts = _wide_shape(problem, matrix, second=name.endswith("w2"))
                made = _wide(made, shape, padding, parts=parts)
            placed.append(_place_codes(name, made, home))
        else:
            numbers = matrix.to(getattr(torch, problem.dtype))
            if problem.pad_to:
                shape, parts = _wide_shape(problem, matrix, second=name.endswith("w2"))
                numbers = padded(numbers, shape, padding, parts=parts)
            placed.append(home.place(name, numbers))
    return placed[0], placed[1]


def _coded(
    problem: MoEProblem, name: str, matrix: torch.Tensor, key: int, ids: torch.Tensor
) -> Codes:
    form = WEIGHT_FORMATS[problem.quantized]
    if form.feature == GATE_UP and problem.gated and name.endswith("w13"):
        return quantised_by_half(matrix, form.weights, key, ids, interleaved=problem.interleaved)
    return quantised(matrix, form.weights, key, ids)


def _place_codes(
    name: str, made: Codes, home: Allocator, *, strided: bool = False
) -> QuantizedMatrix:
    # Codes are placed as bytes: few operations know FP8.
    codes = _place_rows(f"{name}.codes", made.codes.view(torch.uint8), home, strided=strided)
    scales = home.place(f"{name}.scales", _storable(made.scales)).view(made.scales.dtype)
    scale: float | torch.Tensor = 1.0
    if made.global_scale is not None:
        scale = home.place(f"{name}.global_scale", made.global_scale)
        # Hidden states have one number, weights one an expert.
        scale = float(scale) if not scale.dim() else scale
    zeros = made.zero_points
    if zeros is not None:
        zeros = home.place(f"{name}.zero_points", zeros)
    return QuantizedMatrix(codes.view(made.codes.dtype), scales, made.format, scale, zeros)


def _storable(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.uint8) if scales.element_size() == 1 else scales


def _numbers(problem: MoEProblem, home: Allocator) -> dict[str, Any]:
    if not problem.swiglu_parameters:
        return {}
    made = swiglu_numbers(problem, home.device)
    if problem.numbers_of_each:
        return {name: home.place(name, values) for name, values in made.items()}
    return {name: float(values[0]) for name, values in made.items()}


def _norm(problem: MoEProblem, home: Allocator) -> dict[str, Any]:
    if not problem.output_norm:
        return {}
    gain = None
    if problem.output_norm != "plain":
        values = gain_values(problem, home.device).to(getattr(torch, problem.dtype))
        gain = home.place("output_norm_gain", values)
    return {
        "output_norm_eps": NORM_EPS[choose(problem.seed, "output_norm_eps", 0, len(NORM_EPS))],
        "output_norm_gain": gain,
        "output_norm_first": problem.output_norm == "gain_first",
    }


def _gate(problem: MoEProblem, home: Allocator) -> dict[str, Any]:
    if not problem.shared_gate:
        return {}
    values, logits = gate_values(problem, home.device), problem.shared_gate.startswith("logits")
    if logits:
        values = values.to(getattr(torch, problem.dtype))
    return {"shared_gate": home.place("shared_gate", values), "shared_gate_logits": logits}


def _intermediate_scale(problem: MoEProblem) -> float | None:
    """Return the scale of kernels whose scales are all static: one a tensor, hidden states too."""
    static = problem.quantized == "fp8_tensor" and problem.quantized_hidden
    others = problem.shared_experts or problem.one_product
    return INTERMEDIATE_SCALE if static and not others else None


def _shared_weight(problem: MoEProblem) -> float:
    if problem.shared_weight:
        return problem.shared_weight
    if problem.regime == "exact_grid" or choose(problem.seed, "shared_weight", 0, 2):
        return 1.0
    return 0.4  # the scaling factor of DeepSeek-V3 is 2.5
