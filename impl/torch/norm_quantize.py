"""A norm and a quantiser with torch operations only, in float32; no code is the oracle's."""

from __future__ import annotations

import torch

from ...reference.tensors.norm_quantize import NormQuantizeInputs
from ...reference.tensors.quantize import QuantizeInputs
from ..protocol import implementation
from .quantize import quantize


@implementation(
    "norm_and_quantize",
    name="torch-norm-quantize",
    features=("large_rows", "e8m0_scales", "swizzled_scales"),
)
def norm_and_quantize(inputs: NormQuantizeInputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add, normalise and quantise the rows one step after another."""
    h = inputs.x.float()
    if inputs.residual is not None:
        h = h + inputs.residual.float()
        inputs.residual.copy_(h)
    squares = h.square().sum(dim=1, keepdim=True)
    # By tensors: on a GPU torch multiplies by the reciprocal of a number.
    mean = squares / squares.new_full((), h.shape[1])
    root = torch.ones_like(mean) / (mean + inputs.eps).sqrt()
    y = h * root * (inputs.gamma.float() + inputs.gamma_offset)
    made = QuantizeInputs(x=y, to=inputs.to, scale=inputs.scale, scale_layout=inputs.scale_layout)
    codes, scales = quantize(made)
    return codes, scales
