"""FlashInfer's published references and Triton activation as implementations of routing and MoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.flashinfer.moe_trace import MOE_TEMPLATES, REFERENCES, without_experts
from kernelproof.impl.flashinfer.trace import template
from kernelproof.impl.targets.optional import missing
from kernelproof.impl.torch.moe_layouts import both_biases
from kernelproof.properties.isolation.workers import Deadlines, Worker
from kernelproof.properties.worker.requests import verdict_of
from kernelproof.reference import MoEProblem, RouteProblem, Routing, materialise, oracle
from kernelproof.reference.tensors.moe_inputs import MoEInputs, RouteInputs

ABSENT = missing(MOE_TEMPLATES, "flashinfer")
pytestmark = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))

PLAIN = MoEProblem(num_tokens=5, hidden=128, inter=128, num_experts=6, top_k=3, dtype="bfloat16")
FP8_BLOCK: dict[str, Any] = {"quantized": "fp8_block", "quantized_hidden": True}
SHARD: dict[str, Any] = {"local_experts": 3, "expert_offset": 2, "assignment": "masked"}


@pytest.mark.parametrize("regime", ["iid", "zero_weights", "saturated", "exact_grid"])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("trace-cutlass-moe", {"assignment": "duplicates"}),
        ("trace-cutlass-moe", {"interleaved": True}),
        ("trace-bf16-moe", {"activation": "relu2"}),
        ("trace-bf16-moe", {"activation": "geglu_tanh", **SHARD}),
        ("trace-bf16-moe", {"activation": "swiglu_oai", "interleaved": True}),
        ("trace-bf16-moe", {"swiglu_parameters": "each", "assignment": "duplicates"}),
        ("trace-fp8-block-moe", {**FP8_BLOCK, "hidden": 256}),
        ("trace-fp8-block-moe", {**FP8_BLOCK, "activation": "swiglu_oai", **SHARD}),
        ("trace-mxfp4-moe", {"quantized": "mxfp4", "biases": True, "interleaved": True}),
        ("trace-mxfp4-moe", {"quantized": "mxfp4", **SHARD}),
        ("trace-nvfp4-moe", {"quantized": "nvfp4", "interleaved": True}),
        ("trace-nvfp4-moe", {"quantized": "nvfp4", "activation": "relu2"}),
    ],
    ids=str,
)
def test_experts_are_right(name: str, fields: dict[str, Any], regime: str) -> None:
    found = find_implementation(f"flashinfer-{name}")
    problem = replace(PLAIN, **{**fields, "regime": regime})
    assert found.refusal(problem, Target.here()) is None
    inputs = materialise(problem)
    assert isinstance(inputs, MoEInputs)
    out = found(inputs)
    bounded = oracle.bounded_experts(inputs, found.arithmetic)
    assert out.dtype == inputs.out_dtype
    assert ((out.double() - bounded.expected).abs() <= bounded.bound).all()


@pytest.mark.parametrize(
    "fields",
    [
        {"biases": True, "interleaved": True},
        {"regime": "exact_grid", "dtype": "float16"},
        {"dtype": "float16", **SHARD},
        {"dtype": "float32", "num_tokens": 0},
        {"inter": 1300, "hidden": 16, "regime": "saturated"},
    ],
    ids=str,
)
def test_experts_around_the_triton_activation(
    fields: dict[str, Any], worker: Worker, device: str
) -> None:
    payload = {
        "task": "judge",
        "law": "parity",
        "implementation": "flashinfer-triton-silu-and-mul",
        "problem": replace(PLAIN, **fields).to_json(),
        "device": device,
    }
    verdict = verdict_of(worker.run(payload, Deadlines(run=60.0)))
    assert verdict.status == "PASS", verdict


def test_the_triton_activation_has_one_gate() -> None:
    found = find_implementation("flashinfer-triton-silu-and-mul")
    said = found.refusal(replace(PLAIN, activation="geglu"), Target(sm=90))
    assert said == "silu_and_mul is SwiGLU alone"


ROUTE = RouteProblem(num_tokens=9, num_experts=16, top_k=4, scaling_factor=2.5)
GROUPS = {"num_groups": 4, "topk_groups": 2, "bias": True}


@pytest.mark.parametrize("regime", ["iid", "ties", "saturated", "negative_scores", "exact_grid"])
@pytest.mark.parametrize("method", REFERENCES)
def test_routing_is_right(method: str, regime: str) -> None:
    fields: dict[str, Any] = GROUPS if method == "deepseek_v3" else {}
    if method == "llama4":
        fields = {"top_k": 1}
    names = ["route", *(["fused-topk-deepseek"] if method == "deepseek_v3" else [])]
    for name in names:
        found = find_implementation(f"flashinfer-trace-{name}")
        for dtype in ("float32", "bfloat16"):
            problem = replace(ROUTE, method=method, regime=regime, dtype=dtype, **fields)
            assert found.refusal(problem, Target.here()) is None
            inputs = materialise(problem)
            assert isinstance(inputs, RouteInputs)
            routing = Routing(*found(inputs))
            assert oracle.judge_routing(inputs, routing, found.arithmetic).right


def test_the_experts_are_left_out_of_a_copy() -> None:
    """What FlashInfer's own function computes is untouched."""
    reference = template(MOE_TEMPLATES, "_trtllm_fp8_block_scale_moe_default_routing_reference")
    before = dict(vars(__import__(MOE_TEMPLATES, fromlist=["_"])))
    weights, ids = without_experts(reference)(torch.randn(3, 8), None, *(None,) * 6, 2, 0, 1.0)
    assert (weights.shape, ids.shape) == ((3, 2), (3, 2))
    assert dict(vars(__import__(MOE_TEMPLATES, fromlist=["_"]))) == before


