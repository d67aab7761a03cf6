"""Benchmarks of the oracle, of the workers and of the Triton kernels: ``kernelproof bench``."""
