"""Faults in norms that quantise: of the sum, the root, the gains, the scales and of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...reference import Arithmetic
from ...reference.tensors.norm_quantize import NormQuantizeInputs
from ...reference.tensors.quantize import QuantizeInputs
from . import far_bugs
from .catalogue import SeededBug, seeded
from .quantize_bugs import Answer, amaxes, answer, computed, power_at_least, quotients, scales_of

BUGS: list[SeededBug] = []
CONTROLS: list[SeededBug] = []
NORM, PARITY = "norm_and_quantize", "norm_parity"
Change = Callable[[torch.Tensor], torch.Tensor]
TILE, VECTOR = 4, 8
"""Rows of a tile of programs, and channels of a vector of loads."""


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _sum(inputs: NormQuantizeInputs, *, written: bool = True) -> torch.Tensor:
    """Return x and the residual together in float32, and write that over the residual."""
    h = inputs.x.float()
    if inputs.residual is None:
        return h
    h = h + inputs.residual.float()
    if written:
        inputs.residual.copy_(h)
    return h


def _root(h: torch.Tensor, eps: float, mean: Change | None = None) -> torch.Tensor:
    """Return the inverse root of each row."""
    square = h.square().mean(1, keepdim=True) if mean is None else mean(h)
    return 1.0 / (square + eps).sqrt()


def _gain(inputs: NormQuantizeInputs) -> torch.Tensor:
    return inputs.gamma.float() + inputs.gamma_offset


def _matrix(inputs: NormQuantizeInputs, y: torch.Tensor) -> QuantizeInputs:
    """Return what a quantiser is given of a norm."""
    return QuantizeInputs(x=y, to=inputs.to, scale=inputs.scale, scale_layout=inputs.scale_layout)


def _norm(
    inputs: NormQuantizeInputs,
    h: torch.Tensor | None = None,
    *,
    mean: Change | None = None,
    root: Change = _same,
    gain: torch.Tensor | None = None,
    after: Change = _same,
) -> QuantizeInputs:
    """Return the norm as a quantiser is given it, with steps that a fault replaces."""
    h = _sum(inputs) if h is None else h
    by = root(_root(h, inputs.eps, mean))
    return _matrix(inputs, after(h * by * (_gain(inputs) if gain is None else gain)))


def _quantised(given: QuantizeInputs) -> Answer:
    return answer(given, computed(given))


@seeded(BUGS, NORM, PARITY)
def residual_not_written(inputs: NormQuantizeInputs) -> Answer:
    """Leave the residual as it is."""
    return _quantised(_norm(inputs, _sum(inputs, written=False)))


@seeded(BUGS, NORM, PARITY)
def last_row_of_the_residual_stays(inputs: NormQuantizeInputs) -> Answer:
    """Write the sum over the residual in all rows but the last."""
    h = _sum(inputs, written=False)
    if inputs.residual is not None and len(h):
        inputs.residual[:-1].copy_(h[:-1])
    return _quantised(_norm(inputs, h))


@seeded(BUGS, NORM, "far_rows", features=("large_rows",))
def residual_row_in_int32(inputs: NormQuantizeInputs) -> Answer:
    """Multiply a token's number by the stride of the residual in int32."""
    h = inputs.x.float()
    if inputs.residual is not None:
        h = h + far_bugs.found(inputs.residual).float()
        inputs.residual.copy_(h)
    return _quantised(_norm(inputs, h))


@seeded(BUGS, NORM, PARITY)
def residual_in_16_bits(inputs: NormQuantizeInputs) -> Answer:
    """Cut the sum off to 16 bits, where it is to be rounded, or kept."""
    h = _sum(inputs, written=False)
    if inputs.residual is not None:
        cut = (h.view(torch.int32) & -0x10000).view(torch.float32)
        inputs.residual.copy_(cut)
    return _quantised(_norm(inputs, h))


@seeded(BUGS, NORM, PARITY)
def residual_holds_the_norm(inputs: NormQuantizeInputs) -> Answer:
    """Write the norm over the residual."""
    given = _norm(inputs)
    if inputs.residual is not None:
        inputs.residual.copy_(given.x)
    return _quantised(given)


@seeded(BUGS, NORM, PARITY)
def residual_added_after_the_root(inputs: NormQuantizeInputs) -> Answer:
    """Take the root of x alone."""
    x = inputs.x.float()
    return _quantised(_norm(inputs, mean=lambda _: x.square().mean(1, keepdim=True)))


