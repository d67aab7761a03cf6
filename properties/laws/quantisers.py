"""Laws of quantisers: codes and scales, compared to the last bit where the rounding is defined."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...reference import NormQuantizeProblem, QuantizeProblem
from ...reference.formats.quantizers import order_of, scale_bounds
from ...reference.moe.norm_quantize import norm_bounds, norm_scale_bounds
from ...reference.tensors.norm_quantize import NormQuantizeInputs
from ...reference.tensors.quantize import QuantizeInputs
from ...reference.tensors.values import bits, choose, stream
from ..verdicts.comparison import fail, same_bits
from ..verdicts.contained import Stop
from ..verdicts.operations import OPERATIONS
from ..verdicts.quantised import (
    compare_quantised,
    judge_residual,
    linear_scales,
    scale_values,
)
from ..verdicts.subject import Subject
from ..verdicts.verdict import PASS, VACUOUS, Verdict
from .law import NORM, QUANTIZE, Law

NOT_FINITE = (torch.nan, torch.inf, -torch.inf)
MORE_TOKENS = 3
"""Tokens that another batch has more."""
SIGN, SIGN_OF_FP4 = 128, 8
"""The sign bits of codes in FP8 and e2m1."""
LARGEST_INT8 = 127
NEIGHBOURS = 2.0**-6
"""Relative difference of scales of numbers that were rounded to bfloat16 to either side."""
Answer = tuple[torch.Tensor, "torch.Tensor | None"]
"""Codes, and scales where they are computed; clones, for a call may write where the last did."""


def answered(subject: Subject, problem: QuantizeProblem, inputs: QuantizeInputs) -> Answer:
    """Run a quantiser and return its codes, one by one, and its scales.

    Raises:
        Stop: it gave something else, or scales that lie otherwise than they are asked for.
    """
    strides = inputs.scale_strides
    found = subject.read(OPERATIONS[problem.operation].pair, subject.call(problem, inputs))
    if isinstance(found, str):
        raise Stop(fail("shape", f"returned {found}"))
    codes = subject.usable("codes", found[0])
    _check("codes", codes, inputs.codes_shape, inputs.to.dtype)
    codes = inputs.to.elements_of(codes)
    if inputs.scale is not None:
        return codes.clone(), None
    if found[1] is None:
        raise Stop(fail("shape", "returned no scales, and none was given"))
    scales = subject.usable("scales", found[1])
    _check("scales", scales, inputs.scale_shape, inputs.scale_dtype)
    sizes = zip(scales.shape, scales.stride(), strides, strict=True)
    # An axis of one element, or none, may have any stride.
    if scales.numel() and any(size > 1 and has != wanted for size, has, wanted in sizes):
        message = f"scales have strides {scales.stride()}, not {strides} ({inputs.scale_layout})"
        raise Stop(fail("shape", message))
    linear = linear_scales(inputs, scales)
    if isinstance(linear, Verdict):
        raise Stop(linear)
    return codes.clone(), linear.clone()


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise Stop(fail("dtype", f"{name} is {tensor.dtype}, not {dtype}"))
    if tuple(tensor.shape) != shape:
        raise Stop(fail("shape", f"{name} has shape {list(tensor.shape)}, not {list(shape)}"))


def parity(subject: Subject, problem: QuantizeProblem) -> Verdict:
    """Check every scale, and every code by the scale that the call gave."""
    inputs = subject.materialise(problem)
    arithmetic = subject.arithmetic_of(inputs)
    # The oracle looks first: a call may change its inputs.
    given = replace(inputs, x=inputs.x.clone())
    scales = scale_bounds(given.x, given.to, arithmetic, given.factor)
    return compare_quantised(given, arithmetic, scales, answered(subject, problem, inputs))


def norm_parity(subject: Subject, problem: NormQuantizeProblem) -> Verdict:
    """Check the residual, every scale, and every code by the scale that the call gave."""
    inputs: NormQuantizeInputs = subject.materialise(problem)
    arithmetic = subject.arithmetic_of(inputs)
    # The oracle looks first: a call may change its inputs.
    numbers = norm_bounds(inputs.x, inputs.gamma, **inputs.keywords(), arithmetic=arithmetic)
    x, before = inputs.x.clone(), inputs.before
    given = replace(inputs, x=x, before=None if before is None else before.clone())
    scales = norm_scale_bounds(numbers, given.to, arithmetic)
    found = compare_quantised(
        given, arithmetic, scales, answered(subject, problem, inputs), numbers
    )
    return judge_residual(given) or found


def _same(what: str, first: Answer, second: Answer) -> Verdict:
    """Check that two answers have the same bits."""
    for name, one, other in zip(("codes", "scales"), first, second, strict=True):
        if one is None or other is None or same_bits(one, other):
            continue
        width = torch.uint8 if one.element_size() == 1 else torch.int32
        different = int((one.view(width) != other.view(width)).sum())
        return fail("numeric", f"{what}: {name} have other bits ({different} elements)")
    return PASS


def not_finite(subject: Subject, problem: QuantizeProblem) -> Verdict:
    """Set elements of one row to NaN or infinity: codes and scales of other blocks stay."""
    inputs = subject.materialise(problem)
    to = inputs.to
    tokens, channels = inputs.x.shape
    if not tokens:
        return VACUOUS
    row = choose(problem.seed, "bad row", 0, tokens)
    hashes = bits(stream(problem.seed, "bad"), torch.arange(1), channels).flatten()
    bad = (hashes % 7 == 0).to(inputs.x.device)
    bad[choose(problem.seed, "bad row", 1, channels)] = True
    value = NOT_FINITE[choose(problem.seed, "bad row", 2, len(NOT_FINITE))]
    touched = torch.zeros(inputs.x.shape, dtype=torch.bool, device=inputs.x.device)
    touched[row, bad] = True
    down, across = to.scales_of(tuple(inputs.x.shape))
    rows, columns = to.blocks_of(tuple(inputs.x.shape))
    blocks = torch.zeros((down, across), dtype=torch.bool, device=inputs.x.device)
    blocks[row // rows, bad.nonzero().flatten() // columns] = True
    if isinstance(inputs, NormQuantizeInputs):  # a row has one root
        touched[row], blocks[row // rows] = True, True
    elif inputs.scale is None:
        spread = blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        touched = spread[:tokens, :channels]
    if touched.all():
        return VACUOUS
    first = answered(subject, problem, inputs)
    changed = subject.materialise(problem)
    changed.x[row, bad] = value
    second = answered(subject, problem, changed)
    kept = [
        (each[0][~touched], None if each[1] is None else each[1][~blocks])
        for each in (_as_bytes(first), _as_bytes(second))
    ]
    return _same(f"with {value} in row {row}, elsewhere", *kept)


def _as_bytes(answer: Answer) -> Answer:
    """Return codes, and scales of a byte, as bytes, of which torch can take some."""
    codes, scales = answer
    if scales is not None and scales.element_size() == 1:
        scales = scales.view(torch.uint8)
    return codes.view(torch.uint8), scales


def rows(subject: Subject, problem: QuantizeProblem) -> Verdict:
    """Quantise the rows in another order, and some of them alone: each has the same bits.

    A norm's sums may be taken in another order where there are other rows, by which a scale becomes
    its neighbour, and a code by the same scale.
    """
    inputs = subject.materialise(problem)
    is_norm = isinstance(inputs, NormQuantizeInputs)
    given = {name: tensor.clone() for name, tensor in _rows_of(inputs).items()}
    tokens, by_row = problem.num_tokens, problem.block[0] == 1 or problem.scale is not None
    if tokens < 2 or problem.block[0] > 1:  # noqa: PLR2004  no other order
        return VACUOUS
    first = answered(subject, problem, inputs)
    whole = _as_bytes(first)
    turn = 1 + choose(problem.seed, "turn", 0, tokens - 1)
    orders = [[*range(turn, tokens), *range(turn)]]
    if by_row:
        orders += [[turn]]
    for order in orders:
        part = replace(problem, num_tokens=len(order))
        if not subject.supports(part):
            continue
        record = subject.materialise(part)
        for name, tensor in _rows_of(record).items():
            tensor.copy_(given[name][order])
        second = answered(subject, part, record)
        if is_norm:
            ordered = first[0][order], None if first[1] is None else first[1][order]
            verdict = _near(f"rows {order}", ordered, second)
            if verdict.bad:
                return verdict
            continue
        found = _as_bytes(second)
        scales = whole[1]
        if scales is not None and by_row:
            scales = scales[order]
        verdict = _same(f"rows {order}", found, (whole[0][order], scales))
        if verdict.bad:
            return verdict
    return PASS


def _rows_of(inputs: QuantizeInputs) -> dict[str, torch.Tensor]:
    """Return what has a row for each token."""
    found = {"x": inputs.x}
    if isinstance(inputs, NormQuantizeInputs) and inputs.residual is not None:
        assert inputs.before is not None  # noqa: S101  it is there where a residual is
        found |= {"residual": inputs.residual, "before": inputs.before}
    return found


def _near(what: str, first: Answer, second: Answer) -> Verdict:
    """Check that scales are neighbours, and so are codes of the rows whose scales are the same."""
    is_same = torch.ones(first[0].shape[:1], dtype=torch.bool, device=first[0].device)
    if first[1] is not None and second[1] is not None:
        one, other = (scale_values(each).double() for each in (first[1], second[1]))
        is_same = (one == other).all(1)
        powers = first[1].dtype == torch.uint8 or (torch.frexp(one).mantissa == 0.5).all()  # noqa: PLR2004
        most = 2.0 if powers else 1 + NEIGHBOURS
        if ((one > other * most) | (other > one * most)).any():
            return fail("numeric", f"{what}: scales are further apart than one rounding")
    steps = (order_of(first[0]) - order_of(second[0])).abs()[is_same]
    if (steps > 1).any():
        return fail("numeric", f"{what}: codes are {int(steps.max())} apart")
    return PASS


def signs(subject: Subject, problem: QuantizeProblem) -> Verdict:
    """Negate the matrix: each code changes its sign, and no scale changes."""
    first = answered(subject, problem, subject.materialise(problem))
    inputs = subject.materialise(problem)
    for tensor in _rows_of(inputs).values():
        tensor.neg_()
    codes, scales = answered(subject, problem, inputs)
    if inputs.to.dtype == torch.int8:
        wide, wanted = codes.int(), -first[0].int()
        # A given scale may saturate, to -128 or 127.
        inside = first[0].int().abs() < LARGEST_INT8
        inside = inside if problem.scale is not None else torch.ones_like(inside)
        if not inside.any():
            return VACUOUS
        pair = (wide[inside], scales), (wanted[inside], first[1])
    else:
        sign = SIGN_OF_FP4 if inputs.to.is_fp4 else SIGN
        turned = codes.view(torch.uint8) ^ sign
        if inputs.to.is_fp4 and subject.arithmetic_of(inputs).zeros == "unsigned":
            turned = torch.where(codes % sign == 0, codes, turned)
        before = first[0]
        if "residual" in _rows_of(inputs):  # a sum of opposite numbers is 0 in both calls
            turned, before = (each.view(torch.uint8) for each in (turned, before))
            turned, before = (each.masked_fill(each % sign == 0, 0) for each in (turned, before))
        pair = _as_bytes((turned, scales)), _as_bytes((before, first[1]))
    return _same("of the negated matrix", *pair)


def again(subject: Subject, problem: QuantizeProblem) -> Verdict:
    """Repeat a call, also after one on another batch: codes and scales have the same bits."""
    first = answered(subject, problem, subject.materialise(problem))
    other = replace(problem, num_tokens=problem.num_tokens + MORE_TOKENS, seed=problem.seed + 1)
    if problem.regime in ("iid", "faint"):  # what is left of larger values shows
        other = replace(other, regime="large")
    for each in (None, other):
        if each is not None and not subject.supports(each):
            continue
        if each is not None:
            answered(subject, each, subject.materialise(each))
        second = answered(subject, problem, subject.materialise(problem))
        verdict = _same("repeated" + (" after another batch" if each else ""), first, second)
        if verdict.bad:
            return replace(verdict, kind="nondeterministic")
    return PASS


LAWS = (
    Law(
        "norm_parity",
        NORM,
        norm_parity,
        "the residual is the sum, each scale that of the norm, and each code that of the norm over "
        "this scale, to the last bit where the rounding is defined; else one of two",
        weight=3.0,
        overlap="slack_rows compares with the oracle too, with garbage behind the matrix",
    ),
    Law(
        "quantize_parity",
        QUANTIZE,
        parity,
        "each scale is the oracle's, and each code that of x over this scale, to the last bit; "
        "where an arithmetic's error decides between two neighbours, one of them",
        weight=3.0,
        overlap="slack_rows compares with the oracle too, with garbage behind the matrix",
    ),
    Law(
        "quantize_not_finite",
        QUANTIZE + NORM,
        not_finite,
        "NaN and infinities in a row change no code and no scale of other blocks",
    ),
    Law(
        "quantize_rows",
        QUANTIZE + NORM,
        rows,
        "rows in another order, or alone, have the codes and scales that they have together",
        weight=0.5,
        overlap="quantize_parity sees every code; this asks no oracle",
    ),
    Law(
        "quantize_signs",
        QUANTIZE + NORM,
        signs,
        "the codes of the negated matrix differ in their signs only, and its scales not at all",
        weight=0.5,
        overlap="quantize_parity sees every code; this asks no oracle",
    ),
    Law(
        "quantize_again",
        QUANTIZE + NORM,
        again,
        "the same call gives the same bits again, and after a call on another batch",
        weight=0.5,
        overlap="quantize_parity, too, sees what a call before it has left",
    ),
)
