"""Routing and experts by definition, with error bounds."""

from __future__ import annotations

from ...fixtures.moved import attributes_of
from .definition import moe

__all__ = ["moe"]

__getattr__ = attributes_of(__name__)
