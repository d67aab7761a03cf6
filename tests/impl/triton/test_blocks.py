"""Blocks of the Triton attention kernel, and what the compiler makes of it for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernelproof.impl.targets.optional import missing
from kernelproof.impl.triton.blocks import (
    MARGIN,
    SHARED_MEMORY,
    attention_blocks,
    most_splits,
    shared_memory,
    splits_that_fill,
)
from kernelproof.impl.triton.support import ceil_div, next_power_of_two

DIMS = (8, 16, 24, 40, 64, 80, 96, 128, 192, 256, 512)
ABSENT = missing("triton", "triton")

COMPILE = """
import json, warnings
warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernelproof.impl.triton.kernels import attention as kernels
from kernelproof.impl.triton.blocks import SHARED_MEMORY, attention_blocks

kernel = kernels.attention
DTYPES = {"q": "bf16", "k": "bf16", "v": "bf16", "out": "bf16", "lse": "fp32", "sinks": "fp32",
          "k_sf": "u8", "v_sf": "u8",
          "k_scales": "fp32", "v_scales": "fp32", "custom_mask": "u8", "qo_indptr": "i32",
          "kv_indptr": "i32", "seq_lens": "i32", "page_ids": "i32"}
FLOATS = ("scale", "v_scale", "soft_cap", "lse_factor")

def compiled(dim, rows, sm, kv_format="", available=SHARED_MEMORY):
    packed = kv_format == "nvfp4"
    blocks = attention_blocks((dim, dim), 2, rows, interpreted=False, packed=packed,
                              available=available)
    constants = {"PAGED": True, "SHIFTS": True, "KV_FORMAT": kv_format,
                 "CONVERTS": bool(kv_format) and sm >= 89, "SOFT_CAP": False,
                 "CUSTOM_MASK": False, "UPCAST": False,
                 "HEAD_DIM_QK": dim, "HEAD_DIM_VO": dim, "BLOCK_QK": blocks.qk,
                 "BLOCK_VO": blocks.vo, "BLOCK_M": blocks.m, "BLOCK_N": blocks.n,
                 "q_dim": 1, "k_dim": 1, "v_dim": 1, "out_dim": 1, "lse_head": 1}
    scales = [name for name in kernel.arg_names if name[1:].startswith("_sf")]
    constants |= {"k_sf_block": 1, "v_sf_block": 1} if packed else dict.fromkeys(scales)
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in DTYPES:
            is_code = kv_format and name in ("k", "v")
            signature[name] = "*u8" if is_code else "*" + DTYPES[name]
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
        is_stride = name.rpartition("_")[2] in ("token", "head", "page", "slot")
        if name not in constants and (name in DTYPES or is_stride):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    return {"shared": made.metadata.shared, "available": available, "ptx": made.asm["ptx"]}

HOPPER = 225 * 1024  # of 227, with the margin

print(json.dumps({
    "decode": compiled(128, 4, 80), "prefill": compiled(128, 4096, 90),
    "fp8": compiled(128, 4, 90, "float8_e4m3fn"), "old fp8": compiled(128, 4, 80, "float8_e4m3fn"),
    "nvfp4": compiled(128, 4, 90, "nvfp4"), "large nvfp4": compiled(512, 32, 80, "nvfp4"),
    "decode on Hopper": compiled(128, 4, 90, available=HOPPER),
    "prefill on Hopper": compiled(128, 4096, 90, available=HOPPER),
    "wide on Hopper": compiled(256, 4096, 90, available=HOPPER),
    "fp8 prefill on Hopper": compiled(128, 4096, 90, "float8_e4m3fn", HOPPER),
    "nvfp4 prefill on Hopper": compiled(128, 4096, 90, "nvfp4", HOPPER),
    "annotated": [param.name for param in kernel.params
                  if param.annotation_type and not param.is_constexpr],
}))
"""


def test_rounding_up() -> None:
    assert [ceil_div(number, 4) for number in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power_of_two(number) for number in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("rows", [1, 16, 100, 10_000])
def test_blocks_fit_every_gpu(rows: int, element_size: int) -> None:
    for qk in DIMS:
        for vo in DIMS:
            blocks = attention_blocks((qk, vo), element_size, rows, interpreted=False)
            assert blocks.qk >= qk
            assert blocks.vo >= vo
            assert min(blocks.qk, blocks.vo, blocks.m, blocks.n) >= 16
            needed = shared_memory(
                blocks.qk, blocks.vo, blocks.m, blocks.n, blocks.num_stages, element_size
            )
            assert needed <= SHARED_MEMORY or (blocks.m, blocks.n) == (16, 16)


def test_decodes_take_small_blocks_and_prefills_large_ones() -> None:
    assert attention_blocks((128, 128), 2, 4, interpreted=False).m == 16
    assert attention_blocks((128, 128), 2, 4096, interpreted=False).m == 128


def test_the_interpreter_takes_large_blocks_of_long_requests_only() -> None:
    found = [attention_blocks((16, 16), 4, 1, interpreted=True, keys=n).n for n in (0, 4095, 4096)]
    assert found == [32, 32, 128]


def test_stages_go_first_where_memory_is_short() -> None:
    def prefill(available: int) -> tuple[int, int]:
        blocks = attention_blocks((128, 128), 2, 4096, interpreted=False, available=available)
        return blocks.n, blocks.num_stages

    assert [prefill(kib * 1024) for kib in (225, 160, 97, 80)] == [
        (64, 4),
        (64, 4),
        (64, 2),
        (32, 2),
    ]


def test_splits_fill_the_gpu_in_few_waves() -> None:
    room = 264
    assert splits_that_fill(8, room, most_splits(8192)) == 15
    assert splits_that_fill(128, room, most_splits(8192)) == 2  # 256 programs at once
    assert splits_that_fill(160, room, most_splits(8192)) == 3  # 2 waves of a third, not 1 whole
    assert splits_that_fill(512, room, most_splits(8192)) == 1  # 1.94 waves are full enough
    assert splits_that_fill(0, room, 1) == 1


def test_short_requests_are_worth_few_splits() -> None:
    assert [most_splits(keys) for keys in (0, 1, 64, 65, 1024, 8192, 32768)] == [
        1, 1, 1, 2, 16, 16, 64,
    ]  # fmt: skip


def test_products_over_packed_operands_are_not_too_short() -> None:
    for dim in (16, 512):
        for rows in (4, 4096):
            blocks = attention_blocks((dim, dim), 2, rows, interpreted=False, packed=True)
            assert min(blocks.qk, blocks.n) >= 32


@pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
def test_the_compiled_kernel_uses_the_gpu_well(printed_by: Callable[[str], Any]) -> None:
    made = printed_by(COMPILE)
    assert made["annotated"] == []  # Triton would fix their types, and not see strides of 1.
    assert "mma.sync.aligned" in made["decode"]["ptx"]
    assert "wgmma.mma_async" in made["prefill"]["ptx"]
    assert "cvt.rn.f16x2.e4m3x2" in made["fp8"]["ptx"]
    assert "e4m3" not in made["old fp8"]["ptx"]
    for phase in set(made) - {"annotated"}:
        assert made[phase]["shared"] <= made[phase]["available"] + MARGIN
        assert "cp.async.cg.shared.global" in made[phase]["ptx"]  # 16 bytes at a time
        if phase != "nvfp4 prefill on Hopper":  # 512 block scales on 256 threads
            assert "ld.global.b16" not in made[phase]["ptx"]  # 2 bytes at a time
