"""Mixture of experts: what the selected experts make of each token.

    out[t] = sum_s topk_weights[t, s] * expert_{topk_ids[t, s]}(hidden[t])
    expert(x) = w2 activation(w13 x + w13_bias) + w2_bias

Options put a norm around expert(x), a factor before the sum, and add shared experts with a weight
or a gate a token.

w13 holds the gate rows first, then the up rows. (FlashInfer's CUTLASS and trtllm-gen MoE have the
gate in the second half: an adapter swaps them.)
"""

from __future__ import annotations

import torch

from ..scratch import Scratch
from .activations import activate
from .calls import MoECall, MoEOptions, checked_call
from .weights import Matrix, QuantizedMatrix


def moe(
    hidden: torch.Tensor | QuantizedMatrix,
    w13: torch.Tensor | QuantizedMatrix,
    w2: torch.Tensor | QuantizedMatrix,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    activation: str = "swiglu",
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    alpha: float | torch.Tensor | None = None,
    beta: float | torch.Tensor | None = None,
    limit: float | torch.Tensor | None = None,
    interleaved: bool = False,
    expert_offset: int = 0,
    num_experts: int | None = None,
    weights_on_input: bool = False,
    intermediate_scale: float | torch.Tensor | None = None,
    shared_w13: torch.Tensor | QuantizedMatrix | None = None,
    shared_w2: torch.Tensor | QuantizedMatrix | None = None,
    shared_weight: float = 1.0,
    output_norm_eps: float | None = None,
    output_norm_gain: torch.Tensor | None = None,
    output_norm_first: bool = False,
    routed_scaling_factor: float = 1.0,
    shared_gate: torch.Tensor | None = None,
    shared_gate_logits: bool = False,
    one_product: bool = False,
    identity_experts: int = 0,
    compute_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Apply experts to tokens.

    Args:
        hidden: [tokens, hidden], any floating dtype, or a QuantizedMatrix of that shape.
        w13: [experts, 2 * inter, hidden], gate rows first, then up rows; [experts, inter, hidden]
            for activations without a gate. Floating, or a QuantizedMatrix.
        w2: [experts, hidden, inter], the same.
        topk_ids: integers [tokens, top_k]; -1 is no expert. An expert may appear twice.
        topk_weights: [tokens, top_k], floating. A slot of weight 0 contributes exactly 0.
        activation: ``"swiglu"``, ``"swiglu_oai"``, ``"geglu"``, ``"geglu_tanh"`` (gated),
            ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"relu"``, ``"relu2"``, ``"identity"``;
            ``"swiglu_step"``, ``"situ"``, ``"geglu1"`` (gated).
        w13_bias, w2_bias: [experts, rows of w13], [experts, hidden], added to each product; an
            expert-parallel or tensor-parallel shard gets w2_bias once.
        alpha, beta, limit: numbers of swiglu (1, 0, none) and swiglu_oai (1.702, 1, 7), see
            ``activations``: a float, or a tensor [experts]. swiglu_step takes a limit (7), situ
            beta (4) and a limit (25), both of them soft, and geglu1 beta (1).
        interleaved: the rows of w13 and w13_bias are gate 0, up 0, gate 1, up 1, ...; with a gate.
        expert_offset: global id of w13's first expert. Ids of other experts contribute nothing.
        num_experts: how many experts there are in all; w13's if None.
        weights_on_input: a token is multiplied by its slot's weight before the first product, and
            its output is not (vLLM's apply_router_weight_on_input, FlashInfer's
            use_routing_scales_on_input; Llama 4). Then a weight of 0 means an input of zeros.
        intermediate_scale: scale with which a kernel quantises the activation's results to FP8
            (e4m3fn) before the second product, where it is given beforehand: a float, or a tensor
            [experts]. What exceeds 448 of it saturates; other rounding is the error bound's.
        shared_w13, shared_w2: experts that every token goes to, of the same activation, with any
            inter; their outputs are added with ``shared_weight``.
        shared_weight: 1, or 1 / scaling_factor where the caller scales the sum afterwards.
        output_norm_eps: each routed expert's output is divided by its root mean square, of which
            this is added to the mean, before its routing weight (Muse Spark); None: it is not.
        output_norm_gain: [hidden], floating: what the norm is multiplied by, if anything.
        output_norm_first: the gain multiplies before the norm.
        routed_scaling_factor: what the sum of the routed experts is multiplied by; not the shared.
        shared_gate: [tokens, 1] or [tokens, shared experts], floating: what the outputs of the
            shared experts are multiplied by for each token, besides ``shared_weight`` (Qwen2-MoE).
        shared_gate_logits: the gate's sigmoid is, and not the gate.
        one_product: the activation's results are an expert's output, of inter channels: there is
            no second product, w2 is [experts, inter, 0], and w2_bias is None (the routed value
            projections of K2 Horizon's attention, MoVA).
        identity_experts: experts without weights, whose ids follow those of all others: their
            output is the hidden state, which routing weights multiply (LongCat-Flash's zero
            experts of type identity).
        compute_dtype: float64 (default) or float32.

    Returns:
        [tokens, hidden] in ``compute_dtype``. Weights of an expert that no token selected are not
        read.

    Raises:
        ValueError: shapes, dtypes or formats that disagree, ids out of range, an argument that the
            activation does not take; the argument and the position are named.
    """
    options = MoEOptions(
        activation,
        w13_bias,
        w2_bias,
        alpha,
        beta,
        limit,
        interleaved,
        expert_offset,
        num_experts,
        weights_on_input,
        intermediate_scale,
        shared_w13,
        shared_w2,
        shared_weight,
        compute_dtype,
        output_norm_eps=output_norm_eps,
        output_norm_gain=output_norm_gain,
        output_norm_first=output_norm_first,
        routed_scaling_factor=routed_scaling_factor,
        shared_gate=shared_gate,
        shared_gate_logits=shared_gate_logits,
        one_product=one_product,
        identity_experts=identity_experts,
    )
    with torch.no_grad():
        call = checked_call(hidden, w13, w2, topk_ids, topk_weights, options)
        return apply_experts(call, options.compute_dtype)


def apply_experts(call: MoECall, dtype: torch.dtype) -> torch.Tensor:
    """Compute each expert's rows, and add them up by token."""
    out = torch.zeros(call.shape, dtype=dtype, device=call.hidden.values.device)
    for part in call.parts:
        for expert, tokens, weights in part.rows():
            x = call.hidden.tokens(tokens, dtype)
            if part.on_input:
                x *= weights.unsqueeze(-1)
            projected = product(x, part.w13, expert, call.scratch)
            if part.w13_bias is not None:
                projected += part.w13_bias[expert]
            middle = activate(
                part.activation, projected, part.numbers[expert], interleaved=part.interleaved
            )
            y = part.saturated(middle, expert)
            if not part.one_product:
                y = product(y, part.w2, expert, call.scratch)
            if part.w2_bias is not None:
                y += part.w2_bias[expert]
            if part.norm is not None:
                y = part.norm.value(y)
            if not part.on_input:
                y *= weights.unsqueeze(-1)
            y *= part.factor
            out.index_add_(0, tokens, y)
    for tokens, weights, x in call.identities(dtype):
        out.index_add_(0, tokens, weights * x)
    return out


def product(x: torch.Tensor, matrix: Matrix, expert: int, scratch: Scratch) -> torch.Tensor:
    """Multiply rows [n, columns] by an expert's weights: [n, rows]."""
    out = x.new_empty((len(x), matrix.values.shape[1]))
    blocks = matrix.blocks(expert, x.dtype, scratch)
    for part, weights in zip(out.split(matrix.step, dim=1), blocks, strict=True):
        torch.mm(x, weights.T, out=part)
    return out