@seeded(BUGS, NORM, PARITY)
def norm_of_the_rounded_sum(inputs: NormQuantizeInputs) -> Answer:
    """Normalise what the residual holds, and declare the sum."""
    return _quantised(_norm(inputs, _sum(inputs).to(inputs.x.dtype).float()))


@seeded(BUGS, NORM, PARITY)
def eps_beside_the_root(inputs: NormQuantizeInputs) -> Answer:
    """Add eps to the root."""
    h = _sum(inputs)
    root = 1.0 / (h.square().mean(1, keepdim=True).sqrt() + inputs.eps)
    return _quantised(_norm(inputs, h, root=lambda _: root))


@seeded(BUGS, NORM, PARITY)
def eps_of_1e_5(inputs: NormQuantizeInputs) -> Answer:
    """Add 1e-5, whatever is asked for."""
    return _quantised(_norm(replace(inputs, eps=1e-5)))


@seeded(BUGS, NORM, PARITY)
def mean_over_a_power_of_two(inputs: NormQuantizeInputs) -> Answer:
    """Divide by the channels that a row is padded to."""
    wide = 1 << (inputs.x.shape[1] - 1).bit_length()
    return _quantised(_norm(inputs, mean=lambda h: h.square().sum(1, keepdim=True) / wide))


@seeded(BUGS, NORM, PARITY)
def mean_over_one_less(inputs: NormQuantizeInputs) -> Answer:
    """Divide the sum of squares by one channel less."""
    less = max(inputs.x.shape[1] - 1, 1)
    return _quantised(_norm(inputs, mean=lambda h: h.square().sum(1, keepdim=True) / less))


@seeded(BUGS, NORM, PARITY)
def tail_of_the_row_forgotten(inputs: NormQuantizeInputs) -> Answer:
    """Leave out of the sum the channels behind the last whole vector."""
    whole = inputs.x.shape[1] // VECTOR * VECTOR
    size = inputs.x.shape[1]
    return _quantised(
        _norm(inputs, mean=lambda h: h[:, :whole].square().sum(1, keepdim=True) / size)
    )


@seeded(BUGS, NORM, PARITY)
def variance_for_the_mean(inputs: NormQuantizeInputs) -> Answer:
    """Subtract the mean of the row from the root's numbers, as a layer norm does."""
    return _quantised(_norm(inputs, mean=lambda h: h.var(1, correction=0, keepdim=True)))


@seeded(BUGS, NORM, PARITY)
def squares_in_float16(inputs: NormQuantizeInputs) -> Answer:
    """Hold squares in float16, where large ones are infinite and small ones 0."""
    return _quantised(_norm(inputs, mean=lambda h: h.square().half().float().mean(1, keepdim=True)))


@seeded(BUGS, NORM, PARITY)
def root_in_16_bits(inputs: NormQuantizeInputs) -> Answer:
    """Round the inverse root to bfloat16."""
    return _quantised(_norm(inputs, root=lambda root: root.bfloat16().float()))


@seeded(BUGS, NORM, PARITY)
def offset_forgotten(inputs: NormQuantizeInputs) -> Answer:
    """Multiply by the gains without their offset."""
    return _quantised(_norm(inputs, gain=inputs.gamma.float()))


@seeded(BUGS, NORM, PARITY)
def offset_in_16_bits(inputs: NormQuantizeInputs) -> Answer:
    """Add the offset in the gains' dtype."""
    return _quantised(_norm(inputs, gain=(inputs.gamma + inputs.gamma_offset).float()))


@seeded(BUGS, NORM, PARITY)
def gains_without_a_sign(inputs: NormQuantizeInputs) -> Answer:
    """Multiply by the magnitudes of the gains."""
    return _quantised(_norm(inputs, gain=_gain(inputs).abs()))


@seeded(BUGS, NORM, PARITY)
def norm_in_16_bits(inputs: NormQuantizeInputs) -> Answer:
    """Round the norm to x's dtype before it is quantised, and declare float32."""
    return _quantised(_norm(inputs, after=lambda y: y.to(inputs.x.dtype).float()))


@seeded(BUGS, NORM, PARITY)
def amax_before_the_gain(inputs: NormQuantizeInputs) -> Answer:
    """Look for the largest magnitude before the gains are applied."""
    given = _norm(inputs)
    if inputs.scale is not None:
        return answer(given, None)
    before = _matrix(inputs, torch.where(_gain(inputs) == 0, 0.0, given.x / _gain(inputs)))
    return answer(given, scales_of(before))


