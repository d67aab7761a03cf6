"""The report of a comparison, and every form that it is written in."""

from __future__ import annotations

from ....fixtures.moved import attributes_of

__getattr__ = attributes_of(__name__)
