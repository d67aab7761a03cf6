"""Mutants of Triton kernels, made at run time, and judged by the laws or by tests."""
