"""Benchmarks of the oracle, of the workers and of the Triton kernels: ``kernelproof bench``."""

from __future__ import annotations

from ...fixtures.moved import attributes_of

__getattr__ = attributes_of(__name__)
