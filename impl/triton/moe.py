"""Kernelproof's own Triton MoE: sorting, two grouped products, and sums in a fixed order."""

from __future__ import annotations

import torch

from ...reference import Arithmetic, MoEProblem
from ...reference.tensors.moe_inputs import MoEInputs
from ..features import MOE_FEATURES
from ..gating.rules import version_matches
from ..targets.target import Target
from .moe_call import run_experts
from .moe_keys import compile_key, kernels
from .support import kernel, unavailable

ARITHMETIC = Arithmetic(
    accumulate="float32",
    intermediate="inputs",
    partial_outputs=True,
    fp8_products="fixed_point",
    tanh="sigmoid",
)
"""The intermediate is stored in the dtype of the hidden states (FP8 ones: with a scale for each
tile of a row; int8 ones: in two bytes), each slot's output in that of the result.
(Not so in the interpreter, for bfloat16.) Where both operands are FP8, Hopper's tensor cores sum in
fixed point."""
BUILD_MINUTES = 0.4
"""Minutes of a core to build a module: 30 modules took 43 s of 16 cores on an H200."""
WITH_GATHER = ">=3.3.dev0"
NOT_READ = (
    "nvfp4_weights", "mxfp4_weights", "mxfp8_weights", "int4_weights", "int4_zero_points",
    "nvfp4_gate_up_scales", "one_product", "padded_widths",
)  # fmt: skip
"""Features of ``moe`` that these kernels do not have."""
FEATURES = (*(name for name in MOE_FEATURES if name not in NOT_READ), "large_weights")


def _supports(_: MoEProblem, target: Target) -> bool | str:
    absent = unavailable(target)
    if absent is None and target.triton and not version_matches(target.triton, WITH_GATHER):
        return f"sorting needs tl.gather, which Triton has from 3.3 on; this is {target.triton}"
    return absent or True


@kernel(
    "moe",
    name="triton-moe",
    supports=_supports,
    features=FEATURES,
    arithmetic=ARITHMETIC,
    writes_out=True,
    compile_key=compile_key,
    kernels=kernels,
    build_minutes=BUILD_MINUTES,
)
def experts(inputs: MoEInputs) -> torch.Tensor:
    """Apply experts to tokens in four or five launches, twice as many where some are shared.

    None of them waits for the host.

    Args:
        inputs: the arguments of ``reference.moe``; float32, float16 or bfloat16, strided or not;
            e4m3 and int8 weights with scales by tensor, row or block of 128 (of e4m3: powers of
            two as well), and hidden states likewise.
            Where hidden states are FP8, so is the intermediate.

    Returns:
        [tokens, hidden] in ``out_dtype``: ``out`` where it is given.
    """
    return run_experts(inputs)
