"""How a router scores, selects and weighs experts: the methods, and what others call them."""

from __future__ import annotations

from typing import NamedTuple

import torch

RENORMALISE_FLOOR = 1e-20
"""Added to the sum that renormalised weights are divided by, as DeepSeek-V3 and FlashInfer do: a
token whose selected sigmoids all underflow gets weights of 0, not NaN."""


class RoutingMethod(NamedTuple):
    """One way to route.

    Attributes:
        score: the score by which experts are ranked: ``"logit"``, ``"softmax"`` (over all experts),
            ``"sigmoid"`` or ``"sqrt_softplus"`` of the logit.
        weight: the weight of a selected expert: its ``"score"``, the scores divided by their sum
            over the selected (``"renormalize"``), the ``"softmax"`` over the selected logits, the
            ``"sigmoid"`` of the logit, or its share of what is near it (``"sparsemixer"``).
        two_best: a group is ranked by the sum of its two best experts even where no bias is given.
    """

    score: str
    weight: str
    two_best: bool = False


METHODS: dict[str, RoutingMethod] = {
    "default": RoutingMethod("softmax", "score"),
    "renormalize": RoutingMethod("logit", "softmax"),
    "deepseek_v3": RoutingMethod("sigmoid", "renormalize", two_best=True),
    "llama4": RoutingMethod("logit", "sigmoid"),
    "renormalize_naive": RoutingMethod("softmax", "renormalize"),
    "topk": RoutingMethod("logit", "score"),
    "sigmoid_renorm": RoutingMethod("sigmoid", "renormalize"),
    "minimax2": RoutingMethod("sigmoid", "renormalize"),
    "sigmoid": RoutingMethod("sigmoid", "score"),
    "topk_sigmoid": RoutingMethod("logit", "sigmoid"),
    "deepseek_v4": RoutingMethod("sqrt_softplus", "renormalize"),
    "sparsemixer": RoutingMethod("logit", "sparsemixer"),
}
"""FlashInfer's ``RoutingMethodType`` in snake case, vLLM's DeepseekV4, and PhiMoE's. Numbers
of that enum moved between releases (6 was Unspecified, and is SigmoidRenorm), names did not."""

MASKED_GROUPS = {"-inf": float("-inf"), "zero": 0.0}
"""What the score of an expert in a group that was not chosen becomes. Minus infinity: FlashInfer,
vLLM, SGLang's biased grouped top-k, and Hugging Face's DeepSeek-V3 since transformers 5.24.0. Zero:
DeepSeek's published code, Hugging Face's before that, and SGLang's grouped top-k without a bias.
They differ where a bias makes scores negative: zero then lets experts of masked groups in."""

GROUP_SCORES = {"best": 1, "two_best": 2}
"""Number of best experts whose scores make a group's score, by name. The best one: DeepSeek-V2
(``group_limited_greedy``). The two best: DeepSeek-V3 (``noaux_tc``)."""

ROUTING_NAMES: dict[str, dict[str, str]] = {
    "flashinfer": {
        "Default": "default",
        "Renormalize": "renormalize",
        "DeepSeekV3": "deepseek_v3",
        "Llama4": "llama4",
        "RenormalizeNaive": "renormalize_naive",
        "TopK": "topk",
        "SigmoidRenorm": "sigmoid_renorm",
        "MiniMax2": "minimax2",
        "Sigmoid": "sigmoid",
        "TopKSigmoid": "topk_sigmoid",
    },
    "vllm": {
        "Default": "default",
        "Renormalize": "renormalize_naive",
        "DeepSeekV3": "deepseek_v3",
        "Llama4": "llama4",
        "RenormalizeNaive": "renormalize_naive",
        "TopK": "topk",
        "SigmoidRenorm": "sigmoid_renorm",
        "MiniMax2": "minimax2",
        "Sigmoid": "sigmoid",
        "DeepseekV4": "deepseek_v4",
        "fused_topk, softmax, renormalize=False": "default",
        "fused_topk, softmax, renormalize=True": "renormalize_naive",
        "fused_topk, sigmoid, renormalize=False": "sigmoid",
        "fused_topk, sigmoid, renormalize=True": "sigmoid_renorm",
        "grouped_topk, sigmoid, renormalize=True, with bias": "deepseek_v3",
    },
    "sglang": {
        "Default": "default",
        "Renormalize": "renormalize",
        "DeepSeekV3": "deepseek_v3",
        "Llama4": "llama4",
        "RenormalizeNaive": "renormalize_naive",
        "TopK": "topk",
        "fused_topk, softmax, renormalize=False": "default",
        "fused_topk, softmax, renormalize=True": "renormalize_naive",
        "fused_topk, sigmoid, renormalize=True": "sigmoid_renorm",
        "biased_grouped_topk, renormalize=True": "deepseek_v3",
    },
}
"""Names of methods elsewhere, by stack: members of its RoutingMethodType, and functions with the
arguments that matter. vLLM's Renormalize is computed as softmax, top-k, renormalise, which is what
FlashInfer calls RenormalizeNaive (vllm-project/vllm#43223); the two agree except for rounding."""


def routing_method(method: str) -> RoutingMethod:
    """Look a method up.

    Raises:
        ValueError: a name that is none of ``METHODS``.
    """
    if not isinstance(method, str) or method not in METHODS:
        message = f"method is {method!r}; it must be one of {', '.join(METHODS)}"
        raise ValueError(message)
    return METHODS[method]


def router_scores(how: RoutingMethod, logits: torch.Tensor) -> torch.Tensor:
    """Return the scores [tokens, experts] of logits, in their dtype, before any bias."""
    if how.score == "softmax":
        return torch.softmax(logits, dim=-1)
    if how.score == "sigmoid":
        return torch.sigmoid(logits)
    if how.score == "sqrt_softplus":
        # log(1 + exp(x)), without torch's shortcut for x > 20
        return torch.logaddexp(logits, torch.zeros_like(logits)).sqrt()
    return logits


def router_weights(
    how: RoutingMethod,
    logits: torch.Tensor,
    scores: torch.Tensor,
    ids: torch.Tensor,
    floor: float = RENORMALISE_FLOOR,
) -> torch.Tensor:
    """Return the weights [tokens, top_k] that belong to selected experts, unscaled.

    Those of sparsemixer depend on the order of the experts: see ``sparsemixer_weights``.

    Args:
        how: the method.
        logits, scores: [tokens, experts]; the scores without bias.
        ids: int64 [tokens, top_k].
        floor: added to the sum that weights are divided by.
    """
    selected = scores.gather(1, ids)
    if how.weight == "renormalize":
        return selected / (selected.sum(dim=1, keepdim=True) + floor)
    if how.weight == "softmax":
        return torch.softmax(logits.gather(1, ids), dim=1)
    if how.weight == "sigmoid":
        return torch.sigmoid(logits.gather(1, ids))
    return selected
