"""Tiles of the Triton MoE kernels, and what the compiler makes of them for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from kernelproof.impl import UnsupportedError
from kernelproof.impl.targets.optional import missing
from kernelproof.impl.triton.blocks import MARGIN, SHARED_MEMORY
from kernelproof.impl.triton.moe_blocks import (
    LEAST_K,
    LEAST_N,
    SCALE_BLOCK,
    Shape,
    columns_of,
    moe_tiles,
    shared_memory,
)
from kernelproof.impl.triton.moe_operands import check_dtypes, operand
from kernelproof.reference import MatrixFormat, QuantizedMatrix

ABSENT = missing("triton", "triton")
HOPPER = 225 * 1024
"""Of 227 KiB, with the margin."""

COMPILE = """
import json, re, subprocess, sys, tempfile, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernelproof.impl.triton.kernels import moe as kernels
from kernelproof.impl.triton.moe_blocks import Shape, columns_of, moe_tiles
from kernelproof.impl.triton.kernels.moe_sort import sort_pairs
from kernelproof.impl.triton.kernels.route import route

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
INDICES = dict.fromkeys(("pairs", "block_experts", "block_rows", "ids", "counts", "ranks"), "*i32")
FLOATS = ("alpha", "beta", "limit", "floor", "jitter", "scaling_factor", "masked")
SCALES = dict.fromkeys(("hidden_scales", "w13_scales", "middle_scales", "w2_scales"), "*fp32")

def compiled(kernel, pointers, constants, sm, **options):
    odd = kernel.do_not_specialize or ()
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        kinds = SCALES | INDICES | pointers
        signature[name] = kinds.get(name) or ("fp32" if name in FLOATS else "i32")
        if name not in FLOATS and name not in odd:
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        used = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True)
    stack = re.search(r"STACK:(\\d+)", used.stdout)
    return {"shared": made.metadata.shared, "ptx": made.asm["ptx"],
            "stack": int(stack.group(1)) if stack else None}

def absent(kernel, *names):
    found = [name for name in kernel.arg_names
             if any(name == each or name.startswith(each + "_") for each in names)]
    return dict.fromkeys(found)

def experts(rows, sm, hidden="bf16", weights="bf16", scaled=0, gated=True, available=225 * 1024):
    sizes = {"bf16": 2, "fp8e4nv": 1, "fp32": 4}
    first, second = moe_tiles(Shape(rows, sizes[hidden], sizes[weights], gated=gated,
                                    interpreted=False, available=available))
    codes, widened = hidden == "fp8e4nv", hidden != weights
    pointers = {name: "*" + hidden for name in ("hidden", "middle")}
    pointers |= {"w13": "*" + weights, "w2": "*" + weights, "partial": "*bf16"}
    unscaled = [] if codes else ["hidden_scales", "middle_scales"]
    if weights != "fp8e4nv":
        unscaled += ["w13_scales", "w2_scales"]
    common = {"DTYPE": tl.bfloat16 if widened else None, "EVEN": True, "UNIT": 16}
    made = {}
    for name, kernel, tile, own, gone in (
        ("project", kernels.project, first,
         {"HIDDEN_FORMAT": "", "W13_FORMAT": "", "HIDDEN_SCALED": scaled if codes else 0,
          "W13_SCALED": scaled, "ACTIVATION": "swiglu" if gated else "relu2", "GATED": gated,
          "ROUNDS": codes, "hidden_column": 1, "w13_column": 1},
         ["alphas", "betas", "limits", "given_scales", "weights", "w13_bias"]),
        ("contract", kernels.contract, second,
         {"MIDDLE_FORMAT": "", "W2_FORMAT": "", "W2_SCALED": scaled, "w2_column": 1,
          "MIDDLE_SCALED": columns_of(first, gated=gated) if codes else 0}, ["w2_bias"]),
    ):
        constants = common | own | absent(kernel, *gone, *unscaled) | {
            "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": tile.group}
        made[name] = compiled(kernel, pointers, constants, sm, num_warps=tile.num_warps,
                              num_stages=tile.num_stages)
    return made

def small():
    made = {}
    pointers = {"weights": "*fp32", "partial": "*bf16", "out": "*bf16", "added": "*fp32"}
    ones = {"ids_slot": 1, "weights_slot": 1, "ON_INPUT": False}
    for counts, places in ((True, True), (True, False), (False, True)):
        constants = ones | {"COUNTS": counts, "PLACES": places, "BLOCK_M": 64, "EXPERTS": 512,
                            "CHUNK": 256}
        made[f"sort {counts} {places}"] = compiled(sort_pairs, pointers, constants, 90)
    for added in ({"added": None}, {}):
        constants = ones | {"TOP_K": 8, "BLOCK": 1024, "out_channel": 1} | added
        made[f"combine {len(added)}"] = compiled(kernels.combine, pointers, constants, 90)
    constants = {"SCORE": "sigmoid", "WEIGHT": "renormalize", "TOP_K": 8, "GROUPS": 8,
                 "TOPK_GROUPS": 4, "BEST_OF_GROUP": 2, "TOKENS": 8, "EXPERTS": 256, "SLOTS": 8,
                 "GROUP_COLUMNS": 8, "logits_expert": 1, "bias_expert": 1, "SHARED": 0}
    pointers |= {"logits": "*bf16", "bias": "*fp32", "expert_scales": "*fp32",
                 "expert_table": "*i32", "input_ids": "*i64"}
    no_table = {"TABLE": False, "expert_table": None, "input_ids": None}
    for name, others in {
        "route": {"OF_EACH": 0, "expert_scales": None} | no_table,
        "route scaled": {"OF_EACH": 1, "bias": None} | no_table,
        "route table": {"OF_EACH": 0, "TABLE": True, "GROUPS": 1, "bias": None,
                        "expert_scales": None},
    }.items():
        made[name] = compiled(route, pointers, constants | others, 90)
    return made

