"""The oracle against the references that FlashInfer publishes (``flashinfer.trace.templates``).

They take the gate from the second half of w13's rows, compute in float32 and give bfloat16.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernelproof.impl.targets.optional import missing
from kernelproof.reference import (
    MatrixFormat,
    QuantizedMatrix,
    Routing,
    moe,
    moe_error_bound,
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
    route,
)
from kernelproof.reference.moe.activations import Swiglu, activate, activation_of

MODULE = "flashinfer.trace.templates.moe"
ABSENT = missing(MODULE, "flashinfer")
pytestmark = pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))

Given = torch.Tensor | QuantizedMatrix

TOKENS, EXPERTS, HIDDEN, INTER, TOP_K = 6, 16, 256, 128, 4
SPREAD = 1e-5
"""How far float32 routing weights may be from the oracle's, for logits of this size."""


def published(name: str, module: str = MODULE) -> Callable[..., torch.Tensor]:
    """Return a reference by name."""
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        pytest.skip(f"this release of flashinfer has no {module}.{name}")
    reference: Callable[..., torch.Tensor] = found
    return reference


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def other_half_first(w13: torch.Tensor) -> torch.Tensor:
    """Swap gate and up rows [experts, 2 * inter, ...]."""
    first, second = w13.chunk(2, dim=1)
    return torch.cat((second, first), dim=1)


def judge(
    found: torch.Tensor,
    hidden: Given,
    w13: Given,
    w2: Given,
    routing: Routing,
    **options: Any,  # noqa: ANN401
) -> None:
    """Check a reference's output: within the bound, and what its weights may be off."""
    arguments = (hidden, w13, w2, routing.topk_ids, routing.topk_weights)
    expected = moe(*arguments, **options)
    bound = moe_error_bound(*arguments, **options, out_dtype=torch.bfloat16)
    for slot in range(routing.topk_ids.shape[1]):
        one = (each[:, slot : slot + 1] for each in routing)
        bound += SPREAD * moe(hidden, w13, w2, *one, **options).abs()
    assert found.dtype == torch.bfloat16
    assert ((found.double() - expected).abs() <= bound).all()
    assert (bound <= 0.02 * expected.abs().max()).all()


def plain(rows: int = 2 * INTER) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        draw(TOKENS, HIDDEN, seed=1, dtype=torch.bfloat16),
        (draw(EXPERTS, rows, HIDDEN, seed=2) / 8).bfloat16(),
        (draw(EXPERTS, HIDDEN, INTER, seed=3) / 8).bfloat16(),
    )


def test_cutlass() -> None:
    hidden, w13, w2 = plain()
    routing = route(draw(TOKENS, EXPERTS, seed=4), TOP_K)
    ids, weights = routing.topk_ids, routing.topk_weights.float()
    found = published("_cutlass_fused_moe_reference")(hidden, ids, weights, w13, w2)
    judge(found, hidden, other_half_first(w13), w2, Routing(ids, weights))


