"""Fields of attention whose masks have a structure, and of what is added to logits."""

from __future__ import annotations

from typing import Any

from ..attention.alibi import ALIBI_FUNCTIONS
from .base import check_at_least, check_one_of, refuse

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
"""Kinds of spans that requests have."""
BIASES = ("", "dense", "relative", "near")
"""Kinds of bias that logits have."""
NO_MASK: dict[str, Any] = {"custom_mask": False, "mask_pattern": "", "mask_by_head": False}
"""Fields of a problem without a custom mask."""
WITHOUT_TABLES: dict[str, Any] = {**NO_MASK, "spans": "", "logits_bias": ""}
"""Fields of a problem without tensors that have something to say of single rows and keys."""
PLAIN_MASK: dict[str, Any] = {
    **WITHOUT_TABLES, "chunk": 0, "window_dilation": 1, "sink_tokens": 0,
    "alibi_function": "linear",
}  # fmt: skip
"""Fields of a problem whose rows see keys between two ends, and which has no bias but ALiBi."""


def check_masks(problem: object) -> None:
    """Refuse what no mask and no bias of a call of attention can look like."""
    fields = vars(problem)
    check_one_of("mask_pattern", fields["mask_pattern"], MASK_PATTERNS)
    check_one_of("spans", fields["spans"], SPANS)
    check_one_of("logits_bias", fields["logits_bias"], BIASES)
    check_one_of("alibi_function", fields["alibi_function"], tuple(ALIBI_FUNCTIONS))
    check_at_least(problem, (("chunk", 0), ("window_dilation", 1), ("sink_tokens", 0)))
    for name in ("mask_pattern", "mask_by_head"):
        if fields[name] and not fields["custom_mask"]:
            refuse(name, fields[name], "empty or false where custom_mask is false")
    if fields["alibi_function"] != "linear" and not fields["alibi"]:
        refuse("alibi_function", fields["alibi_function"], "linear where alibi is false")
    if fields["spans"] and fields["tree"]:
        refuse("spans", fields["spans"], "empty with a tree: its tokens see each other as it says")
