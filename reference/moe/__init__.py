"""Routing and experts by definition, with error bounds."""

from __future__ import annotations

from .definition import moe

__all__ = ["moe"]
