"""What the adapters to lmdeploy's Triton kernels share."""

from __future__ import annotations

import enum
import functools
from typing import Any

import torch

from ...reference.tensors.inputs import AppendInputs, PagedAttentionInputs
from .claims import by_slots
from .sources import implementation
from .vllm_stubs import Unused

LMDEPLOY = "lmdeploy"
KERNELS = "lmdeploy.pytorch.kernels.cuda"
LEAST_PAGE = 16
"""Keys that a page has at least: a tile of the decode kernel is a page."""


class QuantPolicy(enum.IntEnum):
    """How a cache is quantised, by lmdeploy's numbers (``lmdeploy/messages.py``)."""

    NONE = 0
    INT4 = 4
    INT8 = 8
    FP8 = 16
    FP8_E5M2 = 17
    TURBO_QUANT = 42


POLICIES = {
    "float8_e4m3fn": QuantPolicy.FP8,
    "float8_e5m2": QuantPolicy.FP8_E5M2,
    "int8_zero_point": QuantPolicy.INT8,
    "int4_zero_point": QuantPolicy.INT4,
}
"""lmdeploy's quantisation policies by the cache's element."""

kernel = functools.partial(
    implementation, provider=LMDEPLOY, build_ahead="cuda", build_minutes=0.05, build_compilers=1
)
"""``implementation``, with what all of lmdeploy's kernels declare alike."""


def _device_props(device: int | None = None) -> dict[str, Any]:
    """Describe the GPU; without one, one that is small: 4 parts of a request, tiles of 32 keys."""
    if not torch.cuda.is_available():
        return {
            "multi_processor_count": 4, "compute_capability": (7, 0), "warps_per_sm": 32,
            "blocks_per_sm": 16,
        }  # fmt: skip
    found = torch.cuda.get_device_properties(device or torch.cuda.current_device())
    warps = found.max_threads_per_multi_processor // 32
    return {
        "multi_processor_count": found.multi_processor_count,
        "compute_capability": (found.major, found.minor), "warps_per_sm": warps,
        "blocks_per_sm": warps // 2,
    }  # fmt: skip


def stubs() -> dict[str, dict[str, object]]:
    """Stand in for the rest of lmdeploy."""
    return {
        "lmdeploy.messages": {"QuantPolicy": QuantPolicy},
        "lmdeploy.utils": {"get_logger": Unused()},
        f"{KERNELS}.utils": {
            "get_device_props": _device_props, "is_cuda": torch.cuda.is_available,
        },
    }  # fmt: skip


def quantised(
    inputs: PagedAttentionInputs | AppendInputs, like: torch.Tensor
) -> tuple[list[torch.Tensor], dict[str, object]]:
    """Return the caches by slots, as what they hold, and the arguments that say how to read them.

    Scales of the whole tensor become tensors on the device of ``like``.
    """
    caches = [by_slots(each, inputs.kv_layout) for each in (inputs.k_cache, inputs.v_cache)]
    if inputs.kv_format is None:
        return caches, {}
    scales = [
        like.new_tensor([each], dtype=torch.float32) for each in (inputs.k_scale, inputs.v_scale)
    ]
    if inputs.kv_cache_sf is not None:
        scales = [by_slots(each, inputs.kv_layout) for each in inputs.kv_cache_sf]
    return [inputs.kv_format.view(each) for each in caches], {
        "k_scales_zeros": scales[0],
        "v_scales_zeros": scales[1],
        "quant_policy": POLICIES[inputs.kv_format.element],
    }


def is_page(page_size: int) -> bool:
    """Whether a page is a tile: a power of two that tensor cores multiply."""
    return page_size >= LEAST_PAGE and page_size & (page_size - 1) == 0
