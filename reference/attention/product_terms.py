r"""Bounds on what rounded operands and products add; parts 8 to 10 of ``error_terms``.

8.  Where each product q_i k_ji is rounded before it is summed, by its own relative error |t| <= p
    (``Arithmetic.products``), logit j is off by scale sum q_i k_ji t_ji. As in 3., that splits into
    what all products have in common, at most p |s_j|, and a part of mean zero that is independent
    from key to key, with p g_j in the place of its deviation, g_j = |scale| sqrt(sum q_i^2 k_ji^2).
    Write v_j = p g_j. By Hoeffding's inequality for the sum over keys and channels, the independent
    parts move O = P V by at most LAMBDA sqrt(c) sqrt(sum P_j^2 v_j^2 (V_j - O)^2), which is below

        LAMBDA sqrt(c) [ sqrt(sum P_j^2 v_j^2 V_j^2) + |O| sqrt(sum P_j^2 v_j^2) ]

    and the lse by LAMBDA sqrt(c) sqrt(sum P_j^2 v_j^2). That is exp to first order. A single key is
    off by at most r_j = min(LAMBDA, sqrt(D)) v_j, and what is left of exp is below r_j^2 where
    r_j <= 1: min(r_j^2, r_j) more in d_j. So p |s_j| + min(r_j^2, r_j) + D |scale| floor there, for
    products below the smallest normal number.

    No term is for overflow: float16 holds no product above 65504, and a kernel that multiplies so
    answers NaN or infinity, which is wrong.

9.  Operands of a product that are rounded to TF32, or cut off after its ten bits as tensor cores do
    with float32 in registers (``Arithmetic.operands``), lose at most CUT of themselves each. What
    they have in common is then at most 2 CUT: 2 CUT |s_j| more in d_j, and 2 CUT |O| in the second
    product. About that, each varies by at most CUT / 2, two of them by OPERANDS = CUT / sqrt(2):
    v_j = OPERANDS g_j in 8., and LAMBDA OPERANDS sqrt(sum P_j^2 V_j^2) in the second product. Only
    the roundings of keys differ from key to key; those of a query are the same for all. What they
    have in common for all keys cancels in O, and not in the lse: LAMBDA sum P_j v_j there.

10. Where keys and values of a quantised cache are rounded to the queries' dtype before they are
    multiplied (``Arithmetic.dequantized``), the roundings are known: those of the codes, times the
    scales of blocks or tokens. With k^ and v^ for what is left, |scale q (k^_j - k_j)| more in d_j,
    and |sum P_j (v^_j - v_j)| + sqrt(sum P_j e_j^2) sqrt(sum P_j (v^_j - v_j)^2) in O. Nothing is
    lost where the scales are powers of two. There is no term for overflow, as in 8.

    ``k_scale`` and ``v_scale`` multiply before the rounding, after it, or in the queries' dtype,
    which rounds once more. Each has its own k^ and v^, and the largest of the three counts; for a
    power of two all are the same. Scales are multiplied with each other first, or with codes, in
    float32: an element within SCALED of a midpoint may be rounded up or down, and its step h_ji is
    added: |scale| |q| h_j in d_j, and sum P_j h_j in O.

    A kernel that takes a zero point off a code and multiplies the scale in the queries' dtype
    (``Arithmetic.row_scales`` of ``"steps"``) rounds twice, of which the first is not known from
    the value: h_ji is 2 p (1 + p) |k_ji| more, and half of the smallest number twice.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..formats.arithmetic import SMALLEST_SUBNORMAL, UNIT_ROUNDOFF, Arithmetic, dtype_name
from .reordering import LogitErrors
from .softmax import Weights

LAMBDA = 5.0
"""Confidence of the probabilistic bounds: at most 2 exp(-12.5) = 7.5e-6 an element if every single
rounding were as large as it can be; roundings are about 0.4 of that, which leaves 2 exp(-78)."""
CUT = 2 * UNIT_ROUNDOFF["tfloat32"]
"""Largest share of a float32 operand that cutting it off to TF32 loses: twice that of rounding."""
SCALED = 4 * UNIT_ROUNDOFF["float32"]
"""Share of a code times two scales by which float32 products in any order may be off, and more."""
OPERANDS = CUT / math.sqrt(2)
"""Share of a product by which its two operands' losses vary at most."""
POWER_OF_TWO = 0.5
"""Mantissa that frexp gives a power of two."""


