"""Kept runs, and the page that lists them: ``kernelproof evidence``."""

from __future__ import annotations

from ...fixtures.moved import attributes_of

__getattr__ = attributes_of(__name__)
