r"""Elementwise bounds on what an honest MoE kernel may differ from the float64 oracle.

Write u for the unit roundoff of the accumulation format, x for a token's hidden state [D], w_j for
row j of w13, g_j = w_j x + b_j, a_j for the activation's results [I], W_k for row k of w2, y = W a,
c_s for the routing weights, and LAMBDA and n(k) = min(k, LAMBDA sqrt(k)) as in ``error_terms``.

1.  g_j is a sum of D products. Its error is a sum of independent roundings of mean zero, which is
    beyond LAMBDA d_j only with probability 2 exp(-LAMBDA^2 / 2), where

        d_j = u [ (n(D) / LAMBDA + DOT) |x| |w_j| + LOGIT (|g_j| + |b_j|) ]

    The second term is the scale of quantised operands, the bias and the routing weight on the
    input. Where the projections are stored in a format of roundoff p before the activation,
    p |g_j| more.

2.  The activation carries it: v_j bounds |a(g') - a(g)| / LAMBDA for |g' - g| <= LAMBDA d
    (``activations.Phi.change``: the slope and the largest curvature; a limit cuts it off). If a is
    rounded to a format of roundoff q before the second product, v_j gains q |a_j|, and in the
    scaled formats a share of the row's largest |a|, for small elements share its scale (int8 loses
    half a step, 1 / 254 of it, and nothing else; scales rounded up to powers of two, twice as much
    as FP8 else does); with a scale that is given beforehand, half of the smallest code's value.

3.  The errors of different j are independent: w_j and the rounding of a_j differ. So y_k moves by
    at most LAMBDA sqrt(c sum_j v_j^2 W_kj^2), where c counts the most frequent |a_j| of the row:
    equal rows of w13 round alike. sqrt(I) in the place of LAMBDA sqrt(c), if that is less, is the
    worst case.

4.  What the activation function itself loses is no rounding of mean zero, but the same function of
    g_j in every j: t_j = ACTIVATION u |a_j|; for gelu, whose (1 + erf) / 2 has an absolute error,
    CANCELLED u |x| more, with tanh.approx or a sigmoid made of tanh as well; for the soft caps of
    situ, an error of tanh times the cap and the other factor. It adds |t| |W_k|
    (Cauchy-Schwarz), as does the second product: u (n(I) + DOT) |a| |W_k|, and
    LOGIT u (|y_k| + |bias|).

5.  out = sum_s c_s y_s adds the errors with |c_s|: experts may be equal, so nothing is said of
    independence here. The sum itself adds u (n(S) + SUM) sum |c_s y_s|; in a narrower ``combine``
    format of roundoff r, r (2 S + 1) sum |c_s y_s|: each product, and each sum so far; and half of
    its smallest number for each product, which may be subnormal (sums of such are exact). Expert
    outputs that are stored in the output's dtype of roundoff o (``partial_outputs``): o |c_s y_s|
    more.

    A norm of y (``norms``) carries its error on; stored outputs are rounded before it, too. A
    factor on the sum rounds twice more, in the ``combine`` format once. A gate of shared experts
    that is a sigmoid is off by ACTIVATION u of itself (2 o more where outputs are stored: it and
    its product may be), and by what a sigmoid made of tanh loses.

    An identity expert's output is the hidden state: c_s x_k rounds as any other part of the sum,
    and LOGIT u |c_s x_k| is the product's.

6.  The output is rounded once: E = (1 + o) (the above) + o |out| + floor.

    Where the activation's results are the outputs (``one_product``), what they are off by is
    LAMBDA v_j + t_j, each by itself, in which p |g_j| and q |a_j| count once.

7.  FP8 operands in fixed point: n(D) FIXED_POINT (max|x| max|w_j| + |g_j|) more in g_j, and the
    same in y_k where the intermediate is FP8 too. What is cut off does not cancel where products
    have one sign (7. of ``error_terms``): with t_j = |sum sign(x_i w_ji)| in the place of n(D), it
    is no rounding of mean zero either. The activation carries it as in 2., and it adds |t| |W_k| to
    y_k as in 4.

8.  Where codes of weights are rounded to numbers of roundoff w before they are multiplied
    (``dequantized``), equal codes of a group round alike, so that nothing is said of independence
    within a row: w |x| |w_j| more in LAMBDA d_j, and w |a| |W_k| in y_k (Cauchy-Schwarz).

9.  Where the call takes the softmax of logits (``routing``) that are log c_s, rounded: a logit, and
    its difference from the largest, are each off by u |log c_s| at most, as no weight is above 1.
    The normaliser is a sum of S numbers, off by the mean of such errors, at most u log S twice. So
    c_s is off by u (2 |log c_s| + 2 log S + ACTIVATION + n(S)) of itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..attention.error_terms import DOT, LOGIT, SUM, growth, most_equal_keys
from ..attention.product_terms import LAMBDA
from ..formats.arithmetic import SMALLEST_SUBNORMAL, Arithmetic, checked_arithmetic
from ..scratch import Scratch
from .activations import Swiglu, activate, carried_error, lost_by_functions
from .calls import Experts, MoECall, MoEOptions, checked_call
from .roundings import MoERoundings
from .weights import Matrix, QuantizedMatrix

ACTIVATION = 16.0
"""Error of an activation in units of u: exponential, division, products (ex2.approx: 2 ulp)."""
CANCELLED = 4.0
"""Absolute error, in units of u, of (1 + erf) / 2 and (1 + tanh) / 2."""


TINY = 2.0**-126
"""Smallest routing weight whose logarithm counts."""


class BoundedMoE(NamedTuple):
    """The oracle's answer and the bound on the difference of an honest kernel."""

    expected: torch.Tensor
    bound: torch.Tensor


