"""Kernels that the interpreter runs, the compiler must take too: for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernelproof.impl.targets.optional import missing

ABSENT = missing("triton", "triton")

COMPILE = """
import json, warnings
warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernelproof.impl.triton.kernels.append import append
from kernelproof.impl.triton.kernels.merge import merge
from kernelproof.impl.triton.kernels.metadata import build

def compiled(kernel, pointers, constants, floats=(), **options):
    signature = {
        name: "constexpr" if name in constants else pointers.get(name) or
        ("fp32" if name in floats else "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constants, {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return len(made.asm["ptx"])

indices = dict.fromkeys(("qo_indptr", "kv_indptr", "seq_lens", "page_ids", "query_lens",
                         "block_table", "last_page_lens", "seq_lens_out"), "*i32")
sizes = {"UNIT": 8, "DIM_QK": 24, "DIM_VO": 128, "BLOCK_TOKENS": 4, "BLOCK_CHANNELS": 128}
made = {}
for name, cache, largest in (("copy", "bf16", 0), ("e4m3", "fp8e4nv", 448.0),
                             ("e5m2", "fp8e5", 57344.0)):
    pointers = {"k": "*bf16", "v": "*bf16", "k_cache": "*" + cache, "v_cache": "*" + cache}
    made["append " + name] = compiled(append, pointers | indices, sizes | {"LARGEST": largest},
                                      ("k_scale", "v_scale"))
for states in (2, 8):
    constants = {"UNIT": 16, "DIM": 80, "BLOCK_DIM": 128, "BLOCK_ROWS": 2, "STATES_AT_ONCE": states}
    pointers = {"outs": "*fp32", "lses": "*fp32", "out": "*bf16", "lse": "*fp32"}
    made[f"merge {states}"] = compiled(merge, pointers, constants, ("in_factor", "out_factor"),
                                       num_warps=1)
made["metadata"] = compiled(build, indices, {"BLOCK": 256})
print(json.dumps(made))
"""


@pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
def test_every_kernel_compiles(printed_by: Callable[[str], Any]) -> None:
    made = printed_by(COMPILE)
    assert all(size > 0 for size in made.values())
