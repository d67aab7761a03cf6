r"""Elementwise bounds on what an honest kernel may differ from the float64 oracle.

Write u for the unit roundoff of the accumulation format, s for the logits, m for the row's largest
logit, P for the probabilities, O = P V, and n(k) = min(k, LAMBDA sqrt(k)) for the growth of a sum
of k terms (k is the worst case; the square root holds for independent roundings of mean zero,
with a failure probability below 2 exp(-LAMBDA^2 / 2): Higham & Mary, SIAM J. Sci. Comput. 41(5),
2019; Ipsen & Zhou, arXiv:1906.10465).

1.  Logit j is computed with an absolute error of at most

        d_j = u [ (n(D) + DOT) |scale| |q| |k_j|  +  LOGIT (|s_j| + |m|)  +  EXP ]

    The first term is the dot product of D terms (Cauchy-Schwarz bounds sum |q_i k_i|), the second
    the roundings of the scaled logit, of the change to base 2 and of s_j - m: it grows with
    |logit| u, so that a kernel whose logits are near 1e6 may be off by one in a hundred and still
    be right. The third is the exponential itself. A soft cap has a slope of at most 1. So
    exp(s_j - m) has a relative error of at most e_j = expm1(d_j).

2.  It moves O by sum P_j e_j (V_j - O), for what is common to all keys cancels in the quotient. By
    Cauchy-Schwarz with the weights P that is at most w D, with w = sqrt(sum P_j e_j^2) and
    D^2 = sum P_j V_j^2 - O^2, the variance of V under P (a sink counts as a key of value 0); 2 w D
    where e_j is not small. The two sums of S terms and the division add (2 n(S) + SUM) u A with
    A = sqrt(sum P_j V_j^2) >= sum P_j |V_j|. Together: E_accumulate = 2 w D + (2 n(S) + SUM) u A.

    Roundings of a sum of equal addends are no independent ones: on the way from one power of two
    to the next, all go the same way. Where c keys of a request are equal, as when a block table
    names a page twice, n(S) is min(S, LAMBDA sqrt(c S)).

    Nor are those of addends that are small beside the sum: one below u of it is lost, each time.
    Where one key has almost all weight, t others have a weight above 0 and of at most FEW u, and
    n(S) is t more: none of them is off by more than u.

    Where w > 1, or a d_j is beyond exp's reach, the errors may reorder the keys, and no expansion
    holds: a key of no weight may get all of it. No weight is above
    Q_j = min(1, P_j exp(d_j + max d)), and O is moved by at most sum P'_j |V_j - O|, that is by
    |O| + min(sum Q_j |V_j|, max |V_j|), in the place of 2 w D; the lse by at most max d.

3.  If the probabilities are rounded with roundoff p before they multiply V, each by its own
    relative error |t_j| <= p, then sum P_j t_j V_j splits into a common part (equal logits round
    alike), at most p |O|, and a part of mean zero, at most LAMBDA p sqrt(sum P_j^2 V_j^2), or
    sqrt(S) p sqrt(...) in the worst case. Keys that are equal round alike and their errors add:
    c of them raise LAMBDA by sqrt(c).
    Subnormal probabilities lose SMALLEST_SUBNORMAL / 2.
    E_probabilities = p [ |O| + min(LAMBDA sqrt(c), sqrt(S)) sqrt(sum P_j^2 V_j^2) ] + floor.

    Where the row sum is taken of the rounded probabilities, what is common to all cancels, and
    sum P_j t_j (V_j - O) is left: |O| gives way to |O| sqrt(sum P_j^2) within the minimum's share.

4.  The output is rounded once: E = (1 + o) (E_accumulate + E_probabilities) + o |O| + floor. If
    outputs O_i of parts of the keys with weights w_i were rounded before they were merged, that is
    o sum w_i |O_i| <= o sum P_j |V_j| <= o A more.

5.  lse = m + log(sum): 2 sum P_j e_j + (n(S) + SUM) u + LSE u (|lse| + |m|), stored in float32;
    p more where the row sum is taken of rounded probabilities.

6.  tanh.approx of a soft cap c adds TANH |s_j| to d_j. Taken as 2 / (1 + exp(-2 x)) - 1, which
    cancels where x is small, it adds SIGMOID u c: of h = 1 / (1 + exp(-y)), the exponential's
    (EXP + |y|) u enters with h (1 - h), at most 1/4 and 0.23 with |y|, the sum and the division
    with u each; twice that and the difference make (EXP / 2 + 5.5) u. A compiler may take such a
    logit twice, for the row sum and for the second product, and contract one of them otherwise
    (Triton does): then it does not cancel in the quotient, and O moves by SIGMOID u c A more.

7.  Where FP8 operands are multiplied in fixed point, each addend of a dot product loses at most
    FIXED_POINT of the largest one, which is at most max|q_i| max|k_ji| or a sum on the way to s_j.
    It is cut off, not rounded: a positive addend only loses, a negative one only gains, and equal
    addends lose the same share of a unit each time. So only what positive and negative ones lose
    cancels. With t = |sum sign(q_i k_ji)|, the number of addends of one sign beyond those of the
    other, (n(D) + t) FIXED_POINT (|scale| max|q_i| max|k_ji| + |s_j|) more in d_j.

    The second product adds n(S) FIXED_POINT A in the same way, and |sum c_j sign(V_j)|, where
    c_j = min(FIXED_POINT A, P_j max|V|): no addend loses more than itself. Where values have one
    sign, that is all of O from 1 / FIXED_POINT keys of equal weight on: of 448 times a probability
    of 1, 32,768 keys leave 0.285 of their sum on an H100. The row sum is no product.

8. to 10.: operands and single products that are rounded, see ``product_terms``.

11. Where scales of tokens multiply the probabilities before these are rounded, and not V
    (``Arithmetic.row_scales``), P_j s_j is rounded: 3. holds as it stands, for p is relative.
    Only the floor grows: a subnormal one multiplies a code, not V, so that the largest code and
    v_scale take the place of max |V|. Nothing is dequantised then: 10. adds nothing.

12. An output in FP8 is O / s of an output scale s, saturated and rounded. The division moves it by
    (E_accumulate + E_probabilities) / s, and by OUTPUT_SCALE u |O| / s for roundings of s, 1 / s
    and the product. Saturation brings two numbers no further apart. So E of 4., with
    min(|O / s|, 448) in the place of |O|: o is the half ulp of FP8. An ``output_divisor`` moves the
    output of any dtype alike, before; nothing saturates.

13. ALiBi of slope a may be counted from any position of the request: FlashAttention counts from
    the first key, vLLM from the first new one. That moves s_j, m and a sink alike, by at most a S,
    which is a S more in each of |s_j| and |m|, and adds a product and a sum: (LOGIT + ALIBI) u a S
    more in d_j, and 2 LSE u a S in the lse. Of another function f of the distance than itself, the
    largest |f| takes the place of S: one that is not linear is counted from the query alone, which
    is less.

14. A bias b_j of the logits is one more addend. Before it is added, the logit may be |s_j| + |b_j|
    large; it is changed to base 2 and added by itself. So |s_j| + |b_j| takes the place of |s_j| in
    1. and 6., and BIAS u |b_j| is added to d_j. A bias is an input: it is not rounded.

15. Where the product of a query and a key is stored in a format of roundoff r
    (``Arithmetic.logits``), before it is scaled or after, r |s_j| + floor max(1, |scale|) is added
    to d_j, with the s_j before a soft cap, whose slope is at most 1. A sink that is rounded first
    (``Arithmetic.sinks``) is off by what it loses, which is known. An lse that is stored in such a
    format (``Arithmetic.lse``) has (1 + r) times its bound, and r |lse| + floor more. There is no
    term for overflow, as in 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ..formats.arithmetic import (
    SMALLEST_SUBNORMAL,
    UNIT_ROUNDOFF,
    Arithmetic,
    dtype_name,
    unit_roundoff,
)
from ..formats.cache_elements import CacheElement
from .options import Options, scaled_output
from .product_terms import (
    LAMBDA,
    ProductRoundings,
    Values,
    moved_by_products,
    rounded_products,
)
from .reordering import LARGEST_LOGIT_ERROR, LogitErrors, largest_sum, may_reorder
from .softmax import Weights

DOT = 2.0
"""Roundings of a product of two accumulation-format inputs and of the multiplication by scale."""
LOGIT = 4.0
"""Roundings a logit suffers after the dot product: scale, base change, cap, difference to m."""
EXP = 8.0
"""Error of the exponential and of rescaling by a new maximum, in units of u (ex2.approx: 2 ulp)."""
SUM = 8.0
"""Divisions, v_scale, rescaling of the accumulator: roundings that do not grow with S."""
FEW = 16.0
"""Units of roundoff below which addends of a sum are rounded alike, or lost; see 2."""
LSE = 4.0
"""Roundings of the normaliser: logarithm, base change, addition of m, storage."""
VARIANCE_FLOOR = 2.0**-40
"""Share of sum P V^2 that sum P V^2 - O^2 may lose to cancellation in float64, and more."""
TANH = 2.0**-11
"""Largest relative error of tanh.approx.f32, as the PTX ISA gives it."""
ALIBI = LOGIT + 2
"""Roundings of a logit with ALiBi, in units of u a S, besides those of |s_j|; see 13."""
BIAS = 2.0
"""Roundings of a bias of its own, the change of base and the sum, in units of u |b_j|; see 14."""
OUTPUT_SCALE = 4.0
"""Roundings of an output's scale, of its inverse and of the product, in units of u; see 12."""
SIGMOID = 10.0
"""Absolute error of tanh by way of a sigmoid, in units of u; see 6."""
FIXED_POINT = 2.0**-13
"""What an addend of a Hopper tensor core's FP8 product may lose, as a share of the largest
(DeepSeek-V3, arXiv:2412.19437, section 3.5.2, saw about 14 bits; an H200 here agrees with 13, and
so does an H100: 0.789, 0.570 and 0.285 of a sum of 8,192, 16,384 and 32,768 times 448)."""


