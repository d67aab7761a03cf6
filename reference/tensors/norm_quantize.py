"""What norm_and_quantize is given, and making it from a problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..formats.quantizers import CODE_DTYPES, QuantizedFormat
from ..formats.scale_layouts import swizzle_scales_128x4
from ..moe.norm_quantize import NormQuantized, norm_and_quantize
from ..problems.norm_quantize import NormQuantizeProblem
from .allocation import Allocator
from .quantize import GROUP_OF_ZEROS, OUTLIER, OUTLIERS, QuantizeInputs, ties
from .values import bell, bits, choose, stream

FACTORS = {
    "faint": {"float32": 2.0**-60, "bfloat16": 2.0**-60, "float16": 2.0**-20},
    "large": {"float32": 2.0**50, "bfloat16": 2.0**50, "float16": 2.0**12},
}
"""Factors of values below 4: far below the root of eps, and such that float32 holds the sums of
squares, and float16 those of two."""
PARTS = 8
"""Eighths of a magnitude in which x and the residual of ties share it."""
LEAST_POWER, POWERS = -3, 10
"""Least power of two that a row of ties has as magnitude, and their number."""


@dataclass(frozen=True, eq=False, kw_only=True)
class NormQuantizeInputs(QuantizeInputs):
    """Arguments of ``norm_and_quantize``: those of ``quantize``, whose x is normalised first.

    Attributes:
        gamma: [N] in x's dtype, the gains.
        residual: [T, N] in x's dtype, which x + residual is written over; None: nothing is added.
            Its rows may lie apart as x's do.
        before: a copy of the residual as it is given, for whoever compares; kernels have no use
            for it.
        gamma_offset: what is added to each gain.
        eps: what is added to the mean of the squares.
    """

    gamma: torch.Tensor
    residual: torch.Tensor | None = None
    before: torch.Tensor | None = None
    gamma_offset: float = 0.0
    eps: float = 1e-6

    def keywords(self) -> dict[str, Any]:
        """Return what ``norm_bounds`` takes besides x and gamma."""
        return {"residual": self.before, "gamma_offset": self.gamma_offset, "eps": self.eps}


def norm_quantize_inputs(problem: NormQuantizeProblem, home: Allocator) -> NormQuantizeInputs:
    """Make the tensors of a call of ``norm_and_quantize``."""
    to = QuantizedFormat(
        CODE_DTYPES[problem.codes], problem.block, problem.scale_format, problem.floor
    )
    dtype: torch.dtype = getattr(torch, problem.dtype)
    x, added, gamma = _values(problem, to, home.device)
    tokens, channels = x.shape
    named = {}
    for name, values in (("x", x), ("residual", added)):
        if name == "x" or problem.residual:
            room = home.empty(name, (tokens, channels + problem.spare_channels), dtype)
            named[name] = room[:, :channels]
            named[name].copy_(values)
    if problem.residual:
        named["before"] = named["residual"].clone()
    if problem.scale is not None:
        named["scale"] = home.place("scale", torch.tensor([problem.scale], dtype=torch.float32))
    return NormQuantizeInputs(
        to=to,
        gamma=home.place("gamma", gamma.to(dtype)),
        gamma_offset=problem.gamma_offset,
        eps=0.0 if problem.regime == "ties" else problem.eps,
        scale_layout=problem.scale_layout,
        storages=home.storages,
        **named,
    )


def normed(inputs: NormQuantizeInputs) -> NormQuantized:
    """Normalise and quantise the record's matrix, by definition."""
    found = norm_and_quantize(
        inputs.x, inputs.gamma, inputs.to, scale=inputs.scale, **inputs.keywords()
    )
    if found.scales is None or inputs.scale_layout != "swizzled":
        return found
    return found._replace(scales=swizzle_scales_128x4(found.scales))


Values = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _values(problem: NormQuantizeProblem, to: QuantizedFormat, device: torch.device) -> Values:
    """Make x, the residual and the gains, whose dtype comes later."""
    rows = torch.arange(problem.num_tokens, device=device)
    first = torch.arange(1, device=device)
    channels, seed = problem.num_channels, problem.seed
    hashes = bits(stream(seed, "which"), rows, channels)
    if problem.regime == "ties":
        # A block's scale is of its own row, and all rows have the gains of one.
        gamma = ties(problem, replace(to, block=(1, to.block[1])), first)[0].abs()
        powers = [LEAST_POWER + choose(seed, "power", row, POWERS) for row in rows.tolist()]
        size = torch.tensor(powers, device=device, dtype=torch.float64).exp2().view(-1, 1)
        whole = torch.where(hashes % 2 == 0, size, -size)
        part = ((hashes >> 1) % (2 * PARTS - 1) - (PARTS - 1)) * size / PARTS
        x = part if problem.residual else whole
        return x, whole - x, gamma.double() - problem.gamma_offset
    x, added = (bell(stream(seed, name), rows, channels) for name in ("x", "residual"))
    gamma = bell(stream(seed, "gamma"), first, channels)[0]
    if problem.regime == "outliers":
        x = torch.where(hashes % OUTLIERS == 0, OUTLIER * x, x)
        of_gains = bits(stream(seed, "gains"), first, channels)[0] % OUTLIERS == 0
        gamma = torch.where(of_gains, OUTLIER * gamma, gamma)
    if problem.regime == "zeros":
        groups = hashes[:, ::GROUP_OF_ZEROS].repeat_interleave(GROUP_OF_ZEROS, 1)
        is_zero = (groups[:, :channels] % 3 != 0) | (rows % 3 == 1).unsqueeze(1)
        zeros = torch.where(hashes % 2 == 0, 0.0, -0.0)
        x, added = (torch.where(is_zero, zeros, each) for each in (x, added))
    factor = FACTORS.get(problem.regime, {}).get(problem.dtype, 1.0)
    return x * factor, added * factor, gamma - problem.gamma_offset
