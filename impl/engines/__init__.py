"""Adapters to the Triton kernels of serving engines, whose files are loaded without the engine."""