class Roundings(NamedTuple):
    """Unit roundoffs of a kernel's arithmetic, and what subnormal numbers lose."""

    accumulate: float
    probabilities: float  # 0: not rounded
    probabilities_floor: float
    out: float
    out_floor: float
    sums_rounded: bool = False  # the row sum is of rounded probabilities
    partial: float = 0.0  # of outputs of parts of the keys; 0: not rounded
    merged_above: int = 0  # keys above which parts are rounded twice; 0: never
    tanh: float = 0.0  # relative error of the soft cap's tanh
    products: float = 0.0  # of addends in fixed point; 0: in the accumulation format
    tanh_absolute: float = 0.0  # error of the soft cap's tanh beside the relative one
    of_products: ProductRoundings = ProductRoundings()
    largest_code: float = 0.0  # that rounded probabilities multiply in the place of V; 0: none
    logits: str | None = None  # format in which they are stored; None: not rounded
    sinks: str | None = None
    lse: str | None = None

    @classmethod
    def of(
        cls,
        arithmetic: Arithmetic,
        value_dtype: torch.dtype,
        out_dtype: torch.dtype,
        *,
        cache: CacheElement | None = None,
    ) -> Roundings:
        """Look up the roundings of a kernel on these dtypes; ``cache`` is what its cache holds."""
        of_tokens = cache is not None and cache.scaled_by_token and not cache.zero_point
        on_products = of_tokens and arithmetic.row_scales == "products"
        rounded = arithmetic.probabilities_format(value_dtype)
        out = dtype_name(out_dtype)
        fixed_point = arithmetic.fp8_products == "fixed_point"
        return cls(
            UNIT_ROUNDOFF[arithmetic.accumulate],
            UNIT_ROUNDOFF[rounded] if rounded else 0.0,
            SMALLEST_SUBNORMAL[rounded] / 2 if rounded else 0.0,
            unit_roundoff(out_dtype),
            SMALLEST_SUBNORMAL[out] / 2,
            arithmetic.row_sum == "probabilities" and rounded is not None,
            unit_roundoff(out_dtype) if arithmetic.partial_outputs else 0.0,
            arithmetic.merged_outputs,
            TANH if arithmetic.tanh == "approximate" else 0.0,
            FIXED_POINT if value_dtype.itemsize == 1 and fixed_point else 0.0,
            SIGMOID * UNIT_ROUNDOFF[arithmetic.accumulate] if arithmetic.tanh == "sigmoid" else 0.0,
            ProductRoundings.of(
                arithmetic,
                value_dtype,
                dequantises=cache is not None and not on_products,
                zero_points=cache is not None and cache.zero_point,
            ),
            cache.largest_code if cache is not None and on_products else 0.0,
            *(arithmetic.rounded(name, value_dtype) for name in ("logits", "sinks", "lse")),
        )

    def parts(self, keys: int) -> float:
        """Return the rounding error of partial outputs of a request with this number of keys."""
        return self.partial * (2 if 0 < self.merged_above < keys else 1)


