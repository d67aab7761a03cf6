"""How kernels are usually compared with a reference, to be measured against the error bound.

Each comparison reads only ``out``, as the tests do that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ...impl.torch.batched_moe import rows_of
from ...reference import Problem
from ...reference.operations import OPERATIONS as ORACLES
from ...reference.operations import Table
from ...reference.tensors.batched_moe import BatchedMoEInputs
from ...reference.tensors.inputs import AttentionInputs, MergeInputs, PagedAttentionInputs
from ...reference.tensors.moe_inputs import MoEInputs
from ..laws.general import parity
from ..seeded.decoding import widened
from ..seeded.honest import merge_states
from ..seeded.kernels import HONEST, attend, to_codes
from ..seeded.moe.batched_bugs import apply as batched
from ..seeded.moe.kernels import apply, changed
from ..verdicts.contained import Stop
from ..verdicts.operations import OPERATIONS
from ..verdicts.subject import Subject

Yardstick = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]
"""Whether ``out`` is right, given the oracle's answer and a low-precision reference's."""

TOLERANCE = 1e-2
SHARE = 0.95
COSINE = 0.999
FACTOR = 2.0
NVFP4_SHARE = 0.9
MOE_SHARE, MOE_ATOL, MOE_RTOL = 0.925, 0.1, 0.85


def _close(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return torch.isclose(out, expected, rtol=TOLERANCE, atol=TOLERANCE)


def allclose(out: torch.Tensor, expected: torch.Tensor, low: torch.Tensor) -> bool:
    """Accept if every element is within 1e-2, absolute and relative."""
    del low
    return bool(_close(out, expected).all())


def allclose_mostly(out: torch.Tensor, expected: torch.Tensor, low: torch.Tensor) -> bool:
    """Accept if 95 % of the elements are within 1e-2."""
    del low
    return not out.numel() or bool(_close(out, expected).double().mean() >= SHARE)


def cosine(out: torch.Tensor, expected: torch.Tensor, low: torch.Tensor) -> bool:
    """Accept if the cosine of the whole outputs is at least 0.999."""
    del low
    a, b = out.flatten(), expected.flatten()
    if not b.any():
        return not a.any()
    return bool(torch.nn.functional.cosine_similarity(a, b, dim=0) >= COSINE)


def twice_low_precision(out: torch.Tensor, expected: torch.Tensor, low: torch.Tensor) -> bool:
    """Accept if the largest error is at most twice that of plain code in the inputs' dtype."""
    if not out.numel():
        return True
    allowed = FACTOR * (low - expected).abs().max()
    return bool((out - expected).abs().max() <= allowed)


def flashinfer_nvfp4(out: torch.Tensor, expected: torch.Tensor, low: torch.Tensor) -> bool:
    """Accept if 90 % of the elements are within 0.5: FlashInfer's tests of NVFP4 caches."""
    del low
    close = torch.isclose(out, expected, rtol=0.5, atol=0.5)
    return not out.numel() or bool(close.double().mean() >= NVFP4_SHARE)


def vllm_nvfp4(out: torch.Tensor, expected: torch.Tensor, low: torch.Tensor) -> bool:
    """Accept if every element is within 1.0: vLLM's tests of NVFP4 caches."""
    del low
    return bool(torch.isclose(out, expected, rtol=1.0, atol=1.0).all())


def moe_tests(out: torch.Tensor, expected: torch.Tensor, low: torch.Tensor) -> bool:
    """Accept if 92.5 % of the elements are within 0.1 and 85 %: FlashInfer's and vLLM's MoE tests.

    FlashInfer's tests/moe/trtllm_gen_fused_moe_utils.py, vLLM's test_flashinfer.py.
    """
    del low
    close = torch.isclose(out, expected, rtol=MOE_RTOL, atol=MOE_ATOL)
    return not out.numel() or bool(close.double().mean() >= MOE_SHARE)


YARDSTICKS: Mapping[str, Yardstick] = {
    "allclose at 1e-2": allclose,
    "allclose at 1e-2, 95 % of the elements": allclose_mostly,
    "cosine at least 0.999": cosine,
    "twice the low-precision error": twice_low_precision,
    "0.5 for 90 % (FlashInfer, NVFP4)": flashinfer_nvfp4,
    "1.0 (vLLM, NVFP4)": vllm_nvfp4,
    "atol=0.1, rtol=0.85 on 92.5 % (FlashInfer, vLLM: MoE)": moe_tests,
}
PARITY = "error bound (parity alone)"
NAMES = (*YARDSTICKS, PARITY)


def measure(subject: Subject, problem: Problem) -> dict[str, bool]:
    """Return, by yardstick, whether it accepts the subject's answer to a problem."""
    try:
        accepted = {PARITY: not parity(subject, problem).bad}  # type: ignore[arg-type]
    except Stop:
        return dict.fromkeys(NAMES, False)
    inputs = subject.materialise(problem)
    # Looked at first: a subject may change its inputs.
    expected = OPERATIONS[problem.operation].pair(ORACLES[problem.operation].answer(inputs))[0]
    assert isinstance(expected, torch.Tensor)  # noqa: S101  what the oracle answers is a pair
    low = LOW_PRECISION[problem.operation](inputs).double()
    out = subject.run_operation(problem, inputs)[0].double()
    same_shape = out.shape == expected.shape
    for name, accepts in YARDSTICKS.items():
        accepted[name] = same_shape and accepts(out, expected, low)
    return accepted


def _rounding(inputs: Any) -> Callable[[torch.Tensor], torch.Tensor]:  # noqa: ANN401  with out_dtype
    return lambda tensor: tensor.to(inputs.out_dtype).float()


def _attention(inputs: AttentionInputs) -> torch.Tensor:
    rounded = _rounding(inputs)
    stages = replace(
        HONEST,
        dot=lambda q, k: rounded(q @ k.transpose(-1, -2)),
        probabilities=lambda probabilities, _: rounded(probabilities),
    )
    return attend(inputs, stages)[0]


def _paged_attention(inputs: PagedAttentionInputs) -> torch.Tensor:
    return _attention(widened(inputs))


def _merged(inputs: MergeInputs) -> torch.Tensor:
    scale, lses = inputs.output_scale, inputs.lses.to(inputs.outs.dtype).float()
    merged = merge_states(inputs.outs, lses, inputs.outs.dtype)[0]
    return merged if scale is None else to_codes(merged.float(), scale).to(inputs.out_dtype)


def _experts(inputs: MoEInputs) -> torch.Tensor:
    rounded = _rounding(inputs)
    return apply(inputs, changed(projected=rounded, middle=rounded))


def _batched_experts(inputs: BatchedMoEInputs) -> torch.Tensor:
    rounded = _rounding(inputs)
    return batched(inputs, hidden=rounded(rows_of(inputs))).masked_fill(inputs.unused(), 0.0)


LOW_PRECISION: Table[Callable[[Any], torch.Tensor]] = Table(
    "kernelproof.properties.worker.tolerance_baselines.LOW_PRECISION",
    {
        "paged_attention": _paged_attention,
        "ragged_attention": _attention,
        "merge_state": _merged,
        "moe": _experts,
        "batched_moe": _batched_experts,
    },
)
"""Plain code in the inputs' dtype, which rounds intermediates too, of each operation with a
floating-point answer; integers and copies are compared exactly anyway."""
