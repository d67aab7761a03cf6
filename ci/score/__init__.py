"""Which seeded bugs the laws kill: ``kernelproof score``."""

from __future__ import annotations

from ...fixtures.moved import attributes_of

__getattr__ = attributes_of(__name__)