def growth(terms: int) -> float:
    """Return n(k): how many units of roundoff a sum of k terms may gather."""
    return min(float(terms), LAMBDA * math.sqrt(terms))


def most_equal_keys(norms: torch.Tensor) -> torch.Tensor:
    """Count the most frequent key of any head, by norm: more than there are is only a looser bound.

    Args:
        norms: [N, kv_heads, keys]; a NaN equals nothing.

    Returns:
        [N] int64, at least 1.
    """
    norms = norms.sort(dim=-1).values
    position = torch.arange(norms.shape[-1], device=norms.device)
    # Where a run of equal norms begins, and 0 inside of it: the largest so far is the run's start.
    begins = position[1:] * (norms[..., 1:] != norms[..., :-1])
    if not begins.numel():
        return torch.ones(len(norms), dtype=torch.int64, device=norms.device)
    lengths = position[1:] - begins.cummax(dim=-1).values + 1
    return lengths.amax(dim=(1, 2))


def block_bounds(
    weights: Weights,
    v: torch.Tensor,
    out: torch.Tensor,
    options: Options,
    roundings: Roundings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bounds on out [N, K, R, E] and lse [N, K, R, 1] of a block of rows.

    Args:
        weights: the block's softmax.
        v: [N, K, S', E], zero where an entry is no key of the request.
        out: [N, K, R, E], the block's attention.
        options: the options of the call.
        roundings: the roundings of the kernel.
    """
    u = roundings.accumulate
    num_keys = weights.block.num_keys
    keys, most_share, floors, parts = _of_requests(
        out,
        num_keys,
        [math.sqrt(keys) for keys in num_keys],
        [roundings.probabilities_floor * keys for keys in num_keys],
        [roundings.parts(keys) for keys in num_keys],
    )
    key_norms = _key_norms(weights)
    confidence = LAMBDA * most_equal_keys(key_norms).view(-1, 1, 1, 1).to(out.dtype).sqrt_()
    probabilities = weights.probabilities
    # Of few keys, the sum's bound is the worst case.
    small = _small_weights(probabilities, u) if max(num_keys, default=0) > LAMBDA**2 else 0.0
    grown = torch.minimum(keys, confidence * most_share + small)
    sums = (2 * grown + SUM) * u + grown * roundings.products + parts
    sums += roundings.tanh_absolute * options.logits_soft_cap  # see the end of 6.
    lse_sums = (grown + SUM) * u + (roundings.probabilities if roundings.sums_rounded else 0.0)
    of_products = roundings.of_products
    rounded = rounded_products(weights, _scale(weights, options), options.k_scale, of_products)
    errors = _logit_errors(weights, key_norms, rounded.single, options, roundings)
    sees_nothing = torch.isneginf(weights.lse)
    lse, out_size = weights.lse.masked_fill(sees_nothing, 0.0), out.abs()
    largest = weights.largest.abs() + 2 * weights.farthest
    v_squared = options.scratch.take("v_squared", tuple(v.shape), v.dtype, v.device)
    torch.mul(v, v, out=v_squared)
    # One product for sum P V^2 and sum P^2 V^2: both read V^2, which dominates a decode.
    if roundings.probabilities:
        rows = probabilities.shape[-2]
        squares = probabilities.square()
        second_moments = torch.cat([probabilities, squares], dim=-2) @ v_squared
        weighted, independent = second_moments.sqrt_().split(rows, dim=-2)
        share = torch.minimum(confidence, most_share)
        common = out_size
        if roundings.sums_rounded:
            common = share * common * squares.sum(dim=-1, keepdim=True).sqrt()
        error = torch.addcmul(common, share, independent).mul_(roundings.probabilities)
        if v.numel():
            normaliser = (weights.largest - lse).masked_fill_(sees_nothing, 0.0).exp_()
            error.addcmul_(normaliser, floors * _largest_factor(v_squared, options, roundings))
        error.addcmul_(sums, weighted)
    else:
        weighted = (probabilities @ v_squared).sqrt_()
        error = sums * weighted
    variance = weighted.square().mul_(1 + VARIANCE_FLOOR).addcmul_(out, out, value=-1)
    moved = variance.clamp_(min=0.0).sqrt_().mul_(errors.deviation).mul_(2)
    lse_moved = 2 * errors.mean
    if may_reorder(errors):
        again = 1 + sums + (roundings.probabilities + 2 * of_products.cut) * (1 + most_share)
        anywhere = largest_sum(weights.logits - lse, v, errors).mul_(again).add_(out_size)
        moved = torch.where(errors.reorder, anywhere, moved)
        lse_moved = torch.where(errors.reorder, errors.largest, lse_moved)
    by_products = moved_by_products(
        weights,
        rounded,
        Values(v, options.v_scale, v_squared, out_size, confidence),
        errors,
        of_products,
    )
    error.add_(moved).add_(by_products.out).add_(
        _cut_off(probabilities, v, weighted, roundings.products)
    )
    out_bound = _rounded_output(error, out_size, options, roundings)
    lse_bound = torch.add(lse_sums, lse_moved + by_products.lse).add_(largest, alpha=LSE * u)
    lse_bound.add_(lse.abs(), alpha=LSE * u + UNIT_ROUNDOFF["float32"])
    return (
        out_bound.masked_fill_(sees_nothing, 0.0),
        _stored(lse_bound, lse, roundings.lse).masked_fill_(sees_nothing, 0.0),
    )


def _stored(bound: torch.Tensor, values: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """Return the bound on values that are stored in a format; None: no other than before."""
    if dtype is None:
        return bound
    r = UNIT_ROUNDOFF[dtype]
    return bound.mul_(1 + r).add_(values.abs(), alpha=r).add_(SMALLEST_SUBNORMAL[dtype] / 2)


def _cut_off(
    probabilities: torch.Tensor, v: torch.Tensor, weighted: torch.Tensor, share: float
) -> torch.Tensor | float:
    """Return what values of one sign lose in fixed point, [N, K, R, E]; see 7.

    Args:
        probabilities: [N, K, R, S'].
        v: [N, K, S', E].
        weighted: A, [N, K, R, E].
        share: the share of the largest addend that each one may lose; 0: nothing is lost.
    """
    if not share or not v.numel():
        return 0.0
    largest = v.abs().amax(dim=2, keepdim=True)
    # A over max |V|, of the channel where it is most: one c_j for all channels.
    most = (weighted / largest.clamp(min=torch.finfo(v.dtype).tiny)).amax(dim=-1, keepdim=True)
    lost = torch.minimum(probabilities, share * most)
    return (lost @ v.sign()).abs_() * largest


def _small_weights(probabilities: torch.Tensor, u: float) -> torch.Tensor:
    """Count the keys [N, K, R, 1] of a small weight, but of some: t of 2."""
    small = (probabilities <= FEW * u).logical_and_(probabilities > 0)
    return small.sum(dim=-1, keepdim=True)


def _largest_factor(
    v_squared: torch.Tensor, options: Options, roundings: Roundings
) -> torch.Tensor:
    """Return the most [N, 1, 1, 1] that a rounded probability multiplies: of V, or as in 11."""
    largest = v_squared.amax(dim=(1, 2, 3), keepdim=True).sqrt_()
    if roundings.largest_code:
        v_scale = torch.as_tensor(options.v_scale).abs().amax()
        largest = torch.maximum(largest, roundings.largest_code * v_scale.to(largest))
    return largest


def _rounded_output(
    error: torch.Tensor, out_size: torch.Tensor, options: Options, roundings: Roundings
) -> torch.Tensor:
    """Bound the output once it is rounded, or scaled and rounded: 4. and 12."""
    if options.output_divisor != 1:
        error.add_(out_size, alpha=OUTPUT_SCALE * roundings.accumulate).div_(options.output_divisor)
        out_size = out_size / options.output_divisor
        options = replace(options, output_divisor=1.0)
    if options.output_scale is not None:
        error.add_(out_size, alpha=OUTPUT_SCALE * roundings.accumulate).div_(options.output_scale)
        out_size = scaled_output(out_size, options)
    return (
        error.mul_(1 + roundings.out).add_(out_size, alpha=roundings.out).add_(roundings.out_floor)
    )


def _of_requests(like: torch.Tensor, *numbers: Sequence[float]) -> tuple[torch.Tensor, ...]:
    """Return numbers of N requests as [N, 1, 1, 1] each, all brought over at once."""
    table = torch.tensor(numbers, dtype=like.dtype).to(like.device, non_blocking=True)
    return table.view(*table.shape, 1, 1, 1).unbind()


def _key_norms(weights: Weights) -> torch.Tensor:
    """Return the norms of keys, [N, K, S'], NaN where an entry is none, or no finite key."""
    norms: torch.Tensor = torch.linalg.vector_norm(weights.k, dim=-1)
    norms.masked_fill_(torch.isinf(norms), math.nan)
    if weights.block.padding is not None:
        norms.masked_fill_(weights.block.padding.unsqueeze(1), math.nan)
    return norms


def _scale(weights: Weights, options: Options) -> float:
    if options.sm_scale is not None:
        return options.sm_scale
    return 1.0 / math.sqrt(weights.q.shape[-1])


def _logit_errors(
    weights: Weights,
    key_norms: torch.Tensor,
    of_products: torch.Tensor | float,
    options: Options,
    roundings: Roundings,
) -> LogitErrors:
    """Bound what logits of a block are off by: 1., 6., 7., 13., 14., and ``of_products``."""
    u, head_dim, scale = roundings.accumulate, weights.q.shape[-1], _scale(weights, options)
    query_norms = torch.linalg.vector_norm(weights.q, dim=-1, keepdim=True)
    sizes, largest = weights.sizes, weights.largest.abs()  # sizes are infinite where masked
    absolute = torch.add(sizes, largest).mul_(LOGIT * u).add_(EXP * u)
    products = u * (growth(head_dim) + DOT) * abs(scale)
    absolute.addcmul_(query_norms, key_norms.unsqueeze(2), value=products)
    if roundings.products:
        largest_q, largest_k = weights.q.abs().amax(-1, keepdim=True), weights.k.abs().amax(-1)
        addends = largest_q * largest_k.unsqueeze(2) * abs(scale) + sizes
        one_sided = (weights.q.sign() @ weights.k.sign().transpose(-1, -2)).abs_()
        absolute += addends.mul_(one_sided.add_(growth(head_dim)).mul_(roundings.products))
    if options.logits_soft_cap:
        absolute += roundings.tanh_absolute * options.logits_soft_cap
        if roundings.tanh:
            absolute += sizes.mul_(roundings.tanh)
    absolute += of_products
    if stored := roundings.logits:
        before = (weights.q @ weights.k.transpose(-1, -2)).abs_().mul_(abs(scale))
        floor = SMALLEST_SUBNORMAL[stored] / 2 * max(1.0, abs(scale))
        absolute += before.mul_(UNIT_ROUNDOFF[stored]).add_(floor)
    if weights.slopes is not None:
        absolute += ALIBI * u * weights.farthest
    if weights.bias is not None:
        absolute += weights.bias.abs().mul_(BIAS * u)
    absolute.masked_fill_(torch.isneginf(weights.logits), 0.0)
    relative = absolute.clamp(max=LARGEST_LOGIT_ERROR).expm1_()
    weighted = weights.probabilities * relative
    mean = weighted.sum(dim=-1, keepdim=True)
    square = (weighted * relative).sum(dim=-1, keepdim=True)
    most = absolute.amax(dim=-1, keepdim=True) if absolute.shape[-1] else mean
    if weights.sinks is not None:
        sink_share = 1 - weights.probabilities.sum(dim=-1, keepdim=True)
        of_sink = u * (LOGIT * (weights.sinks.abs() + largest) + EXP)
        of_sink = of_sink + (LOGIT + ALIBI) * u * weights.farthest
        if roundings.sinks:
            rounded = weights.sinks.to(getattr(torch, roundings.sinks)).to(weights.sinks)
            of_sink = of_sink + (rounded - weights.sinks).abs_()
        sink_error = torch.expm1(of_sink.clamp(max=LARGEST_LOGIT_ERROR))
        mean = mean + sink_share * sink_error
        square = square + sink_share * sink_error.square()
        most = torch.maximum(most, of_sink)
    return LogitErrors(absolute, most, mean, square.sqrt())