@seeded(BUGS, NORM, PARITY)
def norm_scale_of_the_row(inputs: NormQuantizeInputs) -> Answer:
    """Use the scale of the whole row for each of its groups."""
    given = _norm(inputs)
    if inputs.scale is not None:
        return answer(given, None)
    amax = amaxes(given)
    return answer(given, scales_of(given, amax.amax(1, keepdim=True).expand_as(amax).contiguous()))


@seeded(BUGS, NORM, PARITY)
def norm_scale_a_thousandth_larger(inputs: NormQuantizeInputs) -> Answer:
    """Return scales a thousandth larger than they are."""
    given = _norm(inputs)
    if inputs.scale is not None:
        return answer(given, None)
    scales = amaxes(given).clamp(min=inputs.to.floor) / inputs.to.largest * 1.001
    return answer(given, power_at_least(scales) if inputs.to.scale_format == "ue8m0" else scales)


@seeded(BUGS, NORM, PARITY)
def norm_floor_forgotten(inputs: NormQuantizeInputs) -> Answer:
    """Use 1e-10 as the floor, whatever is asked for."""
    given = _norm(inputs)
    return answer(given, computed(replace(given, to=replace(given.to, floor=1e-10))))


@seeded(BUGS, NORM, PARITY)
def multiplied_by_the_scale(inputs: NormQuantizeInputs) -> Answer:
    """Multiply by a given scale."""
    given = _norm(inputs)
    if inputs.scale is None:
        return _quantised(given)
    return answer(given, None, given.x * inputs.scale)


@seeded(BUGS, NORM, PARITY)
def norm_overflows(inputs: NormQuantizeInputs) -> Answer:
    """Let codes beyond the largest number become NaN."""
    given = _norm(inputs)
    return _quantised(replace(given, to=replace(given.to, saturate=False)))


def _one_code(inputs: NormQuantizeInputs, place: int, by: int) -> Answer:
    """Move the magnitude of one code to its neighbour."""
    codes, scales = _quantised(_norm(inputs))
    flat = codes.view(torch.uint8).flatten()
    if len(flat) and 0 <= (int(flat[place]) & 0x7F) + by <= 0x7E:  # noqa: PLR2004  the largest
        flat[place] += by
    return flat.view(codes.dtype).view(codes.shape), scales


@seeded(BUGS, NORM, PARITY)
def norms_first_code_lower(inputs: NormQuantizeInputs) -> Answer:
    """Return the first element's code one nearer to zero."""
    return _one_code(inputs, 0, -1)


@seeded(BUGS, NORM, PARITY)
def norms_last_code_higher(inputs: NormQuantizeInputs) -> Answer:
    """Return the last element's code one further from zero."""
    return _one_code(inputs, -1, 1)


@seeded(BUGS, NORM, PARITY)
def norms_ties_away(inputs: NormQuantizeInputs) -> Answer:
    """Round what lies halfway between two codes away from zero."""
    given = _norm(inputs)
    scales = computed(given)
    numbers = quotients(given, scales)
    return answer(given, scales, torch.where(numbers == 0, numbers, numbers * (1 + 2.0**-23)))


@seeded(BUGS, NORM, PARITY)
def norms_zeros_without_a_sign(inputs: NormQuantizeInputs) -> Answer:
    """Return the code of 0 for -0."""
    return _quantised(_norm(inputs, after=lambda y: y + 0.0))


@seeded(BUGS, NORM, PARITY)
def residual_without_a_stride(inputs: NormQuantizeInputs) -> Answer:
    """Read the residual's rows as if one lay right behind the other."""
    h, residual = inputs.x.float(), inputs.residual
    if residual is not None:
        h = h + residual.as_strided(tuple(h.shape), (h.shape[1], 1)).float()
        residual.copy_(h)
    return _quantised(_norm(inputs, h))


@seeded(BUGS, NORM, "quantize_not_finite")
def root_of_rows_before(inputs: NormQuantizeInputs) -> Answer:
    """Leave the row before out of a sum by a product with 0, which NaN and infinity survive."""
    h = _sum(inputs)
    before = (h * 0.0).sum(1, keepdim=True).roll(1, 0)
    return _quantised(_norm(inputs, h, mean=lambda h: h.square().mean(1, keepdim=True) + before))


