"""What FlashInfer's own functions answer, asked about head dimensions, page sizes and data types.

XQA's generator refuses what it has no kernel for before anything is compiled, and FA3's selection
is a plain function.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .capabilities import Modules

HEAD_DIMS = (16, 32, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 512, 576)
PAGE_SIZES = (1, 8, 16, 32, 64, 128, 256)
DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
STORED = {**{name: name for name in DTYPES}, "nvfp4": "uint8"}
"""What FlashInfer takes for each element format of a KV cache."""
XQA_CALL: dict[str, Any] = {
    "input_dtype": torch.bfloat16,
    "kv_cache_dtype": torch.bfloat16,
    "output_dtype": torch.bfloat16,
    "page_size": 16,
    "head_dim": 128,
    "head_group_ratio": 4,
    "use_sliding_window": False,
    "q_seq_len": 1,
}


def xqa(modules: Modules) -> dict[str, Any]:
    """Return the head dimensions and page sizes for which XQA has a kernel; empty if unknown."""
    module = modules.load("flashinfer.jit.xqa")
    generate = getattr(module, "gen_xqa_module", None)
    if generate is None:
        return {}
    known = inspect.signature(generate).parameters
    call = {name: value for name, value in XQA_CALL.items() if name in known}

    def admits(**changed: int) -> bool:
        try:
            generate(**{**call, **changed})
        except ValueError:
            return False
        return True

    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a"
    try:
        return {
            "head_dims": [each for each in HEAD_DIMS if admits(head_dim=each)],
            "page_sizes": [each for each in PAGE_SIZES if admits(page_size=each)],
            "source": "flashinfer.jit.xqa.gen_xqa_module",
        }
    except Exception as error:  # noqa: BLE001  a release with another generator is not known
        modules.failed["flashinfer.jit.xqa.gen_xqa_module"] = f"{type(error).__name__}: {error}"
        return {}


def fa3(modules: Modules) -> dict[str, Any]:
    """Return the dtypes, masks and head dimensions that FA3 is selected for; empty if unknown."""
    utils = modules.load("flashinfer.utils")
    ask = getattr(utils, "is_fa3_backend_supported", None)
    if utils is None or ask is None:
        return {}
    plain = utils.PosEncodingMode.NONE.value

    def admits(q_dtype: str, stored: str, *, custom_mask: bool = False) -> bool:
        answer = ask(plain, False, custom_mask, _torch(q_dtype), _torch(stored))  # noqa: FBT003
        return bool(answer)

    try:
        return {
            "dtypes": [
                [q_dtype, kv_dtype]
                for q_dtype in DTYPES
                for kv_dtype, stored in STORED.items()
                if admits(q_dtype, stored)
            ],
            "custom_mask": admits("float16", "float16", custom_mask=True),
            "head_dims": _head_dims(getattr(utils, "is_fa3_prefill_head_dim_supported", None)),
            "source": "flashinfer.utils.is_fa3_backend_supported",
        }
    except Exception as error:  # noqa: BLE001  a release with another selection is not known
        modules.failed["flashinfer.utils.is_fa3_backend_supported"] = f"{error}"
        return {}


def _head_dims(ask: Callable[[int, int], bool] | None) -> list[list[int]] | None:
    """Return the pairs of head dimensions of FA3's prefill; None where they are not restricted."""
    if ask is None:
        return None
    pairs: Iterable[tuple[int, int]] = [*((each, each) for each in HEAD_DIMS), (192, 128)]
    return [list(pair) for pair in pairs if ask(*pair)]


def _torch(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
