"""What is asked of a GPU before Triton kernels are launched: once, and without waiting."""

from __future__ import annotations

import functools

import torch

from .blocks import MARGIN, SHARED_MEMORY


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many the GPU has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may take, with a margin."""
    if device.type != "cuda":
        return SHARED_MEMORY
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", SHARED_MEMORY + MARGIN)) - MARGIN


@functools.cache
def converts_e4m3(device: torch.device) -> bool:
    """Whether the chip converts and multiplies e4m3 itself, which begins with Ada."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