@seeded(BUGS, NORM, "quantize_rows")
def root_of_a_tile(inputs: NormQuantizeInputs) -> Answer:
    """Use the root of a tile's first row for all of its rows."""
    first = torch.arange(len(inputs.x)) // TILE * TILE
    return _quantised(_norm(inputs, root=lambda root: root[first]))


@seeded(BUGS, NORM, "quantize_signs")
def norms_amax_of_positive_numbers(inputs: NormQuantizeInputs) -> Answer:
    """Look for the largest number, not the largest magnitude."""
    given = _norm(inputs)
    if inputs.scale is not None:
        return answer(given, None)
    return answer(given, scales_of(given, amaxes(given, torch.relu)))


_ROOTS: dict[str, Any] = {}


@seeded(BUGS, NORM, "quantize_again")
def roots_of_an_earlier_call(inputs: NormQuantizeInputs) -> Answer:
    """Use the roots of the last call, where that had more rows."""
    h = _sum(inputs)
    root = _root(h, inputs.eps)
    kept = _ROOTS.get("root")
    _ROOTS["root"] = root
    if kept is not None and len(kept) > len(root):
        return _quantised(_norm(inputs, h, root=lambda _: kept[: len(root)]))
    return _quantised(_norm(inputs, h))


@seeded(BUGS, NORM, "integer_inputs_unchanged")
def sum_over_x(inputs: NormQuantizeInputs) -> Answer:
    """Write the sum over x, too."""
    h = _sum(inputs)
    found = _quantised(_norm(inputs, h))
    inputs.x.copy_(h)
    return found


@seeded(BUGS, NORM, "integer_inputs_unchanged")
def residual_beyond_its_rows(inputs: NormQuantizeInputs) -> Answer:
    """Write one element behind the residual's last row."""
    found = _quantised(_norm(inputs))
    residual = inputs.residual
    if residual is not None and len(residual):
        end = residual.storage_offset() + (len(residual) - 1) * residual.stride(0)
        end += residual.shape[1]
        if end < residual.untyped_storage().nbytes() // residual.element_size():
            residual.as_strided((1,), (1,), end).zero_()
    return found


@seeded(BUGS, NORM, "slack_rows")
def root_with_the_row_behind(inputs: NormQuantizeInputs) -> Answer:
    """Take the last row's root of one row more, where memory goes on behind it."""
    h, x = _sum(inputs), inputs.x
    room = x.untyped_storage().nbytes() // x.element_size()
    end = x.storage_offset() + len(x) * x.stride(0)
    if not len(x) or end + x.shape[1] > room:
        return _quantised(_norm(inputs, h))
    behind = x.as_strided((1, x.shape[1]), x.stride(), end).float()
    root = _root(h, inputs.eps)
    root[-1] = _root(torch.maximum(h[-1:], behind), inputs.eps)[0]
    return _quantised(_norm(inputs, h, root=lambda _: root))


@seeded(CONTROLS, NORM, control="honest")
def honest_norm(inputs: NormQuantizeInputs) -> Answer:
    """Normalise and quantise in float32."""
    return _quantised(_norm(inputs))


@seeded(CONTROLS, NORM, control="honest", arithmetic=Arithmetic(intermediate="inputs"))
def norm_of_16_bits(inputs: NormQuantizeInputs) -> Answer:
    """Round the norm to x's dtype before it is quantised."""
    return _quantised(_norm(inputs, after=lambda y: y.to(inputs.x.dtype).float()))


@seeded(CONTROLS, NORM, control="honest", arithmetic=Arithmetic(combine="inputs"))
def norm_of_what_is_written(inputs: NormQuantizeInputs) -> Answer:
    """Normalise what the residual holds."""
    return _quantised(_norm(inputs, _sum(inputs).to(inputs.x.dtype).float()))


@seeded(
    CONTROLS,
    NORM,
    control="honest",
    arithmetic=Arithmetic(roots="approximate", quotients="reciprocal", scales="approximate"),
)
def norm_by_reciprocals(inputs: NormQuantizeInputs) -> Answer:
    """Take the root with an error of a unit in the last place, and multiply by 1 / scale."""
    given = _norm(inputs, root=lambda root: root.nextafter(torch.zeros(())))
    scales = computed(given)
    by = inputs.scale if inputs.scale is not None else None
    if by is None or (1.0 / by).isinf():
        return answer(given, scales)
    return answer(given, scales, given.x * (1.0 / by))