class ProductRoundings(NamedTuple):
    """What a kernel rounds of operands and of single products of queries and keys."""

    products: float = 0.0  # unit roundoff of a product; 0: in the accumulation format
    floor: float = 0.0  # what a product loses below the smallest normal number
    cut: float = 0.0  # share of itself that an operand loses; 0: none
    dequantized: torch.dtype | None = None  # of keys and values of a quantised cache; None: not
    in_steps: bool = False  # each step of dequantizing is rounded

    @classmethod
    def of(
        cls,
        arithmetic: Arithmetic,
        value_dtype: torch.dtype,
        *,
        dequantises: bool,
        zero_points: bool = False,
    ) -> ProductRoundings:
        """Look up the roundings of a kernel whose queries have the dtype of ``value_dtype``."""
        name = dtype_name(value_dtype)
        in_steps = zero_points and arithmetic.row_scales == "steps"
        rounds = arithmetic.products == "inputs" and value_dtype.itemsize == 2  # noqa: PLR2004
        return cls(
            UNIT_ROUNDOFF[name] if rounds else 0.0,
            SMALLEST_SUBNORMAL[name] / 2 if rounds else 0.0,
            CUT if arithmetic.operands == "tfloat32" and value_dtype == torch.float32 else 0.0,
            value_dtype
            if (dequantises and arithmetic.dequantized == "inputs" and value_dtype.itemsize > 1)
            or in_steps
            else None,
            in_steps,
        )

    @property
    def spread(self) -> float:
        """Share of a product by which single ones vary, independently."""
        return self.products + self.cut * OPERANDS / CUT


class RoundedProducts(NamedTuple):
    """What rounded products and operands add to the logits of a block; R = rows * G.

    Attributes:
        spread: [N, K, R, S'], v_j of 8., 0 where masked; None if no product is rounded.
        single: [N, K, R, S'], what 8., 9. and 10. add to d_j, anything where masked.
    """

    spread: torch.Tensor | None
    single: torch.Tensor | float


class Values(NamedTuple):
    """What is known of the values of a block, for ``moved_by_products``."""

    v: torch.Tensor  # [N, K, S', E], v_scale applied
    v_scale: float | torch.Tensor  # or [K]
    v_squared: torch.Tensor  # [N, K, S', E]
    out_size: torch.Tensor  # [N, K, R, E], |O|
    confidence: torch.Tensor  # [N, 1, 1, 1], LAMBDA sqrt(c)


class Moved(NamedTuple):
    """What is added to the bounds."""

    out: torch.Tensor | float  # [N, K, R, E]
    lse: torch.Tensor | float  # [N, K, R, 1]


def rounded_products(
    weights: Weights, scale: float, k_scale: float | torch.Tensor, roundings: ProductRoundings
) -> RoundedProducts:
    """Bound what rounded products and operands add to logits, which ``scale`` multiplies.

    Args:
        weights: the block's softmax.
        scale: the scale of the logits.
        k_scale: the scale that was applied to the keys.
        roundings: the roundings of the kernel.
    """
    spread: torch.Tensor | None = None
    single: torch.Tensor | float = 0.0
    if roundings.spread:
        squares = weights.q.square() @ weights.k.square().transpose(-1, -2)
        spread = squares.sqrt_().mul_(abs(scale) * roundings.spread)
        spread.masked_fill_(torch.isneginf(weights.logits), 0.0)
        head_dim = weights.q.shape[-1]
        largest = spread * min(LAMBDA, math.sqrt(head_dim))
        single = weights.sizes * (roundings.products + 2 * roundings.cut)
        single += torch.minimum(largest.square(), largest)
        single += head_dim * abs(scale) * roundings.floor
    if roundings.dequantized is not None:
        lost, steps = _lost_by_rounding(
            weights.k, k_scale, roundings.dequantized, in_steps=roundings.in_steps
        )
        q = weights.q
        moved = torch.stack([(q @ each.transpose(-1, -2)).abs_() for each in lost]).amax(dim=0)
        moved += q.abs() @ steps.transpose(-1, -2)
        single = single + moved.mul_(abs(scale))
    return RoundedProducts(spread, single)


