"""The arguments of FlashInfer's FP4 and FP8 GEMMs by trtllm-gen: tensors that nothing reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .experts import BLOCK, BYTES, EIGHT, MX_BLOCK, NV_BLOCK, WIDE, Make
from .questions import GEMM_FUNCTIONS

SCALE_ROWS, SCALE_COLUMNS = 128, 4
"""Scales are stored in whole tiles of these."""
OUTPUTS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def gemm_arguments(
    make: Make, feature: Mapping[str, Any], call: Mapping[str, int]
) -> tuple[str, dict[str, Any]]:
    """Return the name of the function for a kind of call, and its arguments."""
    quantisation = feature["quantisation"]
    tokens, depth, width = call["tokens"], call["hidden_size"], call["intermediate_size"]
    arguments: dict[str, Any] = {"backend": "trtllm", "out_dtype": OUTPUTS[feature["q_dtype"]]}
    if quantisation == "nvfp4":
        arguments |= {
            "a": make(tokens, depth // 2, dtype=BYTES),
            "b": make(width, depth // 2, dtype=BYTES).T,
            "a_descale": make(_whole(tokens, SCALE_ROWS), depth // NV_BLOCK, dtype=EIGHT),
            "b_descale": make(width, depth // NV_BLOCK, dtype=EIGHT).T,
            "alpha": make(1, dtype=WIDE),
        }
    elif quantisation == "mxfp8":
        columns = _whole(depth // MX_BLOCK, SCALE_COLUMNS)
        arguments |= {
            "a": make(tokens, depth, dtype=EIGHT),
            "b": make(width, depth, dtype=EIGHT).T,
            "a_descale": make(_whole(tokens, SCALE_ROWS) * columns, dtype=BYTES),
            "b_descale": make(_whole(width, SCALE_ROWS) * columns, dtype=BYTES),
            "use_8x4_sf_layout": False,
        }
    elif quantisation == "fp8_block":
        arguments |= {
            "a": make(tokens, depth, dtype=EIGHT),
            "b": make(width, depth, dtype=EIGHT),
            "a_scale": make(depth // BLOCK, tokens, dtype=WIDE),
            "b_scale": make(depth // BLOCK, width // BLOCK, dtype=WIDE),
        }
    else:
        arguments |= {
            "a": make(tokens, depth, dtype=EIGHT),
            "b": make(depth // BLOCK, width, BLOCK, dtype=EIGHT),
            "alpha": make(1, dtype=WIDE),
            "backend": "trtllm_low_latency",
        }
    return GEMM_FUNCTIONS[quantisation], arguments


def _whole(count: int, of: int) -> int:
    return -(-count // of) * of
