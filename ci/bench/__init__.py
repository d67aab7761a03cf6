"""Timing kernels on a GPU beside those of other libraries: ``kernelproof bench``."""