def moe_error_bound(
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
    arithmetic: Arithmetic | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Bound, element by element, how far an honest kernel may be from ``moe``.

    Args:
        hidden, w13, w2, topk_ids, topk_weights, and the options: the same as in ``moe``. Weights on
            the input multiply the accumulator, or the hidden states in its format; a kernel that
            rounds weight times hidden state gets that product as its hidden state.
        arithmetic: what the kernel rounds where; float32 throughout if None.
        out_dtype: dtype of the kernel's output; if None that of hidden, or bfloat16 of codes.

    Returns:
        Bounds [tokens, hidden] in ``compute_dtype``. The derivation is this module's docstring.

    Raises:
        ValueError: as ``moe``.
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
    call = checked_call(hidden, w13, w2, topk_ids, topk_weights, options)
    return bounded_moe(call, options.compute_dtype, arithmetic, out_dtype).bound


@torch.no_grad()
def bounded_moe(
    call: MoECall,
    dtype: torch.dtype,
    arithmetic: Arithmetic | None,
    out_dtype: torch.dtype | None,
) -> BoundedMoE:
    """Compute the experts and their bounds in one pass over the weights."""
    stored = call.hidden.values.dtype
    out_dtype = out_dtype or (stored if stored.itemsize > 1 else torch.bfloat16)
    roundings = MoERoundings.of(checked_arithmetic(arithmetic), call.hidden.rounding, out_dtype)
    out = torch.zeros(call.shape, dtype=dtype, device=call.hidden.values.device)
    bound = torch.zeros_like(out)
    r, slots = roundings, call.top_k
    of_sum = r.accumulate * (growth(slots) + SUM) + r.combine * (2 * slots + 1) + r.partial
    for part in call.parts:
        for expert, tokens, weights in part.rows():
            x = call.hidden.tokens(tokens, dtype)
            scale = weights.unsqueeze(-1)
            if part.on_input:
                x, scale = x * scale, torch.ones_like(scale)
            y, error = _expert(x, part, expert, roundings, call.scratch)
            scale, more = scale * part.factor, r.of_factor if part.factor != 1 else 0.0
            gate = y.abs() * (r.sigmoid + 0.5 * r.tanh) * part.gate
            y *= scale
            out.index_add_(0, tokens, y)
            floor = r.out_floor if r.partial else 0.0
            lost = scale.abs() * (error + floor) + (of_sum + more) * y.abs()
            lost += r.combine_floor * max(1.0, abs(part.factor)) * (scale != 0)
            if r.routing and part is call.parts[0]:
                of_softmax = 2 * weights.clamp(min=TINY).log().abs() + 2 * math.log(slots)
                of_softmax += ACTIVATION + growth(slots)
                lost += r.routing * of_softmax.unsqueeze(-1) * y.abs()
            if part.gate:
                lost += gate + (ACTIVATION * r.accumulate + 2 * r.partial) * y.abs()
            bound.index_add_(0, tokens, lost)
    factor = call.parts[0].factor  # of the routed experts, and in the weights of identities
    more = r.of_factor if factor != 1 else 0.0
    for tokens, weights, x in call.identities(dtype):
        y = weights * x
        out.index_add_(0, tokens, y)
        lost = (of_sum + more + r.accumulate * LOGIT) * y.abs()
        lost += r.combine_floor * max(1.0, abs(factor))
        lost += weights.abs() * r.out_floor if r.partial else 0.0
        bound.index_add_(0, tokens, lost)
    bound = (1 + r.out) * bound + r.out * out.abs() + r.out_floor
    # Nothing is added up for a token without an expert: a kernel writes zero there.
    return BoundedMoE(out, bound)


def _expert(
    x: torch.Tensor, part: Experts, expert: int, roundings: MoERoundings, scratch: Scratch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an expert's outputs [n, hidden], without routing weights, and their bounds."""
    u, r = roundings.accumulate, roundings
    first = _product(x, part.w13, expert, scratch, signs=bool(r.first_products))
    projected, columns = first.value, part.w13.columns
    bias = 0.0 if part.w13_bias is None else part.w13_bias[expert]
    projected += bias
    sums = u * (growth(columns) / LAMBDA + DOT)
    stored = r.projections * projected.abs() + r.projections_floor
    errors = sums * first.norms + u * LOGIT * projected.abs() + stored
    if part.w13_bias is not None:
        errors += u * LOGIT * part.w13_bias[expert].abs()
    numbers, interleaved = part.numbers[expert], part.interleaved
    a = activate(part.activation, projected, numbers, interleaved=interleaved)
    a = part.saturated(a, expert)
    errors *= LAMBDA
    errors += r.weights * first.norms
    if part.one_product:
        errors -= (LAMBDA - 1) * stored  # of one element it is at most once
    spread, cut_off = _carried(part, expert, first, errors, roundings)
    size = a.abs()
    if part.one_product:
        spread += cut_off + _lost(part, projected, size, numbers, roundings)
        narrow = 0.0 if r.intermediate_share else r.intermediate  # FP8 would be for a product
        return a, spread + (narrow + u * LOGIT) * size + r.intermediate_floor
    spread /= LAMBDA
    spread += r.intermediate * size + r.intermediate_floor
    if part.scales is not None and r.intermediate_share:
        spread += SMALLEST_SUBNORMAL["float8_e4m3fn"] / 2 * part.scales[expert]
    elif r.intermediate_share:
        spread += r.intermediate_share * size.amax(dim=1, keepdim=True)
    equal = most_equal_keys(size.masked_fill(size == 0, math.nan).unsqueeze(1))
    inter = part.w2.columns
    spread *= equal.clamp(max=max(1.0, inter / LAMBDA**2)).to(a.dtype).sqrt().unsqueeze(-1)
    second = _product(a, part.w2, expert, scratch, spread, signs=bool(r.second_products))
    y = second.value
    error = min(LAMBDA, math.sqrt(inter)) * second.spread
    lost = _lost(part, projected, size, numbers, roundings) + cut_off
    systematic: torch.Tensor = torch.linalg.vector_norm(lost, dim=1, keepdim=True)
    error += systematic * second.row_norms
    error += (u * (growth(inter) + DOT) + r.weights) * second.norms
    if part.w2_bias is not None:
        y += part.w2_bias[expert]
        error += u * LOGIT * part.w2_bias[expert].abs()
    error += u * LOGIT * y.abs()
    if r.second_products:
        error += r.second_products * (second.one_sided + growth(inter)) * (second.largest + y.abs())
    if part.norm is not None:
        error += r.partial * y.abs() + (r.out_floor if r.partial else 0.0)
        y, error = part.norm.value(y), part.norm.change(y, error, u)
    return y, error


def _carried(
    part: Experts, expert: int, first: _Product, errors: torch.Tensor, roundings: MoERoundings
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return what the activation makes of its argument's errors, and of what is cut off from it.

    Args:
        part, expert: the projections and the expert whose activation is bounded.
        first: product, with the bias.
        errors: LAMBDA d_j of 1., what 7. adds left out; they are changed.
        roundings: the roundings of the kernel.
    """

    def carried() -> torch.Tensor:
        numbers, interleaved = part.numbers[expert], part.interleaved
        return carried_error(part.activation, first.value, errors, numbers, interleaved=interleaved)

    if not roundings.first_products:
        return carried(), 0.0
    addends = roundings.first_products * (first.largest + first.value.abs())
    errors += growth(part.w13.columns) * addends
    spread = carried()
    errors += first.one_sided * addends
    return spread, carried() - spread


def _lost(
    part: Experts,
    projected: torch.Tensor,
    size: torch.Tensor,
    numbers: Swiglu,
    roundings: MoERoundings,
) -> torch.Tensor:
    """Return what the activation function itself may lose, [n, inter]."""
    lost = ACTIVATION * roundings.accumulate * size
    absolute = roundings.sigmoid + 0.5 * roundings.tanh
    if part.activation.cancels:
        absolute += CANCELLED * roundings.accumulate
    # a = x share up, so that an absolute error of the share counts with |x up|.
    return lost + lost_by_functions(
        part.activation,
        projected,
        numbers,
        share=absolute,
        tanh=roundings.tanh + roundings.tanh_absolute,
        interleaved=part.interleaved,
    )


class _Product(NamedTuple):
    """A product, and what its bound is made of.

    Attributes:
        value: [n, rows].
        row_norms: |W_k|, [rows].
        norms: |x| |W_k|, [n, rows].
        largest: max|x| max|W_k|, [n, rows].
        spread: sqrt(sum_j v_j^2 W_kj^2), [n, rows]; of nothing, if no v is given.
        one_sided: |sum_i sign(x_i W_ki)|, [n, rows]; of nothing, if no signs are asked for.
    """

    value: torch.Tensor
    row_norms: torch.Tensor
    norms: torch.Tensor
    largest: torch.Tensor
    spread: torch.Tensor
    one_sided: torch.Tensor


def _product(
    x: torch.Tensor,
    matrix: Matrix,
    expert: int,
    scratch: Scratch,
    v: torch.Tensor | None = None,
    *,
    signs: bool = False,
) -> _Product:
    rows = matrix.values.shape[1]
    value = x.new_empty((len(x), rows))
    spread = torch.empty_like(value) if v is not None else x.new_empty((len(x), 0))
    row_norms, row_largest = x.new_empty(rows), x.new_empty(rows)
    squares = None if v is None else v.square()
    one_sided = torch.empty_like(value) if signs else x.new_empty((len(x), 0))
    of_x = x.sign() if signs else x
    start = 0
    for w in matrix.blocks(expert, x.dtype, scratch):
        stop = start + len(w)
        torch.mm(x, w.T, out=value[:, start:stop])
        torch.linalg.vector_norm(w, dim=1, out=row_norms[start:stop])
        # Not vector_norm(ord=inf), which took 14 times as long.
        row_largest[start:stop] = torch.maximum(w.amax(dim=1), -w.amin(dim=1))
        if squares is not None:
            taken = scratch.take("squares", tuple(w.shape), w.dtype, w.device)
            torch.mm(squares, torch.square(w, out=taken).T, out=spread[:, start:stop])
        if signs:
            taken = scratch.take("signs", tuple(w.shape), w.dtype, w.device)
            torch.mm(of_x, torch.sign(w, out=taken).T, out=one_sided[:, start:stop])
        start = stop
    norms = torch.linalg.vector_norm(x, dim=1, keepdim=True) * row_norms
    largest = x.abs().amax(dim=1, keepdim=True) * row_largest
    return _Product(value, row_norms, norms, largest, spread.sqrt_(), one_sided.abs_())
