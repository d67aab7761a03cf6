"""Fields of attention whose masks have a structure, and of what is added to logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..attention.masks import ALIBI_FUNCTIONS
from .base import check_at_least, check_one_of, refuse

if TYPE_CHECKING:
    from .attention import AttentionProblem

MASK_PATTERNS = (
    "",
    "leading_tile",
    "inner_tile",
    "holes",
    "documents",
    "block_causal",
    "blocks",
    "sparse",
)
"""What a custom mask keeps; see ``tensors.mask_patterns``."""
SPANS = ("", "prefix", "images")
"""Which spans requests have."""
BIASES = ("", "dense", "relative")
"""Which bias logits have."""
NO_MASK: dict[str, Any] = {"custom_mask": False, "mask_pattern": "", "mask_by_head": False}
"""Fields of a problem without a custom mask."""
WITHOUT_TABLES: dict[str, Any] = {**NO_MASK, "spans": "", "logits_bias": ""}
"""Fields of a problem without tensors that have something to say of single rows and keys."""
PLAIN_MASK: dict[str, Any] = {
    **WITHOUT_TABLES, "chunk": 0, "window_dilation": 1, "sink_tokens": 0,
    "alibi_function": "linear",
}  # fmt: skip
"""Fields of a problem whose rows see keys between two ends, and which has no bias but ALiBi."""


def check_masks(problem: AttentionProblem) -> None:
    """Refuse what no mask and no bias of a call can look like."""
    check_one_of("mask_pattern", problem.mask_pattern, MASK_PATTERNS)
    check_one_of("spans", problem.spans, SPANS)
    check_one_of("logits_bias", problem.logits_bias, BIASES)
    check_one_of("alibi_function", problem.alibi_function, tuple(ALIBI_FUNCTIONS))
    check_at_least(problem, (("chunk", 0), ("window_dilation", 1), ("sink_tokens", 0)))
    for name in ("mask_pattern", "mask_by_head"):
        if getattr(problem, name) and not problem.custom_mask:
            refuse(name, getattr(problem, name), "empty or false where custom_mask is false")
    if problem.alibi_function != "linear" and not problem.alibi:
        refuse("alibi_function", problem.alibi_function, "linear where alibi is false")
    if problem.spans and problem.tree:
        refuse("spans", problem.spans, "empty with a tree: its tokens see each other as it says")
