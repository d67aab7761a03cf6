"""Isolated worker processes: their start, their deadlines, their end."""

from __future__ import annotations

from ...fixtures.moved import attributes_of

__getattr__ = attributes_of(__name__)