@pytest.mark.parametrize(
    ("name", "problem", "said"),
    [
        ("trace-route", replace(ROUTE, method="topk"), "as kernels are"),
        ("trace-route", replace(ROUTE, bias=True), "adds the bias to the logits"),
        ("trace-route", replace(ROUTE, method="llama4"), "one expert"),
        ("trace-route", replace(ROUTE, method="deepseek_v3", num_groups=16, topk_groups=8),
         "one in each"),
        ("trace-fused-topk-deepseek",
         replace(ROUTE, method="deepseek_v3", num_groups=4, topk_groups=2, masked_groups="zero"),
         "minus infinity"),
        ("trace-cutlass-moe", replace(PLAIN, dtype="float16"), "bfloat16"),
        ("trace-cutlass-moe", replace(PLAIN, activation="relu2"), "no relu2"),
        ("trace-bf16-moe", replace(PLAIN, biases=True), "moe_biases"),
        ("trace-fp8-block-moe", PLAIN, "block scales"),
        ("trace-fp8-block-moe", replace(PLAIN, **FP8_BLOCK, hidden=192), "whole blocks"),
        ("trace-nvfp4-moe", replace(PLAIN, quantized="nvfp4", **SHARD), "expert_parallel"),
    ],
)  # fmt: skip
def test_what_they_do_not_claim(name: str, problem: Any, said: str) -> None:  # noqa: ANN401
    refusal = find_implementation(f"flashinfer-{name}").refusal(problem, Target.here())
    assert said in str(refusal)


def test_a_bias_alone_is_joined_by_zeros() -> None:
    problem = MoEProblem(num_tokens=2, hidden=16, inter=8, num_experts=2, biases=True)
    inputs: Any = materialise(problem)
    first, second = both_biases(replace(inputs, w2_bias=None))
    assert first is not None
    assert second is not None
    assert (first.shape, second.shape) == ((2, 16), (2, 16))
    assert not second.any()
    first, second = both_biases(replace(inputs, w13_bias=None))
    assert first is not None
    assert not first.any()
    assert second is inputs.w2_bias
    assert both_biases(replace(inputs, w13_bias=None, w2_bias=None)) == (None, None)