print(json.dumps({
    "large": experts(64, 90), "medium": experts(32, 90), "decode": experts(1, 90),
    "ungated": experts(64, 90, gated=False), "Ampere": experts(64, 80, available=97 * 1024),
    "fp8": experts(64, 90, "fp8e4nv", "fp8e4nv"),
    "fp8 blocks": experts(64, 90, "fp8e4nv", "fp8e4nv", 128),
    "fp8 weights": experts(64, 90, "bf16", "fp8e4nv", 128),
    "float32": experts(64, 90, "fp32", "fp32"), "small": small(),
    "annotated": [param.name for kernel in (kernels.project, kernels.contract, kernels.combine,
                                            sort_pairs, route)
                  for param in kernel.params if param.annotation_type and not param.is_constexpr],
}))
"""


def shape(**changes: Any) -> Shape:  # noqa: ANN401  fields of any type
    fields: dict[str, Any] = {
        "rows": 64.0, "element_size": 2, "weight_size": 2, "gated": True, "interpreted": False,
        "available": HOPPER, **changes,
    }  # fmt: skip
    return Shape(**fields)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1), (1, 1), (4, 4), (4, 1)])
@pytest.mark.parametrize("available", [SHARED_MEMORY, HOPPER])
def test_tiles_fit_every_gpu(sizes: tuple[int, int], available: int) -> None:
    element, weight = sizes
    for rows, gated in product((0.1, 4, 12, 30, 64, 5000), (True, False)):
        first, second = moe_tiles(
            shape(
                rows=rows,
                element_size=element,
                weight_size=weight,
                gated=gated,
                available=available,
            )
        )
        assert first.m == second.m  # pairs are sorted once
        for tile in (first, second):
            assert shared_memory(tile, element, weight) <= available
            assert tile.n >= LEAST_N
            assert tile.k >= LEAST_K
            assert SCALE_BLOCK % tile.k == 0
        if element == 1:
            assert columns_of(first, gated=gated) % second.k == 0


def test_experts_of_many_rows_take_large_tiles() -> None:
    rows = [0.5, 8, 12, 16, 32, 63, 64, 512]
    assert [moe_tiles(shape(rows=each))[0].m for each in rows] == [
        16, 16, 32, 32, 64, 128, 128, 128,
    ]  # fmt: skip
    first, second = moe_tiles(shape(rows=64))
    assert (first.n, first.k, first.num_warps) == (256, 64, 8)
    assert (second.n, second.k, second.num_warps) == (256, 64, 8)


def test_matrices_that_are_not_multiplied_are_refused() -> None:
    numbers = operand("hidden", torch.zeros(2, 16, dtype=torch.bfloat16))
    others = operand("w13", torch.zeros(2, 16, 16, dtype=torch.float16))
    with pytest.raises(
        UnsupportedError, match=r"hidden is torch\.bfloat16, but w13 torch\.float16"
    ):
        check_dtypes(numbers, others, others)
    with pytest.raises(UnsupportedError, match=r"w13 is torch\.float16, but w2 torch\.bfloat16"):
        check_dtypes(numbers, others, numbers)
    codes = torch.zeros(2, 16, 16, dtype=torch.float8_e5m2)
    e5m2 = QuantizedMatrix(codes, torch.ones(2), MatrixFormat("float8_e5m2", "tensor"))
    with pytest.raises(
        UnsupportedError, match="w2 is float8_e5m2; the Triton MoE reads float8_e4m3fn"
    ):
        operand("w2", e5m2)


def test_scales_are_spread_by_strides() -> None:
    codes = torch.zeros(3, 256, 130, dtype=torch.float8_e4m3fn)
    for scales, kind, shape, columns in (
        (torch.ones(3), "tensor", (3, 256, 1), 0),
        (torch.ones(3, 256), "channel", (3, 256, 1), 0),
        (torch.ones(3, 2, 2), "block", (3, 2, 2), 128),
    ):
        made = operand("w13", QuantizedMatrix(codes, scales, MatrixFormat("float8_e4m3fn", kind)))
        assert made.scales is not None
        assert (made.scales.shape, made.scaled) == (shape, columns)
        assert made.scales.data_ptr() == scales.data_ptr()


@pytest.mark.skipif(ABSENT is not None, reason=str(ABSENT))
def test_the_compiled_kernels_use_the_gpu_well(printed_by: Callable[[str], Any]) -> None:
    made = printed_by(COMPILE)
    assert made.pop("annotated") == []  # Triton would fix their types, and not see strides of 1.
    small = made.pop("small")
    for kernels in (*made.values(), small):
        for name, kernel in kernels.items():
            assert kernel["stack"] == 0, name  # nothing is spilled
            assert kernel["shared"] <= HOPPER + MARGIN
    for case, kernels in made.items():
        for kernel in kernels.values():
            assert "cp.async.cg.shared.global" in kernel["ptx"]  # 16 bytes at a time
            assert "ld.global.b16" not in kernel["ptx"]  # 2 bytes at a time
            assert "st.global.b16" not in kernel["ptx"]
            tensor_cores = {"Ampere": "mma.sync", "decode": "mma.sync", "float32": "fma.rn.f32"}
            assert tensor_cores.get(case, "wgmma.mma_async") in kernel["ptx"]
            if case.startswith("fp8") and case != "fp8 weights":
                assert ".e4m3.e4m3" in kernel["ptx"]
    assert "m64n256k16" in made["large"]["project"]["ptx"]
