"""What the adapters to engines' quantisers claim alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernelproof.impl import Target
from kernelproof.impl.engines.quantisers import refused_groups
from kernelproof.impl.registry import find_implementation
from kernelproof.properties.verdicts.quantised import judge_quantised
from kernelproof.reference import QuantizeProblem, materialise
from kernelproof.reference.tensors.quantize import QuantizeInputs


@pytest.mark.parametrize(
    ("channels", "block", "why"),
    [
        (40, 16, "a row is whole groups"),  # the engines' kernels raise an AssertionError
        (15, 16, "a row is whole groups"),
        (48, 16, None),
        (15, 0, None),
    ],
)
def test_a_group_that_is_cut_is_refused(channels: int, block: int, why: str | None) -> None:
    problem = QuantizeProblem(2, channels, block_rows=1, block_channels=block)
    assert refused_groups(problem) == why


MXFP4 = QuantizeProblem(
    6, 256, block_rows=1, block_channels=32, codes="e2m1", scale_format="e8m0", floor=2.0**-126,
    seed=3,
)  # fmt: skip
NVFP4 = replace(MXFP4, block_channels=16, scale_format="e4m3", floor=6 * 2.0**-9)
INDEXED = replace(MXFP4, floor=6e-4)
FOUR_BITS = [
    ("vllm-quant-mxfp4", replace(MXFP4, power_rule="rounded")),
    ("vllm-triton-kernels-mxfp4", MXFP4),
    ("vllm-megamoe-nvfp4", NVFP4),
    ("sglang-quant-fp4-indexer", INDEXED),
    ("sglang-quant-fp4-indexer-even", INDEXED),
]


# A scale of 0 is divided by, and what comes of it is not taken.
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("name", "problem"), FOUR_BITS)
@pytest.mark.parametrize("regime", ["iid", "zeros", "outliers"])
def test_codes_and_scales_of_four_bits(name: str, problem: QuantizeProblem, regime: str) -> None:
    kernel = find_implementation(name)
    problem = replace(problem, regime=regime)
    if refusal := kernel.refusal(problem, Target.here("cpu")):
        pytest.skip(refusal)  # the engine is not there
    inputs = materialise(problem)
    assert isinstance(inputs, QuantizeInputs)
    found = judge_quantised(kernel, inputs, kernel(inputs))
    assert found.status == "PASS", found.message


@pytest.mark.parametrize(("name", "problem"), FOUR_BITS)
def test_another_format_than_a_kernel_has_is_refused(name: str, problem: QuantizeProblem) -> None:
    kernel, target = find_implementation(name), Target.here("cpu")
    for change in (
        {"scale_layout": "swizzled"}, {"floor": 1e-10}, {"block_channels": 64},
        {"codes": "float8_e4m3fn", "scale_format": "float32", "power_rule": "up"},
    ):  # fmt: skip
        assert kernel.refusal(replace(problem, **change), target) is not None, change
