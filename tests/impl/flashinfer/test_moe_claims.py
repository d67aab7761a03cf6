"""What FlashInfer's MoE and routing adapters claim, and their reasons for what they do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kernelproof.impl import Target, find_implementation
from kernelproof.impl.protocol import EVERY_RULE
from kernelproof.impl.targets.refusal import Refusal
from kernelproof.properties.space.axes import example, narrow
from kernelproof.reference import MoEProblem, Problem, RouteProblem
from kernelproof.tests.choosing import choose

PLAIN = MoEProblem(
    num_tokens=6, hidden=32, inter=48, num_experts=6, top_k=3, dtype="bfloat16", assignment="iid"
)
ROUTE = RouteProblem(num_tokens=9, num_experts=32, top_k=4, dtype="bfloat16")


def on_hopper(name: str, problem: Any, *, gated: bool = True) -> str | None:  # noqa: ANN401
    target = Target(sm=90, flashinfer="0.7.2.post1", cuda="13.0", device="cuda")
    rules = () if gated else (EVERY_RULE,)
    return find_implementation(name).refusal(problem, target, without_rules=rules)


@pytest.mark.parametrize(
    ("name", "sm"),
    [
        ("cutlass-moe", 90),
        ("cutlass-moe-fp8-block", 90),
        ("group-gemm-moe", 90),
        ("cute-dsl-moe-bf16", 90),
        ("trtllm-fp8-block-moe", 100),
        ("fused-topk-deepseek", 90),
        ("top-k-route", 90),
        ("trtllm-gen-routing", 100),
    ],
)
def test_the_suite_finds_problems_that_they_take(name: str, sm: int) -> None:
    """On a machine that is not here: what would be drawn, and which module would be built."""
    found = find_implementation(f"flashinfer-{name}")
    target = Target(sm=sm, flashinfer="0.7.2.post1", cuda="13.0", device="cuda")

    def probe(problems: Sequence[Problem]) -> list[Refusal | None]:
        return [found.refusal(each, target) for each in problems]

    axes = narrow(found.operation, probe, 10**9)
    assert axes is not None
    assert found.compile_key is not None
    if found.build_ahead:
        first = example(found.operation, axes.simplest)
        key = repr(found.compile_key(first))
        modules = choose(axes, lambda problems: [key for _ in problems], 8)
        assert [module.key for module in modules] == [key]


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("cutlass-moe", {"dtype": "float32"}, "float32"),
        ("cutlass-moe", {"hidden": 20}, "multiples of 8"),
        ("cutlass-moe", {"num_tokens": 0}, "without a token"),
        ("cutlass-moe", {"activation": "gelu_tanh"}, "no such activation"),
        ("cutlass-moe", {"local_experts": 4}, "as many experts"),
        ("cutlass-moe", {"local_experts": 2, "expert_offset": 1}, "as many experts"),
        ("cutlass-moe", {"quantized": "fp8_tensor"}, "are to be given"),
        ("cutlass-moe", {"quantized": "fp8_block", "quantized_hidden": True}, "in fp8_block"),
        ("cutlass-moe-fp8-block", {}, "in FP8 with block scales"),
        ("cutlass-moe-fp8-block", {"quantized": "fp8_block", "quantized_hidden": True},
         "quantises hidden states itself"),
        ("cutlass-moe-fp8-block",
         {"quantized": "fp8_block", "quantized_hidden": True, "regime": "exact_grid"}, "whole"),
        ("cutlass-moe", {"assignment": "duplicates"}, "does not name the feature"),
        ("cutlass-moe", {"quantized": "fp8_channel", "quantized_hidden": True}, "not for"),
        ("group-gemm-moe", {"dtype": "float32"}, "16 bits and FP8"),
        ("group-gemm-moe", {"quantized": "fp8_block", "quantized_hidden": True}, "within a row"),
        ("group-gemm-moe", {"quantized": "fp8_tensor"}, "or none"),
        ("group-gemm-moe",
         {"quantized": "fp8_tensor", "quantized_hidden": True, "dtype": "float16"}, "beyond"),
    ],
)  # fmt: skip
def test_what_they_do_not_claim(name: str, fields: dict[str, Any], said: str) -> None:
    assert said in str(on_hopper(f"flashinfer-{name}", replace(PLAIN, **fields), gated=False))


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("fused-topk-deepseek", {"top_k": 9, "method": "deepseek_v3"}, "at most 8"),
        ("fused-topk-deepseek", {}, "DeepSeek-V3's routing alone"),
        ("fused-topk-deepseek", {"top_k": 2, "method": "deepseek_v3"}, "top_k of 1 pass alone"),
        ("fused-topk-deepseek", {"num_experts": 385, "top_k": 1, "method": "deepseek_v3"},
         "at most 384"),
        ("fused-topk-deepseek", {"num_experts": 66, "num_groups": 2, "method": "deepseek_v3"},
         "at most 32 experts"),
        ("fused-topk-deepseek",
         {"num_experts": 256, "num_groups": 8, "topk_groups": 5, "method": "deepseek_v3"},
         "at most 128"),
        ("fused-topk-deepseek",
         {"num_groups": 4, "topk_groups": 4, "method": "deepseek_v3", "masked_groups": "zero"},
         "minus infinity"),
        ("trtllm-gen-routing", {"method": "deepseek_v4"}, "no such method"),
        ("trtllm-gen-routing", {"bias": True}, "ignore the bias"),
        ("trtllm-gen-routing", {"scaling_factor": 2.0}, "ignore the scaling"),
        ("trtllm-gen-routing", {"method": "llama4"}, "one expert"),
        ("top-k-route", {"num_groups": 4, "topk_groups": 4, "method": "default"}, "one group"),
        ("top-k-route", {"method": "deepseek_v3"}, "a kernel of its own"),
    ],
)  # fmt: skip
def test_what_routing_kernels_do_not_claim(name: str, fields: dict[str, Any], said: str) -> None:
    assert said in str(on_hopper(f"flashinfer-{name}", replace(ROUTE, **fields), gated=False))


def test_top_k_is_asked_where_it_can_be_deterministic() -> None:
    found = find_implementation("flashinfer-top-k-route")
    old, new = (
        found.refusal(ROUTE, Target(sm=90, flashinfer=each, cuda="13.0", device="cuda"))
        for each in ("0.6.7", "0.6.8")
    )
    assert "deterministic=True from flashinfer-python 0.6.8 on" in str(old)
    assert new is None
