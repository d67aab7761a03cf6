"""Attention, merging, appending and batch metadata by definition, with error bounds."""

from __future__ import annotations

from .definition import AttentionOutput, paged_attention, ragged_attention

__all__ = ["AttentionOutput", "paged_attention", "ragged_attention"]