def moved_by_products(
    weights: Weights,
    rounded: RoundedProducts,
    values: Values,
    errors: LogitErrors,
    roundings: ProductRoundings,
) -> Moved:
    """Bound what is moved besides what the errors of single logits move; 8., 9. and 10. above.

    Args:
        weights: the block's softmax.
        rounded: the rounding errors of the logits.
        values: the values that the probabilities weigh.
        errors: the errors of its logits, ``rounded.single`` included.
        roundings: the roundings of the kernel.
    """
    out: torch.Tensor | float = 0.0
    lse: torch.Tensor | float = 0.0
    if rounded.spread is not None:
        of_keys = weights.probabilities * rounded.spread
        squares = of_keys.square()
        total = squares.sum(dim=-1, keepdim=True).sqrt_()
        out = (squares @ values.v_squared).sqrt_().addcmul_(values.out_size, total)
        out.mul_(values.confidence)
        lse = values.confidence * total
    if rounded.spread is not None and roundings.cut:
        lse = LAMBDA * of_keys.sum(dim=-1, keepdim=True)
        independent = (weights.probabilities.square() @ values.v_squared).sqrt_()
        out = out + 2 * roundings.cut * values.out_size
        out.addcmul_(values.confidence, independent, value=OPERANDS)
    if roundings.dequantized is not None:
        lost, steps = _lost_by_rounding(
            values.v, values.v_scale, roundings.dequantized, in_steps=roundings.in_steps
        )
        p = weights.probabilities
        out = out + torch.stack([(p @ each).abs_() for each in lost]).amax(dim=0) + p @ steps
        most = torch.stack(lost).abs_().amax(dim=0).add_(steps)
        out.addcmul_((p @ most.square_()).sqrt_(), errors.deviation)
    return Moved(out, lse)


def _lost_by_rounding(
    values: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype, *, in_steps: bool
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return what rounding to a dtype by way of float32 adds to values [N, K, S', D]; see 10.

    Args:
        values: the values with their scale applied.
        scale: a number, or [K].
        dtype: the dtype of the queries.
        in_steps: whether the zero point and the scale are taken in that dtype.

    Returns:
        What is added, by each place of the scale, and the step h, 0 away from midpoints. Both are
        0 where a value overflows.
    """

    def rounded(each: torch.Tensor) -> torch.Tensor:
        return each.float().to(dtype).to(values.dtype)

    candidates = [rounded(values)]
    factor = torch.as_tensor(scale, device=values.device, dtype=values.dtype).reshape(-1, 1, 1)
    mantissas = torch.frexp(torch.as_tensor(scale).double()).mantissa.abs()
    if not bool((mantissas == POWER_OF_TWO).all()):
        after = rounded(values / factor) * factor
        candidates += [after, rounded(after)]
    steps = rounded(values * (1 + SCALED)) - rounded(values * (1 - SCALED))
    if in_steps:
        name = dtype_name(dtype)
        share = 2 * UNIT_ROUNDOFF[name] * (1 + UNIT_ROUNDOFF[name])
        steps = steps.abs() + share * values.abs() + SMALLEST_SUBNORMAL[name]
    lost = [_finite(each - values) for each in candidates]
    return lost, _finite(steps).abs_()


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
