"""The arguments of an MoE call: checked, and split into the rows of each expert."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..scratch import Scratch
from ..validation import (
    check_index_tensor,
    check_same,
    check_tensor,
    checked_integer,
    checked_number,
)
from .activations import Activation, Swiglu, activation_of
from .norms import OutputNorm
from .weights import Matrix, QuantizedMatrix, checked_matrix

LARGEST_E4M3 = 448.0
"""The largest number of float8_e4m3fn: what is beyond it saturates."""
TOKENS = 128
"""Rows of an expert computed at once: what bounds memory where all tokens go to one expert."""


@dataclass(frozen=True)
class MoEOptions:
    """The keyword arguments of ``moe``, which says what they are."""

    activation: str = "swiglu"
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    alpha: float | torch.Tensor | None = None
    beta: float | torch.Tensor | None = None
    limit: float | torch.Tensor | None = None
    interleaved: bool = False
    expert_offset: int = 0
    num_experts: int | None = None
    weights_on_input: bool = False
    intermediate_scale: float | torch.Tensor | None = None
    shared_w13: torch.Tensor | QuantizedMatrix | None = None
    shared_w2: torch.Tensor | QuantizedMatrix | None = None
    shared_weight: float = 1.0
    compute_dtype: torch.dtype = torch.float64
    output_norm_eps: float | None = None
    output_norm_gain: torch.Tensor | None = None
    output_norm_first: bool = False
    routed_scaling_factor: float = 1.0
    shared_gate: torch.Tensor | None = None
    shared_gate_logits: bool = False
    one_product: bool = False
    identity_experts: int = 0


class Experts(NamedTuple):
    """Experts of one set of weights, the tokens that they get, and how they compute.

    Attributes:
        w13, w2: their weights.
        w13_bias, w2_bias: [experts, rows], or None.
        activation, interleaved: the activation between the two products, and whether gate and up
            rows alternate.
        numbers: the numbers of the swiglu family, one entry an expert.
        ids: int64 [tokens, top_k] into w13; what is outside of it contributes nothing.
        weights: [tokens, top_k] in the dtype of the computation.
        on_input: the weights multiply the hidden states, not the outputs.
        scales: the scales of FP8 intermediates, one an expert; None if they are not given
            beforehand.
        norm: the norm of each expert's output, if there is one.
        factor: what the sum of these experts is multiplied by.
        one_product: there is no second product, and nothing in w2.
        gate: what the sigmoids that the weights are made of were multiplied by; 0: of none.
    """

    w13: Matrix
    w2: Matrix
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    activation: Activation
    interleaved: bool
    numbers: list[Swiglu]
    ids: torch.Tensor
    weights: torch.Tensor
    on_input: bool
    scales: list[float] | None = None
    norm: OutputNorm | None = None
    factor: float = 1.0
    gate: float = 0.0
    one_product: bool = False

    def saturated(self, middle: torch.Tensor, expert: int) -> torch.Tensor:
        """Cut the activation's results off where their FP8 codes end."""
        if self.scales is None:
            return middle
        largest = LARGEST_E4M3 * self.scales[expert]
        return middle.clamp(-largest, largest)

    def rows(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return (expert, tokens, weights) by expert, at most ``TOKENS`` rows at a time.

        An expert that nobody selected, and a slot of weight 0, are not computed: whatever NaN is
        there stays there. On the input a weight of 0 makes a row of zeros, which biases may move.
        """
        experts = self.w13.values.shape[0]
        here = (self.ids >= 0) & (self.ids < experts)
        if not self.on_input:
            here &= self.weights != 0
        tokens, slots = here.nonzero(as_tuple=True)
        ids = self.ids[tokens, slots]
        order = ids.argsort(stable=True)
        tokens, weights = tokens[order], self.weights[tokens, slots][order]
        start = 0
        for expert, count in enumerate(ids.bincount(minlength=experts).tolist()):
            for first in range(start, start + count, TOKENS):
                last = min(first + TOKENS, start + count)
                yield expert, tokens[first:last], weights[first:last]
            start += count


class MoECall(NamedTuple):
    """A checked call.

    Attributes:
        hidden: [tokens, hidden].
        parts: the routed experts, and the shared ones where there are any.
        shape: the shape of the result.
        top_k: slots that a token's sum has, shared experts included.
        scratch: memory for what is widened.
        identity: weights [tokens, top_k] of slots that name identity experts, and 0 elsewhere;
            None where there are no such experts.
    """

    hidden: Matrix
    parts: list[Experts]
    shape: tuple[int, int]
    top_k: int
    scratch: Scratch
    identity: torch.Tensor | None = None

    def identities(self, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, ...]]:
        """Return (tokens, weights [n, 1], their hidden states) of slots of identity experts.

        A slot of weight 0 is none: whatever NaN is there stays there.
        """
        for weights in () if self.identity is None else self.identity.unbind(dim=1):
            for tokens in weights.nonzero()[:, 0].split(TOKENS):
                yield tokens, weights[tokens].unsqueeze(-1), self.hidden.tokens(tokens, dtype)


def checked_call(
    hidden: torch.Tensor | QuantizedMatrix,
    w13: torch.Tensor | QuantizedMatrix,
    w2: torch.Tensor | QuantizedMatrix,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    options: MoEOptions,
) -> MoECall:
    """Check the arguments of ``moe`` and bring its parts together."""
    if options.compute_dtype not in (torch.float64, torch.float32):
        message = f"compute_dtype is {options.compute_dtype}; it must be float64 or float32"
        raise ValueError(message)
    states = checked_matrix("hidden", hidden, "tokens hidden")
    tokens = states.values.shape[0]
    weights = _checked_first if options.one_product else _checked_weights
    first, second = weights("w13", "w2", w13, w2, states, options)
    experts = first.values.shape[0]
    ids = _checked_ids(topk_ids, tokens, experts, options)
    check_tensor("topk_weights", topk_weights, "tokens top_k")
    if topk_weights.shape != topk_ids.shape:
        message = (
            f"topk_weights has shape {list(topk_weights.shape)}, but topk_ids {list(ids.shape)}"
        )
        raise ValueError(message)
    activation = activation_of(options.activation, interleaved=options.interleaved)
    routed = Experts(
        first,
        second,
        _checked_bias("w13_bias", options.w13_bias, first, options),
        _checked_bias("w2_bias", options.w2_bias, second, options),
        activation,
        options.interleaved,
        _numbers(activation, options, experts),
        ids - options.expert_offset,
        topk_weights.to(options.compute_dtype),
        options.weights_on_input,
        _checked_scales(options.intermediate_scale, experts),
        _checked_norm(options, second),
        _checked_factor("routed_scaling_factor", options.routed_scaling_factor),
        one_product=options.one_product,
    )
    shared = _shared(states, second, activation, options)
    parts = [routed, shared] if shared else [routed]
    slots = sum(part.ids.shape[1] for part in parts)
    identity = None
    if options.identity_experts:
        check_same("w2", "rows", second.values.shape[1], "hidden, for identities,", states.columns)
        identity = routed.weights.masked_fill(ids < _everywhere(experts, options), 0.0)
        identity = identity * options.routed_scaling_factor
    return MoECall(states, parts, (tokens, second.values.shape[1]), slots, Scratch(), identity)


def _everywhere(experts: int, options: MoEOptions) -> int:
    """Return how many experts all ranks have, of which this one has some."""
    total = options.num_experts
    return experts if total is None else checked_integer("num_experts", total)


def _checked_weights(
    name13: str,
    name2: str,
    w13: torch.Tensor | QuantizedMatrix,
    w2: torch.Tensor | QuantizedMatrix,
    hidden: Matrix,
    options: MoEOptions,
) -> tuple[Matrix, Matrix]:
    first = checked_matrix(name13, w13, "experts rows hidden", interleaved=options.interleaved)
    second = checked_matrix(name2, w2, "experts hidden inter")
    check_same(name13, "columns", first.columns, "hidden", hidden.columns)
    check_same(name2, "experts", second.values.shape[0], name13, first.values.shape[0])
    rows, gated = first.values.shape[1], activation_of(options.activation).gated
    wanted = second.columns * (2 if gated else 1)
    if rows != wanted:
        kind = "gate and up rows" if gated else "rows"
        message = (
            f"{name13} has {rows} rows; {options.activation} with {second.columns} columns of "
            f"{name2} needs {wanted} {kind}"
        )
        raise ValueError(message)
    for name, matrix, halves in ((name13, first, gated), (name2, second, False)):
        scale = matrix.quantized and matrix.quantized.global_scale
        if not halves and isinstance(scale, torch.Tensor) and scale.dim() > 1:
            message = (
                f"{name}.global_scale has shape {list(scale.shape)}, one of gate and one of up, "
                "which it does not have"
            )
            raise ValueError(message)
    return first, second


def _checked_first(
    name13: str,
    name2: str,
    w13: torch.Tensor | QuantizedMatrix,
    w2: torch.Tensor | QuantizedMatrix,
    hidden: Matrix,
    options: MoEOptions,
) -> tuple[Matrix, Matrix]:
    """Return the weights of the only product, and what stands for those of a second one."""
    first = checked_matrix(name13, w13, "experts rows hidden", interleaved=options.interleaved)
    check_same(name13, "columns", first.columns, "hidden", hidden.columns)
    experts, rows = first.values.shape[:2]
    inter = rows // 2 if activation_of(options.activation).gated else rows
    wanted = [experts, inter, 0]
    if not isinstance(w2, torch.Tensor) or list(w2.shape) != wanted:
        shape = list(w2.shape) if isinstance(w2, torch.Tensor) else type(w2).__name__
        message = f"{name2} is {shape}; with one product it must be a tensor {wanted}"
        raise ValueError(message)
    others = ("w2_bias", "intermediate_scale", "output_norm_eps", "shared_w13", "shared_w2")
    for name in others:
        if getattr(options, name) is not None:
            message = f"{name} is given, but one_product says that there is no second product"
            raise ValueError(message)
    return first, Matrix(w2, inter, None)


def _checked_ids(ids: torch.Tensor, tokens: int, experts: int, options: MoEOptions) -> torch.Tensor:
    shape = tuple(ids.shape) if isinstance(ids, torch.Tensor) else ()
    if shape[:1] != (tokens,) or len(shape[1:]) != 1:
        message = f"topk_ids must be [tokens, top_k] with hidden's {tokens} tokens, not {shape}"
        raise ValueError(message)
    check_index_tensor("topk_ids", ids)
    everywhere = _everywhere(experts, options)
    offset = checked_integer("expert_offset", options.expert_offset)
    last = offset + experts
    if offset < 0 or last > everywhere:
        message = (
            f"expert_offset is {offset}, and w13 has {experts} experts: they end at "
            f"{last}, but num_experts is {everywhere}"
        )
        raise ValueError(message)
    wide, identities = ids.to(torch.int64), options.identity_experts
    if checked_integer("identity_experts", identities) < 0:
        message = f"identity_experts is {identities}; it must be 0 or more"
        raise ValueError(message)
    wrong = (wide < -1) | (wide >= everywhere + identities)
    if bool(wrong.any()):
        token, slot = wrong.nonzero()[0].tolist()
        there = f"{everywhere} experts" + (f" and {identities} identities" if identities else "")
        message = f"topk_ids[{token}, {slot}] is {int(wide[token, slot])}; there are {there}"
        raise ValueError(message)
    return wide


def _checked_bias(
    name: str, bias: torch.Tensor | None, matrix: Matrix, options: MoEOptions
) -> torch.Tensor | None:
    if bias is None:
        return None
    check_tensor(name, bias, "experts rows")
    if bias.shape != matrix.values.shape[:2]:
        wanted = list(matrix.values.shape[:2])
        message = f"{name} has shape {list(bias.shape)}; it must be [experts, rows] = {wanted}"
        raise ValueError(message)
    return bias.to(options.compute_dtype)


def _numbers(activation: Activation, options: MoEOptions, experts: int) -> list[Swiglu]:
    """Return alpha, beta and limit of each expert."""
    columns = []
    for name, neutral in Swiglu()._asdict().items():
        given, usual = getattr(options, name), getattr(activation, name)
        if given is not None and usual is None:
            message = f"{name} is given, but activation {options.activation!r} takes none"
            raise ValueError(message)
        if given is None:
            given = neutral if usual is None else usual
        columns.append(_number_of_each(name, given, experts))
        if activation.limits == "softly" and usual is not None and min(columns[-1]) <= 0:
            expert, least = columns[-1].index(min(columns[-1])), min(columns[-1])
            message = f"{name}[{expert}] is {least}; of {options.activation} it is above 0"
            raise ValueError(message)
    return [Swiglu(*each) for each in zip(*columns, strict=True)]


def _number_of_each(name: str, given: float | torch.Tensor, experts: int) -> list[float]:
    if isinstance(given, torch.Tensor):
        if list(given.shape) not in ([], [1], [experts]):
            message = f"{name} has shape {list(given.shape)}; give one number or [{experts}]"
            raise ValueError(message)
        found = given.double().expand(experts).tolist()
    else:
        found = [checked_number(name, given)] * experts
    for expert, value in enumerate(found):
        if math.isnan(value) or (name == "limit" and value < 0):
            message = f"{name}[{expert}] is {value}; it must be a number, a limit at least 0"
            raise ValueError(message)
    return found


def _checked_scales(given: float | torch.Tensor | None, experts: int) -> list[float] | None:
    if given is None:
        return None
    scales = _number_of_each("intermediate_scale", given, experts)
    for expert, scale in enumerate(scales):
        if not 0 < scale < math.inf:
            message = f"intermediate_scale[{expert}] is {scale}; a scale is positive and finite"
            raise ValueError(message)
    return scales


def _checked_factor(name: str, value: float) -> float:
    factor = checked_number(name, value)
    if not math.isfinite(factor):
        message = f"{name} is {factor}; it must be finite"
        raise ValueError(message)
    return factor


def _checked_norm(options: MoEOptions, second: Matrix) -> OutputNorm | None:
    gain = options.output_norm_gain
    if options.output_norm_eps is None:
        if gain is not None:
            message = "output_norm_gain is given, but output_norm_eps is not: there is no norm"
            raise ValueError(message)
        return None
    eps = checked_number("output_norm_eps", options.output_norm_eps)
    if not 0 < eps < math.inf:
        message = f"output_norm_eps is {eps}; it must be positive and finite"
        raise ValueError(message)
    if gain is not None:
        check_tensor("output_norm_gain", gain, "hidden")
        check_same("output_norm_gain", "channels", len(gain), "w2", second.values.shape[1])
        gain = gain.to(options.compute_dtype)
    return OutputNorm(eps, gain, options.output_norm_first)


def _checked_gate(options: MoEOptions, tokens: int, experts: int) -> torch.Tensor | None:
    """Return what the gate multiplies shared experts by [tokens, 1 or experts], if there is one."""
    gate = options.shared_gate
    if gate is None:
        return None
    check_tensor("shared_gate", gate, "tokens shared")
    if gate.shape[0] != tokens or gate.shape[1] not in (1, experts):
        wanted = f"[{tokens}, 1] or [{tokens}, {experts}]: tokens, and shared experts"
        message = f"shared_gate has shape {list(gate.shape)}; it must be {wanted}"
        raise ValueError(message)
    gate = gate.to(options.compute_dtype)
    return torch.sigmoid(gate) if options.shared_gate_logits else gate


def _shared(
    hidden: Matrix, second: Matrix, activation: Activation, options: MoEOptions
) -> Experts | None:
    """Return the experts that every token goes to."""
    if options.shared_w13 is None and options.shared_w2 is None:
        if options.shared_gate is not None:
            message = "shared_gate is given, but no shared experts"
            raise ValueError(message)
        return None
    if options.shared_w13 is None or options.shared_w2 is None:
        message = "shared_w13 and shared_w2: give both, or neither"
        raise ValueError(message)
    if options.intermediate_scale is not None:
        message = "intermediate_scale is of the routed experts: there is none for shared ones"
        raise ValueError(message)
    w13, w2 = _checked_weights(
        "shared_w13", "shared_w2", options.shared_w13, options.shared_w2, hidden, options
    )
    check_same("shared_w2", "rows", w2.values.shape[1], "w2", second.values.shape[1])
    for name in ("alpha", "beta", "limit"):
        if isinstance(getattr(options, name), torch.Tensor):
            message = f"{name} is a tensor of the routed experts; with shared experts give a float"
            raise ValueError(message)
    experts, tokens, device = w13.values.shape[0], hidden.values.shape[0], w13.values.device
    ids = torch.arange(experts, device=device).expand(tokens, experts)
    weight = checked_number("shared_weight", options.shared_weight)
    weights = torch.full(ids.shape, weight, dtype=options.compute_dtype, device=device)
    gate = _checked_gate(options, tokens, experts)
    if gate is not None:
        weights = weights * gate
    logits = abs(weight) if gate is not None and options.shared_gate_logits else 0.0
    numbers = _numbers(activation, options, experts)
    return Experts(
        w13,
        w2,
        None,
        None,
        activation,
        options.interleaved,
        numbers,
        ids,
        weights,
        on_input=False,
        gate=logits,
    )
