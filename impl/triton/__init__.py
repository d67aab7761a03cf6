"""Kernelproof's own Triton kernels: the implementations that launch them."""
