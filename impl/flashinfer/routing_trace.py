"""FlashInfer's published references of routing (``flashinfer.trace.templates``, 0.7 and later).

Most are a part of a reference of the whole MoE: the same function is called with its experts left
out, so that it gives back ids and weights. They are pure PyTorch, in float32.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import torch

from ...reference import RouteProblem
from ...reference.tensors.moe_inputs import RouteInputs
from ..targets.refusal import first_reason
from ..targets.target import Target
from .backends import TRACE
from .routing import masked_by_zero, routed_by
from .trace import lacking, template

MOE_TEMPLATES = "flashinfer.trace.templates.moe"
SAMPLING = "flashinfer.trace.templates.sampling"
FP8_EXPERTS = "_fp8_moe_run_experts"
REFERENCES = {
    "default": "default",
    "renormalize": "renormalize",
    "renormalize_naive": "renormalize_naive",
    "llama4": "llama4",
    "deepseek_v3": "ds",
}
"""Their names in those of the references. That of ``topk`` gives every expert 1 / top_k, which is
not what the kernel does (docs/moe.md)."""
TWO = 2
Pair = tuple[torch.Tensor, torch.Tensor]


def without_experts(reference: Any) -> Any:  # noqa: ANN401  untyped third-party code
    """Return a reference of the whole MoE that returns (weights, ids) in the place of its output.

    Nothing of theirs is changed: this is another function with the same code, among whose globals
    the function that runs the experts is another.
    """
    plain = inspect.unwrap(reference)

    def handed_back(*arguments: Any, **_: Any) -> Pair:  # noqa: ANN401  as theirs
        weights, ids = arguments[6:8]
        return weights, ids

    made = FunctionType(plain.__code__, {**plain.__globals__, FP8_EXPERTS: handed_back})
    made.__kwdefaults__ = plain.__kwdefaults__
    return made


def _no_reference(problem: RouteProblem, _: Target) -> str | None:
    deepseek = problem.method == "deepseek_v3"
    return first_reason(
        (problem.method not in REFERENCES, f"no reference is of {problem.method} as kernels are"),
        (problem.bias and not deepseek, "the reference adds the bias to the logits"),
        (problem.grouped and not deepseek, "the reference has no groups"),
        (problem.method == "llama4" and problem.top_k != 1, "it takes one expert a token"),
        (
            deepseek and problem.num_experts // problem.num_groups < TWO,
            "groups are ranked by two experts, and there is one in each",
        ),
    )


@TRACE.adapter(
    "route", "flashinfer-trace-route", lacking(MOE_TEMPLATES), _no_reference, masked_by_zero
)
def trace_route(inputs: RouteInputs) -> Pair:
    """Route as ``_trtllm_fp8_block_scale_moe_*_routing_reference`` does."""
    name = f"_trtllm_fp8_block_scale_moe_{REFERENCES[inputs.method]}_routing_reference"
    bias, deepseek = inputs.bias, inputs.method == "deepseek_v3"
    if deepseek and bias is None:
        bias = inputs.logits.new_zeros(inputs.logits.shape[1], dtype=torch.float32)
    groups = (inputs.num_groups or 1, inputs.topk_groups or 1) if deepseek else ()
    experts = (None,) * 6
    arguments = (inputs.logits, bias, *experts, inputs.top_k, *groups, 0, inputs.scaling_factor)
    weights, ids = without_experts(template(MOE_TEMPLATES, name))(*arguments)
    return ids.to(torch.int32), weights


def _not_deepseek(problem: RouteProblem, _: Target) -> str | None:
    other = problem.method != "deepseek_v3"
    return "a reference of DeepSeek-V3's routing" if other else None


@TRACE.adapter(
    "route",
    "flashinfer-trace-fused-topk-deepseek",
    lacking(SAMPLING),
    _not_deepseek,
    masked_by_zero,
)
def trace_fused_topk_deepseek(inputs: RouteInputs) -> Pair:
    """Route by ``_fused_topk_deepseek_reference``, into float32 weights."""
    function = template(SAMPLING, "_fused_topk_deepseek_reference")
    return routed_by(function, inputs, torch.float32)