@pytest.mark.parametrize(
    ("number", "activation"), [(3, "swiglu"), (8, "geglu_tanh"), (6, "relu2"), (3, "swiglu_oai")]
)
def test_activations_of_bf16_experts(number: int, activation: str) -> None:
    hidden, w13, w2 = plain(INTER if activation == "relu2" else 2 * INTER)
    logits, options, given = draw(TOKENS, EXPERTS, seed=4), {}, {}
    if activation == "swiglu_oai":
        numbers = 1 + draw(3, EXPERTS, seed=5).abs()
        options = dict(zip(("alpha", "beta", "limit"), numbers, strict=True))
        given = dict(zip(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"), numbers, strict=True))
    found = published("_trtllm_bf16_moe_reference")(
        logits,
        None,
        hidden,
        w13,
        w2,
        EXPERTS,
        TOP_K,
        0,
        2.5,
        activation_type=number,
        **given,
    )
    routing = route(logits, TOP_K, method="default", scaling_factor=2.5)
    ours = w13 if activation == "relu2" else other_half_first(w13)
    judge(found, hidden, ours, w2, routing, activation=activation, **options)


@pytest.mark.parametrize(
    "method", ["default", "renormalize", "renormalize_naive", "llama4", "deepseek_v3"]
)
@pytest.mark.parametrize("offset", [0, 8])
def test_routing_and_fp8_blocks(method: str, offset: int) -> None:
    local = EXPERTS - offset
    logits, bias = draw(TOKENS, EXPERTS, seed=4), 0.1 * draw(1, EXPERTS, seed=5)[0]
    top_k = 1 if method == "llama4" else TOP_K
    hidden = quantize_fp8(16 * draw(TOKENS, HIDDEN, seed=1))
    w13 = quantize_fp8(16 * draw(local, 2 * INTER, HIDDEN, seed=2))
    w2 = quantize_fp8(16 * draw(local, HIDDEN, INTER, seed=3))
    states = 0.05 + draw(HIDDEN // 128, TOKENS, seed=6).abs() / 16
    scales = [
        0.005 + draw(local, rows // 128, columns // 128, seed=seed).abs() / 99
        for seed, rows, columns in ((7, 2 * INTER, HIDDEN), (8, HIDDEN, INTER))
    ]
    short = {"deepseek_v3": "ds"}.get(method, method)
    reference = published(f"_trtllm_fp8_block_scale_moe_{short}_routing_reference")
    arguments = (hidden, states, w13, scales[0], w2, scales[1])
    options: dict[str, Any] = {"method": method, "scaling_factor": 2.5}
    if method == "deepseek_v3":
        options |= {"bias": bias, "num_groups": 4, "topk_groups": 2}
        found = reference(logits, bias, *arguments, top_k, 4, 2, offset, 2.5)
    else:
        found = reference(logits, None, *arguments, top_k, offset, 2.5)
    form = MatrixFormat("float8_e4m3fn", "block")
    judge(
        found,
        QuantizedMatrix(hidden, states.T, form),
        QuantizedMatrix(other_half_first(w13), other_half_first(scales[0]), form),
        QuantizedMatrix(w2, scales[1], form),
        route(logits, top_k, **options),
        expert_offset=offset,
        num_experts=EXPERTS,
    )


@pytest.mark.parametrize("element", ["nvfp4", "mxfp4"])
def test_fp4_with_biases(element: str) -> None:
    logits, form = draw(TOKENS, EXPERTS, seed=4), MatrixFormat(element)

    def codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (quantize_nvfp4(x) if element == "nvfp4" else quantize_mxfp4(x))[:2]

    hidden = draw(TOKENS, HIDDEN, seed=1, dtype=torch.bfloat16)
    w13, scales13 = codes(draw(EXPERTS, 2 * INTER, HIDDEN, seed=2))
    w2, scales2 = codes(draw(EXPERTS, HIDDEN, INTER, seed=3))
    biases = draw(EXPERTS, 2 * INTER, seed=5), draw(EXPERTS, HIDDEN, seed=6)
    routing = route(logits, TOP_K)
    weights = routing.topk_weights.float()
    found = published("_fp4_moe_run_experts")(
        hidden,
        None,
        w13,
        scales13,
        w2,
        scales2,
        *biases,
        weights,
        routing.topk_ids.long(),
        0,
        EXPERTS,
    )
    judge(
        found,
        hidden,
        QuantizedMatrix(other_half_first(w13), other_half_first(scales13), form),
        QuantizedMatrix(w2, scales2, form),
        Routing(routing.topk_ids, weights),
        w13_bias=other_half_first(biases[0]),
        w2_bias=biases[1],
    )


@pytest.mark.parametrize(
    ("name", "activation"),
    [("silu_and_mul", "swiglu"), ("gelu_and_mul", "geglu"), ("gelu_tanh_and_mul", "geglu_tanh")],
)
def test_activations_alone(name: str, activation: str) -> None:
    x = 3 * draw(50, 64, seed=9)
    reference = published(f"_{name}_reference", "flashinfer.trace.templates.activation")
    found = activate(activation_of(activation), x.double(), Swiglu())
    torch.testing.assert_close(reference(x.double()), found, rtol=1e-10, atol=1e-13)


def test_where_the_published_references_disagree_with_the_kernels() -> None:
    # TopK: the reference gives every expert 1 / top_k, FlashInfer's kernel the logit itself
    # (no postprocessing: RoutingPostprocessType::None), which is what the oracle defines.
    reference = published("_trtllm_fp8_block_scale_moe_topk_routing_reference")
    assert "uniform weights" in str(reference.__doc__)
    logits = draw(2, EXPERTS, seed=4)
    routing = route(logits, TOP_K, method="topk")
    selected = logits.double().gather(1, routing.topk_ids.long())
    assert torch.equal(routing.topk_weights, selected)
