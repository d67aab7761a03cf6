"""What may run where, by the rules and by what releases declare: ``kernelproof support``."""

from __future__ import annotations

from ...fixtures.moved import attributes_of

__getattr__ = attributes_of(__name__)
